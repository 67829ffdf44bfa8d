"""A table of a savepoint as a DataFrame.

::

    spark.dataSource.register(holdfast.savepoints.SavepointSource)
    spark.read.format("holdfast").option("operator", "totals").load("s3://bucket/savepoints/before-upgrade")

Each piece is a partition. The driver reads the manifest, executors the pieces, without Spark's state or a checkpoint
directory. On the driver Spark hands a source neither session nor settings: what opens the storage stands in options, or
where the store's own tools look. Options travel to the executors, but for credentials, which tasks have from their
session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import IntegerType, StructField, StructType

from holdfast.backends.arrow.values import cast
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.settings import PREFIX, STORAGE_PREFIX
from holdfast.snapshotter.savepoints.pieces import read_piece
from holdfast.snapshotter.savepoints.saved_operator import Piece, SavedOperator
from holdfast.snapshotter.savepoints.savepoints import read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import CREDENTIALS, parse_storage_options
from holdfast.spark_integration.processor.state.variables import KINDS, table_of
from holdfast.spark_integration.read_state import shown_columns
from holdfast.spark_integration.shard.task_storage import session_values
from holdfast.spark_integration.spark_types import arrow_schema, spark_type
from holdfast.spark_integration.tables.timers import is_by_time

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHARD = "shard"
_STORAGE = "storage."
_OPTIONS = ("path", "operator", "table")
# Of one batch to Spark: a column of text must stay below 2 GiB.
_BATCH_ROWS, _BATCH_BYTES = 1_000_000, 256 << 20


@dataclass(frozen=True)
class _Place:
    """Where a savepoint is, and how to open it."""

    target: str
    name: str
    options: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> _Place:
        """Return the place that a read's options name.

        Raises
        ------
        InvalidArgumentError
            There is no path, or an option is unknown.
        """
        unknown = [name for name in options if name not in _OPTIONS and not name.startswith(_STORAGE)]
        if unknown:
            raise InvalidArgumentError(
                "no such option; there are operator, table, and storage.<name>, as spark.holdfast.storage.<name>",
                option=min(unknown),
            )
        target, _, name = options.get("path", "").rstrip("/").rpartition("/")
        if not target or not name:
            raise InvalidArgumentError("load the path of a savepoint: its directory, a slash, and its name")
        storage = {name.removeprefix(_STORAGE): value for name, value in options.items() if name.startswith(_STORAGE)}
        return cls(target, name, storage)

    def open(self) -> ObjectStorage:
        return open_storage(self.target, parse_storage_options(self.options))

    def without_credentials(self) -> _Place:
        """Return what may travel."""
        return replace(self, options={name: value for name, value in self.options.items() if name not in CREDENTIALS})

    def in_task(self) -> _Place:
        """Return the place with the credentials that the running task has from its session."""
        return replace(self, options={**self.options, **session_values(CREDENTIALS)})


class SavepointSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """Return what ``format`` takes."""
        return "holdfast"

    @cached_property
    def _table(self) -> tuple[_Place, SavedOperator, TableSchema]:
        options = dict(self.options)
        place = _Place.of(options)
        with place.open() as storage:
            savepoint = read_savepoint(storage, place.name)
        operator = savepoint.find_operator(options.get("operator"))
        return place, operator, _table_of(operator, options.get("table", "state"))

    def schema(self) -> StructType:
        """Return the key columns, the value columns, and ``shard``."""
        return _schema_of(self._table[2])

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads it; Spark hands over the schema that the user gave, if any."""
        place, operator, table = self._table
        if schema != _schema_of(table):
            raise InvalidArgumentError(
                "a savepoint knows its columns: leave .schema(…) out", columns=", ".join(_schema_of(table).names)
            )
        return _Reader(place, operator, table)


def load(
    spark: SparkSession, target: str | Path, name: str, operator: str | None = None, table: str = "state"
) -> DataFrame:
    """Return a table of a savepoint.

    Parameters
    ----------
    spark : SparkSession
        Its ``spark.holdfast.storage.*`` open the storage.
    target : str or pathlib.Path
        The directory of savepoints.
    name : str
        Of the savepoint.
    operator : str, optional
        Needed where it has several.
    table : str, default "state"
        A state table, a variable of a processor, or "timers".

    Returns
    -------
    DataFrame
        One row per key: the key columns, the value columns, and ``shard``. A value column whose name is already taken
        is called ``value.<name>``.

    Raises
    ------
    pyspark.errors.AnalysisException
        There is no such savepoint, operator or table; the message says what there is.
    """
    spark.dataSource.register(SavepointSource)
    options = {"table": table} | ({} if operator is None else {"operator": operator})
    storage = {k.removeprefix(PREFIX): v for k, v in dict(spark.conf.getAll).items() if k.startswith(STORAGE_PREFIX)}
    return spark.read.format(SavepointSource.name()).options(**options, **storage).load(f"{target}/{name}")


def _table_of(operator: SavedOperator, name: str) -> TableSchema:
    """Return a table by its name, or by that of the processor's variable which it holds."""
    for table in (name, *(table_of(kind, name) for kind in KINDS)):
        if table in operator.tables and not is_by_time(operator.tables[table]):
            return operator.tables[table]
    tables = [table for table, schema in operator.tables.items() if not is_by_time(schema)]
    raise NotFoundError("no such table: choose one by the option table", table=name, tables=", ".join(tables))


def _schema_of(table: TableSchema) -> StructType:
    columns = shown_columns(table)
    fields = [StructField(field.name, spark_type(field.type)) for field in columns]
    return StructType([*fields, StructField(_free(SHARD, columns.names), IntegerType())])


def _free(name: str, names: list[str]) -> str:
    return _free(f"_{name}", names) if name in names else name


@dataclass(frozen=True)
class _PieceOf(InputPartition):
    piece: Piece


class _Reader(DataSourceReader):
    """Reads the pieces of a table; travels to the executors."""

    def __init__(self, place: _Place, operator: SavedOperator, table: TableSchema) -> None:
        self._place = place.without_credentials()
        self._operator = operator.name
        self._schema = table
        self._pieces = list(operator.of_table(table.name))

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels: each task gets its piece besides."""
        return {**self.__dict__, "_pieces": []}

    def partitions(self) -> list[InputPartition]:
        """Return a partition for each piece."""
        return [_PieceOf(piece) for piece in self._pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a piece."""
        if not isinstance(partition, _PieceOf):  # Spark's own, where there is no piece
            return
        columns = arrow_schema(_schema_of(self._schema), "a savepoint")
        with self._place.in_task().open() as storage:
            folder = savepoint_folder(storage, self._place.name)
            run = read_piece(folder, self._operator, partition.piece, self._schema)
        for chunk in run.chunks(_BATCH_ROWS, _BATCH_BYTES):
            yield _batch_of(chunk, partition.piece.shard, columns)


def _batch_of(chunk: Run, shard: int, columns: pa.Schema) -> pa.RecordBatch:
    rows = [*chunk.keys.columns, *chunk.values.columns]
    arrays = [cast(column, field.type) for column, field in zip(rows, columns, strict=False)]
    return pa.RecordBatch.from_arrays([*arrays, pa.array([shard] * len(chunk), pa.int32())], schema=columns)
