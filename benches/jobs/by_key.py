"""Jobs whose function sees one key at a time: Spark's ``applyInPandasWithState`` beside holdfast's, unchanged.

Each has a vectorised function too, which does the same.

``dropin``: a running count and sum. Micro-batch b touches `DropIn.touched` of the keys, each with as many rows, those
that follow the ones of the batch before it; all keys come again after some batches.

``timers``: every one of `Timers.keys` keys has a timeout in event time. Micro-batches of `Timers.fill_rows` new keys
each register them; in each later one, `Timers.due` of them are due, and `Timers.rows` rows touch other keys, which
put their timeouts off. Without `Timers.timeouts` it is the same micro-batch, and nothing is due.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.benches.jobs.job import beside, option
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.numbered_rows import FIRST_SECOND, numbered_rows
from holdfast.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.state import GroupState

    from holdfast.spark_integration.shard.timeout import TimeMode, TimeoutConf
    from holdfast.spark_integration.vectorised.batch import ShardBatch

_BATCH_S = 60
_FAR_MS = 10 * 365 * 86_400_000


@dataclass(frozen=True)
class JobByKey(JobA):
    """A job with a function for one key."""

    @property
    def timeout_conf(self) -> TimeoutConf:
        """How its timeouts work."""
        return "NoTimeout"

    @abstractmethod
    def one_key(
        self, key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        """Add a key's rows to its count and sum; what both Spark and holdfast call."""


@dataclass(frozen=True)
class DropIn(JobByKey):
    """See the module."""

    name = "dropin"

    rows: int = option(40_000, "rows of a micro-batch")
    keys: int = option(40_000, "possible keys")
    touched: int = option(20_000, "keys of a micro-batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.touched <= min(self.rows, self.keys):
            raise InvalidArgumentError("a micro-batch touches at most as many keys as there are, each with a row")

    def source(self, spark: SparkSession) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        ticks = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", self.rows)
            .option("numPartitions", self.sources)
            .load()
        )
        number = F.expr(f"(value div {self.rows}) * {self.touched} + (value % {self.rows}) % {self.touched}")
        return ticks.select((number % self.keys).alias("key"), (F.col("value") % 100).alias("v"))

    def one_key(
        self, key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        n, s = state.getOption or (0, 0)
        for frame in frames:
            n += len(frame)
            s += int(frame["v"].sum())
        state.update((n, s))
        yield pd.DataFrame({"key": [key[0]], "n": [n], "s": [s]})


@dataclass(frozen=True)
class Timers(JobByKey):
    """See the module."""

    name = "timers"

    rows: int = option(20_000, "rows of a counted micro-batch, of as many keys")
    keys: int = option(2_000_000, "keys in the state, each with a timeout")
    batches: int = option(8, "micro-batches of a run, without those that fill the state")
    warmup: int = option(3, "first of these, which are not counted")
    fill_rows: int = option(250_000, "new keys of a micro-batch that fills the state")
    due: int = option(1000, "timeouts that are due in a counted micro-batch")
    timeouts: bool = option(True, "whether keys have timeouts", bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup < 3:
            raise InvalidArgumentError(
                "nothing is due in the first two micro-batches: warmup must be at least 3", warmup=self.warmup
            )
        if self.keys < 2 * max(self.rows, self.due * self.batches):
            raise InvalidArgumentError("half of the keys must do for all that is due, the other half for a micro-batch")

    @property
    def fill_batches(self) -> int:
        return -(-self.keys // self.fill_rows)

    @property
    def timeout_conf(self) -> TimeoutConf:
        return "EventTimeTimeout" if self.timeouts else "NoTimeout"

    @property
    def time_mode(self) -> TimeMode:
        return "EventTime" if self.timeouts else "None"

    def source(self, spark: SparkSession) -> DataFrame:
        """Return the streaming rows; all rows of a micro-batch happen in one second, a minute after the last ones."""
        from pyspark.sql import functions as F  # noqa: N812

        rows = numbered_rows(
            spark, self.sources, fill_batches=self.fill_batches, fill_rows=self.fill_rows, rows=self.rows
        )
        fills = F.col("batch") < self.fill_batches
        upper_half = self.keys // 2 + (F.col("batch") * self.rows + F.col("i")) % (self.keys - self.keys // 2)
        key = F.when(fills, F.col("batch") * self.fill_rows + F.col("i")).otherwise(upper_half)
        at = F.timestamp_seconds(F.col("batch") * _BATCH_S + FIRST_SECOND)
        made = rows.select(key.alias("key"), (F.col("i") % 100).alias("v"), at.alias("at"))
        return made.where(F.col("key") < self.keys).withWatermark("at", "0 seconds")

    def one_key(
        self, key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        n, s = state.getOption or (0, 0)
        if state.hasTimedOut:
            state.remove()
        else:
            for frame in frames:
                n += len(frame)
                s += int(frame["v"].sum())
            is_new = not state.exists
            state.update((n, s))
            if self.timeouts:
                state.setTimeoutTimestamp(self.due_ms(key[0]) if is_new else state.getCurrentWatermarkMs() + _FAR_MS)
        yield pd.DataFrame({"key": [key[0]], "n": [n], "s": [s]})

    def stateful(self, batch: ShardBatch) -> pa.Table:
        if not self.timeouts:
            return super().stateful(batch)
        is_new, has_rows = pc.invert(batch.state.exists()), pc.greater(batch.groups.count(), 0)
        state = self.combine(batch.state.get(), self.reduce(batch))
        batch.state.put(state, where=has_rows)
        batch.state.delete(where=pc.invert(has_rows))
        far_ms = (batch.watermark_ms or 0) + _FAR_MS
        batch.timers.set(pc.if_else(is_new, self.due_ms(batch.keys["key"].to_numpy()), far_ms), where=has_rows)
        return beside(batch.keys, state)

    def due_ms(self, key: Any) -> Any:
        """Return the timeout that a new key gets: `due` of them fire in each micro-batch once all have one.

        The watermark of a micro-batch is the time of the rows of the one before it.
        """
        batch = self.fill_batches + key // self.due
        return (FIRST_SECOND + batch * _BATCH_S + _BATCH_S // 2) * 1000
