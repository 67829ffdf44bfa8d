"""A Nexmark query: ways to write it, and SQL that defines its results.

::

    events ─▶ in_one_line: holdfast's operators ────────────────────────────────────────▶ result
    events ─▶ on_spark: Spark's own aggregations and joins ─────────────────────────────▶ result
    events ─▶ rows ─▶ `ByKey`: a processor, on holdfast and on Spark ─▶ then ───────────▶ result
    person, auction, bid (whole tables) ─▶ sql ─────────────────────────────────────────▶ result

A query is written by key if Spark's streaming SQL cannot express it.
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
    """A Nexmark query, in each of the ways that the module shows."""

    number: str  # as in Flink's nexmark
    title: str
    in_one_line: Way
    on_spark: Way
    sql: str  # over the views person, auction and bid
    result_of: tuple[str, ...]  # key columns of a result; in update mode its last row counts
    by_key: Way | None = None
    mode: Mode = "append"
    chains: bool = False  # whether an operator in one line follows another
    at_once: bool = False  # results appear with their events, before the watermark passes them

    def by_processor(self, house: House) -> DataFrame:
        """Return the query by key on holdfast; raise `InvalidArgumentError` if there is none."""
        if self.by_key is None:
            raise InvalidArgumentError("this query is not written by key; choose 4 or 19", query=self.number)
        return self.by_key(house)


@dataclass(frozen=True)
class ByKey:
    """A processor in update mode, and the steps before and after it."""

    rows: Way
    keys: tuple[str, ...]
    processor: type[StatefulProcessor]
    output: str
    time_mode: TimeMode
    then: Callable[[DataFrame], DataFrame] = lambda found: found

    def on_holdfast(self, house: House) -> DataFrame:
        grouped = holdfast.stream(self.rows(house)).groupBy(*self.keys)
        processor = self.processor()
        return self.then(grouped.transformWithState(processor, self.output, "update", self.time_mode, name="nexmark"))

    def on_spark(self, house: House) -> DataFrame:
        grouped = self.rows(house).groupBy(*self.keys)
        return self.then(grouped.transformWithState(self.processor(), self.output, "update", self.time_mode))
