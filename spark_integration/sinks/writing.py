"""Writes a micro-batch into a sink's transactions, one a task, and prepares them.

::

    driver    df.mapInArrow(WriteTask).collect()            workers   begin ─▶ write … ─▶ prepare
              Prepared ◀── one row for each partition ─────────────── (handle, rows, was the task repeated)

Credentials do not travel with the task: a worker reads the sink's options from its task's properties.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext

from holdfast import clock
from holdfast.errors import InvalidArgumentError
from holdfast.settings import SINK_PREFIX
from holdfast.spark_integration.sinks.coordinator import Prepared
from holdfast.spark_integration.sinks.two_phase_sink import SinkAttempt, SinkQuery, SinkTransaction, TwoPhaseSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_RETURNED = "partition int, stage int, repeated boolean, rows long, handle string"
_RETURNED_ARROW = pa.schema(
    {
        "partition": pa.int32(),
        "stage": pa.int32(),
        "repeated": pa.bool_(),
        "rows": pa.int64(),
        "handle": pa.string(),
    }
)


@dataclass(frozen=True)
class WriteTask:
    """Writes and prepares what one task has; a function for ``mapInArrow``.

    Attributes
    ----------
    sink : TwoPhaseSink
    query : SinkQuery
        Without options.
    option_names : frozenset of str
    batch_id : int
    schema : pyarrow.Schema
    """

    sink: TwoPhaseSink
    query: SinkQuery
    option_names: frozenset[str]
    batch_id: int
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row if there were any."""
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        query = replace(self.query, options=task_options(self.query.sink, self.option_names))
        attempt = SinkAttempt(query, self.batch_id, partition, clock.new_id() + clock.new_id())
        rows, handle = write_rows(self.sink, attempt, self.schema, batches)
        if rows:
            repeated, stage = is_repeated(context), context.stageId()
            row = {"partition": partition, "stage": stage, "repeated": repeated, "rows": rows, "handle": handle}
            yield pa.RecordBatch.from_pylist([row], _RETURNED_ARROW)


def write_rows(
    sink: TwoPhaseSink, attempt: SinkAttempt, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> tuple[int, str]:
    """Write rows in one transaction and prepare it; return their number, and the handle as JSON.

    Without rows nothing is begun, and the handle is empty. After any error the transaction is aborted.
    """
    given = (batch for batch in batches if batch.num_rows)
    first = next(given, None)
    if first is None:
        return 0, ""
    transaction, rows = sink.begin(attempt, schema), 0
    try:
        for batch in chain([first], given):
            transaction.write(fitted(batch, schema))
            rows += batch.num_rows
        return rows, _prepared(transaction)
    except BaseException as exc:
        try:
            transaction.abort()
        except Exception as other:  # noqa: BLE001  a sink that must not raise here hides not why the task failed
            exc.add_note(f"and its abort failed: {type(other).__name__}")
        raise


def _prepared(transaction: SinkTransaction) -> str:
    handle = transaction.prepare()
    try:
        return json.dumps(dict(handle), allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise InvalidArgumentError(f"the sink's handle is not plain JSON: {exc}") from exc


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return Spark's batch in the schema that the sink was given: time zones and names of elements are normalised."""
    return batch if batch.schema.equals(schema) else batch.cast(schema)


def is_repeated(context: TaskContext) -> bool:
    """Tell whether an earlier attempt at this task may have prepared the same rows."""
    return context.attemptNumber() > 0


def task_options(sink: str, names: Collection[str]) -> Mapping[str, str]:
    """Return a sink's options as this task's session has them; none outside a task."""
    context = TaskContext.get()
    if context is None:
        return {}
    found = {name: context.getLocalProperty(f"{SINK_PREFIX}{sink}.{name}") for name in names}
    return {name: value for name, value in found.items() if value is not None}


def write_frame(frame: DataFrame, task: WriteTask, *, has_twins: bool) -> Prepared:
    """Run the tasks of a micro-batch, and return what they prepared.

    Parameters
    ----------
    has_twins : bool
        Whether Spark may run two attempts at one task at a time (``spark.speculation``).
    """
    rows = frame.mapInArrow(task, _RETURNED).collect()
    return collected(rows, has_twins=has_twins or _began_twice(frame.sparkSession, {row.stage for row in rows}))


def is_classic(session: SparkSession) -> bool:
    """Tell whether a session is in the driver's process: not over Spark Connect."""
    return not type(session).__module__.startswith("pyspark.sql.connect")


def _began_twice(session: SparkSession, stages: Iterable[int]) -> bool:
    """Tell whether a stage was begun again, as where shuffle files were lost: its tasks count their attempts from 0.

    Those of the first time go on meanwhile, and prepare too. Over Connect nothing tells: the next start aborts those.
    """
    if not is_classic(session):
        return False
    tracker = session.sparkContext.statusTracker()
    found = [tracker.getStageInfo(stage) for stage in stages]
    return any(stage is None or stage.currentAttemptId > 0 for stage in found)


def collected(rows: Iterable[Row], *, has_twins: bool) -> Prepared:
    """Return what tasks prepared, by partition."""
    found = sorted(rows, key=lambda row: int(row.partition))
    return Prepared(
        tuple(json.loads(row.handle) for row in found),
        sum(row.rows for row in found),
        repeated=has_twins or any(row.repeated for row in found),
    )
