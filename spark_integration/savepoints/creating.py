"""Creates a savepoint from a running or stopped query.

::

    Spark's location ──▶ logs of micro-batch N, pointers to the state after it      driver
    state directory ──▶ each shard at its pointer ──▶ pieces                        tasks, or the driver
    Spark's source logs ──▶ copies                                                  driver
    manifest                                                                        driver, last

The state after micro-batch N stays readable while Spark can return to it (``minBatchesToRetain``). If the query moves
past the last micro-batch while it is saved, the save restarts once with a later micro-batch, then fails.

With Spark, state passes through the executors, never through the driver. Spark may repeat a task or run two copies of
it at once: each attempt writes objects under unique names, and only objects in the manifest count.

The query's positions, watermark and pinned settings come from Spark's logs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import quote

import xxhash

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.evolution import evolved
from holdfast.backends.options import did_you_mean
from holdfast.backends.schema import TableSchema
from holdfast.errors import (
    ConflictError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from holdfast.settings import Settings
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, read_operator, shard_prefix
from holdfast.snapshotter.ownership.stored_tables import StoredTables, stored_tables
from holdfast.snapshotter.savepoints.manifest import (
    Piece,
    PlannedBatch,
    SavedOperator,
    SavedQuery,
    SavedSink,
    SavedSource,
    Savepoint,
    ShardTimes,
    SourceLog,
    sinks_of,
    unnamed,
)
from holdfast.snapshotter.savepoints.savepoints import (
    SavepointWriter,
    begin_savepoint,
    require_free,
    savepoint_folder,
    write_pieces,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_url
from holdfast.snapshotter.storage.probe import probe_storage
from holdfast.snapshotter.version_reader import read_tables
from holdfast.spark_integration.executor.takeover import working_directory
from holdfast.spark_integration.savepoints.changes import require_comment
from holdfast.spark_integration.savepoints.new_query import partitions_of
from holdfast.spark_integration.savepoints.tasks import ShardTask, SparkTasks, Tasks, each_ahead
from holdfast.spark_integration.shard.pointer_row import STATE_VARIABLES, PointerRow, require_state_of
from holdfast.spark_integration.shard.task import io_executor
from holdfast.spark_integration.spark_state.pointers import StatefulStep, modes_of, stored_steps
from holdfast.spark_integration.spark_state.query_location import LoggedBatch, QueryLocation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: Columns of a task's input row, one row per shard.
SHARD_COLUMNS = "operator string, directory string, shard int, version long, commit string, carried binary"
_log = logging.getLogger(__name__)
_Made = TypeVar("_Made")
_WAIT_EACH_MS = 100


def saved_query(
    location: QueryLocation, query_id: str, batch: LoggedBatch, folder: ObjectStorage, sinks: Iterable[SavedSink]
) -> SavedQuery:
    """Return the query as of a micro-batch, and copy its source logs; warn of sinks that show a later micro-batch.

    `sinks` must be read before the logs, so that the logs have a plan for every micro-batch that they have decided.
    """
    logged = (batch.batch_id, batch.offsets_version, batch.batch, batch.next_watermark_ms)
    sources = _saved_sources(location, batch.sources, folder, {})
    planned = None
    if logged_next := location.planned(batch.batch_id + 1):
        there = {source.name: {log.name for log in source.logs} for source in sources}
        further = _saved_sources(location, logged_next.sources, folder, there)
        planned = PlannedBatch(logged_next.offsets_version, logged_next.batch, further)
    query = SavedQuery(query_id, *logged, sources, planned, tuple(sinks))
    for sink in query.uncommitted:
        _log.warning(
            "sink %r has decided micro-batch %d, and the savepoint is of micro-batch %d, the last that Spark has "
            "committed: %s",
            sink.sink,
            sink.batch_id,
            query.batch_id,
            "restore it with continue_sinks (--continue-sinks), which shows nothing twice"
            if sink.batch_id == query.batch_id + 1 and planned
            else "the query is running. Only a savepoint made after its end can be restored with continue_sinks",
        )
    return query


def _saved_sources(
    location: QueryLocation,
    sources: Sequence[tuple[str, str]],
    folder: ObjectStorage,
    there: Mapping[str, Collection[str]],
) -> tuple[SavedSource, ...]:
    ends = dict(location.kept_sources(sources))
    logs = {name: _logs(location, folder, name, end, there.get(name, ())) for name, end in ends.items()}
    return tuple(SavedSource(name, offset, logs.get(name, ())) for name, offset in sources)


def _logs(
    location: QueryLocation, folder: ObjectStorage, source: str, offset: str, there: Collection[str]
) -> tuple[SourceLog, ...]:
    logs = []
    for file in location.source_logs(source, offset):
        if file in there:
            continue
        try:
            data = location.source_log(source, file)
        except NotFoundError as exc:
            raise UnavailableError("Spark has deleted the log of a source: try again", source=source) from exc
        key = f"sources/{source}/{quote(file, safe='')}-{clock.new_id()}"
        folder.put(key, data)
        logs.append(SourceLog(key, file, len(data), xxhash.xxh3_128_hexdigest(data)))
    return tuple(logs)


def read_records(storage: ObjectStorage, rows: Mapping[str, Iterable[PointerRow]]) -> dict[str, OperatorRecord]:
    """Return the record of each directory, sorted. Raises the errors of `require_state_of` if pointers do not match."""
    records = {directory: read_operator(storage, directory) for directory in sorted(rows)}
    for directory, record in records.items():
        require_state_of(rows[directory], record, storage.url)
    return records


def shard_row(operator: str, row: PointerRow) -> tuple[Any, ...]:
    """Return a task's input row, with `SHARD_COLUMNS`, for a shard that has state."""
    assert row.pointer is not None
    return (operator, row.directory, row.shard, row.pointer.version, row.pointer.commit_id, row.carried)


@dataclass(frozen=True)
class ShardSaver(ShardTask):
    """Saves shards, given as rows of `SHARD_COLUMNS`, to a savepoint directory; see `ShardTask`."""

    GIVEN: ClassVar[str] = SHARD_COLUMNS
    RETURNED: ClassVar[str] = "operator string, shard int, piece string, error string"

    #: The savepoint's name and the id of its maker
    name: str
    maker: str
    tables: Mapping[str, Mapping[str, TableSchema]]  #: Every table as saved, by operator and table
    stored: Mapping[str, StoredTables]  #: How rows are stored, by directory

    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[dict[str, Any]]:
        assert self.settings.state_dir is not None
        storage, savepoint = opened(self.settings.state_dir), savepoint_folder(opened(self.target), self.name)
        operator, shard, stored = row["operator"], row["shard"], self.stored[row["directory"]]
        pointer = Pointer(row["version"], row["commit"])
        carried = {} if row["carried"] is None else {pointer: bytes(row["carried"])}
        prefix = shard_prefix(row["directory"], shard)
        with working_directory(self.settings.local_dir) as home:
            log = ObjectCommitLog(storage, prefix, stored.held, io_executor(), home, carried=carried)
            rows = read_tables(log, pointer, stored.held)
        for table, schema in self.tables[operator].items():
            if table in rows:
                run = stored.shown(rows.pop(table), schema)
                for piece in write_pieces(savepoint, operator, shard, run, maker=self.maker, each=each_ahead):
                    yield {"operator": operator, "shard": shard, "piece": json.dumps(piece.to_json())}


def create(
    spark: SparkSession,
    checkpoint_location: str | Path,
    target: str | Path,
    name: str,
    *,
    batchId: int | None = None,
    without: Collection[str] = (),
    comment: str = "",
) -> Savepoint:
    """Save a query's state and source positions as of a micro-batch.

    Parameters
    ----------
    spark : SparkSession
        Its ``spark.holdfast.state.dir`` and ``spark.holdfast.storage.*`` must be those of the query.
    checkpoint_location : str or pathlib.Path
        The query's own ``checkpointLocation``, as a URL that `holdfast.settings` allows for storage.
    target : str or pathlib.Path
        The savepoint directory, on any storage that ``spark.holdfast.state.dir`` supports.
    name : str
        The savepoint's name: up to 100 letters from a to z, digits, dots, dashes and underscores.
    batchId : int, optional
        The micro-batch; by default the last committed one.
    without : collection of str
        Stateful operators to leave out: holdfast's by name, Spark's by their name in ``state-metadata``.
    comment : str
        A comment shown with the savepoint.

    Raises
    ------
    InvalidArgumentError
        The name is invalid, the location is not a query's, or the query has operators that keep state in Spark.
    ConflictError
        A savepoint of this name exists, or another process has begun one since.
    NotFoundError
        The micro-batch is not committed, or was purged; the query has no such operator.
    UnavailableError
        The query advances faster than its state can be saved; the retry failed, too.
    StateLostError, CorruptionError
        A state object is missing or damaged. The objects stored so far are not a savepoint; remove them with
        ``holdfast savepoint delete``.

    Notes
    -----
    The query may keep running and is not changed. A task needs memory for up to three copies of a shard's rows.
    """
    return save(
        SparkTasks(spark), checkpoint_location, target, name, batch_id=batchId, without=without, comment=comment
    )


def save(
    tasks: Tasks,
    checkpoint_location: str | Path,
    target: str | Path,
    name: str,
    *,
    batch_id: int | None = None,
    without: Collection[str] = (),
    comment: str = "",
    times: LoggedBatch | None = None,
) -> Savepoint:
    """Save a query's state through `tasks`; see `create`. `times`: the micro-batch whose watermark and time to save."""
    _require_names(without, comment)
    _require_place(target, checkpoint_location, tasks)
    with (
        open_storage(str(checkpoint_location), tasks.options) as logs,
        open_storage(str(target), tasks.options) as targets,
    ):
        new = begin_savepoint(targets, name)
        of = _Saver(tasks, logs, str(target), name)
        query_id = of.location.query_id()
        operators, left_out, query = of_batch(
            of.location, batch_id, lambda batch: of.parts(batch, without, new, query_id)
        )
        if times is not None:
            query = replace(query, batch=times.batch, next_watermark_ms=times.next_watermark_ms)
        savepoint = Savepoint(name, comment, clock.now_ms(), tasks.versions(), query, operators, left_out)
        new.finish(savepoint)
    return savepoint


def stop(
    spark: SparkSession,
    query: StreamingQuery,
    checkpoint_location: str | Path,
    target: str | Path,
    name: str,
    *,
    without: Collection[str] = (),
    comment: str = "",
    timeout_s: float = 60,
) -> Savepoint:
    """Stop a query and save it as of its last committed micro-batch.

    Waits up to `timeout_s` for the micro-batch in progress, so that sinks and Spark stop at the same micro-batch. After
    a timeout that micro-batch is not saved, and a restored query reads its input again. A sink that is not idempotent
    may then get its rows twice; holdfast's sinks show no row twice if the restored query continues them.

    Parameters
    ----------
    query : pyspark.sql.streaming.StreamingQuery
    timeout_s : float
        Seconds to wait for the micro-batch in progress.
    spark, checkpoint_location, target, name, without, comment
        As in `create`, which also lists the errors. Everything that does not depend on the last micro-batch is checked
        before the query is stopped: a taken name, an unwritable target, a different query's location, an operator that
        cannot be saved, an unknown operator in `without`, a damaged sink log.
    """
    end(SparkTasks(spark), query, checkpoint_location, target, name, without, comment, timeout_s)
    return create(spark, checkpoint_location, target, name, without=without, comment=comment)


def end(
    tasks: SparkTasks,
    query: StreamingQuery | None,
    checkpoint_location: str | Path,
    target: str | Path,
    name: str,
    without: Collection[str],
    comment: str,
    timeout_s: float,
) -> None:
    """Check that a savepoint is possible, then stop the query if it is running; see `stop`."""
    _require_names(without, comment)
    if query is not None and not hasattr(query, "isActive"):
        raise InvalidArgumentError("pass the query that start() returned, or None if it has ended", given=query)
    _require_place(target, checkpoint_location, tasks)
    with (
        open_storage(str(target), tasks.options) as targets,
        open_storage(str(checkpoint_location), tasks.options) as logs,
    ):
        require_free(targets, name)
        of = _Saver(tasks, logs, str(target), name)
        query_id = of.location.query_id()
        if query is not None and query_id != str(query.id):
            raise InvalidArgumentError(
                "this is another query's checkpoint location: the query keeps running",
                checkpoint_location=checkpoint_location,
                query=query.id,
                of=query_id,
            )
        probe_storage(targets, name, checked="the directory for savepoints failed the check before the query stops")
        of.check(without)
        # A running query repairs a damaged log with its next decision.
        decided_sinks(tasks.settings, tasks.options, query_id)
        if query is not None:
            # Once Spark commits the planned micro-batch, it may have planned and just started the next one.
            planned, end_ms = of.location.newest_planned() or 0, clock.monotonic_ms() + 1000 * timeout_s
            while (
                max(of.location.committed(), default=-1) < planned and query.isActive and clock.monotonic_ms() < end_ms
            ):
                clock.sleep_ms(_WAIT_EACH_MS)
    if query is not None:
        query.stop()


def decided_sinks(settings: Settings, options: Mapping[str, object], query_id: str) -> tuple[SavedSink, ...]:
    """Return a query's sinks according to its state directory; see `sinks_of`."""
    if settings.state_dir is None:
        return ()
    with open_storage(settings.state_dir, options) as storage:
        return sinks_of(storage, query_id)


def of_batch(query: QueryLocation, batch_id: int | None, work: Callable[[LoggedBatch], _Made]) -> _Made:
    """Call `work` with a committed micro-batch; if the query moves past the last one, retry once with a later one."""
    for is_last in (False, True):
        batch = query.batch(batch_id)
        try:
            return work(batch)
        except HoldfastError as exc:
            # After a ConflictError, a retry would take the name back from another attempt.
            if isinstance(exc, ConflictError) or batch_id is not None or batch.batch_id in query.committed():
                raise
            if is_last:
                raise UnavailableError(
                    "the query moved past two micro-batches while its state was read: stop it first, or restart it "
                    "with a higher spark.sql.streaming.minBatchesToRetain",
                    batch_id=batch.batch_id,
                    checkpoint_location=query.url,
                ) from exc
            _log.warning("the query has moved past micro-batch %d; retrying with a later one: %s", batch.batch_id, exc)
    raise AssertionError("unreachable")


def _require_place(target: str | Path, checkpoint_location: str | Path, tasks: Tasks) -> None:
    """Raise `InvalidArgumentError` if the target is a directory of the query, which savepoints should outlive."""
    places = {"checkpointLocation": str(checkpoint_location), "state directory": tasks.settings.state_dir}
    for what, place in places.items():
        if place is not None and parse_url(target) == parse_url(place):
            raise InvalidArgumentError(
                f"this is the query's {what}: choose a separate directory for savepoints, such as a sibling",
                target=target,
            )


def _require_names(without: Collection[str], comment: str) -> None:
    if isinstance(without, str):
        raise InvalidArgumentError("without must be a list of names", without=without)
    require_comment(comment)


@dataclass(frozen=True)
class _Saver:
    """The source and target of a savepoint, independent of the micro-batch."""

    tasks: Tasks
    logs: ObjectStorage
    target: str
    name: str

    @property
    def location(self) -> QueryLocation:
        return QueryLocation(self.logs)

    def parts(
        self, batch: LoggedBatch, without: Collection[str], new: SavepointWriter, query_id: str
    ) -> tuple[tuple[SavedOperator, ...], tuple[str, ...], SavedQuery]:
        """Save a micro-batch's state; return the saved operators, the names of omitted operators, and the query."""
        steps, left_out = self._chosen(stored_steps(self.logs, batch), batch.batch_id, without)
        assert self.tasks.settings.state_dir is not None
        with open_storage(self.tasks.settings.state_dir, self.tasks.options) as storage:
            known = {
                name: self._described(storage, name, step) if step.pointers else _without_rows(name, step, batch)
                for name, step in steps.items()
            }
        pieces = self._saved(known, new.id)
        operators = tuple(of.operator.with_pieces(pieces[name]) for name, of in known.items())
        sinks = decided_sinks(self.tasks.settings, self.tasks.options, query_id)
        return operators, left_out, saved_query(self.location, query_id, batch, new.folder, sinks)

    def check(self, without: Collection[str]) -> None:
        """Raise the error that saving the operators would raise, unless the query moves on twice."""
        for _ in range(2):
            batch = self.location.batch()
            try:
                steps = stored_steps(self.logs, batch)
            except HoldfastError:
                if batch.batch_id in self.location.committed():
                    raise
            else:
                self._chosen(steps, batch.batch_id, without)
                return

    def _chosen(
        self, steps: list[StatefulStep], batch_id: int, without: Collection[str]
    ) -> tuple[dict[str, StatefulStep], tuple[str, ...]]:
        """Return the operators to save, by name, and the names of the omitted operators."""
        found: dict[str, StatefulStep] = {}
        left_out: list[str] = []
        # Spark's operators have Spark's names; the names of holdfast's operators without rows are unknown.
        names = {step.number: sorted(step.pointers) if step.is_ours else [step.host] for step in steps}
        named = {name for of in names.values() for name in of}
        for step in steps:
            for name in names[step.number] or [unnamed(step.number, named)]:
                if name in without:
                    left_out.append(name)
                elif step.is_ours:
                    found[name] = step
                else:
                    if not any(step.is_ours for step in steps):
                        raise InvalidArgumentError(
                            "the query has only state of Spark's own operators: savepoints.from_spark (holdfast "
                            "savepoint from-spark) saves it for use with holdfast",
                            operator=name,
                        )
                    raise InvalidArgumentError(
                        "an operator's state is Spark's own: leave it out with `without`, to read the savepoint or "
                        "restore it without that operator; or clone the query, which copies all state",
                        operator=name,
                        number=step.number,
                    )
        unknown = set(without) - set(left_out)
        if unknown:
            name = min(unknown)
            raise NotFoundError(
                f"the query has no operator with state of this name{did_you_mean(name, named)}", operator=name
            )
        if not found:
            raise NotFoundError(
                "the query has no holdfast state to save after this micro-batch",
                batch_id=batch_id,
                checkpoint_location=self.location.url,
            )
        return found, tuple(left_out)

    def _described(self, storage: ObjectStorage, name: str, step: StatefulStep) -> _Unsaved:
        """Return an operator that is yet to be saved, with its shards' pointers."""
        pointers = step.pointers[name]
        records = read_records(storage, pointers)
        stored = {directory: stored_tables(storage, record) for directory, record in records.items()}
        tables: dict[str, TableSchema] = {}
        for one in stored.values():
            for table, schema in one.live.items():
                before = tables.get(table)  # from a different directory of the operator
                both = before and replace(evolved(before, schema), not_null=before.not_null & schema.not_null)
                tables[table] = both or schema
        newest = max(pointers)
        rows = [row for of in pointers.values() for row in of]
        times = tuple(
            ShardTimes(row.shard, row.earliest_timer_ms, row.batch_ms)
            for row in sorted(rows, key=lambda row: row.shard)
            if row.pointer is not None
        )
        operator = SavedOperator(
            name,
            step.number,
            step.host,
            step.has_timeout,
            records[newest].shards,
            tables,
            stored[newest].declared,
            all(one.is_continuous for one in stored.values()),
            {**_modes(step), **records[newest].configuration},
            times,
        )
        return _Unsaved(operator, rows, stored)

    def _saved(self, known: dict[str, _Unsaved], maker: str) -> dict[str, list[Piece]]:
        shards = [shard_row(name, row) for name, of in known.items() for row in of.rows if row.pointer is not None]
        pieces: dict[str, list[Piece]] = {name: [] for name in known}
        tables = {name: of.operator.tables for name, of in known.items()}
        stored = {directory: found for of in known.values() for directory, found in of.stored.items()}
        saver = ShardSaver(self.tasks.settings, self.target, self.name, maker, tables, stored)
        for row in self.tasks.run(shards, saver):
            source = f"a piece of {row['operator']}"
            pieces[row["operator"]].append(Piece.read(json.loads(row["piece"]), source))
        return pieces


@dataclass(frozen=True)
class _Unsaved:
    #: Has no pieces yet; its columns have the query's current names, and dropped columns are omitted
    operator: SavedOperator
    rows: list[PointerRow]  #: One per shard
    stored: Mapping[str, StoredTables]  #: How rows are stored, by directory


def _without_rows(name: str, step: StatefulStep, batch: LoggedBatch) -> _Unsaved:
    """Return an empty operator for a step that has had no rows yet, so that its name is unknown."""
    _log.warning(
        "operator %d of the query has had no rows yet, so its name is unknown: it is saved as %r, without state; a "
        "restore must rename it",
        step.number,
        name,
    )
    shards, modes = partitions_of(batch.conf), _modes(step)
    operator = SavedOperator(name, step.number, step.host, step.has_timeout, shards, configuration=modes)
    return _Unsaved(operator, [], {})


def _modes(step: StatefulStep) -> dict[str, str]:
    """Return the modes of an operator that Spark has recorded, and checks at a restart."""
    return modes_of(step.properties, step.number) if step.host == STATE_VARIABLES else {}
