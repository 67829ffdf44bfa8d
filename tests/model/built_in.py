"""The built-in backends, by name, for tests that hold for all of them, and copies of what they keep."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast import clock
from holdfast.backends import registry
from holdfast.backends.base import Backend
from holdfast.backends.run import TableSchema

BUILT_IN = tuple(point.name for point in registry._BUILT_IN)


def open_backend(
    name: str, directory: Path, tables: Mapping[str, TableSchema], new_id: Callable[[], str] = clock.new_id
) -> Backend:
    """Open a shard's directory with the backend of this name, without options."""
    return registry.find_backend(name)(directory, tables, new_id)


def copy_directory(source: Path, target: Path) -> None:
    """Copy a shard's directory as it is: links stay links, times stay.

    Raises
    ------
    FileNotFoundError, shutil.Error
        A file vanished meanwhile.
    """
    copies: dict[int, str] = {}

    def copy(file: str, place: str) -> str:
        inode = os.stat(file).st_ino
        if inode in copies:
            os.link(copies[inode], place)
        else:
            copies[inode] = shutil.copy2(file, place)
        return place

    shutil.copytree(source, target, copy_function=copy)
