"""What a query of Nexmark is: ways to write it, and SQL that says what it finds.

::

    events ─▶ in_one_line: operators of holdfast's ─────────────────────────────────────▶ result
    events ─▶ on_spark: aggregations and joins of Spark's own ──────────────────────────▶ result
    events ─▶ rows ─▶ `ByKey`: a processor, on holdfast and on Spark ─▶ then ───────────▶ result
    person, auction, bid (whole tables) ─▶ sql ─────────────────────────────────────────▶ result

A query is written by key if a stream in Spark's SQL cannot say it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pyspark.sql import DataFrame
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import holdfast
from holdfast.benches.nexmark.events import House
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.shard.timeout import TimeMode

Mode = Literal["append", "update"]
Way = Callable[[House], DataFrame]


@dataclass(frozen=True)
class Query:
    """See the module."""

    number: str  # as the queries of Flink's nexmark are numbered
    title: str
    in_one_line: Way
    on_spark: Way
    sql: str  # over the views person, auction and bid
    result_of: tuple[str, ...]  # columns that say which result a row is; in update mode its last row counts
    by_key: Way | None = None
    mode: Mode = "append"
    chains: bool = False  # whether an operator in one line stands behind another
    at_once: bool = False  # a result comes with the events that make it, not once the watermark has passed them

    def by_processor(self, house: House) -> DataFrame:
        """Return the query by key, on holdfast. Raises `InvalidArgumentError` if it is not written so."""
        if self.by_key is None:
            raise InvalidArgumentError(
                "Spark's own operators say this query: it is not written by key", query=self.number
            )
        return self.by_key(house)


@dataclass(frozen=True)
class ByKey:
    """A processor, which runs in update mode, and the steps around it."""

    rows: Way
    keys: tuple[str, ...]
    processor: type[StatefulProcessor]
    output: str
    time_mode: TimeMode
    then: Callable[[DataFrame], DataFrame] = lambda found: found

    def on_holdfast(self, house: House) -> DataFrame:
        """Return the query on holdfast."""
        grouped = holdfast.stream(self.rows(house)).groupBy(*self.keys)
        processor = self.processor()
        return self.then(grouped.transformWithState(processor, self.output, "update", self.time_mode, name="nexmark"))

    def on_spark(self, house: House) -> DataFrame:
        """Return the same in Spark's own ``transformWithState``."""
        grouped = self.rows(house).groupBy(*self.keys)
        return self.then(grouped.transformWithState(self.processor(), self.output, "update", self.time_mode))
