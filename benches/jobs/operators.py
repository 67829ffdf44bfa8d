"""Built-in operators of holdfast and of Spark, which emit the same rows.

A micro-batch spans ten seconds of event time, and the watermark trails by four seconds.

===========  ==========================================================================================
`dedup`      each id twice within a micro-batch; ids expire after four seconds
`window`     windows of ten seconds, about as many keys as rows
`session`    a gap of five seconds, `keys` possible keys
`agg`        a count and a sum for each of `keys` possible keys
`join`       half of the rows with the other half, at most two seconds apart, `keys` possible keys
`left_join`  the same, which emits all rows of one half
`full_join`  the same, which emits all rows
===========  ==========================================================================================

With `Operators.waiting`, the gap and the distance are long enough for that many rows to wait in the state. Large
micro-batches fill it; afterwards as many rows leave as arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import click
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from holdfast.benches.jobs.job import FIRST_SECOND, StreamingJob, numbered_rows, option

OPERATORS = ("dedup", "window", "session", "agg", "join", "left_join", "full_join")
#: Spark's name of each join.
_HOW = {"join": "inner", "left_join": "left", "full_join": "full"}
_BATCH_MS, _GAP_MS, _WITHIN_MS = 10_000, 5_000, 2_000
_FILL_ROWS = 500_000


@dataclass(frozen=True)
class Operators(StreamingJob):
    """One built-in operator."""

    name = "operators"

    operator: str = option("window", "operator to run", click.Choice(OPERATORS))
    rows: int = option(10_000, "rows per micro-batch")
    keys: int = option(200_000, "possible keys of session, agg and joins")
    batches: int = option(60, "micro-batches of a run")
    warmup: int = option(35, "uncounted micro-batches at the start, in which the JVM compiles the query")
    waiting: int = option(0, "rows that wait in the state of a session or join; default: those of a few seconds")

    @property
    def fill_batches(self) -> int:
        return -(-self.waiting // _FILL_ROWS)

    @property
    def output_mode(self) -> str:
        return "update" if self.operator == "agg" else "append"

    @property
    def compared(self) -> tuple[str, ...]:
        """The columns in which engines must agree, all if empty; it is undefined which duplicate survives."""
        return ("key",) if self.operator == "dedup" else ()

    def numbers(self, spark: SparkSession) -> DataFrame:
        if not self.waiting:
            return super().numbers(spark)
        fill, fill_rows, batch = self.fill_batches, min(self.waiting, _FILL_ROWS), F.col("batch")
        before = F.least(batch, F.lit(fill)) * fill_rows + F.greatest(batch - fill, F.lit(0)) * self.rows
        return numbered_rows(spark, self, fill_rows).select((before + F.col("i")).alias("value"))

    def _wait(self, usual_ms: int) -> str:
        return f"{self.waiting * _BATCH_MS // self.rows or usual_ms} milliseconds"

    def source(self, spark: SparkSession) -> DataFrame:
        number = F.col("value")
        at = F.timestamp_millis(F.lit(FIRST_SECOND * 1000) + (number * _BATCH_MS / self.rows).cast("long"))
        key = F.xxhash64((number / 2).cast("long")) if self.operator == "dedup" else F.xxhash64(number) % self.keys
        rows = self.numbers(spark).select(key.alias("key"), at.alias("at"), (number % 100).alias("v"))
        return rows.withWatermark("at", "4 seconds")

    def on_holdfast(self, frame: DataFrame) -> DataFrame:
        import holdfast

        if self.operator in _HOW:
            left, right = map(holdfast.stream, self._halves(frame))
            return left.join(right, on="key", within=self._wait(_WITHIN_MS), how=_HOW[self.operator])
        events, n = holdfast.stream(frame), holdfast.count()
        if self.operator == "dedup":
            return events.dropDuplicatesWithinWatermark(["key"])
        if self.operator == "window":
            return events.groupBy("key").window("at", "10 seconds").agg(n=n)
        if self.operator == "session":
            return events.groupBy("key").session("at", self._wait(_GAP_MS)).agg(n=n)
        return events.groupBy("key").agg(n=n, total=holdfast.sum("v"))

    def on_spark(self, frame: DataFrame) -> DataFrame:
        if self.operator in _HOW:
            left, right = self._halves(frame)
            within = self._wait(_WITHIN_MS)
            near = f"at >= other_at - interval {within} AND at <= other_at + interval {within}"
            joined = left.join(right.withColumnRenamed("key", "k"), F.expr(f"key = k AND {near}"), _HOW[self.operator])
            key = F.coalesce("key", "k") if self.operator == "full_join" else F.col("key")
            return joined.select(key.alias("key"), "at", "v", "other_at", "w")
        n = F.count("*").alias("n")
        if self.operator == "dedup":
            return frame.dropDuplicatesWithinWatermark(["key"])
        if self.operator == "window":
            return frame.groupBy("key", F.window("at", "10 seconds")).agg(n)
        if self.operator == "session":
            return frame.groupBy("key", F.session_window("at", self._wait(_GAP_MS))).agg(n)
        return frame.groupBy("key").agg(n, F.sum("v").alias("total"))

    @staticmethod
    def _halves(frame: DataFrame) -> tuple[DataFrame, DataFrame]:
        other = frame.where("v % 2 = 1").withColumnsRenamed({"at": "other_at", "v": "w"})
        return frame.where("v % 2 = 0"), other
