"""Export a DataFrame as a new Delta table: tasks write files, the driver adds them in a single transaction.

    <url>/part-<export>-<partition>-<attempt>-<number>.parquet      by tasks; not yet part of a table
    <url>/_delta_log/00000000000000000000.json                      by the driver, last: the schema and all files

Only files that a task reported enter the table; leftovers of repeated attempts are deleted at the end. A failed or
interrupted export deletes all its files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyarrow as pa
from deltalake import CommitProperties
from deltalake.transaction import AddAction, create_table_with_add_actions
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row

from holdfast import clock
from holdfast.backends.registry import backend_names
from holdfast.errors import ConflictError, HoldfastError, NotFoundError
from holdfast.settings import Settings
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.shard.task import storage_at
from holdfast.spark_integration.sinks.delta.commits import delta_schema
from holdfast.spark_integration.sinks.delta.partitions import statistics
from holdfast.spark_integration.sinks.delta.tables import KeptTable
from holdfast.spark_integration.sinks.files.location import check_columns
from holdfast.spark_integration.sinks.files.sink import encoded
from holdfast.spark_integration.sinks.writing import fitted, numbered
from holdfast.spark_integration.spark_types import arrow_schema

_FILE_BYTES = 128 << 20
_WRITTEN = "name string, size_bytes long, stats string"
_EXPORT = "holdfast.export"
_COMMIT_BYTES_MAX = 1 << 30
_FIRST_COMMIT = "_delta_log/00000000000000000000.json"


def export_table(frame: DataFrame, url: str) -> None:
    """Write a DataFrame as a new Delta table. Raises `ConflictError` if the URL is in use, `SchemaMismatchError`."""
    schema = arrow_schema(frame.schema, "the table")
    check_columns(schema)
    configuration = dict(frame.sparkSession.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    export_id = clock.new_id()
    with _new_table(url, settings.storage_values(configuration)) as (table, storage):
        files: list[Row] = []
        writer = _FileWriter(table.url, settings, schema, export_id)
        try:
            files = numbered(frame).mapInArrow(writer, _WRITTEN).collect()
            _make(table, schema, files, export_id)
        except BaseException as exc:
            is_made = False
            with suppress(NotFoundError):  # found if only the commit's reply was lost
                is_made = export_id.encode() in bytes(storage.get(_FIRST_COMMIT, _COMMIT_BYTES_MAX))
            if not is_made:
                _delete_files(storage, export_id)
            if not (is_made and isinstance(exc, HoldfastError)):
                raise
        table.sync(table.open(), -1)
        _delete_files(storage, export_id, {file.name for file in files})


def require_new_table(url: str, options: Mapping[str, str], schema: pa.Schema) -> None:
    """Raise the errors of `export_table` about the URL and columns, without a Spark session."""
    check_columns(schema)
    with _new_table(url, options):
        pass


@contextmanager
def _new_table(url: str, options: Mapping[str, str]) -> Iterator[tuple[KeptTable, ObjectStorage]]:
    with open_storage(url, options) as storage:
        # deltalake needs a plain path for a local URL.
        table = KeptTable(storage.url.removeprefix("file://")).with_options(options)
        held = next((info.key for info in storage.list("")), None)
        if held is not None:
            raise ConflictError(
                "an exported table needs a new directory, and this one is not empty: choose another",
                table=table.url,
                holds=held,
            )
        with suppress(NotFoundError):
            table.open()  # before any write: fails if only one of the two clients can access the store
            raise ConflictError("there is a Delta table already: choose another directory", table=table.url)
        yield table, storage


@dataclass(frozen=True)
class _FileWriter:
    url: str
    settings: Settings  #: The session's settings, without credentials
    schema: pa.Schema
    export_id: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        storage, attempt_id = storage_at(self.url, self.settings), clock.new_id()
        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        for number, rows in enumerate(_gathered(batches, self.schema)):
            name = f"{_prefix(self.export_id)}{partition:06}-{attempt_id}-{number:06}.parquet"
            data = encoded(rows)
            storage.put(name, data)
            yield pa.RecordBatch.from_pydict({"name": [name], "size_bytes": [data.size], "stats": [statistics(rows)]})


def _gathered(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Group the batches into one table per output file."""
    held, held_bytes = list[pa.RecordBatch](), 0
    for batch in batches:
        held.append(fitted(batch, schema))
        held_bytes += held[-1].nbytes
        if held_bytes >= _FILE_BYTES:
            yield pa.Table.from_batches(held)
            held, held_bytes = [], 0
    if any(batch.num_rows for batch in held):
        yield pa.Table.from_batches(held)


def _make(table: KeptTable, schema: pa.Schema, files: list[Row], export_id: str) -> None:
    now_ms = clock.now_ms()
    adds = [AddAction(file.name, file.size_bytes, {}, now_ms, data_change=True, stats=file.stats) for file in files]
    with table.translated("create"):
        create_table_with_add_actions(
            table.url,
            delta_schema(schema),
            adds,
            mode="error",
            storage_options=table.storage_options,
            commit_properties=CommitProperties(custom_metadata={_EXPORT: export_id}),
        )


def _delete_files(storage: ObjectStorage, export_id: str, but: Collection[str] = ()) -> None:
    """Delete the export's files, except those in `but`."""
    written = (info.key for info in storage.list("") if info.key.startswith(_prefix(export_id)))
    storage.delete([key for key in written if key not in but])


def _prefix(export_id: str) -> str:
    return f"part-{export_id}-"
