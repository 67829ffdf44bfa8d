"""Queries that are upgraded again and again: saved, restored with other shards on another backend, sinks continued.

Started as a program with its `Job` as JSON in the one argument; `tests.faults.sinks.test_upgrades` does so. All
queries of a run are in one session: a SIGKILL meets each of them wherever it is.

::

    <folder>/queries/<target>-<generation>   checkpoint locations
    <folder>/savepoints/<target>-<generation>
    <folder>/running/<generation>            its queries have been started
    <folder>/stop/<generation>               they are to be stopped and saved, and the next ones started
    <folder>/marks/<target>                  the driver dies at the step that is missing there
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from holdfast import savepoints, sinks
from tests.faults import killed_driver
from tests.faults.sinks.killed_at import KilledAt
from tests.faults.sinks.killed_query import ROWS, totals
from tests.faults.sinks.targets import Place, target_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Where each query's numbers come from.
SOURCES = {"parquet": "files", "delta": "files", "postgres": "files", "kafka": "kafka"}
_BACKENDS, _SHARDS = ("memory", "filesystem", "rocksdb"), (2, 4)


@dataclass(frozen=True)
class Job(killed_driver.Job):
    """What the driver is to do."""

    #: Where each target is.
    places: dict[str, Place] | None = None
    #: Where the numbers are: folder of files, Kafka's servers and topic.
    numbers: Place | None = None
    #: With which the driver begins: 0, or the one after that of the driver that was killed.
    generation: int = 0
    #: Whether results go where they go without holdfast's sinks.
    is_plain: bool = False


@dataclass
class Queries:
    """The queries of one generation after the other."""

    spark: SparkSession
    job: Job
    running: dict[str, StreamingQuery]

    def restore(self, generation: int) -> None:
        """Restore all queries from what was saved of the generation before, and start them; or begin with the first."""
        shards = _SHARDS[generation % len(_SHARDS)]
        self.spark.conf.set("spark.holdfast.backend", _BACKENDS[generation % len(_BACKENDS)])
        self.spark.conf.set("spark.holdfast.shards", shards)
        for target in self.places:
            if generation:
                before = f"{target}-{generation - 1}"
                keeps = {} if self.job.is_plain else {"continue_sinks": True}
                where = self._location(target, generation)
                savepoints.restore(self.spark, self._saved, before, where, shards=shards, **keeps)
            self.running[target] = self._start(target, generation)
        _touch(self.job, "running", generation)

    def stop(self, generation: int) -> None:
        for target, query in self.running.items():
            name, where = f"{target}-{generation}", self._location(target, generation)
            savepoints.stop(self.spark, query, where, self._saved, name)

    def save(self, generation: int) -> None:
        for target in self.places:
            savepoints.create(self.spark, self._location(target, generation), self._saved, f"{target}-{generation}")

    @property
    def places(self) -> dict[str, Place]:
        return self.job.places or {}

    @property
    def _saved(self) -> str:
        return str(self.job.path / "savepoints")

    def _location(self, target: str, generation: int) -> str:
        return str(self.job.path / "queries" / f"{target}-{generation}")

    def _start(self, name: str, generation: int) -> StreamingQuery:
        target, place = target_of(name), self.places[name]
        rows = target.shape(totals(self._numbers(SOURCES[name]), "update", f"totals-{name}"))
        writer = target.plain_writer(rows, place) if self.job.is_plain else None
        if writer is None:
            writer = rows.writeStream.foreachBatch(self._writing(name))
        return writer.outputMode("update").option("checkpointLocation", self._location(name, generation)).start()

    def _numbers(self, source: str) -> DataFrame:
        where = self.job.numbers or {}
        if source == "files":
            reader = self.spark.readStream.schema("value long").option("maxFilesPerTrigger", 1)
            return reader.parquet(where["folder"])
        kafka = {
            "kafka.bootstrap.servers": where["servers"],
            "subscribe": where["topic"],
            "startingOffsets": "earliest",
        }
        reader = self.spark.readStream.format("kafka").options(**kafka).option("maxOffsetsPerTrigger", ROWS)
        return reader.load().selectExpr("CAST(CAST(value AS STRING) AS LONG) AS value")

    def _writing(self, name: str) -> Callable[[DataFrame, int], None]:
        target, place = target_of(name), self.places[name]
        dying = KilledAt(target.sink(place), str(self.job.path / "marks" / name))
        if not self.job.is_plain:
            return sinks.exactly_once(dying)

        def write(rows: DataFrame, _: int) -> None:
            target.plain(rows, place)
            dying.reach("committed")

        return write


def _touch(job: Job, folder: str, generation: int) -> None:
    (job.path / folder).mkdir(exist_ok=True)
    (job.path / folder / str(generation)).touch()


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    places, generation = job.places or {}, job.generation
    jars = ",".join(target_of("kafka").jars())
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {jars} {os.environ['PYSPARK_SUBMIT_ARGS']}"
    queries = Queries(killed_driver.start_spark(job), job, {})
    for name, place in places.items():
        target = target_of(name)
        for option, value in target.options(place).items():
            queries.spark.conf.set(f"spark.holdfast.sink.{target.name}.{option}", value)
    if generation:
        queries.save(generation - 1)
    queries.restore(generation)
    while True:
        for query in queries.running.values():
            query.awaitTermination(0.05)  # raises what ended it
        if (job.path / "stop" / str(generation)).exists():
            queries.stop(generation)
            generation += 1
            queries.restore(generation)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
