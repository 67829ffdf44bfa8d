"""State that expires: all entries are refreshed in every micro-batch, as long as the query runs.

A time to live of a few micro-batches lets every entry come up in the index of expiry times several times in a run.
Without `Ttl.expires` it is the same micro-batch, and state lives for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from holdfast.benches.jobs.job import option
from holdfast.benches.jobs.job_a import JobA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Ttl(JobA):
    """See the module: job A, but each micro-batch has the next rows of all keys in turn."""

    name = "ttl"

    rows: int = option(5_000_000, "rows of a micro-batch; with as many as there are keys, each key has one")
    keys: int = option(5_000_000, "keys in the state")
    ttl: int = option(60_000, "time to live, in ms of processing time", click.IntRange(1))
    expires: bool = option(True, "whether state expires", bool)

    @property
    def ttl_ms(self) -> int | None:
        return self.ttl if self.expires else None

    def source(self, spark: SparkSession) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        rows = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", self.rows)
            .option("numPartitions", self.sources)
            .load()
        )
        return rows.select((F.col("value") % self.keys).alias("key"), (F.col("value") % 100).alias("v"))
