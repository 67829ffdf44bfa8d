"""Job A from files: running count and sum for each key, over rows that every engine reads from the same files.

A micro-batch is `FromFiles.sources` files of CSV (`holdfast.benches.peers.input_files`). Spark takes as many a
micro-batch; a peer has none, so the time of its "micro-batch" b is the time until it had done as many rows as the
files up to b have (`holdfast.benches.peers.progress`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from holdfast.benches.instruments.measured import Places
from holdfast.benches.instruments.spark import session
from holdfast.benches.jobs.by_key import ByProcessor
from holdfast.benches.jobs.job import option
from holdfast.benches.peers import input_files
from holdfast.benches.peers.progress import equality

_SAMPLED_KEYS = 1000


@dataclass(frozen=True)
class FromFiles(ByProcessor):
    """See the module; keys are drawn evenly from all, so that `touched` says nothing here."""

    name = "from-files"

    rows: int = option(1_000_000, "rows of a micro-batch")
    keys: int = option(1_000_000, "possible keys")
    batches: int = option(6, "micro-batches of a run")
    warmup: int = option(2, "first of these, which are not counted")
    memory_mb: int | None = option(512, "MiB of memory for engines on RocksDB", click.IntRange(1))
    touched: int = option(1, "unused: keys are drawn")
    commit_ms: int = option(1000, "time between two checkpoints of engines that make them by time", click.IntRange(1))
    seed: int = option(14, "of the keys")

    def folder(self) -> Path:
        """Return the folder of the files; they are made where they are missing."""
        return input_files.folder_of(
            rows=self.rows, keys=self.keys, batches=self.batches, files=self.sources, seed=self.seed
        )

    @property
    def every(self) -> int:
        """Which keys are sampled while a peer runs: those that this divides, about a thousand."""
        return max(1, self.keys // _SAMPLED_KEYS)

    def source(self, spark: SparkSession) -> DataFrame:
        return (
            spark.readStream.schema("key long, v long")
            .option("maxFilesPerTrigger", self.sources)
            .option("header", value=True)
            .csv(str(self.folder()))
        )

    def verify(self, settings: Mapping[str, str], places: Places, table: str, *, ours: bool) -> dict[str, Any]:
        """Compare all counts and sums, read back from the checkpoint, with pyarrow's; the floor has none."""
        if not table:
            return {}
        spark = session(settings)
        try:
            found = _state_of_ours(spark, places, table) if ours else _state_of_spark(spark, places)
        finally:
            spark.stop()
        return equality("all keys", found.select(["key", "n", "s"]).sort_by("key"), input_files.totals(self.folder()))


def _state_of_ours(spark: SparkSession, places: Places, table: str) -> pa.Table:
    from holdfast.benches.runs.engines import OPERATOR
    from holdfast.spark_integration.state_source.reading import read_state

    return read_state(spark, places.checkpoint, OPERATOR, table=table)


def _state_of_spark(spark: SparkSession, places: Places) -> pa.Table:
    state = spark.read.format("statestore").load(str(places.checkpoint))
    return state.selectExpr("key.key", "value.count AS n", "value.sum AS s").toArrow()
