"""Streaming rows of a job whose first micro-batches fill the state, and are larger than those that are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: When the rows of the first micro-batch happen, in s since 1970.
FIRST_SECOND = 1_700_000_000
SEEDS_PER_PARTITION = 8


def numbered_rows(spark: SparkSession, partitions: int, *, fill_batches: int, fill_rows: int, rows: int) -> DataFrame:
    """Return the micro-batch, ``batch``, of each row and its number in it, ``i``.

    Parameters
    ----------
    fill_batches : int
        Micro-batches that fill the state, each of `fill_rows` rows; every later one has `rows`.

    Notes
    -----
    Spark's ``rate-micro-batch`` source makes equal micro-batches; so it makes a few seeds, and each becomes as many
    rows as its micro-batch needs.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    seeds = SEEDS_PER_PARTITION * partitions
    ticks = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", seeds)
        .option("numPartitions", partitions)
        .load()
    )
    batch, seed = F.expr(f"value div {seeds}").alias("batch"), (F.col("value") % seeds).alias("seed")
    wanted = F.when(F.col("batch") < fill_batches, fill_rows).otherwise(rows)
    first, end = (F.floor(wanted * (F.col("seed") + i) / seeds) for i in (0, 1))
    return ticks.select(batch, seed).select("batch", F.explode(F.sequence(first, end - 1)).alias("i"))
