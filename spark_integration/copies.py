"""Clones or rescales a query into a new query, or drains it.

**Clone**: copies a query as of a micro-batch, byte by byte, to run a second query beside it::

    operators' directories, records, columns     driver                  state directory of the clone
    the objects of each shard's version          tasks, or the driver    state directory of the clone
    Spark's state, logs and positions            driver                  checkpoint location of the clone
    metadata, with a new id                      driver                  last

Pointers are in Spark's state, which only Spark writes, and name the query and the operator's directory. So a clone
keeps both names: it needs a separate state directory, where its records name the original
(`holdfast.snapshotter.ownership.queries`). The copy includes all commits and snapshots up to the version, and verifies
the digests of those that the version needs.

From Spark's checkpoint location, while the query may run, it copies::

    offsets/5 … 7   commits/5 … 7          up to the micro-batch
    sources/…                              what its offsets need
    state/<operator>/<partition>/8.zip     up to the version after it; all files without a version
    state/<operator>/_metadata/v2/4        up to the micro-batch
    metadata                               not copied: the clone has a new id

**Rescale**: a temporary savepoint, and its restore with a different number of shards.

**Drain**: ends a query for good with one more micro-batch, without input, in which all timers and windows are due::

    location                   <location>-draining, the same query
      offsets/7   ─ copied ─▶    offsets/7
      commits/7   ─ copied ─▶    commits/7
                                 offsets/8      like 7, a moment later, with END_MS as watermark: Spark runs it next
                                 commits/8      ─▶ savepoint, with the watermark of 7

Before it plans anything, Spark runs the newest micro-batch of its offset log, with the watermark logged there. A
watermark at the end of time would make all later input late, so no location where the query could continue gets one.

Invariants of draining
----------------------
* **once**: the last micro-batch belongs to the query and has its own plan: a sink shows it once, however often it runs.
* **no input**: the trigger runs the planned micro-batch and plans no other.
* **repeatable**: the plan is the same each time. An interrupted drain resumes in the same copy, as long as the query
  has planned nothing more; a completed drain can be repeated, and sinks do not show its output again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    InvalidArgumentError,
    NotFoundError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.commits import COMMIT_BYTES_MAX, CommitObjects
from holdfast.snapshotter.ownership.operator_record import declare_operator, shard_prefix
from holdfast.snapshotter.ownership.queries import QueryOrigin, find_origin
from holdfast.snapshotter.ownership.stored_tables import FOLDER as SCHEMAS
from holdfast.snapshotter.savepoints.manifest import Savepoint
from holdfast.snapshotter.snapshots import read_manifest
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import sibling_url
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.spark_integration.savepoints.changes import Changes
from holdfast.spark_integration.savepoints.creating import SHARD_COLUMNS, end, of_batch, read_records, save, shard_row
from holdfast.spark_integration.savepoints.new_query import NewQuery, moved, new_query, remove_folder
from holdfast.spark_integration.savepoints.restoring import Restorable, restore_into
from holdfast.spark_integration.savepoints.tasks import ShardTask, SparkTasks, Tasks
from holdfast.spark_integration.shard.task import io_executor
from holdfast.spark_integration.spark_state.pointers import StatefulStep, StateOperators, stored_steps
from holdfast.spark_integration.spark_state.query_location import LEFTOVER, LoggedBatch, QueryLocation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_FILE_BYTES_MAX = 4 << 30
#: The most bytes of files in memory at once; a larger file is copied alone.
AT_ONCE_BYTES = 256 << 20
_LOG = re.compile(r"(offsets|commits)/(0|[1-9][0-9]{0,17})")
# A file of a state store: the version, a unique id in some formats, and the kind of file.
_VERSION = re.compile(r"([0-9]{1,18})(_[0-9A-Za-z-]+)?\.(zip|delta|snapshot|changelog)")
_METADATA = re.compile(r"state/[0-9]+/_metadata/v[0-9]+/([0-9]{1,18})")
#: The end of time, 2262-01-01, the last year that pandas supports.
END_MS = 9_214_646_400_000
_LOG_BYTES_MAX = 256 << 20


def copy_location(source: ObjectStorage, target: ObjectStorage, query: QueryLocation, batch: LoggedBatch) -> None:
    """Copy everything but ``metadata``. Raises `UnavailableError` if the query has moved past the micro-batch."""
    folders = ("state/", "offsets/", "commits/", "sources/")
    sizes = {info.key: info.size_bytes for folder in folders for info in source.list(folder)}
    state = [key for key in sizes if key.startswith("state/") and _is_of(key, batch.batch_id)]
    logs = [key for key in sizes if (found := _LOG.fullmatch(key)) and int(found[2]) <= batch.batch_id]
    kept = query.kept_sources(batch.sources)
    logs += [f"sources/{name}/{log}" for name, offset in kept for log in query.source_logs(name, offset)]
    vanished = {key for keys in (state, logs) for key in _copy_objects(source, target, keys, sizes, query)}
    needed = {f"offsets/{batch.batch_id}", f"commits/{batch.batch_id}"}
    needed |= {key for key in logs if key.startswith("sources/")}
    # While Spark retains the micro-batch, it deletes only older files.
    if vanished & needed or batch.batch_id not in query.committed():
        raise UnavailableError(
            "the query has moved past the micro-batch: try again", batch_id=batch.batch_id, location=source.url
        )


def _is_of(key: str, batch_id: int) -> bool:
    """Return whether a file of Spark's state belongs to a micro-batch's version or an earlier one."""
    if LEFTOVER.search(key):
        return False
    described = _METADATA.fullmatch(key)
    if described:
        return int(described[1]) <= batch_id
    version = _VERSION.fullmatch(key.rpartition("/")[2])
    return version is None or int(version[1]) <= batch_id + 1


def _copy_objects(
    source: ObjectStorage, target: ObjectStorage, keys: Iterable[str], sizes: Mapping[str, int], query: QueryLocation
) -> list[str]:
    """Copy files; return those that no longer exist."""

    def copy(key: str) -> str | None:
        folder, _, below = key.partition("/")
        try:
            data = query.source_log(*below.split("/", 1)) if folder == "sources" else source.get(key, _FILE_BYTES_MAX)
        except NotFoundError:
            return key
        target.put(key, moved(key, data, target.url))
        return None

    copied = (gone for group in _batches(keys, sizes) for gone in io_executor().map(copy, group))
    return [key for key in copied if key is not None]


def _batches(keys: Iterable[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield files in groups that fit into memory; files that Spark has compacted since the listing count as empty."""
    group: list[str] = []
    room = AT_ONCE_BYTES
    for key in keys:
        size_bytes = sizes.get(key, 0)
        if group and size_bytes > room:
            yield group
            group, room = [], AT_ONCE_BYTES
        group.append(key)
        room -= size_bytes
    if group:
        yield group


@dataclass(frozen=True)
class ShardCopier(ShardTask):
    """Copies shards from the original's state directory to the clone's; see `ShardTask`."""

    GIVEN: ClassVar[str] = SHARD_COLUMNS
    RETURNED: ClassVar[str] = "operator string, shard int, objects long, error string"

    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[dict[str, Any]]:
        prefix = shard_prefix(row["directory"], row["shard"])
        assert self.settings.state_dir is not None
        source, target = (PrefixedStorage(opened(url), prefix) for url in (self.settings.state_dir, self.target))
        carried = None if row["carried"] is None else bytes(row["carried"])
        objects = copy_shard(source, target, Pointer(row["version"], row["commit"]), carried)
        yield {"operator": row["operator"], "shard": row["shard"], "objects": objects}


def copy_shard(source: PrefixedStorage, target: PrefixedStorage, pointer: Pointer, carried: bytes | None) -> int:
    """Copy a version's objects, and older ones; return the number of intact commits and snapshots.

    `carried`: the version's commit, if the pointer carries it. Raises `StateLostError` if an object that the version
    needs is missing, `CorruptionError` if it is damaged or was replaced.
    """
    commit = CommitObjects(source, {}).newest(pointer, carried)
    needed = [*commit.lineage.chain, *([commit.entry] if carried is None else [])]
    stored = [one for one in list_shard(source).versions if one.version < pointer.version or one.pointer == pointer]
    copied = _copy_snapshots(source, target, [one.key for one in stored if one.kind == "snapshot"])
    copied |= _copy_all(source, target, [one.key for one in stored if one.kind == "commit"])
    for entry in needed:
        found, facts = copied.get(entry.key), {"key": f"{source.url}/{entry.key}", "version": pointer.version}
        if found is None:
            raise StateLostError("an object that the version needs, or a part of it, is missing", **facts)
        if found != _Copied(entry.size_bytes, entry.digest):
            raise CorruptionError(
                "an object that the version needs, or a part of it, was altered or damaged; holdfast verify names it",
                **facts,
            )
    return sum(one is not None and one.digest is not None for one in copied.values())


class _Copied(NamedTuple):
    """A copied object; without a digest if it is damaged."""

    size_bytes: int
    digest: str | None


def _copy_snapshots(source: PrefixedStorage, target: PrefixedStorage, keys: Sequence[str]) -> dict[str, _Copied | None]:
    """Copy intact snapshots, manifests last; return the outcome of each manifest and its parts, None if missing."""
    found: dict[str, _Copied | None] = {}
    manifests: dict[str, tuple[memoryview, dict[str, _Copied]]] = {}
    for key in keys:
        try:
            data = source.get(key)
            manifest, _ = read_manifest(data, source.prefix, f"{source.url}/{key}", key)
        except NotFoundError:
            found[key] = None
        except CorruptionError:
            found[key] = _Copied(0, None)
        else:
            parts = {part.key: _Copied(part.size_bytes, part.digest) for file in manifest.files for part in file.parts}
            manifests[key] = data, parts
    # Each part once: snapshots share parts.
    copied = _copy_all(source, target, sorted({key for _, parts in manifests.values() for key in parts}))
    for key, (data, parts) in manifests.items():
        if parts.items() <= copied.items():
            target.put(key, data)
            found[key] = _Copied(len(data), stored_file.digest_of(data))
        else:
            found[key] = None if None in map(copied.get, parts) else _Copied(len(data), None)
    return found


def _copy_all(source: PrefixedStorage, target: PrefixedStorage, keys: Sequence[str]) -> dict[str, _Copied | None]:
    return dict(zip(keys, io_executor().map(partial(_copy, source, target), keys), strict=True))


def _copy(source: PrefixedStorage, target: PrefixedStorage, key: str) -> _Copied | None:
    """Copy an object; return None if it no longer exists."""
    try:
        data = source.get(key, COMMIT_BYTES_MAX)
    except NotFoundError:
        return None
    target.put(key, data)
    return _Copied(len(data), stored_file.digest_of(data))


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
        A session whose ``spark.holdfast.state.dir`` is the original query's.
    original : str or pathlib.Path
        The original's ``checkpointLocation``. The query may keep running and is not changed.
    checkpoint_location : str or pathlib.Path
        The clone's ``checkpointLocation``: new, or left by an interrupted attempt.
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
        The location is not empty, or the state directory has operators with the same names.
    InvalidArgumentError
        The original is not a query with state, or its state is not durable.
    NotFoundError
        The micro-batch is not committed, or was purged.
    StateLostError, CorruptionError
        An object of the state is missing or damaged.

    Notes
    -----
    Spark's own stateful operators are copied, too. Numbers of shards and partitions stay. A clone runs beside the
    original, so it cannot continue the original's sinks: give it new ones, or `rescale` the original. A failed clone
    leaves nothing. After an interruption, a kill, or a failure of Spark or of the last step, the next clone into the
    same location deletes the leftovers: start it when no task of the first is running any more.
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
    """Clone a query through `tasks`; see `clone`."""
    with (
        open_storage(str(original), tasks.options) as location,
        open_storage(str(tasks.settings.state_dir), tasks.options) as storage,
    ):
        query = QueryLocation(location)
        query_id = query.query_id()

        def cloned(batch: LoggedBatch) -> str:
            steps = stored_steps(location, batch)
            with new_query(tasks.settings, tasks.options, checkpoint_location, to_state_dir) as new:
                _copy_operators(tasks, new, storage, steps, query_id, batch.batch_id)
                new.require()  # the copy may have taken long
                copy_location(location, new.location, query, batch)
                new.finish()
                return new.query_id

        return of_batch(query, batch_id, cloned)


def _copy_operators(
    tasks: Tasks, new: NewQuery, storage: ObjectStorage, steps: list[StatefulStep], query_id: str, batch_id: int
) -> None:
    """Copy what the pointers need from the operators' directories."""
    rows = {directory: of for step in steps for held in step.pointers.values() for directory, of in held.items()}
    records = read_records(storage, rows)
    taken = [directory for directory in records if new.storage.list(f"{directory}/")]
    if taken:
        raise ConflictError(
            "a clone needs its own state directory, and this one has operators of these names: choose a different one",
            operators=", ".join(taken),
            storage=new.storage.url,
        )
    if new.storage.url == storage.url:  # the original may not have created all its directories yet
        raise ConflictError(
            "a clone needs its own state directory, and this one is the original's: choose a different one",
            storage=new.storage.url,
        )
    before = find_origin(storage, query_id)  # the original may itself be a clone
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
        declare_operator(new.storage, record)
        for info in storage.list(f"{record.operator}/{SCHEMAS}/"):  # tables that later runs declared
            new.storage.put(info.key, storage.get(info.key))
    shards = [shard_row(directory, row) for directory, of in rows.items() for row in of if row.pointer is not None]
    tasks.run(shards, ShardCopier(tasks.settings, str(new.settings.state_dir)))


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
    """Make a new query that continues an existing query with a different number of shards.

    Parameters
    ----------
    spark, original, checkpoint_location
        As in `clone`, for the new query. The original changes only if its sinks are continued.
    shards : int
        Shards per operator.
    partitions, rename, continue_sinks
        As in `restore`.
    to_state_dir : str or pathlib.Path, optional
        The new query's ``spark.holdfast.state.dir``; by default the original's.

    Returns
    -------
    str
        The new query's id.

    Raises
    ------
    HoldfastError
        As in `create` and `restore`, which it calls.

    Notes
    -----
    Cost: the state is read and written twice, into a temporary savepoint and out of it, because it is sorted in
    between. The savepoint lies in the new state directory and is deleted before the query can start.
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
    """Rescale a query through `tasks`; see `rescale`. Raises `NeedsSparkError`, before any write, if that is needed."""
    with open_storage(str(original), tasks.options) as location:
        batch, operators = QueryLocation(location).batch(), StateOperators(location)
        hosts = {one.host for one in operators.at(batch.batch_id) if operators.hold_pointers(one)}
        tasks.state_maker(batch.conf, hosts)
    with new_query(tasks.settings, tasks.options, checkpoint_location, to_state_dir) as new:
        save(tasks, original, new.rescaling_url, new.query_id)
        new.require()  # the savepoint may have taken long
        saved = Restorable.read(new.rescaling_url, new.query_id, tasks.options, changes)
        restore_into(tasks, new, saved, tasks.state_maker(saved.conf, saved.hosts))
        new.remove_savepoint()
        new.finish()
        return new.query_id


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
    """Stop a query for good: fire all timers, close all windows, and save the result.

    One more micro-batch, without input, runs with a watermark in the year 2262. Its results go where the query's go;
    holdfast's sinks show them once. In the savepoint nothing is due, and the watermark is the query's, so a restored
    query takes new input.

    Parameters
    ----------
    spark : SparkSession
    query : pyspark.sql.streaming.StreamingQuery or None
        None if it has ended, for example in a second attempt.
    writer : pyspark.sql.streaming.DataStreamWriter
        The query's writer, or one built the same way. Its location and trigger are replaced.
    checkpoint_location, target, name, without, comment, timeout_s
        As in `stop`.

    Raises
    ------
    StreamingQueryException
        The last micro-batch failed: call `drain` again, which resumes with it.
    HoldfastError
        As in `stop`.

    Notes
    -----
    Processing-time timers do not fire. The query's own location does not change: do not start the query again, or it
    repeats what was drained (holdfast's sinks refuse). The last micro-batch runs in a copy of the location,
    ``<checkpoint_location>-draining``, which is deleted at the end.
    """
    if not hasattr(writer, "trigger"):  # before the query stops
        raise InvalidArgumentError(
            "drain needs a writer that has not been started: out.writeStream.outputMode(…).foreachBatch(…)",
            writer=type(writer).__name__,
        )
    tasks, place = SparkTasks(spark), sibling_url(str(checkpoint_location), "-draining")
    end(tasks, query, checkpoint_location, target, name, without, comment, timeout_s)
    with open_storage(str(checkpoint_location), tasks.options) as logs, open_storage(place, tasks.options) as copied:
        _copy_planned(logs, copied)
        copy = QueryLocation(copied)
        while (undrained := _undrained(copied)) is None:
            planned = copy.newest_planned()
            writer.option("checkpointLocation", place).trigger(once=True).start().awaitTermination()
            if planned not in copy.committed() or copy.newest_planned() != planned:
                raise UnavailableError(
                    "Spark has not run the planned micro-batch, or ran more: call drain again",
                    location=place,
                    planned=planned,
                )
        savepoint = save(tasks, place, target, name, without=without, comment=comment, times=undrained)
    remove_folder(place, tasks.options)
    return savepoint


def _copy_planned(logs: ObjectStorage, copied: ObjectStorage) -> None:
    """Copy a location with the planned micro-batch, unless it is already copied."""
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
        copied.put(key, logs.get(key, _LOG_BYTES_MAX))
    copied.put("metadata", logs.get("metadata", _LOG_BYTES_MAX))


def _undrained(copied: ObjectStorage) -> LoggedBatch | None:
    """Return the micro-batch before the draining one if that is committed; else plan the draining one."""
    copy = QueryLocation(copied)
    last = copy.batch()
    if (copy.newest_planned() or 0) > last.batch_id:
        return None
    if json.loads(last.batch)["batchWatermarkMs"] == END_MS:
        return copy.batch(last.batch_id - 1)
    version, batch, *sources = bytes(copied.get(f"offsets/{last.batch_id}", _LOG_BYTES_MAX)).decode().split("\n")
    before = json.loads(batch)
    # Each micro-batch of a query has a different time, and all attempts at it have the same.
    planned = before | {"batchWatermarkMs": END_MS, "batchTimestampMs": before["batchTimestampMs"] + 1}
    copied.put_if_absent(f"offsets/{last.batch_id + 1}", "\n".join([version, json.dumps(planned), *sources]).encode())
    return None
