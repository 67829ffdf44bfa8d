"""Each order once, however often it is delivered within a day: python deduplication.py."""

import os
import sys
import tempfile
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import holdfast

os.environ["PYSPARK_PYTHON"] = sys.executable
folder = tempfile.mkdtemp()
spark = SparkSession.builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()
spark.conf.set("spark.holdfast.state.dir", f"{folder}/app")

orders = spark.readStream.schema("id long, item string").csv(f"{folder}/orders-*.csv")
out = holdfast.stream(orders).dropDuplicates(["id"], ttl="1 day")
writer = out.writeStream.outputMode("append").option("checkpointLocation", f"{folder}/app-spark").format("console")
for part, rows in enumerate(["17,tea\n18,rice\n18,rice", "17,tea\n19,salt"]):
    Path(f"{folder}/orders-{part}.csv").write_text(rows)
    try:
        writer.trigger(availableNow=True).start().awaitTermination()
    except StreamingQueryException as error:
        sys.exit(holdfast.explain(error))
