"""Databases that nobody has open: making one of complete state, and looking at the marker of one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rocksdict import Options

from holdfast.backends.rocksdb.errors import damaged, rocksdb_errors
from holdfast.backends.rocksdb.marker import MARKER_KEY, Marker, VersionLabel
from holdfast.backends.rocksdb.options import open_rocksdb
from holdfast.backends.rocksdb.writes import RowWriter
from holdfast.backends.run import Run


def create_database(path: Path, options: Options, label: VersionLabel, runs: Iterable[Run]) -> None:
    """Write a database that holds one version into an empty directory, flush and close it.

    Parameters
    ----------
    options : Options
        With ``create_if_missing``.
    runs : iterable of Run
        Complete state, of any tables.
    """
    with rocksdb_errors(path):
        rdict = open_rocksdb(path, options)
        try:
            marker = Marker()
            writer = RowWriter(rdict, marker.encode())
            for run in runs:
                if len(run):
                    marker = marker.with_tables([run.schema])
                    writer.write_run(marker.tables[run.schema.name], run)
            writer.finish(marker.labelled(label).encode())
            rdict.flush()
        finally:
            rdict.close()


def read_marker(path: Path, options: Options) -> Marker:
    """Return the marker of a database that nobody has open, without changing its table files."""
    with rocksdb_errors(path):
        rdict = open_rocksdb(path, options, read_only=True)
        try:
            value = rdict.get(MARKER_KEY)
        finally:
            rdict.close()
    if value is None:
        raise damaged(path, "it has no marker")
    return Marker.decode(value, path)
