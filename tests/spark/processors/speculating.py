"""An application whose slow tasks are attempted twice: ``speculating.py FOLDER MASTER BACKEND``.

Spark makes a second attempt only on another host than the first.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import holdfast
from tests.input_files import add_file
from tests.spark.application import start_spark
from tests.spark.processors.engines import NEEDED

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "500ms",
    "spark.speculation.multiplier": "1.5",
    "spark.speculation.quantile": "0.5",
    "spark.sql.shuffle.partitions": "4",
}
BATCHES = 2
KEYS = 40
SLOW_S = 30


class Slow(StatefulProcessor):
    """Counts and lists the rows of a key; the first attempt of each micro-batch at one key takes its time."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")
        self._batches = handle.getListState("batches", "batch long")

    def handleInputRows(self, key: tuple[Any, ...], rows: Any, timerValues: Any) -> Iterator[Row]:
        batches = [row.batch for row in rows]
        n = (self._count.get() or (0,))[0] + len(batches)
        self._count.update((n,))
        self._batches.appendList([(batch,) for batch in batches])
        if key == (0,):
            try:
                (Path(self._folder) / f"first-{batches[0]}").touch(exist_ok=False)
            except FileExistsError:
                (Path(self._folder) / f"second-{batches[0]}").touch()
            else:
                time.sleep(SLOW_S)
        yield Row(k=key[0], n=n)


def run(folder: Path, master: str, backend: str) -> dict[str, Any]:
    """Run a query; return its output and state, and how many micro-batches had a second attempt."""
    spark = start_spark(folder, {**SPECULATION, **NEEDED, "spark.master": master})
    own = folder / backend
    for batch in range(BATCHES):
        add_file(own / "input", batch, pa.table({"k": list(range(KEYS)), "batch": [batch] * KEYS}))
    spark.conf.set("spark.holdfast.backend", backend)
    frame = spark.readStream.schema("k long, batch long").option("maxFilesPerTrigger", 1).parquet(str(own / "input"))
    counted = (
        holdfast.stream(frame)
        .groupBy("k")
        .transformWithState(Slow(str(own)), "k long, n long", "update", "None", name=backend)
    )
    found: list[list[int]] = []

    def collect(rows: Any, number: int) -> None:
        del found[number:]
        found.append(sorted(row.n for row in rows.collect()))

    writer = counted.writeStream.foreachBatch(collect).outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(own / "query")).start().awaitTermination()

    def stored(table: str) -> list[dict[str, Any]]:
        return holdfast.read_state(spark, own / "query", backend, table=table).to_pylist()

    return {
        "output": found,
        "counts": sorted([row["k"], row["n"]] for row in stored("v.count")),
        "batches": sorted([row["k"], row["batch"]] for row in stored("l.batches")),
        "second": len(list(own.glob("second-*"))),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(run(Path(sys.argv[1]), *sys.argv[2:])))
