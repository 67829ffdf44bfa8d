"""A query that is held between the success of its tasks and Spark's commit, until somebody has killed executors.

Started as a program with its `Job` as JSON in the one argument. Each moment is in a micro-batch of its own::

    moment      tasks with state        what holds it            what is to come
    one task    one of two has ended    the other one            the sink's decision, Spark's commit
    shuffled    one of two has ended    the other one            another stage, Spark's commit
    prepared    both have ended         the sink's `confirm`     the sink's decision, Spark's commit
    written     both have ended         foreachBatch             Spark's commit
    again       both have ended         foreachBatch             a second evaluation, Spark's commit

Where another stage follows, an executor takes along what its task has put out: Spark repeats the task that had ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from holdfast import sinks
from holdfast.sinks import Handle, SinkQuery
from tests.cluster.standalone import EXECUTOR, START_S
from tests.faults import killed_driver
from tests.faults.sinks import killed_query
from tests.faults.sinks.killed_at import Stepping
from tests.faults.sinks.killed_query import ROWS
from tests.faults.sinks.targets import target_of
from tests.input_files import add_file

ONE_TASK, SHUFFLED, PREPARED, WRITTEN, AGAIN = "one task", "shuffled", "prepared", "written", "again"
#: The partition whose task has ended at each moment, and the one whose task may wait.
ENDED, OTHER = 0, 1
#: Micro-batches before the first moment, and after the last one.
_BEFORE, _AFTER = 2, 1


class Attempt(NamedTuple):
    """An attempt at a task: its stage, and the process of its executor."""

    stage: int
    executor: int


@dataclass(frozen=True)
class Moment:
    name: str
    batch: int
    #: The job's.
    folder: str

    @property
    def holds_a_task(self) -> bool:
        return self.name in (ONE_TASK, SHUFFLED)

    @property
    def is_reached(self) -> bool:
        return (self._notes / "reached").exists()

    def end(self) -> None:
        (self._notes / "over").touch()

    def attempts(self, partition: int) -> list[Attempt]:
        """Return the attempts at a partition so far, the first one first."""
        return [Attempt(*json.loads(path.read_text())) for path in sorted(self._notes.glob(f"{partition}-*"))]

    def hold(self) -> None:
        """Tell that the query is there, and wait for the end."""
        self.tell()
        self.wait_for_the_end()

    def tell(self) -> None:
        self._notes.mkdir(parents=True, exist_ok=True)
        (self._notes / "reached").touch()

    def wait_for_the_end(self) -> None:
        wait_for((self._notes / "over").exists)

    def note_attempt(self, context: TaskContext) -> None:
        executor = next(one.pid for one in psutil.Process().parents() if EXECUTOR in one.cmdline())
        self._notes.mkdir(parents=True, exist_ok=True)
        unseen = self._notes / f".{context.taskAttemptId()}"
        unseen.write_text(json.dumps([context.stageId(), executor]))
        unseen.rename(self._notes / f"{context.partitionId()}-{context.taskAttemptId():06d}")

    @property
    def _notes(self) -> Path:
        return Path(self.folder, "moments", self.name)


def wait_for(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError("the moment does not come, or does not end")
        time.sleep(0.02)


@dataclass(frozen=True)
class Job(killed_query.Job):
    """What the driver is to do; the `way` ``plain`` overwrites a folder of Parquet files for each micro-batch."""

    #: The moments' names, in the order of their micro-batches.
    names: Sequence[str] = ()
    #: `spark.holdfast.commit.carriedBytes`
    carried_bytes: str = "6k"

    @property
    def moments(self) -> dict[int, Moment]:
        return {batch: Moment(name, batch, self.folder) for batch, name in enumerate(self.names, _BEFORE)}

    @property
    def batches(self) -> int:
        return _BEFORE + len(self.names) + _AFTER

    @property
    def output(self) -> Path:
        return self.path / "output"

    def add_input(self) -> None:
        for batch in range(self.batches):
            add_file(self.path / "input", batch, pa.table({"value": range(batch * ROWS, (batch + 1) * ROWS)}))


@dataclass(frozen=True)
class _Held(Stepping):
    """A sink that is held once all is prepared, and nothing is decided."""

    moments: Mapping[int, Moment]

    def reach(self, step: str) -> None:
        """Go on: this is no step."""

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        if batch_id in self.moments and self.moments[batch_id].name == PREPARED:
            self.moments[batch_id].hold()
        self.inner.confirm(query, batch_id, handles)


def _writing(job: Job) -> Callable[[DataFrame, int], None]:
    if job.way == "plain":
        return lambda frame, batch_id: frame.write.mode("overwrite").parquet(str(job.output / str(batch_id)))
    target, place = target_of(job.target), job.place or {}
    write = sinks.exactly_once(_Held(target.sink(place), job.moments))
    return lambda frame, batch_id: write(target.shape(frame), batch_id)


def _held(job: Job, write: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
    """Return what writes a micro-batch and is held at its moment, if it has one."""
    moments = job.moments

    def write_held(frame: DataFrame, batch_id: int) -> None:
        moment = moments.get(batch_id)
        if moment is None:
            write(frame, batch_id)
            return
        frame = frame.mapInArrow(_task_of(moment), frame.schema)
        if moment.holds_a_task:
            threading.Thread(target=_tell_when_a_task_has_ended, args=(frame, moment), daemon=True).start()
        if moment.name == SHUFFLED:
            frame = frame.repartition(2, "key")
        write(frame, batch_id)
        if moment.name in (WRITTEN, AGAIN):
            moment.hold()
        if moment.name == AGAIN:
            write(frame, batch_id)

    return write_held


def _task_of(moment: Moment) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = list(batches)
        context = TaskContext.get()
        assert context is not None
        moment.note_attempt(context)
        # So they run on two executors, which have one core each.
        wait_for(lambda: moment.attempts(ENDED) and moment.attempts(OTHER))
        if moment.holds_a_task and context.partitionId() == OTHER:
            moment.wait_for_the_end()
        yield from rows

    return run


def _tell_when_a_task_has_ended(frame: DataFrame, moment: Moment) -> None:
    """Tell when the driver knows of the success of one task, while the other one waits."""
    tracker = frame.sparkSession.sparkContext.statusTracker()
    wait_for(lambda: moment.attempts(OTHER))
    stage = moment.attempts(OTHER)[0].stage
    wait_for(lambda: (found := tracker.getStageInfo(stage)) and found.numCompletedTasks == 1)
    moment.tell()


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    # Else Spark's status tracker passes over what follows an event within 100 ms.
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--conf spark.ui.liveUpdate.period=0 {os.environ['PYSPARK_SUBMIT_ARGS']}"
    spark = killed_driver.start_spark(job)
    spark.conf.set("spark.holdfast.commit.carriedBytes", job.carried_bytes)
    target = target_of(job.target)
    for option, value in target.options(job.place or {}).items():
        spark.conf.set(f"spark.holdfast.sink.{target.name}.{option}", value)
    numbers = spark.readStream.schema("value long").option("maxFilesPerTrigger", 1).parquet(str(job.path / "input"))
    writer = killed_query.totals(numbers, "update").writeStream.foreachBatch(_held(job, _writing(job)))
    writer = writer.outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(job.path / "query")).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
