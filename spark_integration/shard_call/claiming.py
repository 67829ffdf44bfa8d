"""Checks an operator's directory before a task uses it, once per executor or process.

The processes of an executor share the state of their run's claim in a file (`ClaimNote`); for claims see
`holdfast.snapshotter.ownership.claims`.

A shard without a pointer chooses the operator's directory. From then on, the shard's pointer names the directory. So
two shards of a query may safely choose different directories.

::

    spark.holdfast.state.dir
        totals/                 the first query with an operator of this name
        totals@<query id>/      another query with an operator of this name: a DataFrame started twice, or a query
                                whose checkpoint location was deleted

Before a shard continues from local copies, the state directory must hold its history::

    pointer ──▶ commit, carried ──▶ commits/41 ──▶ … ──▶ snapshots/30
                │                   └─ in the state directory: if all is missing, only this executor has the state
                └─ in Spark's state: all that a new shard has
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar, cast

from pyspark import TaskContext

from holdfast import clock
from holdfast.backends import local_files
from holdfast.backends.base import Pointer
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    SchemaMismatchError,
    StateLostError,
    UnavailableError,
)
from holdfast.settings import Settings
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.ownership.claims import RENEW_EVERY_MS, Claim, ClaimingRun, Claims, Tenure
from holdfast.snapshotter.ownership.operator_record import (
    OperatorRecord,
    check_operator,
    declare_operator,
    find_operator,
    same_name,
)
from holdfast.snapshotter.ownership.queries import QueryOrigin, find_origin
from holdfast.snapshotter.ownership.stored_tables import StoredTables, declare_tables, stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.probe import probe_storage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.spark_integration.executor.local_dirs import CLAIM_SUFFIX, RUNS, private_directory
from holdfast.spark_integration.executor.processes import executor_process, kept_per_process, lives, place_of
from holdfast.spark_integration.shard.news import is_repeated, report_to_driver
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.shard.pointer_row import directory_of_query

_log = logging.getLogger(__name__)
_REMEDY = (
    "Set spark.holdfast.state.dir to the directory that has the state, or restore its objects: only this executor's "
    "local copy still has the missing state"
)
_Result = TypeVar("_Result")


class ClaimNote:
    """A file with a run's tenure in an operator's directory, for the processes of an executor."""

    def __init__(self, operator_directory: Path, run_id: str) -> None:
        self._path = operator_directory / RUNS / f"{run_id}{CLAIM_SUFFIX}"

    def read(self) -> tuple[Tenure, int] | None:
        """Return the tenure and when it was renewed; None if there is no note or it is damaged."""
        with local_files.writing(self._path), suppress(FileNotFoundError):
            modified_ms, data = self._path.stat().st_mtime_ns // 1_000_000, self._path.read_bytes()
            with suppress(ValueError, TypeError, KeyError, CorruptionError):
                return _parsed(data), modified_ms
        return None

    @contextmanager
    def locked(self, *, wait: bool) -> Iterator[bool]:
        """Exclude other processes of this executor; unless `wait`, yield False if one of them has the lock."""
        folder = private_directory(self._path.parent)
        with local_files.writing(self._path):
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            is_locked = True
            with local_files.writing(self._path):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    is_locked = False
            yield is_locked
        finally:
            os.close(descriptor)

    def write(self, tenure: Tenure) -> None:
        """Store a tenure, renewed now; the caller holds the lock."""
        whole = self._path.with_name(f"{self._path.name}.new")
        with local_files.writing(self._path):
            whole.write_text(json.dumps(asdict(tenure)))
            whole.replace(self._path)


@lru_cache(maxsize=16)  # each call of a shard reads the note
def _parsed(data: bytes) -> Tenure:
    noted = json.loads(data)
    return Tenure(**noted | {"claim": Claim.read(noted["claim"], "a run's note")})


@kept_per_process(1)
def _kept() -> dict[tuple[object, ...], Any]:
    """Return this process's cached results."""
    return {}


def _once(what: str, of: tuple[str, ...], find: Callable[[], _Result]) -> _Result:
    """Return the cached result, or compute it once per process."""
    kept, key = _kept(), (what, *of)
    if key not in kept:
        kept[key] = find()
    return cast("_Result", kept[key])


def _run_of(storage: ObjectStorage, record: OperatorRecord) -> tuple[str, ...]:
    """Return the cache key for an operator's definition in a run of a query."""
    return (storage.url, record.operator, record.query_id, record.run_id, record.definition_id)


def keep_claim(
    storage: ObjectStorage,
    record: OperatorRecord,
    operator_directory: Path,
    batch_id: int | None,
    settings: Settings,
    now_ms: Callable[[], int] = clock.now_ms,
) -> Tenure:
    """Claim the operator's directory once per run, after a test of the storage; renew the claim when due.

    Executors make the claim, because only they are sure to have the storage's credentials and network.
    """
    claims = Claims(storage, claimant(record, batch_id, settings), lives)
    note = ClaimNote(operator_directory, record.run_id)
    noted, has_news = note.read(), is_repeated()
    if noted is None:
        with note.locked(wait=True):
            noted = note.read()
            if noted is None:
                store_ms = probe_storage(storage, f"{record.operator}/probes")
                noted = claims.take(record, store_ms), now_ms()
                note.write(noted[0])
                has_news = True
    tenure, renewed_ms = noted
    if abs(now_ms() - renewed_ms) >= RENEW_EVERY_MS:
        # Do not wait for a process that is renewing: unreachable storage may delay it for minutes.
        with note.locked(wait=False) as is_mine:
            if is_mine and note.read() == noted:
                try:
                    tenure = claims.renew(tenure)
                except UnavailableError as exc:
                    # An old claim is harmless; if the storage stays unreachable, the commit fails.
                    _log.warning("cannot renew the claim; will retry later: %s", exc)
                note.write(tenure)
                has_news = True
    if has_news:
        report_to_driver(settings.news, record.query_id, settings.state_dir)
    return tenure


def tables_once(storage: ObjectStorage, record: OperatorRecord, function: ShardFunction) -> StoredTables:
    """Return the state tables of this run of an operator; looked up once per process and run."""

    def found() -> StoredTables:
        stored, declared = find_operator(storage, record.operator), function.tables()
        if stored is None:
            return StoredTables.of_first_run(declared)
        check_operator(stored, record, storage.url)
        try:
            tables = stored_tables(storage, stored).with_changes(function.changes())
            function.require_restartable(tables, stored.configuration)
        except SchemaMismatchError as exc:
            exc.facts |= {"operator": record.operator, "storage": storage.url}
            raise
        tables = tables.with_declared(declared)
        for table, change in tables.made.items():
            _log.info("%s: columns of %s change in this run: %s", record.operator, table, change)
        return tables

    return _once("tables", _run_of(storage, record), found)


def origin_once(storage: ObjectStorage, query_id: str) -> QueryOrigin | None:
    """Return the origin of a restored or cloned query, or None; looked up once per process."""
    return _once("origin", (storage.url, query_id), lambda: find_origin(storage, query_id))


def require_clone_once(storage: ObjectStorage, query_id: str, state_id: str, directory: str) -> None:
    """Check that a query may continue state with a different id; checked once per process. Raises `ConflictError`."""

    def check() -> None:
        origin = origin_once(storage, query_id)
        if origin is not None and state_id in (origin.state_id, *origin.directories.values()):
            return
        stored = find_operator(storage, directory)
        # If a task that did not know its query created the state, the state's id is that run's id or starts with it.
        if stored is None or stored.query_id != state_id or not state_id.startswith(stored.run_id):
            raise ConflictError(
                "this query's pointers name the state of a different query, and it was not cloned into this directory: "
                "set spark.holdfast.state.dir to the directory that it was cloned into",
                query=query_id,
                original=state_id,
                directory=directory,
                storage=storage.url,
            )

    _once("clone", (storage.url, query_id, state_id, directory), check)


def declare_once(storage: ObjectStorage, record: OperatorRecord, planned: StoredTables) -> None:
    """Record an operator before storing state; once per process and run of the query."""

    def declare() -> None:
        stored = declare_operator(storage, record)
        if stored.run_id != record.run_id:  # a record of this run already has the tables
            declare_tables(storage, stored, planned)

    _once("declared", _run_of(storage, record), declare)


def require_stored_once(
    log: ObjectCommitLog, record: OperatorRecord, pointer: Pointer, lineage: Lineage, last_directory: str | None = None
) -> None:
    """Check with a single get, once per process and run, that the state directory holds a version's objects."""

    def check() -> None:
        if lineage.chain:
            _require_versions(log, pointer, lineage.chain[-1])
        elif find_operator(log.storage, record.operator) is None:
            _once("warned", of_run, warn)

    def warn() -> None:
        _log.warning(
            "the state directory %s lacks the operator %r, to which the query's pointers refer: it was emptied, or is "
            "a different directory. No state is lost, because the pointers carry all of it. If this is intended, let "
            "the query fill this directory; if not, stop the query and set spark.holdfast.state.dir to %s",
            *(log.storage.url, record.operator, last_directory or "its previous directory"),
        )

    of_run = log.storage.url, record.run_id, record.operator
    _once("stored", (log.storage.url, record.run_id, log.objects.prefix), check)


def _require_versions(log: ObjectCommitLog, pointer: Pointer, newest: ChainEntry) -> None:
    try:
        log.objects.get_range(newest.key, 0, 1)
        return
    except NotFoundError:
        stored = list_shard(log.objects).versions
        if stored and stored[-1].version >= newest.version:
            return  # restoring copes with missing parts or reports them
    raise StateLostError(
        "the state directory has only older versions than the query's pointer: it was restored from an older "
        f"backup, or is a different directory. {_REMEDY}"
        if stored
        else "the state directory has no state for the query's pointer: it was emptied, or is "
        f"a different directory. {_REMEDY}",
        shard=log.objects.prefix,
        version=pointer,
        missing=newest.key,
        newest_stored=stored[-1].pointer if stored else None,
        storage=log.storage.url,
    )


def claimant(record: OperatorRecord, batch_id: int | None, settings: Settings) -> Claim:
    """Return a claim for this task; the query's name comes from the description of Spark's job."""
    context = TaskContext.get()
    description = (context.getLocalProperty("spark.job.description") or "") if context else ""
    name, found, _ = description.partition(f"id = {record.query_id}")
    name = name.strip().removesuffix("<br/>").strip()
    executor = place_of(executor_process())
    run = ClaimingRun(record.run_id, clock.now_ms(), 0, batch_id, record.retained_versions, settings.driver, executor)
    host = socket.gethostname()
    query_name = name if found and name else None
    return Claim(record.operator, 0, record.query_id, query_name, settings.application, host, (run,))


def require_one_definition(operator_directory: Path, run_id: str, definition_id: str) -> None:
    """Reject a second operator of the same name in a run. Raises `ConflictError`, `UnavailableError`."""
    note = private_directory(operator_directory / RUNS) / run_id
    with local_files.writing(note):
        if not note.exists():
            with NamedTemporaryFile("w", dir=note.parent) as written, suppress(FileExistsError):
                written.write(definition_id)
                written.flush()
                os.link(written.name, note)  # atomically, so that no process reads an empty note
        running = note.read_text()
    if running != definition_id:
        raise same_name(operator_directory.name)


def require_restored(origin: QueryOrigin, operator: str, allowed: Collection[str]) -> None:
    """Check that an operator without state may start empty in a restored query."""
    if operator in origin.operators or operator in origin.empty or origin.unnamed:
        return
    restored = ", ".join(sorted(origin.operators)) or "none"
    if operator not in allowed:
        raise SchemaMismatchError(
            "this query was restored without state for this operator: give it the name of the restored operator that "
            "it continues. To start without state, set spark.holdfast.restore.allowNew to the operator's name",
            operator=operator,
            restored=restored,
        )
    _log.warning("%r starts without state in a query that was restored with the operators %s", operator, restored)


def begin_directory(
    storage: ObjectStorage, operator: str, query_id: str, claim: Callable[[str], _Result], *, is_run_known: bool
) -> tuple[str, _Result]:
    """Choose and claim the directory of a shard without a pointer; return it and the result of `claim`.

    Unless `is_run_known`, the shard must not use the shared directory.
    """
    own = directory_of_query(operator, query_id)
    stored = find_operator(storage, operator)
    is_ours = stored is not None and stored.query_id == query_id
    if is_ours or (is_run_known and stored is None and find_operator(storage, own) is None):
        try:
            return operator, claim(operator)
        except ConflictError as exc:
            # The query's own directory avoids only conflicts with other queries, not with a copy of this query, a newer
            # run, or a second operator of the same name.
            if exc.facts.get("owner") in (None, query_id):
                raise
            _log.warning("%s", exc)
    _log.warning("directory %r belongs to a different query; query %s stores its state in %r", operator, query_id, own)
    return own, claim(own)
