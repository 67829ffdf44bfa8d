"""Prints each order once, however often it is delivered within a day: python deduplication.py."""

import os
import sys
import tempfile

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import holdfast

os.environ["PYSPARK_PYTHON"] = sys.executable
folder = tempfile.mkdtemp()
spark = SparkSession.builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()
spark.conf.set("spark.holdfast.state.dir", f"{folder}/app")

orders = spark.readStream.schema("id long, item string").parquet(f"{folder}/orders/*.parquet")
out = holdfast.stream(orders).dropDuplicates(["id"], ttl="1 day")
writer = out.writeStream.outputMode("append").option("checkpointLocation", f"{folder}/app-spark").format("console")
for rows in [(17, "tea"), (18, "rice"), (18, "rice")], [(17, "tea"), (19, "salt")]:
    spark.createDataFrame(rows, orders.schema).write.mode("append").parquet(f"{folder}/orders")
    try:
        writer.trigger(availableNow=True).start().awaitTermination()
    except StreamingQueryException as error:
        sys.exit(holdfast.explain(error))
