"""Flights and the worst delay of each carrier: python quickstart.py."""

import os
import sys
import tempfile

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import holdfast

os.environ["PYSPARK_PYTHON"] = sys.executable  # Spark's workers run this Python, its environment activated or not
folder = tempfile.mkdtemp()
spark = SparkSession.builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()  # about as many as cores
spark.conf.set("spark.holdfast.state.dir", f"{folder}/app")  # or s3://bucket/app

flights = spark.readStream.schema("carrier string, delay double").parquet(f"{folder}/flights/*.parquet")
out = holdfast.stream(flights).groupBy("carrier").agg(n=holdfast.count(), worst=holdfast.max("delay"), name="totals")
writer = out.writeStream.outputMode("update").option("checkpointLocation", f"{folder}/app-spark").format("console")
for rows in [("AA", 5.0), ("UA", 12.0), ("AA", 7.0)], [("UA", 3.0), ("DL", 41.0)]:
    spark.createDataFrame(rows, flights.schema).write.mode("append").parquet(f"{folder}/flights")
    try:
        writer.trigger(availableNow=True).start().awaitTermination()
    except StreamingQueryException as error:
        sys.exit(holdfast.explain(error))
