"""Makes a new query's state and checkpoint location from a savepoint.

::

    the operators' records                            driver         checkpoint directory
    pieces ──▶ version 1 of each new shard            tasks          checkpoint directory
    pointers to these ──▶ stub query ──▶ state/       Spark          beside the new location
    positions, watermark, settings, state/            driver         new location
    metadata                                          driver         new location, last

Until the last step nobody can start the query, and a restore that was stopped anywhere can be begun again. Afterwards
nothing depends on the savepoint, or on the query that it is of.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.stored_schema import encode_schemas
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.operator_record import (
    OperatorRecord,
    declare_operator,
    find_operator,
)
from holdfast.snapshotter.ownership.stored_tables import StoredTables, declare_tables
from holdfast.snapshotter.savepoints.manifest import Savepoint
from holdfast.snapshotter.savepoints.saved_operator import NAME, SavedOperator
from holdfast.snapshotter.savepoints.savepoints import read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints import seeding
from holdfast.spark_integration.savepoints.migrating import Migrate, Migration, migrated, migrations_of
from holdfast.spark_integration.savepoints.restoring_shards import (
    FIRST_VERSION,
    RESTORED,
    SHARD,
    HashRange,
    RestoredOperator,
    ShardRestorer,
    shard_rows,
)
from holdfast.spark_integration.savepoints.stub_query import StubOperator, run_stub
from holdfast.spark_integration.savepoints.tasks import run_tasks
from holdfast.spark_integration.shard.operator_directory import own_directory
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode, TimeoutConf
from holdfast.spark_integration.stored_pointers import HOSTS, configured
from holdfast.spark_integration.tables.key_timers import DUE, TIMERS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MODES = {"timeMode": "None", "outputMode": "update"}
_KNOWN_MODES = {"none", "processingtime", "eventtime", "append", "update"}
Sources = Literal["saved", "fresh"]


def restore(
    spark: SparkSession,
    target: str | Path,
    name: str,
    query_checkpoint: str | Path,
    *,
    shards: int | None = None,
    partitions: int | None = None,
    rename: Mapping[str, str] | None = None,
    sources: Sources = "saved",
    migrate: Mapping[str, Migrate | Mapping[str, Migrate]] | None = None,
) -> str:
    """Make a checkpoint location from which a query goes on where a savepoint was made, and its state.

    Parameters
    ----------
    spark : SparkSession
        Its ``spark.holdfast.checkpoint.dir`` is where the state goes, and must be the new query's.
    target : str or pathlib.Path
    name : str
        Of the savepoint in that directory.
    query_checkpoint : str or pathlib.Path
        The new query's ``checkpointLocation``: new, or left by a restore that was stopped.
    shards : int, optional
        Of each operator; by default as many as the savepoint has.
    partitions : int, optional
        Spark's shuffle partitions, which the query keeps for good; by default as many as before, or, with `shards`, as
        many as shards.
    rename : mapping of str to str, optional
        New names of operators, by their old ones.
    sources : {"saved", "fresh"}
        Where sources begin: where they were, or where their own options say.
    migrate : mapping of str to callable, optional
        By operator a function that gives its state other columns, or such functions by table: docs/state-schema.md.

    Returns
    -------
    str
        The new query's id.

    Raises
    ------
    NotFoundError
        There is no such savepoint, or no operator or table to rename or migrate.
    ConflictError
        The location holds something else, or another restore writes the same state.
    InvalidArgumentError
        The savepoint cannot be restored whole: its query had state of Spark's own. A function that migrates is wrong.
    CorruptionError
        A part of the savepoint is damaged.

    Notes
    -----
    A task holds the rows of one shard, up to three times.
    """
    _require_possible(sources, shards, partitions)
    settings, options = configured(spark)
    with (
        open_storage(str(target), options) as savepoints,
        open_storage(str(query_checkpoint), options) as location,
        open_storage(str(settings.checkpoint_dir), options) as storage,
    ):
        savepoint = read_savepoint(savepoints, name)
        plans = _plans(savepoint, shards, dict(rename or {}), dict(migrate or {}))
        conf = seeding.pinned(savepoint.query, shards if partitions is None else partitions)
        query_id = clock.new_uuid()
        stopped = seeding.begin(location, query_id)
        for other in stopped:
            _remove_stub(_stub_url(query_checkpoint, other), options)
        states = {saved.name: _State(storage, saved, plan, query_id, stopped) for saved, plan in plans}
        seeding.forget(location, stopped)
        for state in states.values():
            state.declare(settings)
        shards_of = _restored(spark, settings, str(target), savepoint, plans, states)
        operators = [_stub_operator(saved, states[saved.name], shards_of[saved.name]) for saved, _ in plans]
        with _stub(spark, operators, _stub_url(query_checkpoint, query_id), conf, options) as stub:
            folder = savepoint_folder(savepoints, name)
            seeding.seed(location, stub, folder, savepoint.query, conf, fresh=sources == "fresh")
        seeding.finish(location, query_id)
    return query_id


@contextmanager
def _stub(
    spark: SparkSession,
    operators: Sequence[StubOperator],
    url: str,
    conf: Mapping[str, str],
    options: Mapping[str, object],
) -> Iterator[ObjectStorage]:
    """Run the stub, and give its location; it is gone after the context."""
    try:
        with _pinning(spark, conf):
            run_stub(spark, operators, url)
        with open_storage(url, options) as stub:
            yield stub
    finally:
        _remove_stub(url, options)


def _require_possible(sources: str, *numbers: int | None) -> None:
    if sources not in ("saved", "fresh"):
        raise InvalidArgumentError("sources is saved or fresh", sources=sources)
    if any(number is not None and number < 1 for number in numbers):
        raise InvalidArgumentError("shards and partitions are at least 1", given=numbers)


def _stub_url(query_checkpoint: str | Path, query_id: str) -> str:
    """Return the stub's location, beside the new one."""
    return f"{str(query_checkpoint).rstrip('/')}-restoring-{query_id}"


def _remove_stub(url: str, options: Mapping[str, object]) -> None:
    with open_storage(url, options) as stub:
        stub.delete([info.key for info in stub.list("")])
        if stub.url.startswith("file://"):  # where folders stay without what was in them
            shutil.rmtree(stub.url.removeprefix("file://"), ignore_errors=True)


@dataclass(frozen=True)
class _Plan:
    """What becomes of an operator."""

    name: str
    shards: int
    migrations: Mapping[str, Migration]


def _plans(
    savepoint: Savepoint,
    shards: int | None,
    rename: dict[str, str],
    migrate: dict[str, Migrate | Mapping[str, Migrate]],
) -> list[tuple[SavedOperator, _Plan]]:
    """Return what becomes of each operator, by its number in Spark's state."""
    operators = sorted(savepoint.operators, key=lambda operator: operator.number)
    if savepoint.left_out or [operator.number for operator in operators] != list(range(len(operators))):
        raise InvalidArgumentError(
            "the query of the savepoint had other operators with state, which a restored location cannot begin anew",
            left_out=", ".join(savepoint.left_out),
        )
    for what, of in (("rename", rename), ("migrate", migrate)):
        unknown = of.keys() - {operator.name for operator in operators}
        if unknown:
            raise NotFoundError(f"the savepoint has no operator of this name to {what}", operator=min(unknown))
    for operator in operators:
        modes = [operator.configuration.get(name, default) for name, default in _MODES.items()]
        if operator.host not in HOSTS or any(mode.lower() not in _KNOWN_MODES for mode in modes):
            raise CorruptionError("the savepoint has an operator that no release has", operator=operator.name)
    names = [rename.get(operator.name, operator.name) for operator in operators]
    for new in names:
        if not NAME.fullmatch(new) or names.count(new) > 1:
            raise InvalidArgumentError("each operator needs a name of its own, as in a query", name=new)
    migrations = [migrations_of(of, migrate[of.name]) if of.name in migrate else {} for of in operators]
    return [
        (of, _Plan(new, shards or of.shards, changed))
        for of, new, changed in zip(operators, names, migrations, strict=True)
    ]


class _State:
    """The directory of one restored operator."""

    def __init__(
        self, storage: ObjectStorage, saved: SavedOperator, plan: _Plan, query_id: str, stopped: Collection[str]
    ) -> None:
        self.plan = plan
        self.query_id = query_id
        self._saved = saved
        self._storage = storage
        record = find_operator(storage, plan.name)
        if record is not None and record.query_id in stopped:
            self._clear(plan.name)
            record = None
        is_free = record is None and not storage.list(f"{plan.name}/")
        self.directory = plan.name if is_free else own_directory(plan.name, query_id)

    def _clear(self, directory: str) -> None:
        """Delete what a restore has left that was stopped; no query can have used it, for none has its id."""
        keys = [info.key for info in self._storage.list(f"{directory}/")]
        record = f"{directory}/operator"
        self._storage.delete(key for key in keys if key != record)
        self._storage.delete([record])  # last: as long as it is there, the rest is known to be this

    def declare(self, settings: Settings) -> None:
        """Write the record, before any state: from then on the directory is the new query's.

        Raises
        ------
        ConflictError
            Another query has taken the directory meanwhile.
        """
        saved = migrated(self._saved, self.plan.migrations)
        record = OperatorRecord.of(
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


@dataclass(frozen=True)
class _Restored:
    """A shard's first version, and when its first timer is due."""

    commit_id: str
    earliest_timer_ms: int | None


def _restored(
    spark: SparkSession,
    settings: Settings,
    target: str,
    savepoint: Savepoint,
    plans: list[tuple[SavedOperator, _Plan]],
    states: Mapping[str, _State],
) -> dict[str, dict[int, _Restored]]:
    """Restore all shards, and return them by operator and number."""
    rows = [row for saved, plan in plans for row in shard_rows(saved, plan.shards)]
    found: dict[str, dict[int, _Restored]] = {saved.name: {} for saved, _ in plans}
    operators = {
        saved.name: RestoredOperator(
            states[saved.name].directory,
            plan.shards,
            encode_schemas(saved.tables),
            savepoint.query.batch_id + 1 - FIRST_VERSION,
            _time_mode(saved) == "ProcessingTime",
            plan.migrations,
        )
        for saved, plan in plans
    }
    restorer = ShardRestorer(settings, target, savepoint.name, operators)
    for row in run_tasks(spark, rows, SHARD, restorer, RESTORED):
        if row["commit"] is not None:
            found[row["operator"]][row["shard"]] = _Restored(row["commit"], row["earliest_timer_ms"])
    return found


def _stub_operator(saved: SavedOperator, state: _State, shards: Mapping[int, _Restored]) -> StubOperator:
    """Return the operator that puts the pointers of restored shards."""
    pointers = []
    for shard, restored in sorted(shards.items()):
        wanted = HashRange.of_shard(shard, state.plan.shards)
        times = [of for of in saved.times if HashRange.of_shard(of.shard, saved.shards).overlaps(wanted)]
        # What was evicted before it is known of all of them; nothing, if a table was left out for a while.
        batch_ms = min((of.batch_ms for of in times), default=0) if saved.is_continuous else 0
        pointers.append(
            PointerRow(
                query=state.query_id,
                directory=state.directory,
                shard=shard,
                shards=state.plan.shards,
                pointer=Pointer(FIRST_VERSION, restored.commit_id),
                carried=None,
                earliest_timer_ms=restored.earliest_timer_ms,
                batch_ms=batch_ms,
            )
        )
    time_mode = _time_mode(saved)
    timeout_conf: TimeoutConf = TIMEOUT_CONF[time_mode] if saved.has_timeout else "NoTimeout"
    output_mode = saved.configuration.get("outputMode", "update").lower()
    return StubOperator(saved.host, timeout_conf, time_mode, output_mode, tuple(pointers))


def _time_mode(saved: SavedOperator) -> TimeMode:
    """Return the clock of an operator's timers."""
    known: dict[str, TimeMode] = {"none": "None", "processingtime": "ProcessingTime", "eventtime": "EventTime"}
    stated = saved.configuration.get("timeMode")
    if stated is not None:
        return known[stated.lower()]
    if not saved.has_timeout:
        return "None"
    names = saved.tables[TIMERS].value.names if TIMERS in saved.tables else []
    return "ProcessingTime" if DUE["ProcessingTimeTimeout"] in names else "EventTime"


@contextmanager
def _pinning(spark: SparkSession, conf: Mapping[str, str]) -> Iterator[None]:
    """Let Spark write its own state meanwhile as the savepoint's query did."""
    wanted = {
        **conf,
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.unsupportedOperationCheck": "false",
    }
    before: dict[str, str | None] = {name: spark.conf.get(name, None) for name in wanted}
    try:
        for name, value in wanted.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
