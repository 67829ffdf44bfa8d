"""What a worker checks and opens for its shard, once for each process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.run import TableSchema
from holdfast.errors import ConflictError, FencedError, InvalidArgumentError, UnavailableError
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.claims import RENEW_EVERY_MS, Claims
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator, find_operator
from holdfast.snapshotter.ownership.query_origin import QueryOrigin, declare_origin
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.executor.processes import executor_process
from holdfast.spark_integration.shard_call import claiming
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.storage_in_ram import storage_in_ram

TABLE = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
RECORD = OperatorRecord.of("totals", "query-1", "def-1", "run-1", 2, {"state": TABLE}, 100)
SETTINGS = Settings(application="local-1", driver="a driver's process")


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStorage]:
    executor = executor_process()
    monkeypatch.setattr(claiming, "executor_process", lambda: executor)
    with storage_in_ram() as storage, FaultyStorage(storage) as opened:
        yield opened


def test_one_definition_may_run_under_a_name_in_one_run_of_a_query(tmp_path: Path) -> None:
    operator = tmp_path / "query" / "totals"
    for _ in range(2):
        claiming.require_one_definition(operator, "run-1", "def-1")
    with pytest.raises(ConflictError, match=r"pass each its own name=.*operator=totals"):
        claiming.require_one_definition(operator, "run-1", "def-2")
    claiming.require_one_definition(operator, "run-2", "def-2")
    claiming.require_one_definition(tmp_path / "query" / "others", "run-1", "def-2")


def test_a_note_that_cannot_be_kept_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "totals" / "runs").mkdir(parents=True, mode=0o700)
    (tmp_path / "totals" / "runs").chmod(0o700)
    (tmp_path / "totals" / "runs" / "run-1").mkdir()
    with pytest.raises(UnavailableError, match=r"run-1.*spark\.holdfast\.local\.dir"):
        claiming.require_one_definition(tmp_path / "totals", "run-1", "def-1")


def test_a_directory_is_claimed_once_by_an_executor_and_again_for_the_next_run(
    storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch and shard asks."""
    for _ in range(3):
        claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    asked = [(operation.action, operation.keys[0].split("/")[1]) for operation in storage.operations]
    probe = [(action, "probes") for action in ("put", "put", "get", "list", "delete")]
    assert asked == [*probe, ("list", "claims"), ("put", "claims"), ("list", "claims")]
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    assert len(storage.operations) == len(asked), "one process of the executor probes and claims"
    claiming.keep_claim(storage, replace(RECORD, run_id="run-2"), tmp_path, 0, SETTINGS)
    assert len(storage.operations) == len(asked) + 9, "each run probes and claims anew, after the one before"


def test_a_claim_that_failed_is_made_again(storage: FaultyStorage, tmp_path: Path) -> None:
    storage.faults.append(Fault("fail", action="list", key="*/claims/*"))
    with pytest.raises(UnavailableError):
        claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    other = replace(RECORD, query_id="query-2", run_id="run-2", definition_id="def-2")
    with pytest.raises(ConflictError):
        claiming.keep_claim(storage, other, tmp_path, 0, SETTINGS)
    storage.assert_all_hit()


def test_a_probe_that_failed_is_made_again(storage: FaultyStorage, tmp_path: Path) -> None:
    """A retried task must not take a directory for tested because its first attempt began to test it."""
    storage.faults.append(
        Fault("fail", action="delete", times=2, error=lambda: InvalidArgumentError("denied", action="delete"))
    )
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"state\.dir failed the check.*denied.*action=delete"):
            claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
        assert not [info for info in storage.list("") if info.key.endswith("/operator")]
    claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    storage.assert_all_hit()


def test_a_claim_is_renewed_when_it_is_time_by_one_process(storage: FaultyStorage, tmp_path: Path) -> None:
    """All micro-batches of two minutes cost nothing, the next one 3 requests."""
    now_ms = clock.now_ms()
    claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    storage.operations.clear()
    claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS, lambda: now_ms + RENEW_EVERY_MS - 1000)
    assert not storage.operations
    aged_seconds = (now_ms - RENEW_EVERY_MS) / 1000
    os.utime(tmp_path / "runs" / "run-1-claim", (aged_seconds, aged_seconds))
    for _ in range(2):
        claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    assert [operation.action for operation in storage.operations] == ["list", "put", "list"]
    assert len(storage.list("totals/claims/")) == 2


def test_nobody_waits_for_a_renewal_but_who_makes_it(
    storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that is away holds up one micro-batch for a minute or two: not, one after the other, each worker's."""
    claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    later_ms = clock.now_ms() + RENEW_EVERY_MS
    asked, answering = threading.Event(), threading.Event()

    def away() -> None:
        asked.set()
        answering.wait(20)

    storage.faults.append(Fault("delay", "list", "*/claims/*", wait=away))
    with ThreadPoolExecutor(3) as pool:  # each opens the note for itself, as a process does
        try:
            renewing = pool.submit(claiming.keep_claim, storage, RECORD, tmp_path, 1, SETTINGS, lambda: later_ms)
            assert asked.wait(10)
            pool.submit(claiming.keep_claim, storage, RECORD, tmp_path, 1, SETTINGS, lambda: later_ms).result(5)
            monkeypatch.setattr(os, "getpid", lambda: 4711)  # one that has just begun
            pool.submit(claiming.keep_claim, storage, RECORD, tmp_path, 1, SETTINGS, lambda: later_ms).result(5)
            assert not renewing.done()
        finally:
            answering.set()
        assert renewing.result(5).claim.number == 2
    assert len(storage.list("totals/claims/")) == 2, "one has renewed"


def test_a_claim_that_cannot_be_renewed_stops_nothing(storage: FaultyStorage, tmp_path: Path) -> None:
    """Nothing depends on its age; what is not allowed, though, is told."""
    claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    later_ms = clock.now_ms() + RENEW_EVERY_MS
    storage.faults += [
        Fault("fail", action="list"),
        Fault("fail", action="list", error=lambda: InvalidArgumentError("x")),
    ]
    claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS, lambda: later_ms)
    with pytest.raises(InvalidArgumentError):
        claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS, lambda: later_ms + RENEW_EVERY_MS)
    storage.assert_all_hit()


def test_an_older_run_stops_when_it_renews(
    storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at each call after that, in any process: a retried task must not slip through."""
    claiming.keep_claim(storage, RECORD, tmp_path / "old", 0, SETTINGS)
    newer = replace(RECORD, run_id="run-2", definition_id="def-2")
    claiming.keep_claim(storage, newer, tmp_path / "new", 0, SETTINGS)
    later_ms = clock.now_ms() + RENEW_EVERY_MS
    for process in (os.getpid(), os.getpid(), 4711):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        with pytest.raises(FencedError, match=r"newer run of this query.*run=run-1 newer_run=run-2"):
            claiming.keep_claim(storage, RECORD, tmp_path / "old", 0, SETTINGS, lambda: later_ms)
    claiming.keep_claim(
        storage, replace(RECORD, run_id="run-2", definition_id="def-2"), tmp_path / "new", 0, SETTINGS, lambda: later_ms
    )


def test_a_run_beside_another_deletes_nothing(storage: FaultyStorage, tmp_path: Path) -> None:
    """Every process of the executor is told so with each micro-batch, until the other one has died."""
    me = claiming.claimant(RECORD, 40, Settings(application="another"))
    elsewhere = replace(me, runs=(replace(me.holder, executor="elsewhere"),))
    Claims(storage, elsewhere, lambda _: None).take(RECORD, clock.now_ms())
    copy = replace(RECORD, run_id="run-2", definition_id="def-2")
    for batch_id in (50, 300):
        held = claiming.keep_claim(storage, copy, tmp_path, batch_id, SETTINGS)
        assert held.retained(100, batch_id) == max(100, batch_id)
    storage.delete([info.key for info in storage.list("totals/claims/")])
    later_ms = clock.now_ms() + RENEW_EVERY_MS
    assert claiming.keep_claim(storage, copy, tmp_path, 300, SETTINGS, lambda: later_ms).retained(100, 300) == 100
    assert claiming.keep_claim(storage, copy, tmp_path, 301, SETTINGS).since_ms is None


def test_processes_of_an_executor_that_begin_at_once_claim_once(storage: FaultyStorage, tmp_path: Path) -> None:
    begun = threading.Barrier(2)
    storage.faults.append(Fault("delay", "put", "*/probes/*", wait=lambda: begun.wait(5)))
    with ThreadPoolExecutor(4) as pool:  # each opens the note for itself, as a process does
        waiting = [pool.submit(claiming.keep_claim, storage, RECORD, tmp_path, 0, SETTINGS) for _ in range(4)]
        begun.wait(5)  # one of them has the lock; the others come to it, or have come
        for done in waiting:
            done.result()
    puts = [operation.keys[0].split("/")[1] for operation in storage.operations if operation.action == "put"]
    assert puts == ["probes", "probes", "claims"]


def test_the_record_is_written_once_before_the_first_commit(storage: FaultyStorage, tmp_path: Path) -> None:
    """Not before: until then a query that dies leaves no state, and its directory to others."""
    claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    assert find_operator(storage, "totals") is None
    storage.operations.clear()
    for _ in range(3):
        claiming.declare_once(storage, RECORD, StoredTables.of_first_run({"state": TABLE}))
    assert [operation.action for operation in storage.operations] == ["get", "get", "put"]
    assert find_operator(storage, "totals") == RECORD


@pytest.mark.parametrize("note", [b"", b"{", b"{}", b"\xff\x00", b'{"claim": {}}', b'{"claim": 1, "x": 2}', b"3"])
def test_a_note_of_a_killed_process_or_a_damaged_one_is_no_claim(
    storage: FaultyStorage, tmp_path: Path, note: bytes
) -> None:
    (tmp_path / "runs").mkdir(mode=0o700)
    (tmp_path / "runs" / "run-1-claim").write_bytes(note)
    claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
    assert len(storage.list("totals/claims/")) == 1


def test_only_a_clone_goes_on_under_another_id_and_only_in_its_directory(storage: FaultyStorage) -> None:
    """In the original's state directory it would pass for a newer run of the original."""
    declare_operator(storage, RECORD)
    declare_origin(storage, QueryOrigin("other", "query-0", "query-0", 7, {"pairs": "query-0"}))
    for query_id in ("clone", "other"):
        with pytest.raises(ConflictError, match=rf"was cloned into.*query={query_id} original=query-1"):
            claiming.require_clone_once(storage, query_id, "query-1", "totals")
    declare_origin(storage, QueryOrigin("again", "query-1", "query-1", 7, {"totals": "query-1", "pairs": "run-3"}))
    before = len(storage.operations)
    for _ in range(3):
        claiming.require_clone_once(storage, "again", "query-1", "totals")
        claiming.require_clone_once(storage, "again", "run-3", "pairs")
    assert len(storage.operations) == before + 1, "looked up once"


def test_state_that_began_where_spark_told_no_query_goes_on_where_it_does(storage: FaultyStorage) -> None:
    """Its id is of the run that began it: in a thread of ``foreachBatch``, or over Connect."""
    declare_operator(storage, replace(RECORD, query_id="run-1"))
    declare_operator(storage, replace(RECORD, operator="pairs", query_id="def-1-1700", run_id="def-1"))
    claiming.require_clone_once(storage, "query-1", "run-1", "totals")
    claiming.require_clone_once(storage, "query-1", "def-1-1700", "pairs")
