"""What the tasks of one process share: their storage, what they have claimed and looked at, their threads."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from pyspark import TaskContext

from holdfast import clock
from holdfast.backends import local_files
from holdfast.errors import ConflictError, UnavailableError
from holdfast.settings import STORAGE_PREFIX, Settings
from holdfast.snapshotter.ownership.claim_listing import Claimant
from holdfast.snapshotter.ownership.claims import RENEW_EVERY_MS, Claims, Held
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, check_stored, declare_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage, open_storage, parse_storage_options
from holdfast.snapshotter.storage.probe import probe_storage
from holdfast.spark_integration.executor.local_dirs import CLAIM_SUFFIX, RUNS, private_directory
from holdfast.spark_integration.executor.processes import executor_process, living, machine
from holdfast.spark_integration.shard.claim_note import ClaimNote

_log = logging.getLogger(__name__)
_IO_THREADS = 8
_HIDDEN_BY_CONNECT = ("secret", "token", "password", "account_key", "sas_token", "client_secret")


def storage_options(settings: Settings) -> dict[str, str]:
    """Return the values of ``spark.holdfast.storage.*`` from this task's properties.

    They are not pickled with the operator, since they may be credentials. Spark Connect hides credentials
    from the driver's program, so their usual names are tried whether it saw them or not.
    """
    context = TaskContext.get()
    values = {}
    for name in {*settings.storage_names, *_HIDDEN_BY_CONNECT}:
        value = context.getLocalProperty(STORAGE_PREFIX + name) if context else None
        if value is not None:
            values[name] = value
    return values


def checkpoint_storage(settings: Settings) -> ObjectStorage | None:
    """Return the durable storage of this task, shared by the tasks of this process."""
    if settings.checkpoint_dir is None:
        return None
    options = storage_options(settings)
    return _open(os.getpid(), settings.checkpoint_dir, tuple(sorted(options.items())))


@lru_cache(maxsize=4)
def _open(_pid: int, url: str, options: tuple[tuple[str, str], ...]) -> ObjectStorage:
    return open_storage(url, parse_storage_options(dict(options)))


def io_executor() -> Executor:
    """Return this process's threads for storage requests."""
    return _executor(os.getpid())


@lru_cache(maxsize=1)
def _executor(_pid: int) -> Executor:
    return ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="holdfast-io")


_Process = tuple[int, str, str, str, str, str]
_claimed: set[_Process] = set()
_declared: set[_Process] = set()


def _of_process(storage: ObjectStorage, record: OperatorRecord) -> _Process:
    return (os.getpid(), storage.url, record.operator, record.query_id, record.run_id, record.definition_id)


def keep_claim(
    storage: ObjectStorage,
    record: OperatorRecord,
    operator_directory: Path,
    batch_id: int | None,
    application: str,
    now_ms: Callable[[], int] = clock.now_ms,
) -> Held:
    """Claim the operator's directory before it is used, and renew the claim when it is time; see `snapshotter.claims`.

    The first process of an executor tests the storage and claims, once for each run; each other one looks at the
    operator's record. Here and not where the operator is defined: only executors are sure to have the credentials, the
    network and the local file system that will be used.

    Returns
    -------
    Held
        What the run holds.

    Raises
    ------
    ConflictError
        Another query, or another operator of this query, is at work here; or another application on this query.
    FencedError
        A newer run of this query is.
    SchemaMismatchError
        The state was written with other columns or another number of shards.
    """
    claims = Claims(storage, record.operator, claimant(record, batch_id, application), living, now_ms=now_ms)
    note = ClaimNote(operator_directory / RUNS / f"{record.run_id}{CLAIM_SUFFIX}")
    process = _of_process(storage, record)
    renewed_ms = note.modified_ms()
    if process not in _claimed or renewed_ms is None:
        private_directory(note.path.parent)
        with note.locked() as held:
            if held is None:
                probe_storage(storage, f"{record.operator}/probes")
                note.write(claims.take(record))
            else:
                check_stored(storage, record)
        _claimed.add(process)
    if renewed_ms is not None and abs(now_ms() - renewed_ms) >= RENEW_EVERY_MS:
        _renew(claims, note)
    return note.held()


def look_once(storage: ObjectStorage, record: OperatorRecord) -> None:
    """Check that the stored record, if any, allows this one to go on; once in this process for each run of the query.

    Raises
    ------
    ConflictError
        The directory belongs to another query, or to another operator of this query.
    SchemaMismatchError
        The state was written with other columns or another number of shards.
    """
    process = _of_process(storage, record)
    if process not in _claimed:
        check_stored(storage, record)
        _claimed.add(process)


def declare_once(storage: ObjectStorage, record: OperatorRecord) -> None:
    """`declare_operator`, once in this process for each operator definition and run of the query."""
    process = _of_process(storage, record)
    if process not in _declared:
        declare_operator(storage, record)
        _declared.add(process)


def claimant(record: OperatorRecord, batch_id: int | None, application: str) -> Claimant:
    """Return who claims in this task; Spark tells the query's name in the description of its jobs only."""
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


def _renew(claims: Claims, note: ClaimNote) -> None:
    seen_ms = note.modified_ms()
    with note.locked() as held:
        if held is None or note.modified_ms() != seen_ms:
            return  # another process was faster
        renewed = held
        try:
            renewed = claims.renew(held)
        except UnavailableError as exc:
            # The commit will say so where that matters; a claim that grows old harms nobody.
            _log.warning("the claim was not renewed, and is tried again later: %s", exc)
        note.write(renewed)


def require_one_definition(operator_directory: Path, run_id: str, definition_id: str) -> None:
    """Refuse a second operator under one name in one run of a query.

    Raises
    ------
    ConflictError
        Another operator of this query has the name.
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
        raise ConflictError(
            "two operators of this query have the same name: give each its own, as in "
            "applyInArrowWithState(…, name='totals')",
            operator=operator_directory.name,
        )
