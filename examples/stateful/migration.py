"""Migration: moves a query from Spark's own operator to holdfast, with its state.

::

    python -m holdfast.examples.stateful.migration

runs a query with Spark's `transformWithState`, stops it, and continues with a new query on holdfast, whose initial
state is the old state as Spark's `statestore` source reads it::

    on holdfast: {'user': 'ann', 'visits': 4, 'pages': 3}

The processor is the same, plus `handleInitialState`. The new query has a new checkpoint location and reads only new
input, here files in a different folder. A source with offsets, such as Kafka, starts at the offsets in the last file of
``<old checkpoint>/offsets`` that ``commits`` has, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, GroupedData, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.examples.stateful.local import MicroBatch, example_session, run

CLICKS = "user string, page string"
VISITS = "user string, visits long, pages long"


class Visits(StatefulProcessor):
    """Counts a user's clicks and distinct pages."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.visits = handle.getValueState("visits", "n long")
        self.pages = handle.getMapState("pages", "page string", "n long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        if initialState.page is None:
            self.visits.update((initialState.n,))
        else:
            self.pages.updateValue((initialState.page,), (initialState.n,))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        (visits,) = self.visits.get() or (0,)
        for row in rows:
            visits += 1
            (on_page,) = self.pages.getValue((row.page,)) or (0,)
            self.pages.updateValue((row.page,), (on_page + 1,))
        self.visits.update((visits,))
        yield Row(user=key[0], visits=visits, pages=len(list(self.pages.keys())))


def visits_on_spark(clicks: DataFrame) -> DataFrame:
    """Return the old query."""
    return clicks.groupBy("user").transformWithState(Visits(), VISITS, "append", "None")


def visits(clicks: DataFrame, known: GroupedData | None = None) -> DataFrame:
    """Return the new query; `known` is its initial state, which a restart does not need."""
    users = holdfast.stream(clicks).groupBy("user")
    return users.transformWithState(Visits(), VISITS, "append", "None", initialState=known, name="visits")


def state_on_spark(spark: SparkSession, checkpoint: Path) -> GroupedData:
    """Return the old query's state as rows for `Visits.handleInitialState`: a user's total or one of a user's pages."""

    def variable(name: str) -> DataFrame:
        return spark.read.format("statestore").option("stateVarName", name).load(str(checkpoint))

    totals = variable("visits").select("key.user", F.lit(None).cast("string").alias("page"), "value.n")
    pages = variable("pages").select("key.user", "user_map_key.page", "user_map_value.n")
    return totals.unionByName(pages).groupBy("user")


BEFORE: list[MicroBatch] = [
    [("ann", "home"), ("ann", "news"), ("bob", "home")],
    [("ann", "home"), ("cem", "news")],
]
AFTER: list[MicroBatch] = [
    [("ann", "shop"), ("dan", "home")],
    [("bob", "home"), ("dan", "news")],
]


def migrate(spark: SparkSession, folder: Path) -> tuple[list[list[Row]], list[list[Row]]]:
    """Run the old query, then the new query; return their rows by micro-batch."""
    old, new = folder / "old", folder / "new"
    old.mkdir()
    new.mkdir()
    first = run(spark, visits_on_spark, CLICKS, BEFORE, old)
    known = state_on_spark(spark, old / visits_on_spark.__name__)

    def migrated(clicks: DataFrame) -> DataFrame:
        return visits(clicks, known)

    return first, run(spark, migrated, CLICKS, AFTER, new)


def main() -> None:
    """Migrate, and print the rows of both queries."""
    with tempfile.TemporaryDirectory() as folder, example_session() as spark:
        spark.conf.set("spark.holdfast.state.dir", f"{folder}/state")
        for engine, batches in zip(("Spark", "holdfast"), migrate(spark, Path(folder)), strict=True):
            for row in (row for rows in batches for row in rows):
                print(f"on {engine}: {row.asDict()}")


if __name__ == "__main__":
    main()
