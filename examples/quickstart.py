"""Flights and the worst delay of each carrier: python quickstart.py."""

import os
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import holdfast

os.environ["PYSPARK_PYTHON"] = sys.executable  # Spark's workers run this Python, its environment activated or not
folder = tempfile.mkdtemp()
spark = SparkSession.builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()  # about as many as cores
spark.conf.set("spark.holdfast.state.dir", f"{folder}/app")  # or s3://bucket/app


def totals(batch: holdfast.ShardBatch) -> dict[str, pa.Array]:
    """Count flights and keep the worst delay, for all carriers of a shard in one call."""
    old = batch.state.get(default={"n": 0})  # one row per key, null where new
    n = pc.add(old["n"], batch.groups.count())
    worst = pc.max_element_wise(old["worst"], batch.groups.max("delay"))
    batch.state.put(n=n, worst=worst)
    return {"n": n, "worst": worst}  # the keys come before them


flights = spark.readStream.schema("carrier string, delay double").csv(f"{folder}/flights-*.csv")
out = (
    holdfast.stream(flights)
    .groupBy("carrier")
    .applyInArrowWithState(
        totals, "carrier string, n long, worst double", "n long, worst double", "update", name="totals"
    )
)
writer = out.writeStream.outputMode("update").option("checkpointLocation", f"{folder}/app-spark").format("console")
for day, rows in enumerate(["AA,5\nUA,12\nAA,7", "UA,3\nDL,41"]):  # each start continues where the one before stopped
    Path(f"{folder}/flights-{day}.csv").write_text(rows)
    writer.trigger(availableNow=True).start().awaitTermination()
