"""Job A from files: running count and sum for each key, over rows that every engine reads from the same files.

A micro-batch is `FromFiles.sources` files of CSV (`holdfast.benches.peers.input_files`). Spark takes as many a
micro-batch; a peer has none, so the time of its "micro-batch" b is the time until it had done as many rows as the
files up to b have (`holdfast.benches.peers.progress`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from holdfast.benches.jobs.by_processor import ByProcessor
from holdfast.benches.jobs.job import option
from holdfast.benches.peers import input_files

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

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
