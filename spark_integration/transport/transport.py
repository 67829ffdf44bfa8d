"""What travels with rows on their way to their shard: their keys' hash, and their event time.

Spark ships a state operator's rows one by one, but a shard wants columns.
`holdfast.spark_integration.transport.packed` turns rows into what Spark shuffles by ``route``, and back into columns
inside the shard's call. Output has a seam of its own: `holdfast.spark_integration.transport.output`. If late rows are
dropped, Spark tells which, between sending and receiving, by the event times that travel beside the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, StructField

from holdfast.spark_integration.spark_types import Watermark

HASH = "__holdfast_hash"
EVENT_TIME = "__holdfast_event_time"
#: Puts tables of rows together, in memory or in a file.
Gather = Callable[[Iterable[pa.Table]], pa.Table]


def quoted(name: str) -> Column:
    """Return a column by its bare name, whatever characters it contains."""
    return F.col("`" + name.replace("`", "``") + "`")


class Received(NamedTuple):
    """The rows of one shard and micro-batch.

    `late`: how many more there were, dropped because they were late.
    """

    rows: pa.Table
    late: int


@dataclass(frozen=True)
class EventTime:
    """The column that carries the watermark.

    `filters_rows`: whether Spark drops rows older than the watermark before they reach their shard, as it does for
    ``EventTimeTimeout``. Otherwise it only needs the column's metadata.
    """

    column: str
    watermark: Watermark
    filters_rows: bool

    @property
    def sent(self) -> StructField:
        """The column as it travels: microseconds since 1970. Spark compares these; a time in pandas ends in 2262.

        Times are later by as much as the watermark is held back: Spark drops what is older than its own.
        """
        return StructField(EVENT_TIME, LongType(), metadata=Watermark(self.watermark.delay_ms).metadata)


def moments_of(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return the time that Spark compares with the watermark: the column itself or, for windows, their ends."""
    return pc.struct_field(column, "end") if pa.types.is_struct(column.type) else column
