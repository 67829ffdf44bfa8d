"""Makes a new query from another, with other numbers of shards: a temporary savepoint, and its restore."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints.changes import Changes
from holdfast.spark_integration.savepoints.creating import save
from holdfast.spark_integration.savepoints.new_query import new_query
from holdfast.spark_integration.savepoints.restoring import Restorable, restore_into
from holdfast.spark_integration.savepoints.tasks import SparkTasks, Tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rescale(
    spark: SparkSession,
    original: str | Path,
    checkpoint_location: str | Path,
    *,
    shards: int,
    partitions: int | None = None,
    rename: Mapping[str, str] | None = None,
    to_state_dir: str | Path | None = None,
    continue_sinks: bool = False,
) -> str:
    """Make a new query that continues from another, with a different number of shards.

    Parameters
    ----------
    spark : SparkSession
        Its ``spark.holdfast.state.dir`` must be the original query's.
    original : str or pathlib.Path
        The original's ``checkpointLocation``. It may keep running and is not changed, unless its sinks are continued.
    checkpoint_location : str or pathlib.Path
        The new query's ``checkpointLocation``: new, or left by an attempt that was stopped.
    shards : int
        Shards per operator.
    partitions, rename, continue_sinks
        As in `holdfast.savepoints.restore`.
    to_state_dir : str or pathlib.Path, optional
        The new query's ``spark.holdfast.state.dir``; by default the original's.

    Returns
    -------
    str
        The new query's id.

    Raises
    ------
    ConflictError
        The location is not empty, or another attempt writes the same state. Or the original goes on, so that its sinks
        show more than the new query begins with.
    InvalidArgumentError
        The original is not a query, has operators whose state is Spark's own, or an argument is wrong.
    NotFoundError
        The original has not committed a micro-batch, or has no operator to rename.
    StateLostError, CorruptionError
        An object of the state is missing or damaged.

    Notes
    -----
    Cost: the state is read and written twice, because it is sorted in between: once into a savepoint in the new
    state directory, which is deleted before the query can start, and once out of it.
    """
    changes = Changes(shards, partitions, dict(rename or {}), continue_sinks=continue_sinks)
    return rescale_with(SparkTasks(spark), original, checkpoint_location, changes, to_state_dir)


def rescale_with(
    tasks: Tasks,
    original: str | Path,
    checkpoint_location: str | Path,
    changes: Changes,
    to_state_dir: str | Path | None = None,
) -> str:
    """Rescale as `rescale` does; if only Spark can, do nothing and raise `NotKnownError`."""
    with open_storage(str(original), tasks.options) as location:
        tasks.require_known(location)
    with new_query(tasks.settings, tasks.options, checkpoint_location, to_state_dir) as new:
        save(tasks, original, new.rescaling_url, new.query_id)
        new.require()  # saving may have taken long
        saved = Restorable.read(new.rescaling_url, new.query_id, tasks.options, changes)
        restore_into(tasks, new, saved, tasks.state_maker(saved.conf, saved.hosts))
        new.remove_savepoint()
        new.finish()
        return new.query_id
