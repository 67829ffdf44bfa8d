"""Job A from files: running count and sum per key, over CSV files that all engines read.

Spark reads `FromFiles.sources` files per micro-batch. A peer has no micro-batches: its "micro-batch" b ends when it has
processed as many rows as the files up to b have (`holdfast.benches.peers.progress`). pyarrow, which is not compared,
computes the right totals::

    <cache>/bench-rows/<digest>/batch-0000-0.csv        #key,v      two integers per line, after a header
                                batch-0000-1.csv        17,99

Pathway needs a header; Flink cannot skip headers, but skips comments. The files stay in the cache; a seed reproduces
them. Their modification times ascend, so that Spark reads them in order.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from pyspark.sql import DataFrame, SparkSession

from holdfast.benches.instruments.measured import Places
from holdfast.benches.instruments.spark import session
from holdfast.benches.jobs.by_key import ByProcessor
from holdfast.benches.jobs.job import option
from holdfast.benches.peers.progress import equality
from holdfast.spark_integration.java import cache_dir

_FIRST_SECOND = 1_700_000_000
_VALUES = 100
_HEADER = b"#key,v\n"
_NO_HEADER = csv.ReadOptions(column_names=["key", "v"], skip_rows=1)
_AS_LONGS = csv.ConvertOptions(column_types={"key": pa.int64(), "v": pa.int64()})


def folder_of(*, rows: int, keys: int, batches: int, files: int, seed: int) -> Path:
    """Return the folder of `batches` micro-batches of `rows` rows in `files` files each; create it if missing."""
    sizes = f"header rows={rows} keys={keys} batches={batches} files={files} seed={seed}"
    folder = cache_dir() / "bench-rows" / hashlib.sha256(sizes.encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    try:
        _write(made, rows, keys, batches, files, np.random.default_rng(seed))
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else a concurrent process was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _write(folder: Path, rows: int, keys: int, batches: int, files: int, chance: np.random.Generator) -> None:
    for batch in range(batches):
        table = pa.table({"key": chance.integers(0, keys, rows), "v": np.arange(rows) % _VALUES})
        ends = [rows * i // files for i in range(files + 1)]
        for file, (first, end) in enumerate(pairwise(ends)):
            path = folder / f"batch-{batch:04}-{file}.csv"
            with path.open("wb") as file_out:
                file_out.write(_HEADER)
                csv.write_csv(table.slice(first, end - first), file_out, csv.WriteOptions(include_header=False))
            second = _FIRST_SECOND + batch * files + file
            os.utime(path, (second, second))


def batches_of(folder: Path) -> Iterator[list[Path]]:
    """Yield the files of each micro-batch."""
    names = sorted(path.name for path in folder.glob("batch-*.csv"))
    for batch in sorted({name.rpartition("-")[0] for name in names}):
        yield [folder / name for name in names if name.startswith(f"{batch}-")]


def rows_of(files: list[Path]) -> pa.Table:
    tables = [csv.read_csv(path, read_options=_NO_HEADER, convert_options=_AS_LONGS) for path in files]
    return pa.concat_tables(tables)


def totals(folder: Path, every: int = 1) -> pa.Table:
    """Return ``key``, ``n`` and ``s`` of the keys that `every` divides, sorted by key."""
    rows = pa.concat_tables(sampled(rows_of(files), every) for files in batches_of(folder))
    found = rows.group_by("key").aggregate([("v", "count"), ("v", "sum")])
    return pa.table({"key": found["key"], "n": found["v_count"], "s": found["v_sum"]}).sort_by("key")


def sampled(rows: pa.Table, every: int) -> pa.Table:
    """Return the rows whose key `every` divides."""
    if every == 1:
        return rows
    keys = rows["key"]
    return rows.filter(pc.equal(pc.subtract(keys, pc.multiply(pc.divide(keys, every), every)), 0))


def sampled_rows_so_far(folder: Path, every: int) -> list[int]:
    """Return the cumulative number of rows of sampled keys by micro-batch."""
    counts = [sampled(rows_of(files), every).num_rows for files in batches_of(folder)]
    return np.cumsum(counts).tolist()


_SAMPLED_KEYS = 1000


@dataclass(frozen=True)
class FromFiles(ByProcessor):
    """Running count and sum per key, over CSV files; keys are drawn evenly, so `touched` is unused."""

    name = "from-files"

    rows: int = option(1_000_000, "rows per micro-batch")
    keys: int = option(1_000_000, "possible keys")
    batches: int = option(6, "micro-batches of a run")
    warmup: int = option(2, "uncounted micro-batches at the start")
    memory_mb: int | None = option(512, "memory of engines on RocksDB, MiB", click.IntRange(1))
    touched: int = option(1, "unused: keys are drawn")
    commit_ms: int = option(1000, "interval of engines with periodic checkpoints, ms", click.IntRange(1))
    seed: int = option(14, "seed of the keys")

    def folder(self) -> Path:
        return folder_of(rows=self.rows, keys=self.keys, batches=self.batches, files=self.sources, seed=self.seed)

    @property
    def every(self) -> int:
        """Keys that this divides, about a thousand, are sampled while a peer runs."""
        return max(1, self.keys // _SAMPLED_KEYS)

    def source(self, spark: SparkSession) -> DataFrame:
        return (
            spark.readStream.schema("key long, v long")
            .option("maxFilesPerTrigger", self.sources)
            .option("header", value=True)
            .csv(str(self.folder()))
        )

    def verify(self, settings: Mapping[str, str], places: Places, table: str, *, ours: bool) -> dict[str, Any]:
        """Compare all counts and sums, as read from the checkpoint, with pyarrow's; the floor keeps no state."""
        if not table:
            return {}
        spark = session(settings)
        try:
            found = _state_of_ours(spark, places, table) if ours else _state_of_spark(spark, places)
        finally:
            spark.stop()
        return equality("all keys", found.select(["key", "n", "s"]).sort_by("key"), totals(self.folder()))


def _state_of_ours(spark: SparkSession, places: Places, table: str) -> pa.Table:
    from holdfast.benches.runs.engines import OPERATOR
    from holdfast.spark_integration.state_source.reading import read_state

    return read_state(spark, places.checkpoint, OPERATOR, table=table)


def _state_of_spark(spark: SparkSession, places: Places) -> pa.Table:
    state = spark.read.format("statestore").load(str(places.checkpoint))
    return state.selectExpr("key.key", "value.count AS n", "value.sum AS s").toArrow()
