"""How rows reach their shard: the seam.

Spark ships a state operator's rows one by one, but a shard wants columns. A transport turns the user's rows
into what Spark shuffles by ``route``, and back into columns inside the shard's call:

* `holdfast.spark_integration.transport.packed`: Python splits each Arrow batch by shard and sends a few blobs of Arrow
  data. One more Python stage, no work per row: best for large batches.
* `holdfast.spark_integration.transport.rows`: Spark computes the route and sends the rows as they are. No stage before
  the shuffle: best for small batches.

Output has a seam of its own: `holdfast.spark_integration.transport.output`. If late rows are dropped, Spark tells
which, between `Transport.send` and `Transport.receive`, by the event times that travel beside the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, StructField

from holdfast.spark_integration.spark_types import Watermark

HASH = "__holdfast_hash"
EVENT_TIME = "__holdfast_event_time"


def quoted(name: str) -> Column:
    """Return a column by its bare name, whatever characters it contains."""
    return F.col("`" + name.replace("`", "``") + "`")


#: Puts tables of rows together, in memory or in a file.
Gather = Callable[[Iterable[pa.Table]], pa.Table]


class Received(NamedTuple):
    """The rows of one shard and micro-batch.

    Attributes
    ----------
    rows : pyarrow.Table
    late : int or None
        How many more there were, dropped because they were late; None where Spark has dropped them, and counts them.
    """

    rows: pa.Table
    late: int | None


class Transport(Protocol):
    """Carries rows from a DataFrame to the shards."""

    def send(self, frame: DataFrame, hashed: Column) -> DataFrame:
        """Return the frame to group by `ROUTE`; runs on the driver.

        Parameters
        ----------
        frame : DataFrame
            The columns to carry.
        hashed : Column
            The hash of the keys, over columns of `frame`; carried as the last column, `HASH`.

        Notes
        -----
        Expressions over the keys must come last. Spark infers constraints from aliases: it repeats an expression for
        each of its columns that is renamed after it, which doubles the number of constraints with each key.
        """

    @property
    def arrow_schema(self) -> pa.Schema:
        """The columns of the frame sent."""

    def receive(self, chunks: Iterable[pd.DataFrame], gather: Gather) -> Received:
        """Return the rows of one shard and micro-batch; runs in a worker."""


@dataclass(frozen=True)
class EventTime:
    """The column that carries the watermark.

    Attributes
    ----------
    column : str
    watermark : Watermark
    filters_rows : bool
        Whether Spark drops rows older than the watermark before they reach their shard, as it does for
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

    @property
    def later_us(self) -> int:
        """How much later than they are times travel."""
        return self.watermark.held_back_ms * 1000


def moments_of(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return the time that Spark compares with the watermark: the column itself or, for windows, their ends."""
    return pc.struct_field(column, "end") if pa.types.is_struct(column.type) else column
