"""Operators in one line, beside Spark's own of the same name, which show the same rows.

A micro-batch is ten seconds of event time, and the watermark four seconds behind it.

=========  ============================================================================================
`dedup`    each id twice, within a micro-batch; an id is forgotten after four seconds
`window`   windows of ten seconds, about as many keys as rows
`session`  a gap of five seconds, as many possible keys as rows
`agg`      a count and a sum for each of so many possible keys
=========  ============================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from holdfast.benches.jobs.job import FIRST_SECOND, StreamingJob, option

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OPERATORS = ("dedup", "window", "session", "agg")
_BATCH_MS = 10_000


@dataclass(frozen=True)
class Operators(StreamingJob):
    """See the module."""

    name = "operators"

    operator: str = option("window", "which operator", click.Choice(OPERATORS))
    rows: int = option(10_000, "rows of a micro-batch")
    keys: int = option(200_000, "possible keys of session and agg")
    batches: int = option(16, "micro-batches of a run")
    warmup: int = option(8, "first of these, which are not counted")

    @property
    def output_mode(self) -> str:
        """In which the query shows its rows."""
        return "update" if self.operator == "agg" else "append"

    def source(self, spark: SparkSession) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        number = F.col("value")
        at = F.timestamp_millis(F.lit(FIRST_SECOND * 1000) + (number * _BATCH_MS / self.rows).cast("long"))
        key = F.xxhash64((number / 2).cast("long")) if self.operator == "dedup" else F.xxhash64(number) % self.keys
        rows = self.numbers(spark).select(key.alias("key"), at.alias("at"), (number % 100).alias("v"))
        return rows.withWatermark("at", "4 seconds")

    def on_holdfast(self, frame: DataFrame) -> DataFrame:
        """Return the operator on holdfast."""
        import holdfast

        events, n = holdfast.stream(frame), holdfast.count()
        if self.operator == "dedup":
            return events.dropDuplicatesWithinWatermark(["key"])
        if self.operator == "window":
            return events.groupBy("key").window("at", "10 seconds").agg(n=n)
        if self.operator == "session":
            return events.groupBy("key").session("at", "5 seconds").agg(n=n)
        return events.groupBy("key").agg(n=n, total=holdfast.sum("v"))

    def on_spark(self, frame: DataFrame) -> DataFrame:
        """Return Spark's own."""
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        n = F.count("*").alias("n")
        if self.operator == "dedup":
            return frame.dropDuplicatesWithinWatermark(["key"])
        if self.operator == "window":
            return frame.groupBy("key", F.window("at", "10 seconds")).agg(n)
        if self.operator == "session":
            return frame.groupBy("key", F.session_window("at", "5 seconds")).agg(n)
        return frame.groupBy("key").agg(n, F.sum("v").alias("total"))
