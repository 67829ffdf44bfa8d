"""The sessions of each user, printed when half an hour without a click is over: python sessions.py.

The function is one for Spark's own ``applyInPandasWithState``: without ``holdfast.stream(…)`` it runs on Spark alone.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.state import GroupState

import holdfast

os.environ["PYSPARK_PYTHON"] = sys.executable
folder = tempfile.mkdtemp()
spark = SparkSession.builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()
spark.conf.set("spark.sql.session.timeZone", "UTC")
spark.conf.set("spark.holdfast.state.dir", f"{folder}/app")
GAP = pd.Timedelta(minutes=30)


def session(key: tuple[str, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Add a user's clicks to the session; emit what is over."""
    clicks, last = state.getOption or (0, pd.Timestamp.min)
    over = []
    for at in sorted(at for frame in frames for at in frame["at"]):
        if clicks and at - last > GAP:
            over.append((key[0], clicks, last))
            clicks = 0
        clicks, last = clicks + 1, max(last, at)
    if state.hasTimedOut:
        over.append((key[0], clicks, last))
        state.remove()
    else:
        state.update((clicks, last))
        state.setTimeoutTimestamp(int((last + GAP).timestamp() * 1000))
    if over:
        yield pd.DataFrame(over, columns=["user", "clicks", "last"])


clicks = spark.readStream.schema("user string, at timestamp").csv(f"{folder}/clicks-*.csv")
out = (
    holdfast.stream(clicks.withWatermark("at", "5 minutes"))
    .groupBy("user")
    .applyInPandasWithState(
        session, "user string, clicks long, last timestamp", "clicks long, last timestamp", "append", "EventTimeTimeout"
    )
)
writer = out.writeStream.outputMode("append").option("checkpointLocation", f"{folder}/app-spark").format("console")
for part, rows in enumerate(
    ["ann,2026-03-02 09:00:00\nbob,2026-03-02 09:05:00\nann,2026-03-02 09:20:00", "bob,2026-03-02 10:00:00"]
):
    Path(f"{folder}/clicks-{part}.csv").write_text(rows)
    try:
        writer.trigger(availableNow=True).start().awaitTermination()
    except StreamingQueryException as error:
        sys.exit(holdfast.explain(error))
