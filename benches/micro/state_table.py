"""Reading state as a table: a savepoint through the data source ``holdfast``, beside the same rows in Parquet.

Spark counts all rows and adds up two columns, on two cores. What holdfast checks on the way, digests and every value,
Parquet does not. The ratio says more than the times: both suffer alike from whatever else the machine does. Run with
``make bench-micro``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import savepoints
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.snapshotter.savepoints.making import making
from holdfast.snapshotter.savepoints.manifest import SavedQuery, SavedSource, Savepoint
from holdfast.snapshotter.savepoints.pieces import write_pieces
from holdfast.snapshotter.savepoints.saved_operator import Piece, SavedOperator, ShardTimes
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS, SHARDS, ROUNDS = 10_000_000, 4, 5
NAME, OPERATOR = "bench", "totals"
Benchmark = Any
_SCHEMA = TableSchema.of(
    "state", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64()), ("total", pa.float64())])
)


def write_savepoint(target: Path, rows: int) -> None:
    """Write a savepoint of so many rows: a string, an integer and a float each."""
    chance = np.random.default_rng(0)
    each = rows // SHARDS
    pieces: list[Piece] = []
    with open_storage(str(target)) as storage, making(storage, NAME) as new:
        for shard in range(SHARDS):
            width = 2**64 // SHARDS
            hashes = np.sort(chance.integers(shard * width, (shard + 1) * width - 1, each, dtype=np.uint64))
            users = np.char.add("user-", chance.permutation(each).astype("U9"))
            keys = pa.record_batch([pa.array(users, pa.large_string())], schema=_SCHEMA.key)
            numbers = [pa.array(chance.integers(0, 1000, each)), pa.array(chance.random(each))]
            run = Run.build(_SCHEMA, Keys(hashes, keys), pa.record_batch(numbers, schema=_SCHEMA.value))
            pieces += write_pieces(new.folder, OPERATOR, shard, run)
        tables, times = {"state": _SCHEMA}, tuple(ShardTimes(shard, None, 0) for shard in range(SHARDS))
        host = "applyInPandasWithState"
        operator = SavedOperator(OPERATOR, 0, host, False, SHARDS, tables, tables, True, {}, times, tuple(pieces))
        query = SavedQuery("bench", 0, "v1", '{"conf":{}}', 0, (SavedSource("0", "-", ()),))
        new.finish(Savepoint(NAME, "", 0, {}, query, (operator,), ()))


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """Return a session on two cores."""
    ensure_java()
    # Not a setting of the session: what plans a data source asks only the environment.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture(scope="module")
def folder(spark: SparkSession) -> Iterator[Path]:
    """Return a folder with the savepoint, and its rows as Parquet."""
    home = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        write_savepoint(home, ROWS)
        savepoints.load(spark, home, NAME).write.parquet(str(home / "parquet"))
        yield home
    finally:
        shutil.rmtree(home)


def add_up(frame: DataFrame) -> None:
    """Read all rows."""
    (row,) = frame.selectExpr("count(*) AS rows", "sum(n)", "sum(total)").collect()
    assert row["rows"] == ROWS


def test_ten_million_rows_of_a_savepoint(benchmark: Benchmark, spark: SparkSession, folder: Path) -> None:
    """Through the data source."""
    frame = savepoints.load(spark, folder, NAME)
    benchmark.pedantic(add_up, [frame], rounds=ROUNDS, warmup_rounds=2)


def test_ten_million_rows_of_parquet(benchmark: Benchmark, spark: SparkSession, folder: Path) -> None:
    """By Spark's own reader, which reads only the columns that are added up."""
    frame = spark.read.parquet(str(folder / "parquet"))
    benchmark.pedantic(add_up, [frame], rounds=ROUNDS, warmup_rounds=2)
