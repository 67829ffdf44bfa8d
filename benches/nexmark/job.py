"""``nexmark``: a query over events that Spark computes from their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import click
from pyspark.sql import DataFrame, SparkSession

from holdfast.benches.jobs.job import StreamingJob, option
from holdfast.benches.nexmark.auctions import AVERAGE_PRICE, BIDS_OF_CATEGORY, LAST_BID, TOP_BIDS, WINNING_BIDS
from holdfast.benches.nexmark.events import House, Mix, events
from holdfast.benches.nexmark.query import Query, Way
from holdfast.benches.nexmark.windows import COUNT_BY_BIDDER, HIGHEST_BID, HOT_ITEMS, NEW_USERS, USER_SESSIONS
from holdfast.benches.runs.engines import BACKENDS, SPARK_ROCKSDB, SparkEngine

QUERIES: dict[str, Query] = {
    query.number: query
    for query in (
        AVERAGE_PRICE,
        HOT_ITEMS,
        HIGHEST_BID,
        NEW_USERS,
        WINNING_BIDS,
        USER_SESSIONS,
        COUNT_BY_BIDDER,
        LAST_BID,
        TOP_BIDS,
        BIDS_OF_CATEGORY,
    )
}


@dataclass(frozen=True)
class Nexmark(StreamingJob):
    """One Nexmark query over generated events."""

    name = "nexmark"

    rows: int = option(100_000, "events per micro-batch: 46 of 50 are bids")
    keys: int = option(1_000, "people who bid and sell at a time")
    batches: int = option(36, "micro-batches of a run")
    warmup: int = option(24, "uncounted micro-batches at the start, in which the JVM compiles the query")
    query: str = option("5", "number of the query", click.Choice(list(QUERIES)))
    per_second: int = option(10_000, "events per second of event time")
    auctions: int = option(100, "auctions that are open at a time")
    disorder_ms: int = option(1_000, "how much earlier than its predecessors an event may happen, ms")
    seed: int = option(1, "seed of the events")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.mix  # validates its parameters

    @property
    def mix(self) -> Mix:
        return Mix(self.per_second, self.keys, self.auctions, self.disorder_ms, self.seed)

    @property
    def asked(self) -> Query:
        return QUERIES[self.query]

    def settings(self) -> dict[str, str]:
        # Chained operators need Spark's RocksDB; in query 4, Spark's aggregation follows the processor.
        chained = SPARK_ROCKSDB if self.asked.chains else {}
        return super().settings() | chained | {"spark.sql.streaming.unsupportedOperationCheck": "false"}

    def source(self, spark: SparkSession) -> DataFrame:
        return events(self.numbers(spark).withColumnRenamed("value", "number"), self.mix)


def _engine(
    name: str, way: Callable[[Query], Way], backend: str = "", state_store: Mapping[str, str] = SPARK_ROCKSDB
) -> SparkEngine:
    def query(events: DataFrame, job: Nexmark) -> DataFrame:
        return way(job.asked)(House(events, job.mix))

    mode = lambda job: str(job.asked.mode)  # noqa: E731
    return SparkEngine(f"nexmark-{name}", query, Nexmark, backend, state_store, output_mode=mode)


ENGINES = {
    engine.name: engine
    for engine in (
        *(_engine(backend, lambda query: query.in_one_line, backend, {}) for backend in BACKENDS),
        *(_engine(f"{backend}-by-key", lambda query: query.by_processor, backend) for backend in BACKENDS),
        _engine("spark", lambda query: query.on_spark),
    )
}
