"""Writes to a sink while what the stage before has written is lost, in an application of its own.

Spark then takes its executor for lost. In a local session this is the driver: its heartbeats fail from here on, and
after ten minutes of them its JVM exits. So no session that other tests use may lose its shuffle files.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from holdfast.examples.sinks.csv_folder import CsvFolder
from holdfast.spark_integration.sinks.two_phase_sink import SinkAttempt, SinkQuery, SinkTransaction
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


def main(folder: Path) -> None:
    spark = start_spark(folder)
    frame = spark.range(1000).repartition(7, "id")
    task = WriteTask(
        LosingShuffles(str(folder)), SinkQuery("csv", "query"), frozenset(), 0, pa.schema({"id": pa.int64()})
    )
    found = [write_frame(frame, task, has_twins=False) for _ in range(2)]
    print("RESULT", json.dumps([[prepared.rows, prepared.repeated] for prepared in found]))
    spark.stop()


if __name__ == "__main__":
    # By its module's name, by which workers find the class.
    from tests.spark.sinks import lost_shuffle

    lost_shuffle.main(Path(sys.argv[1]))
