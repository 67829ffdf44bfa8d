"""What a query of Nexmark is: the rows that it groups, ways to write it, and SQL that says what it finds.

::

                       ┌─ vectorised: `applyInArrowWithState` ─────────────┐
    events ─▶ rows ────┤                                                   ├─▶ then ─▶ result
                       └─ by key: `transformWithState`, on holdfast or Spark┘
    events ─▶ in_one_line: an operator of holdfast's, which is vectorised, too ──────▶ result
    events ─▶ on_spark: aggregations and joins of Spark's own ───────────────────────▶ result
    person, auction, bid (whole tables) ─▶ sql ──────────────────────────────────────▶ result
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import holdfast
from holdfast.spark_integration.shard.timeout import TimeMode

Mode = Literal["append", "update"]
_NAME = "nexmark"


@dataclass(frozen=True)
class Query:
    """See the module."""

    number: str  # as the queries of Flink's nexmark are numbered
    title: str
    keys: tuple[str, ...]
    rows: Callable[[DataFrame], DataFrame]  # from events to what is grouped by the keys
    output: str  # columns of the operator's result
    processor: Callable[[], StatefulProcessor]
    sql: str  # over the views person, auction and bid
    result_of: tuple[str, ...]  # columns that say which result a row is; in update mode its last row counts
    vectorised: Callable[[holdfast.ShardBatch], pa.Table] | None = None
    state: str = ""  # columns of a key's state where the function is vectorised
    in_one_line: Callable[[DataFrame], DataFrame] | None = None  # from events to the result, in place of `vectorised`
    mode: Mode = "append"
    time_mode: TimeMode = "EventTime"
    then: Callable[[DataFrame], DataFrame] | None = None  # what stands behind the operator
    #: From events to the result by operators of Spark's own; None if a stream in SQL cannot say it. Then the processor
    #: runs in Spark's ``transformWithState``.
    on_spark: Callable[[DataFrame], DataFrame] | None = None
    spark_mode: Mode = "append"
    at_once: bool = False  # a result comes with the events that make it, not once the watermark has passed them

    def of_shards(self, events: DataFrame) -> DataFrame:
        """Return the query on holdfast, by an operator in one line or else by the function of a shard."""
        if self.in_one_line is not None:
            return self.in_one_line(events)
        assert self.vectorised is not None
        grouped = holdfast.stream(self.rows(events)).groupBy(*self.keys)
        return self._end(
            grouped.applyInArrowWithState(
                self.vectorised, self.output, self.state, self.mode, name=_NAME, timeMode=self.time_mode
            )
        )

    def by_key(self, events: DataFrame) -> DataFrame:
        """Return the query on holdfast, by the processor of a key."""
        grouped = holdfast.stream(self.rows(events)).groupBy(*self.keys)
        return self._end(
            grouped.transformWithState(self.processor(), self.output, self.mode, self.time_mode, name=_NAME)
        )

    def by_key_on_spark(self, events: DataFrame) -> DataFrame:
        """Return the query by the same processor, in Spark's own ``transformWithState``."""
        grouped = self.rows(events).groupBy(*self.keys)
        return self._end(grouped.transformWithState(self.processor(), self.output, self.mode, self.time_mode))

    def of_spark(self, events: DataFrame) -> DataFrame:
        """Return the query by Spark's own operators."""
        return self.by_key_on_spark(events) if self.on_spark is None else self.on_spark(events)

    @property
    def mode_of_spark(self) -> Mode:
        """The output mode of `of_spark`."""
        return self.mode if self.on_spark is None else self.spark_mode

    def _end(self, frame: DataFrame) -> DataFrame:
        return frame if self.then is None else self.then(frame)
