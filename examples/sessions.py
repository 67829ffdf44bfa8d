"""Prints each user's sessions, which end after half an hour without a click: python sessions.py."""

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

clicks = spark.readStream.schema("user string, at timestamp").csv(f"{folder}/in/*.csv").withWatermark("at", "1 minute")
sessions = holdfast.stream(clicks).groupBy("user").session("at", "30 minutes").agg(clicks=holdfast.count())
out = sessions.selectExpr("user", "clicks", "session_window.end")
writer = out.writeStream.outputMode("append").option("checkpointLocation", f"{folder}/app-spark").format("console")
for rows in [("ann", "9:00"), ("bob", "9:05"), ("ann", "9:20")], [("bob", "10:00")]:
    new = [(user, f"2026-03-02 {at}") for user, at in rows]
    spark.createDataFrame(new).write.mode("append").csv(f"{folder}/in")
    try:
        writer.trigger(availableNow=True).start().awaitTermination()
    except StreamingQueryException as error:
        sys.exit(holdfast.explain(error))
