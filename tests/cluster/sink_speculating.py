"""A query with a sink, of which one task of each micro-batch is slow.

Started as ``sink_speculating.py FOLDER MASTER TARGET PLACE``. The slow attempt has written its rows and waits; it
prepares when its twin has ended, if Spark has not killed it by then.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from holdfast import sinks
from holdfast.sinks import Handle, SinkAttempt, SinkQuery, SinkTransaction
from tests.faults.sinks.killed_at import Stepping
from tests.faults.sinks.targets import SCHEMA, target_of
from tests.input_files import add_file
from tests.spark.application import start_spark
from tests.spark.processors.speculating import SPECULATION

#: Micro-batches; those but the last one have a slow attempt, of which the last one's start finds what is left.
BATCHES = 3
KEYS = 40
PARTITIONS = 4
_SLOW = 0
_PATIENCE_S = 90
# Spark lets a Python worker live for two seconds after it has killed its task.
_LATER_S = 1


@dataclass(frozen=True)
class Late(Stepping):
    """A sink whose first attempt at a partition prepares after the second one."""

    #: For notes of which attempts there were.
    folder: str

    def reach(self, step: str) -> None:
        """Go on: only attempts wait."""

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        return _Late(self.inner.begin(attempt, schema), attempt, Path(self.folder))


@dataclass
class _Late(SinkTransaction):
    inner: SinkTransaction
    attempt: SinkAttempt
    folder: Path

    def write(self, rows: pa.RecordBatch) -> None:
        self.inner.write(rows)

    def prepare(self) -> Handle:
        batch = self.attempt.batch_id
        if self.attempt.partition != _SLOW or batch == BATCHES - 1:
            return self.inner.prepare()
        second = self.folder / f"second-{batch}"
        try:
            (self.folder / f"first-{batch}").touch(exist_ok=False)
        except FileExistsError:
            handle = self.inner.prepare()
            second.touch()
            return handle
        end_s = time.monotonic() + _PATIENCE_S
        while not second.exists() and time.monotonic() < end_s:
            time.sleep(0.05)
        time.sleep(_LATER_S)
        handle = self.inner.prepare()
        (self.folder / f"late-{batch}").touch()
        return handle

    def abort(self) -> None:
        self.inner.abort()


def _results(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        same = {"n": 1, "total": 1, "part": context.partitionId(), "run": "", "attempt": str(context.taskAttemptId())}
        columns = [
            pa.repeat(pa.scalar(same[field.name], field.type), len(batch)) if field.name in same else batch[field.name]
            for field in SCHEMA
        ]
        yield pa.record_batch(columns, SCHEMA)


def run(folder: Path, master: str, name: str, place: dict[str, str]) -> dict[str, Any]:
    """Run the query; return how many micro-batches had two attempts, and what they have left."""
    spark = start_spark(folder, {**SPECULATION, "spark.master": master})
    target = target_of(name)
    for option, value in target.options(place).items():
        spark.conf.set(f"spark.holdfast.sink.{target.name}.{option}", value)
    for batch in range(BATCHES):
        add_file(folder / "input", batch, pa.table({"key": list(range(KEYS)), "batch": [batch] * KEYS}))
    frame = spark.readStream.schema("key long, batch long").option("maxFilesPerTrigger", 1)
    results = frame.parquet(str(folder / "input")).repartition(PARTITIONS, "key").mapInArrow(
        _results, "key long, batch long, n long, total long, part int, run string, attempt string"
    )  # fmt: skip
    sink = target.sink(place)
    writer = results.writeStream.foreachBatch(sinks.exactly_once(Late(sink, str(folder)))).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder / "query")).start()
    query.awaitTermination()
    left = sink.leftovers(SinkQuery(sink.name, str(query.id), options=target.options(place)))
    return {"twins": len(list(folder.glob("second-*"))), "late": len(list(folder.glob("late-*"))), "left": len(left)}


if __name__ == "__main__":
    print("RESULT " + json.dumps(run(Path(sys.argv[1]), *sys.argv[2:4], json.loads(sys.argv[4]))))
