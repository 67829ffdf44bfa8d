"""Reads a Parquet sink's committed files: those that manifests name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.snapshotter.storage.url import parse_url
from holdfast.spark_integration.shard.task_storage import io_executor
from holdfast.spark_integration.sinks.files.attempts import file_name
from holdfast.spark_integration.sinks.files.places import read_claims, read_file
from holdfast.spark_integration.sinks.parquet.manifests import FILES, Manifests, in_force
from holdfast.spark_integration.sinks.parquet.sink import DATA

#: A listing is some ms old when a manifest is read, and that may have been merged.
_TRIES = 5


def read_parquet(
    url: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Return the rows of all committed micro-batches of a Parquet sink.

    Parameters
    ----------
    url : str
        The sink's.
    columns : sequence of str, optional
        All by default.
    options : mapping of str to str, optional
        As ``spark.holdfast.sink.<name>.*`` has them: ``key``, ``secret``, ``client_kwargs.endpoint_url`` …

    Returns
    -------
    pyarrow.Table
        In the order of micro-batches, of partitions, and of rows in them.

    Raises
    ------
    InvalidArgumentError
        There is no such column, or it is named twice.
    NotFoundError
        No sink has been opened there.
    CorruptionError
        A manifest or a file is not what was written.
    """
    url = str(parse_url(url))
    with open_storage(url, parse_storage_options(options or {})) as storage:
        listed = _listed(storage)
        wanted = listed.schema.names if columns is None else list(columns)
        unknown = [name for name in wanted if name not in listed.schema.names]
        if unknown or not wanted or len(set(wanted)) < len(wanted):
            raise InvalidArgumentError(
                "columns must name some of the sink's, each once",
                columns=", ".join(unknown or wanted),
                there=", ".join(listed.schema.names),
            )
        schema = pa.schema([listed.schema.field(name) for name in wanted])

        def read(entry: Mapping[str, object]) -> pa.Table:
            return _rows_of(storage, entry, wanted).select(wanted).cast(schema)

        tables = list(io_executor().map(read, listed.files.to_pylist()))
    return pa.concat_tables([schema.empty_table(), *tables])


def parquet_files(url: str | os.PathLike[str], *, options: Mapping[str, str] | None = None) -> list[str]:
    """Return the URLs of a Parquet sink's committed files, for any Parquet reader.

    For a local sink they are paths. ``spark.read.parquet(*files)``, ``duckdb.read_parquet(files)`` and
    ``pyarrow.dataset.dataset(files)`` take them.

    Parameters
    ----------
    url, options
        As for `read_parquet`.

    Raises
    ------
    NotFoundError
        No sink has been opened there.
    CorruptionError
        A manifest is not what was written.
    """
    url = str(parse_url(url))
    with open_storage(url, parse_storage_options(options or {})) as storage:
        files = _listed(storage).files.select(["attempt", "number"]).to_pydict()
    names = map(file_name, files["attempt"], files["number"])
    return [f"{url}/{DATA}/{name}" for name in names]


@dataclass(frozen=True)
class _Listed:
    schema: pa.Schema
    files: pa.Table


def _listed(storage: ObjectStorage) -> _Listed:
    """Return the manifests of all the sink's queries, at one moment."""
    claims = read_claims(storage)
    if claims.columns is None:
        raise NotFoundError("no sink has been opened there", storage=storage.url)
    ((sink, queries),) = claims.queries.items()
    for _ in range(_TRIES):
        try:
            tables = [table for query_id in queries for table in _tables(storage, sink, query_id)]
        except NotFoundError:
            continue
        return _Listed(claims.columns, pa.concat_tables([FILES.empty_table(), *tables]))
    raise UnavailableError("manifests are merged faster than they can be read: try again", storage=storage.url)


def _tables(storage: ObjectStorage, sink: str, query_id: str) -> list[pa.Table]:
    manifests = Manifests(storage, sink, query_id)
    return list(io_executor().map(manifests.read, in_force(manifests.listed())))


def _rows_of(storage: ObjectStorage, entry: Mapping[str, object], columns: Sequence[str]) -> pa.Table:
    key = f"{DATA}/{file_name(str(entry['attempt']), int(str(entry['number'])))}"
    try:
        table = read_file(storage, key, int(str(entry["size_bytes"])), str(entry["digest"]), columns)
    except NotFoundError as exc:
        raise CorruptionError("a committed file is gone", key=key, storage=storage.url) from exc
    if table.num_rows != entry["rows"]:
        raise CorruptionError("a committed file has another number of rows", key=key, storage=storage.url)
    return table
