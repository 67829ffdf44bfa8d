"""Claims an operator's directory for a run before the run uses it: once per executor, checked once per process.

The processes of an executor share a claim through `holdfast.spark_integration.shard.claim_note`;
`holdfast.snapshotter.ownership.claims` says what a claim is.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pyspark import TaskContext

from holdfast import clock
from holdfast.backends import local_files
from holdfast.errors import ConflictError, SchemaMismatchError, UnavailableError
from holdfast.snapshotter.ownership.claim_listing import Claimant
from holdfast.snapshotter.ownership.claims import RENEW_EVERY_MS, Claims, Tenure
from holdfast.snapshotter.ownership.operator_record import (
    OperatorRecord,
    check_operator,
    check_stored,
    declare_operator,
    find_operator,
    same_name,
)
from holdfast.snapshotter.ownership.query_origin import QueryOrigin, find_origin
from holdfast.snapshotter.ownership.stored_tables import StoredTables, declare_tables, stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.probe import probe_storage
from holdfast.spark_integration.executor.local_dirs import CLAIM_SUFFIX, RUNS, private_directory
from holdfast.spark_integration.executor.per_process import kept_per_process
from holdfast.spark_integration.executor.processes import executor_process, living, machine
from holdfast.spark_integration.shard.claim_note import ClaimNote
from holdfast.spark_integration.shard.operator import ShardFunction

_log = logging.getLogger(__name__)

#: An operator's definition in a run of a query, and where its objects lie.
_Run = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class _Done:
    """What this process has done for the runs that it serves.

    Attributes
    ----------
    claimed : set
        Runs whose stored record was checked and, where the run is known, whose directory was claimed.
    declared : set
        Runs whose record is stored.
    tables : dict
        By run, the tables that the operator's state may hold from then on.
    origins : dict
        By storage and query, what it began with.
    clones : set
        By storage and query, whose state in which directory it may go on with.
    """

    claimed: set[_Run] = field(default_factory=set)
    declared: set[_Run] = field(default_factory=set)
    tables: dict[_Run, StoredTables] = field(default_factory=dict)
    origins: dict[tuple[str, str], QueryOrigin | None] = field(default_factory=dict)
    clones: set[tuple[str, str, str, str]] = field(default_factory=set)


@kept_per_process(1)
def _done() -> _Done:
    return _Done()


def _run_of(storage: ObjectStorage, record: OperatorRecord) -> _Run:
    return (storage.url, record.operator, record.query_id, record.run_id, record.definition_id)


def keep_claim(
    storage: ObjectStorage,
    record: OperatorRecord,
    operator_directory: Path,
    batch_id: int | None,
    application: str,
    now_ms: Callable[[], int] = clock.now_ms,
) -> Tenure:
    """Claim the operator's directory before it is used, and renew the claim when due; see `ownership.claims`.

    Once per run, the first process of an executor tests the storage and claims; the others check the operator's
    record. This happens here and not on the driver, because only executors are sure to have the credentials, network
    and local file system that the run will use.

    Returns
    -------
    Tenure
        The run's, from now on.

    Raises
    ------
    ConflictError
        Another query, or another operator of this query, uses the directory; or another application runs this query.
    FencedError
        A newer run of this query uses the directory.
    SchemaMismatchError
        The state was written with another number of shards.
    """
    claims = Claims(storage, record.operator, claimant(record, batch_id, application), living, now_ms=now_ms)
    note = ClaimNote(operator_directory / RUNS / f"{record.run_id}{CLAIM_SUFFIX}")
    run, done = _run_of(storage, record), _done()
    renewed_ms = note.modified_ms()
    if run not in done.claimed or renewed_ms is None:
        private_directory(note.path.parent)
        if renewed_ms is not None or not _take(claims, note, storage, record):
            check_stored(storage, record)
        done.claimed.add(run)
    if renewed_ms is not None and abs(now_ms() - renewed_ms) >= RENEW_EVERY_MS:
        _renew(claims, note, renewed_ms)
    return note.tenure()


def tables_once(storage: ObjectStorage, record: OperatorRecord, function: ShardFunction) -> StoredTables:
    """Return the tables of an operator's state from now on; looked up once per process and run of the query.

    Raises
    ------
    ConflictError
        The directory belongs to another query, or to another operator of this query.
    SchemaMismatchError
        The operator cannot go on with the stored state: that has other tables, another configuration or another number
        of shards.
    """
    run, done = _run_of(storage, record), _done()
    if run not in done.tables:
        stored, declared = find_operator(storage, record.operator), function.tables()
        tables = StoredTables.of_first_run(declared)
        if stored is not None:
            check_operator(stored, record, storage.url)
            try:
                tables = stored_tables(storage, stored).with_changes(function.changes())
                function.require_restartable(tables, stored.configuration)
            except SchemaMismatchError as exc:
                exc.facts |= {"operator": record.operator, "storage": storage.url}
                raise
            tables = tables.with_declared(declared)
            for table, change in tables.made.items():
                _log.info("%s: columns of %s change from now on: %s", record.operator, table, change)
        done.tables[run] = tables
    return done.tables[run]


def origin_once(storage: ObjectStorage, query_id: str) -> QueryOrigin | None:
    """Return what a query that was restored or cloned began with, if it was; looked up once per process."""
    of, done = (storage.url, query_id), _done()
    if of not in done.origins:
        done.origins[of] = find_origin(storage, query_id)
    return done.origins[of]


def require_clone_once(storage: ObjectStorage, query_id: str, state_id: str, directory: str) -> None:
    """Check that a query may go on with the state of another id; looked up once per process.

    Parameters
    ----------
    query_id : str
        The query's, as Spark tells it.
    state_id, directory : str
        What the query's pointer names.

    Raises
    ------
    ConflictError
        The query was not cloned into this state directory.
    """
    of, done = (storage.url, query_id, state_id, directory), _done()
    if of in done.clones:
        return
    origin = origin_once(storage, query_id)
    if origin is None or state_id not in (origin.state_id, *origin.directories.values()):
        stored = find_operator(storage, directory)
        # State that began in a task which Spark told no query bears the id of that run, or one made of it.
        if stored is None or stored.query_id != state_id or not state_id.startswith(stored.run_id):
            raise ConflictError(
                "this query is a copy of the one whose state its pointers name, and was not cloned into this "
                "state directory: set spark.holdfast.state.dir to the directory that it was cloned into",
                query=query_id,
                original=state_id,
                directory=directory,
                storage=storage.url,
            )
    done.clones.add(of)


def declare_once(storage: ObjectStorage, record: OperatorRecord, planned: StoredTables) -> None:
    """Store what the state of an operator holds, before any of it; once per process and run of the query."""
    run, done = _run_of(storage, record), _done()
    if run not in done.declared:
        stored = declare_operator(storage, record)
        if stored.run_id != record.run_id:  # else the record, which this run has written, says all
            declare_tables(storage, stored, planned)
        done.declared.add(run)


def claimant(record: OperatorRecord, batch_id: int | None, application: str) -> Claimant:
    """Return who claims in this task; the query's name is known only from the description of Spark's jobs."""
    context = TaskContext.get()
    description = (context.getLocalProperty("spark.job.description") or "") if context else ""
    name, found, _ = description.partition(f"id = {record.query_id}")
    name = name.strip().removesuffix("<br/>").strip()
    return Claimant(
        query_id=record.query_id,
        run_id=record.run_id,
        query_name=name if found and name else None,
        application=application,
        host=socket.gethostname(),
        machine=machine(),
        process=str(executor_process()),
        batch_id=batch_id,
        retained_versions=record.retained_versions,
    )


def _take(claims: Claims, note: ClaimNote, storage: ObjectStorage, record: OperatorRecord) -> bool:
    """Test the storage and claim, unless another process has; tell whether it was this one."""
    with note.locked() as tenure:
        if tenure is not None:
            return False
        probe_storage(storage, f"{record.operator}/probes")
        note.write(claims.take(record))
        return True


def _renew(claims: Claims, note: ClaimNote, seen_ms: int) -> None:
    """Renew the claim, unless another process does: a storage that is away may hold that one up for minutes."""
    with note.locked_if_free() as tenure:
        if tenure is None or note.modified_ms() != seen_ms:
            return  # another process is at it, or was faster
        renewed = tenure
        try:
            renewed = claims.renew(tenure)
        except UnavailableError as exc:
            # The commit reports it if it matters; an old claim does no harm.
            _log.warning("the claim was not renewed; will retry later: %s", exc)
        note.write(renewed)


def require_one_definition(operator_directory: Path, run_id: str, definition_id: str) -> None:
    """Reject a second operator of the same name in a run of a query.

    Raises
    ------
    ConflictError
        Another operator of this query has this name.
    UnavailableError
        Local storage is full or failing.
    """
    note = private_directory(operator_directory / RUNS) / run_id
    with local_files.writing(note):
        try:
            descriptor = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            running = note.read_text()
        else:
            with open(descriptor, "w") as file:
                file.write(definition_id)
            running = definition_id
    if running and running != definition_id:
        raise same_name(operator_directory.name)
