"""Copies a query as it was after a micro-batch, byte by byte, to run a second one beside it.

::

    state's directories, records, columns        driver                  state directory of the clone
    what each shard's version is made of         tasks, or the driver    state directory of the clone
    Spark's state, logs and positions            driver                  checkpoint location of the clone
    metadata, with an id of its own              driver                  last

Pointers lie in Spark's state, which nobody but Spark writes, and name the query and the operator's directory. So a
clone keeps both: its state directory is another one, and in it the clone writes under the original's id, which
`holdfast.snapshotter.ownership.query_origin` tells its new shards. Nothing of the clone names the original's places.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConflictError, HoldfastError, InvalidArgumentError
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator, read_operator
from holdfast.snapshotter.ownership.query_origin import QueryOrigin, find_origin
from holdfast.snapshotter.ownership.stored_tables import FOLDER as SCHEMAS
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.copies.copied_location import copy_location
from holdfast.spark_integration.copies.copied_shards import COPIED, ShardCopier
from holdfast.spark_integration.savepoints.new_query import NewQuery, new_query
from holdfast.spark_integration.savepoints.saving import SHARD, shard_row
from holdfast.spark_integration.savepoints.working import SparkTasks, Tasks
from holdfast.spark_integration.shard.operator_directory import operator_of
from holdfast.spark_integration.spark_state.query_location import QueryLocation
from holdfast.spark_integration.stored_pointers import StatefulStep, stored_steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)


def clone(
    spark: SparkSession,
    original: str | Path,
    checkpoint_location: str | Path,
    *,
    to_state_dir: str | Path,
    batchId: int | None = None,
) -> str:
    """Copy a query as of a micro-batch; the clone has its own id and continues the micro-batch numbers.

    Parameters
    ----------
    spark : SparkSession
        Its ``spark.holdfast.state.dir`` must be the original query's.
    original : str or pathlib.Path
        The original's ``checkpointLocation``. It may keep running and is not changed.
    checkpoint_location : str or pathlib.Path
        The clone's ``checkpointLocation``: new, or left by an attempt that was stopped.
    to_state_dir : str or pathlib.Path
        The clone's ``spark.holdfast.state.dir``, not the original's.
    batchId : int, optional
        The micro-batch; by default the last committed one.

    Returns
    -------
    str
        The clone's id.

    Raises
    ------
    ConflictError
        The location is not empty, or the state directory has operators of these names.
    InvalidArgumentError
        The original is not a query with state, or its state is not durable.
    NotFoundError
        The micro-batch is not committed, or was purged.
    StateLostError, CorruptionError
        An object of the state is missing or damaged.

    Notes
    -----
    Operators with state of Spark's own are copied, too. Numbers of shards and partitions stay. A clone runs beside the
    original, so it cannot continue its sinks: give it its own, or `rescale` the original. If it fails, nothing is
    left; if it is interrupted or killed, or Spark or the last step fails, the next one into the same location deletes
    what is left: run it once no task of the first one runs.
    """
    return copy(SparkTasks(spark), original, checkpoint_location, to_state_dir=to_state_dir, batch_id=batchId)


def copy(
    tasks: Tasks,
    original: str | Path,
    checkpoint_location: str | Path,
    *,
    to_state_dir: str | Path,
    batch_id: int | None = None,
) -> str:
    """Copy a query by Spark, or by this process; see `clone`."""
    with (
        open_storage(str(original), tasks.options) as location,
        open_storage(str(tasks.settings.state_dir), tasks.options) as storage,
    ):
        query = QueryLocation(location)
        query_id = query.query_id()
        batch = query.batch(batch_id)

        def cloned() -> str:
            steps = stored_steps(location, batch)
            with new_query(tasks.settings, tasks.options, checkpoint_location, to_state_dir) as new:
                _copy_operators(tasks, new, storage, steps, query_id, batch.batch_id)
                new.require()  # copying may have taken long
                copy_location(location, new.location, query, batch)
                new.finish()
                return new.query_id

        try:
            return cloned()
        except HoldfastError as exc:
            # Who has lost the location would take it back.
            if isinstance(exc, ConflictError) or batch_id is not None or batch.batch_id in query.committed():
                raise
            _log.warning("the query has moved past micro-batch %d; copying a later one: %s", batch.batch_id, exc)
            batch = query.batch()
            return cloned()


def _copy_operators(
    tasks: Tasks,
    new: NewQuery,
    storage: ObjectStorage,
    steps: list[StatefulStep],
    query_id: str,
    batch_id: int,
) -> None:
    """Copy the operators' directories, as far as the pointers need them."""
    rows = {directory: of for step in steps for directory, of in step.pointers.items()}
    if "" in rows:
        raise InvalidArgumentError(
            "the query has state that is not durable, because it runs without spark.holdfast.state.dir: it "
            "cannot be copied",
            query=query_id,
        )
    records = {directory: read_operator(storage, directory) for directory in sorted(rows)}
    for directory, record in records.items():
        for row in rows[directory]:
            row.require(operator_of(directory) or "", row.shard, record.shards)
    taken = [directory for directory in records if new.storage.list(f"{directory}/")]
    if taken:
        raise ConflictError(
            "a clone needs its own state directory, and this one has operators of these names: choose another",
            operators=", ".join(taken),
            storage=new.storage.url,
        )
    if new.storage.url == storage.url:  # where the original may not have begun all of its directories yet
        raise ConflictError(
            "a clone needs its own state directory, and this one is the original's: choose another",
            storage=new.storage.url,
        )
    before = find_origin(storage, query_id)  # what is cloned may be a clone
    origin = QueryOrigin(
        new.query_id,
        query_id if before is None else before.state_id,
        query_id,
        batch_id,
        {directory: record.query_id for directory, record in records.items()},
        () if before is None else before.empty,
        sum(step.is_ours and not step.pointers for step in steps),
    )
    new.fill(origin)
    for record in records.values():
        _copy_record(storage, new.storage, record)
    shards = [shard_row(directory, row) for directory, of in rows.items() for row in of if row.pointer is not None]
    tasks.run(shards, SHARD, ShardCopier(tasks.settings, str(new.settings.state_dir)), COPIED)


def _copy_record(source: ObjectStorage, target: ObjectStorage, record: OperatorRecord) -> None:
    """Copy an operator's record, and which tables later runs have declared."""
    declare_operator(target, record)
    for info in source.list(f"{record.operator}/{SCHEMAS}/"):
        target.put(info.key, source.get(info.key))
