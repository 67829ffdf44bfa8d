"""The data source ``holdfast``: state as a Spark table.

::

    spark.read.format("holdfast").option("operator", "totals").load("s3://bucket/savepoints/before-upgrade")

`holdfast.state` reads a query: by its checkpoint location, with the state directory and the micro-batch as options.

On the driver Spark gives a source neither session nor settings: what opens the storage stands in options, or where the
store's own tools look. Options travel to the executors, but for credentials, which tasks have from their session.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.lookup.keys import Lookup, Shards
from holdfast.spark_integration.savepoints.restoring_shards import HashRange
from holdfast.spark_integration.state_source.options import ReadOptions
from holdfast.spark_integration.state_source.shown import ShownTable
from holdfast.spark_integration.state_source.tables import Part, QueryTable, ReadableTable, SavedTable

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
        table: ReadableTable = SavedTable.find(options) if options.state_dir is None else QueryTable.find(options)
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
        return TableReader(table, shown, options.shards, self._lookup)


class TableReader(DataSourceReader):
    """Reads the parts of a table; travels to the executors.

    Parameters
    ----------
    shards : Shards or None
        Which to read; None for all.
    lookup : Lookup or None
        Which key to read; None for all.

    Notes
    -----
    It takes no filters: Spark up to 4.3 keeps the partitions that one filter leaves, and reads no others for another
    filter of the same DataFrame in one plan, or for none.
    """

    def __init__(self, table: ReadableTable, shown: ShownTable, shards: Shards | None, lookup: Lookup | None) -> None:
        self._parts = [
            part
            for part in table.parts()
            if (shards is None or part.shard in shards)
            and (lookup is None or part.hashes.overlaps(HashRange(lookup.hash, lookup.hash)))
        ]
        self._table, self._shown, self._lookup = table.travelling(), shown, lookup

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
            wanted = run if self._lookup is None else self._lookup.rows(run)
            yield from self._shown.batches(wanted, partition.shard, batch_id)
