"""The built-in backends, by name, for tests that hold for all of them, and directories for them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast import clock
from holdfast.backends import registry
from holdfast.backends.base import Backend
from holdfast.backends.run import TableSchema
from tests.ram import place_in_ram

BUILT_IN = tuple(registry._BUILT_IN)


def open_backend(
    name: str, directory: Path, tables: Mapping[str, TableSchema], new_id: Callable[[], str] = clock.new_id
) -> Backend:
    """Open a shard's directory with the backend of this name, without options."""
    return registry.find_backend(name)(directory, tables, new_id)


def copy_directory(source: Path, target: Path) -> None:
    """Copy a shard's directory as it is: links stay links, times stay."""
    copies: dict[int, str] = {}

    def copy(file: str, place: str) -> str:
        inode = os.stat(file).st_ino
        if inode in copies:
            os.link(copies[inode], place)
        else:
            copies[inode] = shutil.copy2(file, place)
        return place

    shutil.copytree(source, target, copy_function=copy)


def copy_at_rest(source: Path, target: Path) -> None:
    """Copy a shard's directory at a moment at which no background work changes it, as a kill would leave it.

    A copy that is made during a compaction holds files of before and after it, which no kill leaves.
    """

    def files() -> dict[Path, tuple[int, int, int]]:
        found = {}
        for path in source.rglob("*"):
            with suppress(FileNotFoundError):
                facts = path.stat()
                found[path] = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        return found

    while True:
        before = files()
        with suppress(FileNotFoundError, shutil.Error):
            copy_directory(source, target)
            if files() == before:
                return
        shutil.rmtree(target, ignore_errors=True)


@contextmanager
def ram_directory() -> Iterator[Path]:
    """Make a directory in RAM, where there is room: short paths, and nothing that syncs waits for a disk."""
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir=place_in_ram()) as path:
        yield Path(path)
