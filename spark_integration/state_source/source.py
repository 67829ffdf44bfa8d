"""The data source ``holdfast``: state as a Spark table.

::

    spark.read.format("holdfast").option("operator", "totals").load("s3://bucket/savepoints/before-upgrade")

It reads savepoints by itself. The state of a query is found by `holdfast.state`, which hands a stored read over.

On the driver Spark gives a source neither session nor settings: what opens the storage stands in options, or where the
store's own tools look. Options travel to the executors, but for credentials, which tasks have from their session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from holdfast.backends.run import Run
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.lookup.keys import Lookup, Shards
from holdfast.spark_integration.state_source.filters import ShardFilters, narrowed, wanted_hashes
from holdfast.spark_integration.state_source.options import ReadOptions
from holdfast.spark_integration.state_source.query_table import QueryTable
from holdfast.spark_integration.state_source.saved_table import SavedTable
from holdfast.spark_integration.state_source.shown import ShownTable
from holdfast.spark_integration.state_source.table import Part, ReadableTable

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

NAME = "holdfast"


class StateSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """Return what ``format`` takes."""
        return NAME

    @cached_property
    def _parsed(self) -> ReadOptions:
        return ReadOptions.parse(dict(self.options))

    @cached_property
    def _table(self) -> tuple[ReadableTable, ShownTable]:
        options = self._parsed
        table: ReadableTable = SavedTable.find(options) if options.read is None else QueryTable.find(options)
        return table, ShownTable.of(table.schema, options.columns, changes=options.changes_from is not None)

    @cached_property
    def _lookup(self) -> Lookup | None:
        table, key = self._table[0], self._parsed.key
        return Lookup.of(table.schema, table.grouping, key) if key else None

    def schema(self) -> StructType:
        """Return the key columns, the value columns, and ``shard``; before them, those of a change feed."""
        _ = self._lookup  # Spark asks for the columns first: what is wrong with the key is said then
        return self._table[1].struct

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader; Spark passes the schema that the user gave, if any."""
        (table, shown), options = self._table, self._parsed
        if schema != shown.struct:
            raise InvalidArgumentError(
                "state knows its columns: leave .schema(…) out, and select some with the option columns",
                columns=", ".join(shown.wanted),
            )
        # Where the session does not allow it, Spark refuses a reader that can take filters.
        kind = FilteringReader if options.pushdown else TableReader
        return kind(table, shown, options.shards, self._lookup)


class TableReader(DataSourceReader):
    """Reads the parts of a table; travels to the executors.

    Parameters
    ----------
    table : ReadableTable
    shown : ShownTable
    shards : Shards or None
        Which to read; None for all.
    lookup : Lookup or None
        Which key to read; None for all.
    """

    def __init__(self, table: ReadableTable, shown: ShownTable, shards: Shards | None, lookup: Lookup | None) -> None:
        hashes = None if lookup is None else lookup.hashes
        self._parts = narrowed(table.parts(), lambda shard: shards is None or shard in shards, hashes)
        self._lookup = lookup
        self._table = table.travelling()
        self._shown = shown

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle; each task also gets its part."""
        return {**self.__dict__, "_parts": []}

    def partitions(self) -> list[InputPartition]:
        """Return a partition for each part."""
        return list(self._parts)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part."""
        if not isinstance(partition, Part):  # Spark's own, where there is no part
            return
        for run, batch_id in self._table.rows(partition):
            for rows in [run] if partition.wanted is None else _with_hashes(run, partition.wanted):
                wanted = rows if self._lookup is None else self._lookup.rows(rows)
                yield from self._shown.batches(wanted, partition.shard, batch_id)


class FilteringReader(TableReader):
    """The same, but Spark may push down filters: on the shard, and on all key columns.

    Only if a read's options say so: Spark up to 4.3 keeps the partitions that one filter leaves, and reads no others
    for another filter of the same DataFrame in one plan, or for none.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take filters; yield those that Spark must still apply: all but those on the shard."""
        on_shard = ShardFilters(self._shown.shard)
        others = list(on_shard.take(filters))
        schema = self._table.schema
        key = [schema.key.field(name) for name in self._table.grouping]
        self._parts = narrowed(self._parts, on_shard.keeps, wanted_hashes(others, pa.schema(key)))
        return others


def _with_hashes(run: Run, hashes: Iterable[int]) -> Iterator[Run]:
    """Yield the rows with some hashes."""
    return (rows for one in sorted(hashes) if len(rows := run.slice(one, one)))
