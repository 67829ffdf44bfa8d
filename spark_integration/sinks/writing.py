"""Write a micro-batch in one sink transaction per task, and prepare the transactions.

    driver    df.mapInArrow(WriteTask).collect()            workers   begin ─▶ write … ─▶ prepare
              Prepared ◀── one row for each partition ─────────────── (handle, number of rows, whether repeated)

The pickled task contains no credentials: a worker reads the sink's options from its task's properties.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from holdfast import clock
from holdfast.errors import InvalidArgumentError
from holdfast.settings import SINK_PREFIX
from holdfast.spark_integration.shard.task import session_values
from holdfast.spark_integration.sinks.coordinator import Prepared
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
    begin,
)
from holdfast.spark_integration.spark_versions import is_classic
from holdfast.spark_integration.transport.python_stage import ImmediateAcks
from holdfast.spark_integration.worker_python import require_worker_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RETURNED = "partition long, stage long, repeated boolean, rows long, handle string"
# How long to wait for Spark's status tracker to catch up.
_TRACKER_MS = 2000


@dataclass(frozen=True)
class WriteTask(ImmediateAcks):
    """A function for ``mapInArrow`` that writes and prepares a task's rows."""

    sink: TwoPhaseSink
    query: SinkQuery  #: The query without options
    option_names: frozenset[str]
    batch_id: int
    schema: pa.Schema
    spares: Sequence[Handle] = ()  #: Handle i is for the first attempt at partition i: see `ReusingSink`

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row of `_RETURNED` if the task had rows or a spare handle, or was repeated."""
        context = TaskContext.get()
        assert context is not None
        partition, stage, repeated = context.partitionId(), context.stageId(), context.attemptNumber() > 0
        has_spare = partition < len(self.spares)
        spare = self.spares[partition] if has_spare and not repeated else None
        rows, handle = write_attempt(
            self.sink, self.query, self.option_names, self.batch_id, self.schema, batches, spare=spare
        )
        if rows or has_spare or repeated:
            row = {"partition": partition, "stage": stage, "repeated": repeated, "rows": rows, "handle": handle}
            yield pa.RecordBatch.from_pylist([row])


def write_attempt(
    sink: TwoPhaseSink,
    query: SinkQuery,
    option_names: Collection[str],
    batch_id: int,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    spare: Handle | None = None,
) -> tuple[int, str]:
    """Write and prepare the running task's rows in a new attempt; session options override `query.options`."""
    context = TaskContext.get()
    assert context is not None
    query = replace(query, options={**query.options, **session_values(f"{SINK_PREFIX}{query.sink}.", option_names)})
    attempt = SinkAttempt(query, batch_id, context.partitionId(), clock.new_id() + clock.new_id())
    return write_rows(sink, attempt, schema, batches, spare)


def write_rows(
    sink: TwoPhaseSink,
    attempt: SinkAttempt,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    spare: Handle | None = None,
) -> tuple[int, str]:
    """Write and prepare rows in one transaction; return their number and the JSON handle, empty if there are none."""
    given = (batch for batch in batches if batch.num_rows)
    first = next(given, None)
    if first is None:
        return 0, ""
    transaction, rows = begin(sink, attempt, schema, spare), 0
    try:
        for batch in chain([first], given):
            transaction.write(fitted(batch, schema))
            rows += batch.num_rows
        return rows, _prepared(transaction)
    except BaseException as exc:
        try:
            transaction.abort()
        except Exception as other:  # noqa: BLE001  a failing sink must not mask the task's error
            exc.add_note(f"aborting its transaction failed, too: {type(other).__name__}")
        raise


def _prepared(transaction: SinkTransaction) -> str:
    handle = transaction.prepare()
    try:
        return json.dumps(dict(handle), allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise InvalidArgumentError(f"the sink's handle is not plain JSON: {exc}") from exc


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return Spark's batch with the names, types and time zones of the sink's schema."""
    return batch if batch.schema.equals(schema) else batch.rename_columns(schema.names).cast(schema)


def numbered(frame: DataFrame) -> DataFrame:
    """Rename the columns to c0, c1, …: PySpark parses dots and backticks in names."""
    return frame.toDF(*[f"c{i}" for i in range(len(frame.columns))])


def write_frame(frame: DataFrame, task: WriteTask, *, speculates: bool) -> Prepared:
    """Run a micro-batch's tasks and return their results; `speculates`: whether Spark runs tasks speculatively."""
    session = frame.sparkSession
    require_worker_python(session)
    frame = numbered(frame)
    if not is_classic(session):
        # Connect does not report that a stage was restarted, so a spare handle might be used twice.
        task = replace(task, spares=())
    rows = frame.mapInArrow(task, _RETURNED).collect()
    stages = {row.stage for row in rows}  # Spark restarts a stage after losing shuffle files, for example
    began_twice = is_classic(session) and not all(_ran_once(session, stage) for stage in stages)
    if began_twice and task.spares:
        # Two attempts may share a spare handle, and one could end the other's transaction. Write all rows again.
        rows = frame.mapInArrow(replace(task, spares=()), _RETURNED).collect()
        return prepared_of(rows, repeated=True)
    found = prepared_of(rows, repeated=speculates or began_twice or any(row.repeated for row in rows))
    taken = {row.partition for row in rows if row.rows or row.repeated}
    return replace(found, unused=tuple(spare for i, spare in enumerate(task.spares) if i not in taken))


def drop_frame(frame: DataFrame) -> int:
    """Compute a micro-batch only to update the operators' state; return its number of rows."""
    counted = numbered(frame).mapInArrow(_counted, "rows long").collect()
    return sum(row.rows for row in counted)


def _counted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pylist([{"rows": sum(batch.num_rows for batch in batches)}])


def _ran_once(session: SparkSession, stage: int) -> bool:
    """Return whether all tasks of a stage are known to have succeeded in its first attempt.

    Spark's tracker lags and drops events, but never reports a first attempt complete after a second has begun.
    """
    tracker, end_ms = session.sparkContext.statusTracker(), clock.monotonic_ms() + _TRACKER_MS
    while True:
        found = tracker.getStageInfo(stage)
        if found is not None and found.currentAttemptId > 0:
            return False
        if found is not None and found.numCompletedTasks >= found.numTasks:
            return True
        if clock.monotonic_ms() > end_ms:
            return False
        clock.sleep_ms(1)


def prepared_of(outputs: Iterable[Any], *, repeated: bool) -> Prepared:
    """Collect the tasks' results (rows of `_RETURNED` or similar objects) by partition; `repeated`: see `Prepared`."""
    found = sorted((one for one in outputs if one.handle), key=lambda one: one.partition)
    return Prepared(tuple(json.loads(one.handle) for one in found), sum(one.rows for one in found), repeated)
