"""Job B: large state. Each micro-batch touches a few of many keys that have state.

::

    key           string of 16 hexadecimal digits, unordered
    n             long         rows seen                          ┐
    total         long         sum of their amounts               │ 92 bytes of values and
    first_seen    timestamp    time of the first row              │ 16 of key in the state
    last_seen     timestamp    time of the last row               │
    page          string       60 characters, of the last row     ┘    (`JobB.value_bytes` sets its size)

Micro-batches of `JobB.fill_rows` new keys each fill the state with `Job.keys` keys. All others have `Job.rows` rows
with keys drawn from these, evenly or skewed so that a few keys get most rows. Neither holdfast nor Spark makes
snapshots during a run unless `JobB.snapshot_commits` is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import click
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import holdfast
from holdfast.benches.jobs.job import FIRST_SECOND, SEEDS_PER_PARTITION, SparkJob, numbered_rows, option
from holdfast.errors import InvalidArgumentError

_NUMBERS_BYTES = 32
_PAGE, _ABOUT_PAGE = "https://shop.example/product/", "?via=newsletter"
_DIGITS = 16


@dataclass(frozen=True)
class JobB(SparkJob):
    """Large state, of which each micro-batch touches little."""

    name = "job-b"
    state = "n long, total long, first_seen timestamp, last_seen timestamp, page string"
    output = f"key string, {state}"

    rows: int = option(100_000, "rows per counted micro-batch")
    keys: int = option(2_000_000, "keys in the state")
    batches: int = option(20, "micro-batches of a run, after those that fill the state")
    warmup: int = option(4, "uncounted micro-batches at the start")
    memory_mb: int | None = option(512, "memory of engines on RocksDB, MiB", click.IntRange(1))
    fill_rows: int = option(500_000, "new keys per micro-batch that fills the state")
    value_bytes: int = option(
        92, "bytes of a key's values: 32 for numbers and times, the rest for the page", click.IntRange(_NUMBERS_BYTES)
    )
    skew: float = option(1.0, "1 draws keys evenly; with s, a share x of the keys gets x^(1/s) of the rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        least = SEEDS_PER_PARTITION * self.sources
        if min(self.rows, self.fill_rows) < least or self.skew < 1 or self.value_bytes < _NUMBERS_BYTES:
            problem = f"job B needs {least} rows per micro-batch, a skew of 1 and {_NUMBERS_BYTES} value bytes, or more"
            raise InvalidArgumentError(problem, job=self.stored())

    @property
    def fill_batches(self) -> int:
        return -(-self.keys // self.fill_rows)

    def settings(self) -> dict[str, str]:
        if self.snapshot_commits is None:
            return self.without_snapshots().settings()
        never = str(self.all_batches + 1)
        return {"spark.sql.streaming.stateStore.minDeltasForSnapshot": never, **super().settings()}

    def source(self, spark: SparkSession) -> DataFrame:
        rows = numbered_rows(spark, self, self.fill_rows)
        # 53 random bits fill a double's mantissa.
        chance = F.xxhash64("batch", "i").bitwiseAND((1 << 53) - 1) / float(1 << 53)
        key = F.when(F.col("batch") < self.fill_batches, F.col("batch") * self.fill_rows + F.col("i")).otherwise(
            F.floor(F.pow(chance, F.lit(self.skew)) * self.keys)
        )
        numbered = rows.select("batch", "i", key.alias("number")).where(F.col("number") < self.keys)
        return numbered.select(
            _digits("number").alias("key"),
            (F.col("i") % 100).alias("amount"),
            F.timestamp_seconds(F.col("batch") * 60 + FIRST_SECOND).alias("at"),
            _page(self.value_bytes - _NUMBERS_BYTES).alias("page"),
        )

    def reduce(self, batch: holdfast.ShardBatch) -> pa.Table:
        groups = batch.groups
        return pa.table(
            {
                "n": groups.count(),
                "total": groups.sum("amount"),
                "first_seen": groups.min("at"),
                "last_seen": groups.max("at"),
                "page": groups.last("page", order_by="at"),
            }
        )

    def combine(self, old: Mapping[str, pa.Array], new: pa.Table) -> pa.Table:
        was_seen = pc.fill_null(pc.less_equal(old["first_seen"], new["first_seen"]), False)
        is_newer = pc.fill_null(pc.greater_equal(new["last_seen"], old["last_seen"]), True)
        return pa.table(
            {
                "n": pc.add(pc.coalesce(old["n"], pa.scalar(0)), new["n"]),
                "total": pc.add(pc.coalesce(old["total"], pa.scalar(0)), new["total"]),
                "first_seen": pc.if_else(was_seen, old["first_seen"], new["first_seen"]),
                "last_seen": pc.if_else(is_newer, new["last_seen"], old["last_seen"]),
                "page": pc.if_else(is_newer, new["page"], old["page"]),
            }
        )

    def aggregates(self) -> list[Column]:
        return [
            F.count("*").alias("n"),
            F.sum("amount").alias("total"),
            F.min("at").alias("first_seen"),
            F.max("at").alias("last_seen"),
            F.max_by("page", "at").alias("page"),
        ]


def _page(characters: int) -> Column:
    """Return a URL with this many characters, a quarter of them random; in short URLs, a larger share."""
    whole = len(_PAGE) + _DIGITS + len(_ABOUT_PAGE)
    if characters > whole:
        more = F.sequence(F.lit(1), F.lit(characters // whole))
        others = F.transform(more, lambda i: F.concat(F.lit(_PAGE), _digits("number", "batch", i), F.lit(_ABOUT_PAGE)))
        page = F.concat(_address(), F.array_join(others, ""))
        return F.substring(page, 1, characters)
    first = min(len(_PAGE), whole - characters) + 1
    return F.substring(_address(), first, characters) if characters < whole else _address()


def _address() -> Column:
    return F.concat(F.lit(_PAGE), _digits("number", "batch"), F.lit(_ABOUT_PAGE))


def _digits(*columns: str | Column) -> Column:
    """Hash columns into 16 hexadecimal digits."""
    return F.lpad(F.lower(F.hex(F.xxhash64(*columns))), 16, "0")
