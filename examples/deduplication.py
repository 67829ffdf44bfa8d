"""Each order once, however often it is delivered within a day: python deduplication.py."""

import os
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import holdfast

os.environ["PYSPARK_PYTHON"] = sys.executable
folder = tempfile.mkdtemp()
spark = SparkSession.builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()
spark.conf.set("spark.holdfast.state.dir", f"{folder}/app")


def first(batch: holdfast.ShardBatch) -> pa.Table:
    """Keep the orders that have no state yet."""
    is_new = pc.invert(batch.state.exists())
    batch.state.put(item=batch.groups.first("item"), where=is_new)
    return batch.keys.append_column("item", batch.groups.first("item")).filter(is_new)


orders = spark.readStream.schema("id long, item string").csv(f"{folder}/orders-*.csv")
seen = holdfast.StateTable("item string", ttlDurationMs=24 * 3_600_000)  # forgotten after a day
out = (
    holdfast.stream(orders)
    .groupBy("id")
    .applyInArrowWithState(first, "id long, item string", seen, "append", name="orders")
)
writer = out.writeStream.outputMode("append").option("checkpointLocation", f"{folder}/app-spark").format("console")
for part, rows in enumerate(["17,tea\n18,rice\n18,rice", "17,tea\n19,salt"]):
    Path(f"{folder}/orders-{part}.csv").write_text(rows)
    writer.trigger(availableNow=True).start().awaitTermination()
