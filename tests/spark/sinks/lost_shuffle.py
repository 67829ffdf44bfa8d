"""Writes to a sink while what the stage before has written is lost, in an application of its own.

Spark then takes its executor for lost. In a local session this is the driver: its heartbeats fail from here on, and
after ten minutes of them its JVM exits. So no session that other tests use may lose its shuffle files.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from holdfast.examples.sinks.csv_folder import CsvFolder
from holdfast.spark_integration.sinks.two_phase_sink import Handle, ReusingSink, SinkAttempt, SinkQuery, SinkTransaction
from holdfast.spark_integration.sinks.writing import WriteTask, write_frame
from tests.spark.application import start_spark


@dataclass(frozen=True)
class LosingShuffles(CsvFolder):
    """A sink whose first task loses what the stage before has written, as the death of an executor does."""

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        lost = Path(self.folder, "lost")
        if not lost.exists():
            lost.touch()
            # Spark tells its Python workers where this session's blocks are.
            for folder in os.environ["SPARK_LOCAL_DIRS"].split(","):
                for path in Path(folder).rglob("shuffle_*"):
                    path.unlink(missing_ok=True)
        return super().begin(attempt, schema)


@dataclass(frozen=True)
class NotingSpares(LosingShuffles, ReusingSink):
    """The same, which notes which spare handle each attempt was given."""

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        return self._noted(attempt, schema, None)

    def begin_reusing(self, attempt: SinkAttempt, schema: pa.Schema, spare: Handle) -> SinkTransaction:
        return self._noted(attempt, schema, spare["file"])

    def _noted(self, attempt: SinkAttempt, schema: pa.Schema, spare: object) -> SinkTransaction:
        Path(self.folder, f"noted-{attempt.attempt_id}").write_text(json.dumps([attempt.batch_id, spare]))
        return super().begin(attempt, schema)

    def given(self) -> list[list[Any]]:
        """Return micro-batch and spare of each attempt, in the order of micro-batches."""
        return sorted((json.loads(path.read_text()) for path in Path(self.folder).glob("noted-*")), key=str)


def stop_status(spark: SparkSession, lost: Path) -> None:
    """Let Spark's status learn nothing more once shuffles are lost, as a busy driver drops events."""
    while not lost.exists():
        time.sleep(0.005)
    # Spark begins a stage again after 200 ms.
    context = spark.sparkContext._jsc.sc()
    context.listenerBus().removeListener(context.statusStore().listener().get())


def write_twice(spark: SparkSession, folder: Path, spares: list[str]) -> dict[str, Any]:
    """Write a frame into a sink of its own, and once more; the first time what it reads is lost on the way."""
    folder.mkdir()
    sink, schema = NotingSpares(str(folder)), pa.schema({"id": pa.int64()})
    frame = spark.range(1000).repartition(3, "id")
    task = WriteTask(sink, SinkQuery("csv", "query"), frozenset(), 0, schema, [{"file": spare} for spare in spares])
    prepared, given = [], []
    for _ in range(2):
        found = write_frame(frame, task, speculates=False)
        prepared.append([found.rows, found.repeated, list(found.unused)])
        given = given or sink.given()
    return {"prepared": prepared, "given": given}


def main(folder: Path) -> None:
    spark = start_spark(folder)
    found = {
        "no spares": write_twice(spark, folder / "one", []),
        "spares": write_twice(spark, folder / "two", [f"old-{number}" for number in range(5)]),
    }
    # The last one, since the status learns nothing more.
    threading.Thread(target=stop_status, args=(spark, folder / "three/lost"), daemon=True).start()
    found["no events"] = write_twice(spark, folder / "three", [f"old-{number}" for number in range(3)])
    print("RESULT", json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    # By its module's name, by which workers find the class.
    from tests.spark.sinks import lost_shuffle

    lost_shuffle.main(Path(sys.argv[1]))
