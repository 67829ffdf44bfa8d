"""Ends a query for good: one more micro-batch, without input, in which all is due up to the end of time.

::

    location                   <location>-draining, of the same query
      offsets/7   ─ copied ─▶    offsets/7
      commits/7   ─ copied ─▶    commits/7
                                 offsets/8      as 7, a moment later, with END_MS as its watermark: what Spark runs next
                                 commits/8      ─▶ savepoint, with the watermark of 7

Spark runs what stands in its log of offsets with the watermark that stands there, before it plans anything. With the
watermark at the end of time all later input would be late, and dropped: so no location in which the query could go on
ever has it.

Invariants
----------
* **once**: the last micro-batch is the query's, with a plan of its own: a sink shows it once, whoever repeats it.
* **no input**: the trigger runs what is planned and plans nothing.
* **again**: the plan is the same each time. What was stopped half-way goes on in the same copy, as long as the query
  itself has planned nothing more; what was done is repeated, and shown no second time.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import UnavailableError
from holdfast.snapshotter.savepoints.manifest import Savepoint
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.copies.cloning import copy_location
from holdfast.spark_integration.savepoints.creating import end, require_names, save
from holdfast.spark_integration.savepoints.tasks import SparkTasks
from holdfast.spark_integration.spark_state.query_location import LoggedBatch, QueryLocation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

#: The end of time, 2262-01-01: pandas has no later years.
END_MS = 9_214_646_400_000
_FILE_BYTES_MAX = 256 << 20


def drain(
    spark: SparkSession,
    query: StreamingQuery | None,
    writer: DataStreamWriter,
    checkpoint_location: str | Path,
    target: str | Path,
    name: str,
    *,
    without: Collection[str] = (),
    comment: str = "",
    timeout_s: float = 60,
) -> Savepoint:
    """Stop a query for good: fire all timers, close all windows, and save it as it is then.

    One more micro-batch, without input, runs with the year 2262 as watermark. It goes where the query's results go, and
    holdfast's sinks show it once.

    Parameters
    ----------
    spark : SparkSession
    query : pyspark.sql.streaming.StreamingQuery or None
        None if it has ended, as for a second attempt.
    writer : pyspark.sql.streaming.DataStreamWriter
        What the query was started with, or one that is made in the same way. Its location and trigger are replaced.
    checkpoint_location, target, name, without, comment, timeout_s
        As in `stop`.

    Returns
    -------
    Savepoint
        Without anything due, and with the watermark that the query had: a restored query takes new input.

    Raises
    ------
    StreamingQueryException
        The last micro-batch failed. Call `drain` again: it goes on where this one was stopped.
    HoldfastError
        As in `stop`.

    Notes
    -----
    Timers in processing time do not fire for it. The query's own location stays as it was before: do not start it
    again, or what was drained is done a second time (holdfast's sinks refuse). The last micro-batch runs in a copy of
    it, ``<checkpoint_location>-draining``, which is deleted at the end.
    """
    require_names(without, comment)
    tasks = SparkTasks(spark)
    end(tasks, query, checkpoint_location, target, name, without, timeout_s)
    place = f"{str(checkpoint_location).rstrip('/')}-draining"
    with open_storage(str(checkpoint_location), tasks.options) as logs, open_storage(place, tasks.options) as copied:
        _copy(logs, copied)
        while (undrained := _undrained(copied)) is None:
            _run_once(writer, place, QueryLocation(copied))
        savepoint = save(tasks, place, target, name, without=without, comment=comment, times=undrained)
        copied.delete([info.key for info in copied.list("")])
    return savepoint


def _copy(logs: ObjectStorage, copied: ObjectStorage) -> None:
    """Copy a location with all that is planned there, unless that was done before."""
    query, copy = QueryLocation(logs), QueryLocation(copied)
    keys = [info.key for info in copied.list("")]
    if "metadata" in keys:
        newest = query.newest_planned() or 0
        there, here = copy.planned(newest), query.planned(newest)
        if there and here and there.plan == here.plan:
            return
        copied.delete(["metadata"])
    copied.delete(keys)
    batch = query.batch()
    copy_location(logs, copied, query, batch)
    planned = query.planned(batch.batch_id + 1)
    if planned is not None:
        for source, offset in query.kept_sources(planned.sources):
            for log in query.source_logs(source, offset):
                copied.put(f"sources/{source}/{log}", query.source_log(source, log))
        key = f"offsets/{batch.batch_id + 1}"
        copied.put(key, logs.get(key, _FILE_BYTES_MAX))
    copied.put("metadata", logs.get("metadata", _FILE_BYTES_MAX))


def _undrained(copied: ObjectStorage) -> LoggedBatch | None:
    """Return the micro-batch before the last one, once that is done; else plan the next one."""
    copy = QueryLocation(copied)
    last = copy.batch()
    if (copy.newest_planned() or 0) > last.batch_id:
        return None
    if json.loads(last.batch)["batchWatermarkMs"] == END_MS:
        return copy.batch(last.batch_id - 1)
    version, batch, *sources = bytes(copied.get(f"offsets/{last.batch_id}", _FILE_BYTES_MAX)).decode().split("\n")
    before = json.loads(batch)
    # No two micro-batches of a query have one time, and each attempt has the same.
    planned = before | {"batchWatermarkMs": END_MS, "batchTimestampMs": before["batchTimestampMs"] + 1}
    copied.put_if_absent(f"offsets/{last.batch_id + 1}", "\n".join([version, json.dumps(planned), *sources]).encode())
    return None


def _run_once(writer: DataStreamWriter, place: str, copy: QueryLocation) -> None:
    """Run what is planned, and nothing else."""
    planned = copy.newest_planned()
    writer.option("checkpointLocation", place).trigger(once=True).start().awaitTermination()
    if planned not in copy.committed() or copy.newest_planned() != planned:
        raise UnavailableError(
            "Spark has not run the micro-batch that was planned for it, or more than that: call drain again",
            location=place,
            planned=planned,
        )
