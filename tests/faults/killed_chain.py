"""A driver process that is made to be killed: sessions of joined, distinct rows, three operators in one line.

Started as `tests.faults.killed_driver` is, with the same `Job`; below it, what must come of it, by DuckDB.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from tests.faults.killed_driver import Job, start_spark
from tests.spark.processors.engines import NEEDED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WITHIN_S, GAP_S = 15, 25
#: No row is later than that, so that one computation over all input knows the result.
DELAY = "2 minutes"
SCHEMA = "key long, amount long, seq long, user long, at timestamp"


def sessions(spark: SparkSession, folder: Path) -> DataFrame:
    """Return sessions of each user's visits, a visit for each 20 seconds with rows, with what was paid near them."""
    source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder / "input"))
    visits = source.select("user", F.window("at", "20 seconds").start.alias("at")).withWatermark("at", DELAY)
    payments = source.where("amount > 900").select("user", F.col("at").alias("paid"), "amount")
    distinct = holdfast.stream(visits).dropDuplicates(["user", "at"], name="visits")
    paid = holdfast.stream(payments.withWatermark("paid", DELAY))
    joined = holdfast.stream(distinct).join(paid, "user", within=f"{WITHIN_S} seconds", how="left").drop("paid")
    by_user = holdfast.stream(joined).groupBy("user").session("at", f"{GAP_S} seconds")
    found = by_user.agg(n=holdfast.count(), total=holdfast.sum("amount"), name="sessions")
    return found.selectExpr("user", "session_window.start", "session_window.end", "n", "total")


def run(spark: SparkSession, folder: Path, query: str, output: str) -> None:
    """Run the query over the files that it has not read yet, into a folder of Parquet files."""
    writer = sessions(spark, folder).writeStream.format("parquet").option("path", str(folder / output))
    writer = writer.option("checkpointLocation", str(folder / query)).outputMode("append")
    writer.trigger(availableNow=True).start().awaitTermination()


def expected(folder: Path) -> list[tuple[Any, ...]]:
    """Compute all sessions from all input at once, with times in microseconds."""
    import duckdb

    query = f"""
        WITH source AS (
            SELECT "user", epoch_us("at") AS at_us, amount FROM read_parquet('{folder}/input/*.parquet')
        ),
        visits AS (SELECT DISTINCT "user", at_us // 20_000_000 * 20_000_000 AS at_us FROM source),
        joined AS (
            SELECT visits."user", visits.at_us, paid.amount
            FROM visits LEFT JOIN (SELECT * FROM source WHERE amount > 900) AS paid
            ON visits."user" = paid."user" AND abs(visits.at_us - paid.at_us) <= {WITHIN_S} * 1_000_000
        ),
        marked AS (
            SELECT *, coalesce(at_us - lag(at_us) OVER by_user > {GAP_S} * 1_000_000, true) AS begins
            FROM joined WINDOW by_user AS (PARTITION BY "user" ORDER BY at_us)
        ),
        numbered AS (SELECT *, sum(begins::int) OVER (PARTITION BY "user" ORDER BY at_us) AS session FROM marked)
        SELECT "user", min(at_us), max(at_us) + {GAP_S} * 1_000_000, count(*), sum(amount)::bigint
        FROM numbered GROUP BY "user", session
    """
    with duckdb.connect() as connection:
        return connection.execute(query).fetchall()


def stored(savepoint: Path, operators: Mapping[str, Sequence[str]]) -> dict[str, list[tuple[Any, ...]]]:
    """Read tables of a savepoint: by name of the operator, the rows of files that have it, with times in microseconds.

    Of visits those that are remembered, of sessions those that are open.
    """
    import duckdb

    queries = {
        "visits": 'SELECT "key.user", epoch_us("key.at") FROM rows',
        "sessions": """SELECT "key.user", epoch_us("key.session_start"), epoch_us("value.session_end"), "value.n",
            "value.total" FROM rows""",
    }
    found = {}
    for name, files in operators.items():
        rows = pa.concat_tables(pa.ipc.open_stream(savepoint / file).read_all() for file in files)
        with duckdb.connect() as connection:
            connection.register("rows", rows)
            found[name] = connection.execute(queries[name]).fetchall()
    return found


def visits(folder: Path, after_us: int) -> list[tuple[Any, ...]]:
    """Compute from all input the visits that are later than a watermark."""
    import duckdb

    query = f"""
        SELECT DISTINCT "user", epoch_us("at") // 20_000_000 * 20_000_000 AS at_us
        FROM read_parquet('{folder}/input/*.parquet') WHERE at_us > {after_us}
    """
    with duckdb.connect() as connection:
        return connection.execute(query).fetchall()


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    spark = start_spark(job)
    for name, value in NEEDED.items():
        spark.conf.set(name, value)
    run(spark, job.path, "query", "output")
    spark.stop()


if __name__ == "__main__":
    main()
