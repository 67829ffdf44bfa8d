"""Session windows: an event belongs to its key's session if it comes no later than `GAP_MS` after the event before it.

In each micro-batch, a minute of event time, other keys have two events each, and come again some minutes later. So
their sessions end by a timeout, when the watermark has passed their last event by the gap::

    minute      7      8      9     10     11     12
    key 1       ‥                    ▲ over        ‥       ‥ two events
    key 2              ‥                    ▲ over
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.benches.jobs.by_key import JobByKey
from holdfast.benches.jobs.job import option
from holdfast.benches.jobs.numbered_rows import FIRST_SECOND
from holdfast.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.state import GroupState

    from holdfast.spark_integration.shard.timeout import TimeMode, TimeoutConf
    from holdfast.spark_integration.vectorised.batch import ShardBatch

GAP_MS = 90_000
_BATCH_S, _PERIOD, _APART_MS = 60, 5, 20_000
SESSION = ["n", "first_ms", "last_ms"]


def session_of_key(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Add a key's events to its session; emit the sessions that are over."""
    session, over = state.getOption, []
    if state.hasTimedOut:
        over.append(session)
        state.remove()
    else:
        for at_ms in sorted(at_ms for frame in frames for at_ms in frame["at_ms"].tolist()):
            if session is not None and at_ms - session[2] <= GAP_MS:
                session = (session[0] + 1, session[1], at_ms)
            else:
                over += [session] if session is not None else []
                session = (1, at_ms, at_ms)
        assert session is not None  # a key that is called has events, or has timed out
        state.update(session)
        state.setTimeoutTimestamp(session[2] + GAP_MS)
    yield pd.DataFrame(over, columns=SESSION).assign(key=key[0])


def sessions_of_shard(batch: ShardBatch) -> pa.Table:
    """Do the same for all keys of a shard."""
    events, ones = batch.rows["at_ms"], np.ones(batch.rows.num_rows, np.int64)
    new = pa.table([ones, events, events, batch.groups.index], names=[*SESSION, "key"])
    old = batch.state.get().append_column("key", pa.array(np.arange(len(batch.groups)))).filter(batch.state.exists())
    parts = pa.concat_tables([old, new]).sort_by([("key", "ascending"), ("last_ms", "ascending")])
    key, first_ms, last_ms = (parts[name].to_numpy() for name in ("key", "first_ms", "last_ms"))
    other_key = np.append(True, key[1:] != key[:-1])
    begins = np.flatnonzero(other_key | np.append(True, first_ms[1:] - last_ms[:-1] > GAP_MS))
    ends = np.append(begins[1:], len(key)) - 1
    counts = np.add.reduceat(parts["n"].to_numpy(), begins)
    sessions = pa.table([counts, first_ms[begins], last_ms[ends]], names=SESSION)
    is_newest = np.append(other_key[1:], True)[ends]  # of its key
    newest, has_rows = sessions.filter(is_newest), pc.greater(batch.groups.count(), 0)
    batch.state.put(newest, where=has_rows)
    batch.state.delete(where=pc.invert(has_rows))
    batch.timers.set(pc.add(newest["last_ms"], GAP_MS), where=has_rows)
    of_key = key[begins]
    is_over = ~is_newest | ~has_rows.to_numpy(zero_copy_only=False)[of_key]
    return sessions.append_column("key", batch.keys["key"].take(pa.array(of_key))).filter(is_over)


@dataclass(frozen=True)
class Sessions(JobByKey):
    """See the module."""

    name = "sessions"
    state = "n long, first_ms long, last_ms long"
    output = f"key long, {state}"

    rows: int = option(20_000, "rows of a micro-batch, two for each of its keys")
    keys: int = option(50_000, "possible keys, five times those of a micro-batch")
    batches: int = option(16, "micro-batches of a run")
    warmup: int = option(8, "first of these, which are not counted")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows % 2 or self.keys * 2 != self.rows * _PERIOD:
            raise InvalidArgumentError("a micro-batch has two rows for each fifth key", rows=self.rows, keys=self.keys)

    @property
    def timeout_conf(self) -> TimeoutConf:
        return "EventTimeTimeout"

    @property
    def time_mode(self) -> TimeMode:
        return "EventTime"

    def source(self, spark: SparkSession) -> DataFrame:
        """Return the streaming rows: the two events of a key are 20 s apart."""
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        ticks = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", self.rows)
            .option("numPartitions", self.sources)
            .load()
        )
        touched = self.rows // 2
        batch, i = F.expr(f"value div {self.rows}"), F.col("value") % self.rows
        key = (batch % _PERIOD) * touched + i % touched
        at_ms = (batch * _BATCH_S + FIRST_SECOND) * 1000 + F.when(i < touched, 0).otherwise(_APART_MS)
        timed = ticks.select(key.alias("key"), at_ms.alias("at_ms"), F.timestamp_millis(at_ms).alias("at"))
        return timed.withWatermark("at", "0 seconds")

    def one_key(
        self, key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        return session_of_key(key, frames, state)

    def stateful(self, batch: ShardBatch) -> pa.Table:
        return sessions_of_shard(batch)
