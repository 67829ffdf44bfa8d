"""The three highest bids of each auction, whenever they change: python top_n.py."""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.streaming.state import GroupState

import holdfast

os.environ["PYSPARK_PYTHON"] = sys.executable
folder = tempfile.mkdtemp()
spark = SparkSession.builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()
spark.conf.set("spark.holdfast.state.dir", f"{folder}/app")


def top(key: tuple[str, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Keep an auction's three highest bids; emit them if they have changed."""
    old = list(state.get[0]) if state.exists else []
    best = sorted([*old, *(bid for frame in frames for bid in frame["bid"].tolist())], reverse=True)[:3]
    if best != old:
        state.update((best,))
        yield pd.DataFrame({"auction": key[0], "place": range(1, len(best) + 1), "bid": best})


bids = spark.readStream.schema("auction string, bid long").csv(f"{folder}/bids-*.csv")
out = (
    holdfast.stream(bids)
    .groupBy("auction")
    .applyInPandasWithState(top, "auction string, place int, bid long", "best array<long>", "update", "NoTimeout")
)
writer = out.writeStream.outputMode("update").option("checkpointLocation", f"{folder}/app-spark").format("console")
for part, rows in enumerate(["tea,10\ntea,30\nsalt,5\ntea,20\ntea,1", "salt,7\ntea,2"]):
    Path(f"{folder}/bids-{part}.csv").write_text(rows)
    writer.trigger(availableNow=True).start().awaitTermination()
