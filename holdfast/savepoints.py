"""Savepoints: self-contained copies of a query's state, owned by the user and never deleted by holdfast.

::

    from holdfast import savepoints

    savepoints.create(spark, "/data/query", "s3://bucket/savepoints", "before-upgrade")

A savepoint holds the state of all holdfast operators after one micro-batch, including timers and expiry times, and the
positions of the sources. It refers to nothing outside its folder, so it can be copied and moved, and outlives its
query. Its tables are Arrow files that pyarrow and Polars open directly, and DuckDB through pyarrow: docs/savepoints.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from holdfast.snapshotter.savepoints import savepoints as _stored
from holdfast.snapshotter.savepoints.manifest import Savepoint
from holdfast.snapshotter.savepoints.savepoints import Listed
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.copies import clone, drain, rescale
from holdfast.spark_integration.savepoints.changes import Sources
from holdfast.spark_integration.savepoints.creating import create, stop
from holdfast.spark_integration.savepoints.difference import Side, TableDifference, difference, facts_that_differ
from holdfast.spark_integration.savepoints.from_spark import from_spark
from holdfast.spark_integration.savepoints.restoring import restore
from holdfast.spark_integration.savepoints.write import edit, write
from holdfast.spark_integration.state_source.reading import load

__all__ = [
    "Listed",
    "Savepoint",
    "Sources",
    "TableDifference",
    "clone",
    "create",
    "delete",
    "diff",
    "drain",
    "edit",
    "from_spark",
    "leftovers",
    "listed",
    "load",
    "read",
    "rescale",
    "restore",
    "stop",
    "verify",
    "write",
]

_THREADS = 8
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


def read(target: str | Path, name: str, options: Mapping[str, str] = _NO_OPTIONS) -> Savepoint:
    """Return a savepoint's manifest.

    Parameters
    ----------
    target : str or pathlib.Path
        The directory of savepoints.
    name : str
    options : mapping of str to str, optional
        Storage options, as in ``spark.holdfast.storage.*``.

    Raises
    ------
    NotFoundError
        No savepoint has this name, or it is unfinished.
    CorruptionError
        Its manifest is damaged.
    """
    with open_storage(str(target), options) as storage:
        return _stored.read_savepoint(storage, name)


def listed(target: str | Path, options: Mapping[str, str] = _NO_OPTIONS) -> list[Listed]:
    """Return a directory's savepoints by name, including unfinished and damaged savepoints; see `read`."""
    with open_storage(str(target), options) as storage, ThreadPoolExecutor(_THREADS) as threads:
        return _stored.list_savepoints(storage, threads)


def verify(target: str | Path, name: str, options: Mapping[str, str] = _NO_OPTIONS) -> list[str]:
    """Read a whole savepoint and return the damage, empty if it can be restored; see `read`."""
    with open_storage(str(target), options) as storage, ThreadPoolExecutor(_THREADS) as threads:
        return _stored.verify_savepoint(storage, _stored.read_savepoint(storage, name), threads)


def leftovers(target: str | Path, name: str, options: Mapping[str, str] = _NO_OPTIONS) -> list[str]:
    """Return the keys of objects in a savepoint's folder that are not part of it; see `read`.

    Repeated tasks or failed attempts at this savepoint left them. They do not affect a restore, and are deleted with
    the savepoint; skip them if you read the folder without `read` or `load`.
    """
    with open_storage(str(target), options) as storage:
        savepoint = _stored.read_savepoint(storage, name)
        return _stored.unnamed_keys(_stored.savepoint_folder(storage, name).list(""), savepoint)


def diff(
    target: str | Path,
    name: str,
    other: str,
    options: Mapping[str, str] = _NO_OPTIONS,
    *,
    keys: int = 0,
    other_target: str | Path | None = None,
) -> tuple[list[str], list[TableDifference]]:
    """Return how two savepoints differ.

    Parameters
    ----------
    name, other : str
        The earlier and the later savepoint.
    keys : int
        The largest number of differing keys to return, per table and kind.
    other_target : str or pathlib.Path, optional
        The other savepoint's directory; by default the first's.

    Returns
    -------
    tuple of list of str and list of TableDifference
        The differences outside the state, as sentences, and those of each table, for the operators in both.

    Raises
    ------
    NotFoundError, CorruptionError
        A savepoint is missing or damaged.
    """
    with (
        open_storage(str(target), options) as storage,
        open_storage(str(other_target or target), options) as other_storage,
    ):
        before, after = (
            Side(_stored.read_savepoint(at, one), _stored.savepoint_folder(at, one))
            for at, one in ((storage, name), (other_storage, other))
        )
        return facts_that_differ(before.savepoint, after.savepoint), list(difference(before, after, keys))


def delete(target: str | Path, name: str, options: Mapping[str, str] = _NO_OPTIONS) -> int:
    """Delete a savepoint, finished or not; return its number of objects.

    Raises
    ------
    NotFoundError
        No savepoint has this name.
    """
    with open_storage(str(target), options) as storage:
        return _stored.delete_savepoint(storage, name)
