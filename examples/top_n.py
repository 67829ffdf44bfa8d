"""The three highest bids of each auction, whenever they change: python top_n.py."""

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

bids = spark.readStream.schema("auction string, bid long").csv(f"{folder}/bids-*.csv")
out = holdfast.stream(bids).groupBy("auction").top(3, by="bid")
writer = out.writeStream.outputMode("update").option("checkpointLocation", f"{folder}/app-spark").format("console")
for part, rows in enumerate(["tea,10\ntea,30\nsalt,5\ntea,20\ntea,1", "salt,7\ntea,2"]):
    Path(f"{folder}/bids-{part}.csv").write_text(rows)
    try:
        writer.trigger(availableNow=True).start().awaitTermination()
    except StreamingQueryException as error:
        sys.exit(holdfast.explain(error))
