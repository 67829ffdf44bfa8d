"""Migration: a query on Spark's own operator goes on with holdfast, with the state that it has.

::

    python -m holdfast.examples.stateful.migration

runs a query with Spark's `transformWithState`, stops it, and goes on with a new query on holdfast, whose initial state
is what Spark's `statestore` source reads of the old one::

    on holdfast: {'user': 'ann', 'visits': 4, 'pages': 3}

The processor is the same; `handleInitialState` is what it needs in addition. The new query has a checkpoint location of
its own, and reads what the old one has not read: here files in another folder. A source with offsets, such as Kafka,
begins at those in the last file of ``<old checkpoint>/offsets`` that ``commits`` has, too.
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
    """Counts the clicks of a user, and on how many pages they were."""

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
    """Return the query as it was."""
    return clicks.groupBy("user").transformWithState(Visits(), VISITS, "append", "None")


def visits(clicks: DataFrame, known: GroupedData | None = None) -> DataFrame:
    """Return the query as it goes on; `known` is the state to begin with, and is not needed at a restart."""
    users = holdfast.stream(clicks).groupBy("user")
    return users.transformWithState(Visits(), VISITS, "append", "None", initialState=known, name="visits")


def state_on_spark(spark: SparkSession, checkpoint: Path) -> GroupedData:
    """Return the state of the old query as rows for `Visits.handleInitialState`: a total, or a page, of a user."""

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
    """Run the old query and then the new one; return their rows by micro-batch."""
    old, new = folder / "old", folder / "new"
    old.mkdir()
    new.mkdir()
    first = run(spark, visits_on_spark, CLICKS, BEFORE, old)
    known = state_on_spark(spark, old / visits_on_spark.__name__)

    def going_on(clicks: DataFrame) -> DataFrame:
        return visits(clicks, known)

    return first, run(spark, going_on, CLICKS, AFTER, new)


def main() -> None:
    """Migrate, and print what both queries give."""
    with tempfile.TemporaryDirectory() as folder, example_session() as spark:
        spark.conf.set("spark.holdfast.state.dir", f"{folder}/state")
        for engine, batches in zip(("Spark", "holdfast"), migrate(spark, Path(folder)), strict=True):
            for row in (row for rows in batches for row in rows):
                print(f"on {engine}: {row.asDict()}")


if __name__ == "__main__":
    main()
