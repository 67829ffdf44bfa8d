"""Prints the three highest bids of each auction whenever they change: python top_n.py."""

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

bids = spark.readStream.schema("auction string, bid long").parquet(f"{folder}/bids/*.parquet")
out = holdfast.stream(bids).groupBy("auction").top(3, by="bid")
writer = out.writeStream.outputMode("update").option("checkpointLocation", f"{folder}/app-spark").format("console")
for rows in [("tea", 10), ("tea", 30), ("salt", 5), ("tea", 20), ("tea", 1)], [("salt", 7), ("tea", 2)]:
    spark.createDataFrame(rows, bids.schema).write.mode("append").parquet(f"{folder}/bids")
    try:
        writer.trigger(availableNow=True).start().awaitTermination()
    except StreamingQueryException as error:
        sys.exit(holdfast.explain(error))
