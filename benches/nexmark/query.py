"""What a query of Nexmark is: the rows that it groups, three ways to write it, and SQL that says what it finds.

::

                       ┌─ vectorised: `applyInArrowWithState` ─────────────┐
    events ─▶ rows ────┤                                                   ├─▶ then ─▶ result
                       └─ by key: `transformWithState`, on holdfast or Spark┘
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
    """See the module.

    Attributes
    ----------
    number : str
        As the queries of Flink's nexmark are numbered.
    title : str
    keys : tuple of str
        Columns to group by.
    rows : callable
        From events to what is grouped.
    output, state : str
        Columns of the operator's result, and of a key's state where the function is vectorised.
    vectorised : callable
        The function of a shard.
    processor : callable
        Makes the processor of a key.
    sql : str
        What the query finds, over the views ``person``, ``auction`` and ``bid``.
    result_of : tuple of str
        Columns that say which result a row is; in update mode the last such row counts.
    mode : {"append", "update"}
        Of the query.
    time_mode : {"EventTime", "None"}
        The clock of its timers.
    then : callable, optional
        What stands behind the operator.
    on_spark : callable, optional
        From events to the result by operators of Spark's own; None if a stream in SQL cannot say it. Then the
        processor runs in Spark's ``transformWithState``.
    spark_mode : {"append", "update"}
        Of `on_spark`.
    at_once : bool
        Whether a result comes with the events that make it; otherwise when the watermark has passed them.
    """

    number: str
    title: str
    keys: tuple[str, ...]
    rows: Callable[[DataFrame], DataFrame]
    output: str
    state: str
    vectorised: Callable[[holdfast.ShardBatch], pa.Table]
    processor: Callable[[], StatefulProcessor]
    sql: str
    result_of: tuple[str, ...]
    mode: Mode = "append"
    time_mode: TimeMode = "EventTime"
    then: Callable[[DataFrame], DataFrame] | None = None
    on_spark: Callable[[DataFrame], DataFrame] | None = None
    spark_mode: Mode = "append"
    at_once: bool = False

    def of_shards(self, events: DataFrame) -> DataFrame:
        """Return the query on holdfast, by the function of a shard."""
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
