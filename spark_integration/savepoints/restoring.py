"""Creates a new query's state and checkpoint location from a savepoint.

::

    the operators' records                            driver                      state directory
    pieces ──▶ version 1 of each new shard            tasks, or the driver        state directory
    pointers to these ──▶ state/                      driver, or a stub query     new location
    positions, watermark, settings                    driver                      new location
    metadata                                          driver                      new location, last

The query cannot start before the last step, and an interrupted restore can be repeated. The finished query depends on
neither the savepoint nor the saved query.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.errors import InvalidArgumentError
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator, find_operator
from holdfast.snapshotter.ownership.queries import QueryOrigin
from holdfast.snapshotter.ownership.stored_tables import StoredTables, declare_tables
from holdfast.snapshotter.savepoints.manifest import SavedOperator, Savepoint, require_sinks
from holdfast.snapshotter.savepoints.manifest import continue_sinks as hand_over
from holdfast.snapshotter.savepoints.savepoints import read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints.changes import Changes, Migrate, Plan, Sources, migrated, plans_of
from holdfast.spark_integration.savepoints.new_query import NewQuery, new_query, pinned, seed
from holdfast.spark_integration.savepoints.restoring_shards import (
    FIRST_VERSION,
    HashRange,
    RestoredOperator,
    ShardRestorer,
    rows_of_shards,
)
from holdfast.spark_integration.savepoints.tasks import SparkTasks, StateMaker, Tasks
from holdfast.spark_integration.shard.pointer_row import PointerRow, directory_of_query
from holdfast.spark_integration.shard.timeout import TIME_MODES, TIMEOUT_CONF, TimeMode, TimeoutConf
from holdfast.spark_integration.spark_state.pointers import PointerOperator
from holdfast.spark_integration.timers import DUE, TIMERS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: A shard's first commit and the due time of its first timer.
_Restored = tuple[str, int | None]
_log = logging.getLogger(__name__)


def restore(
    spark: SparkSession,
    target: str | Path,
    name: str,
    checkpoint_location: str | Path,
    *,
    shards: int | None = None,
    partitions: int | None = None,
    rename: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
    reset: Collection[str] = (),
    sources: Sources = "saved",
    migrate: Mapping[str, Migrate | Mapping[str, Migrate]] | None = None,
    continue_sinks: bool = False,
) -> str:
    """Make a checkpoint location and state from which a query continues at a savepoint.

    Parameters
    ----------
    spark : SparkSession
        Its ``spark.holdfast.state.dir`` receives the state and must be the new query's.
    target : str or pathlib.Path
    name : str
        The savepoint's name in that directory.
    checkpoint_location : str or pathlib.Path
        The new query's ``checkpointLocation``: empty, or left by an interrupted restore.
    shards : int, optional
        Shards per operator; defaults to the savepoint's.
    partitions : int, optional
        Spark's shuffle partitions, fixed for the query's lifetime; defaults to `shards`, else to the saved number.
    rename : mapping of str to str, optional
        New operator names by old name.
    skip : collection of str
        Operators that the new query does not have, or that the savepoint left out.
    reset : collection of str
        Operators that start without state. The new query must have operators of the same kind in their places.
    sources : {"saved", "fresh"}
        Where sources start: at the saved positions, or as their options say.
    migrate : mapping of str to callable, optional
        By operator, a function that changes its state's columns, or functions by table: docs/state-schema.md.
    continue_sinks : bool
        Take over the saved query's sinks, in its state directory, and end that query for good. A micro-batch that a
        sink has decided but Spark has not committed becomes the new query's first, and is not shown again.

    Returns
    -------
    str
        The new query's id.

    Raises
    ------
    NotFoundError
        The savepoint, or an operator or table to rename, skip, reset or migrate, does not exist.
    ConflictError
        The location is not empty, another restore writes the same state, or a sink shows more than the savepoint holds.
    InvalidArgumentError
        The savepoint is incomplete, because its query had state in Spark, or a migration function is wrong.
    CorruptionError
        A part of the savepoint is damaged.

    Notes
    -----
    A task needs memory for up to three copies of a shard's rows, plus the timers of the old shard they come from. A
    failed restore leaves nothing. If it is interrupted or killed, or Spark or the last step fails, the next restore
    into the location deletes the leftovers: start it when no task of the first is running any more.
    """
    if isinstance(skip, str) or isinstance(reset, str):
        raise InvalidArgumentError("skip and reset are lists of names", skip=skip, reset=reset)
    names = dict(rename or {}), frozenset(skip), frozenset(reset)
    changes = Changes(shards, partitions, *names, sources, dict(migrate or {}), continue_sinks)
    tasks = SparkTasks(spark)
    return restore_with(tasks, Restorable.read(str(target), name, tasks.options, changes), checkpoint_location)


@dataclass(frozen=True)
class Restorable:
    """A savepoint and the changes for a new query."""

    target: str  #: URL of the savepoint directory
    savepoint: Savepoint
    changes: Changes
    plans: list[Plan]
    conf: Mapping[str, str]  #: The settings that the new query pins

    @classmethod
    def read(cls, target: str, name: str, options: Mapping[str, object], changes: Changes) -> Restorable:
        """Read a savepoint's manifest. Raises the errors of `restore` if these changes do not allow a restore."""
        with open_storage(target, options) as savepoints:
            savepoint = read_savepoint(savepoints, name)
        partitions = changes.shards if changes.partitions is None else changes.partitions
        conf = pinned(savepoint.query, partitions)
        return cls(target, savepoint, changes, plans_of(savepoint, changes), conf)

    @property
    def hosts(self) -> set[str]:
        """Spark's names for the new query's operators."""
        return {plan.saved.host for plan in self.plans}


def restore_with(tasks: Tasks, saved: Restorable, checkpoint_location: str | Path) -> str:
    """Restore a savepoint; see `restore`. Raises `NeedsSparkError`, before any write, if that requires Spark."""
    make_state = tasks.state_maker(saved.conf, saved.hosts)
    with new_query(tasks.settings, tasks.options, checkpoint_location) as new:
        restore_into(tasks, new, saved, make_state)
        new.finish()
        return new.query_id


def restore_into(tasks: Tasks, new: NewQuery, saved: Restorable, make_state: StateMaker) -> None:
    """Fill a new query's location and state directory from a savepoint, except ``metadata``."""
    plans, changes, query = saved.plans, saved.changes, saved.savepoint.query
    if changes.continue_sinks:
        require_sinks(new.storage, query)
    kept = [plan for plan in plans if not plan.is_reset]
    states = {plan.saved.name: _Directory(new.storage, plan, new.query_id) for plan in kept}
    _check_shards(states.values())
    new.fill(
        QueryOrigin(
            new.query_id,
            new.query_id,
            query.query_id,
            query.batch_id,
            {state.directory: new.query_id for state in states.values()},
            tuple(plan.name for plan in plans if plan.is_reset),
        )
    )
    for state in states.values():
        state.declare(new.settings)
    shards_of = _restored(tasks, new, saved, states)
    operators = []
    for plan in plans:
        name = plan.saved.name
        pointers: Iterable[PointerRow] = ()
        if name in states:  # otherwise reset
            pointers = _pointers(states[name], shards_of[name], new.settings.state_dir)
        time_mode = _time_mode(plan.saved)
        timeout_conf: TimeoutConf = TIMEOUT_CONF[time_mode] if plan.saved.has_timeout else "NoTimeout"
        output_mode = plan.saved.configuration.get("outputMode", "update").lower()
        operators.append(PointerOperator(plan.saved.host, timeout_conf, time_mode, output_mode, tuple(pointers)))
    first = make_state(new, operators)
    planned = query.planned if changes.continue_sinks else None
    with open_storage(saved.target, new.options) as savepoints:
        folder = savepoint_folder(savepoints, saved.savepoint.name)
        seed(new.location, first, folder, query, fresh=changes.sources == "fresh", planned=planned)
    if changes.continue_sinks:
        new.require()  # the next line ends the saved query
        hand_over(new.storage, query, new.query_id, clock.new_id())
        return
    for sink in query.uncommitted:
        _log.warning(
            "sink %r has decided micro-batch %d of the saved query, which is not in the savepoint: the restored query "
            "reads its input again, and needs a different sink. To continue this sink, restore with continue_sinks "
            "(--continue-sinks)",
            sink.sink,
            sink.batch_id,
        )


class _Directory:
    """A restored operator's directory."""

    def __init__(self, storage: ObjectStorage, plan: Plan, query_id: str) -> None:
        self.plan = plan
        self.query_id = query_id
        self._storage = storage
        record = find_operator(storage, plan.name)
        #: The number of shards of the stored operator with this name, if any
        self.shards_by_name = None if record is None else record.shards
        is_free = record is None and not storage.list(f"{plan.name}/")
        self.directory = plan.name if is_free else directory_of_query(plan.name, query_id)

    def declare(self, settings: Settings) -> None:
        """Claim the directory by writing the record before any state. Raises `ConflictError`."""
        saved = migrated(self.plan.saved, self.plan.migrations)
        record = OperatorRecord(
            self.directory,
            self.query_id,
            clock.new_id(),
            clock.new_id(),
            self.plan.shards,
            saved.tables,
            settings.retained_versions,
            saved.configuration,
        )
        declared = StoredTables.of_first_run(saved.declared)
        declare_tables(self._storage, declare_operator(self._storage, record), declared)


def _check_shards(states: Collection[_Directory]) -> None:
    """If a stored operator of the same name has a different number of shards, warn, or raise if no setting fits."""
    misled = [state for state in states if state.shards_by_name not in (None, state.plan.shards)]
    if not misled:
        return
    numbers = {state.plan.shards for state in states}
    if len(numbers) > 1:
        raise InvalidArgumentError(
            "the state directory has operators of these names with different numbers of shards, and a session can set "
            "only one: rename the operators, or choose a different state directory or one number of shards for all",
            operators=", ".join(state.plan.name for state in misled),
        )
    _log.warning(
        "the state directory has operators of these names with different numbers of shards (%s): set "
        "spark.holdfast.shards=%d in the session of the restored query",
        ", ".join(state.plan.name for state in misled),
        min(numbers),
    )


def _restored(
    tasks: Tasks, new: NewQuery, saved: Restorable, states: Mapping[str, _Directory]
) -> dict[str, dict[int, _Restored]]:
    rows = [row for state in states.values() for row in rows_of_shards(state.plan.saved, state.plan.shards)]
    found: dict[str, dict[int, _Restored]] = {name: {} for name in states}
    operators = {
        name: RestoredOperator(
            state.directory,
            state.plan.shards,
            state.plan.saved.tables,
            saved.savepoint.query.batch_id + 1 - FIRST_VERSION,
            _time_mode(state.plan.saved) == "ProcessingTime",
            state.plan.migrations,
        )
        for name, state in states.items()
    }
    state_dir = str(new.settings.state_dir)
    restorer = ShardRestorer(new.settings, state_dir, saved.target, saved.savepoint.name, operators)
    for row in tasks.run(rows, restorer):
        if row["commit"] is not None:
            found[row["operator"]][row["shard"]] = row["commit"], row["earliest_timer_ms"]
    return found


def _pointers(state: _Directory, shards: Mapping[int, _Restored], state_dir: str | None) -> Iterator[PointerRow]:
    saved = state.plan.saved
    times = sorted(saved.times, key=lambda of: of.shard)
    numbers = [of.shard for of in times]
    for shard, (commit_id, earliest_timer_ms) in sorted(shards.items()):
        old = HashRange.of_shard(shard, state.plan.shards).shards(saved.shards)
        # Every old shard has evicted rows up to this time, which is unknown if a run left out a table.
        before = times[bisect_left(numbers, old[0]) : bisect_right(numbers, old[-1])]
        batch_ms = min((of.batch_ms for of in before), default=0) if saved.is_continuous else 0
        yield PointerRow(
            query=state.query_id,
            directory=state.directory,
            shard=shard,
            shards=state.plan.shards,
            pointer=Pointer(FIRST_VERSION, commit_id),
            carried=None,
            earliest_timer_ms=earliest_timer_ms,
            batch_ms=batch_ms,
            state_dir=state_dir,
        )


def _time_mode(saved: SavedOperator) -> TimeMode:
    stated = saved.configuration.get("timeMode")
    if stated is not None:
        return TIME_MODES[stated.lower()]
    if not saved.has_timeout:
        return "None"
    if not saved.tables:  # the mode is unknown, and this one needs no watermark
        return "ProcessingTime"
    names = saved.tables[TIMERS].value.names if TIMERS in saved.tables else []
    return "ProcessingTime" if DUE["ProcessingTimeTimeout"] in names else "EventTime"
