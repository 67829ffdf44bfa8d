"""The built-in backends, by name, for tests that hold for all of them."""

from __future__ import annotations

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
