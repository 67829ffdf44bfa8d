"""Job A: running count and sum per key, over rows that Spark generates.

Each micro-batch has `Job.rows` rows with keys spread evenly over `Job.keys`. All engines read the same frame, write to
the ``noop`` sink and use the same settings, so that only the way they keep state differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import holdfast
from holdfast.benches.jobs.job import SparkJob


@dataclass(frozen=True)
class JobA(SparkJob):
    """Running count and sum per key."""

    name = "job-a"
    output = "key long, n long, s long"
    state = "n long, s long"

    def source(self, spark: SparkSession) -> DataFrame:
        key = F.abs(F.xxhash64("value")) % self.keys
        return self.numbers(spark).select(key.alias("key"), (F.col("value") % 100).alias("v"))

    def reduce(self, batch: holdfast.ShardBatch) -> pa.Table:
        return pa.table({"n": batch.groups.count(), "s": batch.groups.sum("v")})

    def combine(self, old: Mapping[str, pa.Array], new: pa.Table) -> pa.Table:
        sums = {name: pc.add(pc.coalesce(old[name], pa.scalar(0)), new[name]) for name in ("n", "s")}
        return pa.table(sums)

    def aggregates(self) -> list[Column]:
        return [F.count("*").alias("n"), F.sum("v").alias("s")]
