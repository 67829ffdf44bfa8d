"""What a worker checks and opens for its shard, in which directory it begins, and which failures it reports."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.run import TableSchema
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    FencedError,
    InvalidArgumentError,
    SchemaMismatchError,
    UnavailableError,
)
from holdfast.settings import Settings
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.claims import RENEW_EVERY_MS, Claims
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator, find_operator
from holdfast.snapshotter.ownership.queries import QueryOrigin, declare_origin
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.troubles import read_trouble
from holdfast.spark_integration.executor import processes
from holdfast.spark_integration.executor.processes import ProcessId, executor_process, place_of
from holdfast.spark_integration.shard import news
from holdfast.spark_integration.shard.pointer_row import directory_of_query, operator_of
from holdfast.spark_integration.shard_call import claiming
from holdfast.spark_integration.shard_call.announcing import reported
from holdfast.spark_integration.shard_call.claiming import begin_directory
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.testing.state_rows import TABLES
from tests.model.test_at_once import Declaring
from tests.ram import storage_in_ram
from tests.unit.snapshotter.ownership.conftest import claimant, claims_of

TABLE = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
RECORD = OperatorRecord("totals", "query-1", "def-1", "run-1", 2, {"state": TABLE}, 100)
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


def test_two_definitions_at_the_same_moment(tmp_path: Path) -> None:
    """One of them is refused: nobody reads a note that is not yet written."""

    def is_refused(run_id: str, definition_id: str) -> bool:
        together.wait()
        try:
            claiming.require_one_definition(tmp_path / "totals", run_id, definition_id)
        except ConflictError:
            return True
        return False

    together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for run_id in map("run-{}".format, range(300)):
            assert sorted(pool.map(is_refused, [run_id] * 2, ["def-1", "def-2"])) == [False, True]
    assert len(list((tmp_path / "totals" / "runs").iterdir())) == 300


def test_a_note_that_cannot_be_kept_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "totals" / "runs").mkdir(parents=True, mode=0o700)
    (tmp_path / "totals" / "runs").chmod(0o700)
    (tmp_path / "totals" / "runs" / "run-1").mkdir()
    with pytest.raises(UnavailableError, match=r"run-1.*spark\.holdfast\.local\.dir"):
        claiming.require_one_definition(tmp_path / "totals", "run-1", "def-1")


def test_a_directory_is_claimed_once_by_an_executor_and_again_for_the_next_run(
    storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_task_that_is_repeated_tells_the_driver_again(
    storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark drops what the one has told that claimed and then failed."""
    told: list[str] = []
    monkeypatch.setattr(claiming, "report_to_driver", lambda _news, query_id, _state_dir: told.append(query_id))
    for attempt, tells in ((0, 1), (0, 1), (1, 2), (0, 2)):
        task = SimpleNamespace(attemptNumber=lambda number=attempt: number)
        monkeypatch.setattr(news, "TaskContext", SimpleNamespace(get=lambda task=task: task))
        claiming.keep_claim(storage, RECORD, tmp_path, 0, SETTINGS)
        assert told == tells * ["query-1"]


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


def test_only_who_renews_waits_for_it(storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_older_run_stops_renewing(storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_note_of_a_killed_process_is_no_claim(storage: FaultyStorage, tmp_path: Path, note: bytes) -> None:
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


APPLICATION = Settings(application="application")
DECLARING: Any = Declaring({"state": TABLE})


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStorage]:
    with storage_in_ram() as shared, FaultyStorage(shared) as opened:
        yield opened


def record(query: str, run: str = "run-1", directory: str = "totals", shards: int = 2) -> OperatorRecord:
    return OperatorRecord(directory, query, f"def-{run}", run, shards, {"state": TABLE}, 100)


def begin(shared: FaultyStorage, local: Path, query: str, run: str = "run-1", shards: int = 2) -> str:
    def claim(directory: str) -> None:
        mine = record(query, f"{query}-{run}", directory, shards)
        claiming.tables_once(shared, mine, DECLARING)
        claiming.keep_claim(shared, mine, local / query / directory, 0, APPLICATION)

    return begin_directory(shared, "totals", query, claim, is_run_known=True)[0]


def declare(shared: FaultyStorage, query: str, directory: str, run: str = "run-1") -> None:
    declare_operator(shared, record(query, f"{query}-{run}", directory))


def test_names() -> None:
    assert operator_of("totals") == operator_of(directory_of_query("totals", "q-1")) == "totals"
    assert [operator_of(name) for name in ("", "@", "a@", "@b", "a@b/c", "a/b", "..", "a@b@c")] == [None] * 8


def test_the_first_query_takes_the_name_and_others_their_own(shared: FaultyStorage, tmp_path: Path) -> None:
    assert begin(shared, tmp_path, "q1") == "totals"
    assert begin(shared, tmp_path, "q2") == "totals@q2", "the first one lives, though it has no state yet"
    declare(shared, "q1", "totals")
    declare(shared, "q2", "totals@q2")
    for run in ("run-2", "run-3"):
        assert begin(shared, tmp_path, "q2", run) == "totals@q2"
        assert begin(shared, tmp_path, "q1", run) == "totals"
    assert begin(shared, tmp_path, "q3") == "totals@q3"


def test_a_copy_of_a_query_that_has_no_state_yet_is_refused_too(
    shared: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the directory that is the query's own, and the first application would be the one to stop."""
    monkeypatch.setattr(claiming, "lives", partial(processes.lives, within_seconds=0))
    first = claimant("q1", "first", driver=place_of(ProcessId.of(os.getpid())))
    claims = claims_of(shared, first)
    held = claims.take(record("q1", "first"), clock.now_ms())
    with pytest.raises(ConflictError, match="another application is running this query"):
        begin(shared, tmp_path, "q1")
    assert not [info.key for info in shared.list("totals@q1/")]
    claims.renew(held)


def test_it_stays_there_when_the_name_becomes_free(shared: FaultyStorage, tmp_path: Path) -> None:
    begin(shared, tmp_path, "q1")
    declare(shared, "q1", "totals")
    assert begin(shared, tmp_path, "q2") == "totals@q2"
    declare(shared, "q2", "totals@q2")
    shared.delete([info.key for info in shared.list("totals/")])
    assert begin(shared, tmp_path, "q2", "run-2") == "totals@q2"


def test_of_two_queries_at_once_each_has_a_directory_of_its_own(shared: FaultyStorage, tmp_path: Path) -> None:
    found = []
    shared.faults.append(
        Fault("delay", "put", "totals/claims/*", times=1, wait=lambda: found.append(begin(shared, tmp_path, "q2")))
    )
    found.append(begin(shared, tmp_path, "q1"))
    assert len(set(found)) == 2
    assert set(found) <= {"totals", "totals@q1", "totals@q2"}


def test_two_operators_of_one_name_in_one_query_are_refused(shared: FaultyStorage, tmp_path: Path) -> None:
    begin(shared, tmp_path, "q1")
    declare(shared, "q1", "totals")
    twin = replace(record("q1", "q1-run-1"), definition_id="another")

    def claim(_: str) -> None:
        claiming.tables_once(shared, twin, DECLARING)

    with pytest.raises(ConflictError, match="two operators of this query have the same name"):
        begin_directory(shared, "totals", "q1", claim, is_run_known=True)


def test_a_run_that_comes_late_and_another_number_of_shards_are_refused(
    shared: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(shared, tmp_path, "q1", "run-2")
    declare(shared, "q1", "totals", "run-2")
    with pytest.raises(SchemaMismatchError):
        begin(shared, tmp_path / "other", "q1", "run-3", shards=8)

    def fenced(_: str) -> None:
        raise FencedError("a newer run")

    with pytest.raises(FencedError):
        begin_directory(shared, "totals", "q1", fenced, is_run_known=True)


def test_a_task_that_does_not_know_its_run_joins_nobody(shared: FaultyStorage, tmp_path: Path) -> None:
    """It writes no claim, by which it would stop the run that it belongs to."""
    seen = []

    def look(directory: str) -> None:
        seen.append(directory)
        claiming.tables_once(shared, record("def-1", "def-1", directory), DECLARING)

    assert begin_directory(shared, "totals", "def-1", look, is_run_known=False) == ("totals@def-1", None)
    assert seen == ["totals@def-1"]
    assert not shared.list("")


def test_what_is_stored_is_looked_at_once_in_a_process(shared: FaultyStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(shared, "q1", "totals")
    shared.operations.clear()
    mine = record("q1", "run-7")
    for _ in range(3):
        claiming.tables_once(shared, mine, DECLARING)
    assert [operation.action for operation in shared.operations] == ["get", "list"]
    with pytest.raises(ConflictError):
        claiming.tables_once(shared, record("q2", "run-7"), DECLARING)
    shared.faults.append(Fault("fail", action="get"))
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    with pytest.raises(UnavailableError):
        claiming.tables_once(shared, mine, DECLARING)


def test_a_run_id_that_users_have_set_once_does_not_stop_the_query(shared: FaultyStorage, tmp_path: Path) -> None:
    """A record of an earlier release may hold the user's job group: "nightly" in this run and in each later one."""
    declare_operator(shared, replace(record("q1"), run_id="nightly", definition_id="of-then"))
    for run in ("run-1", "run-2"):
        assert begin(shared, tmp_path, "q1", run) == "totals"


SHARD = "totals/shard-0003"


@pytest.fixture
def reporting(tmp_path: Path) -> Iterator[FaultyStorage]:
    with FaultyStorage(open_storage(str(tmp_path / "durable"))) as opened:
        yield opened


@pytest.fixture
def log(reporting: FaultyStorage, tmp_path: Path) -> Iterator[ObjectCommitLog]:
    with ThreadPoolExecutor(1) as executor:
        yield ObjectCommitLog(reporting, SHARD, TABLES, executor, tmp_path, "memory", 0, {})


def told(reporting: FaultyStorage) -> list[tuple[str, str]]:
    shard = PrefixedStorage(reporting, SHARD)
    reports = [read_trouble(shard, info.key) for info in shard.list("troubles/")]
    return [(report.what, report.error) for report in reports]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no number: 'x'"), "ValueError: no number: 'x'"),
        (CorruptionError("a commit is damaged", key="1-aa"), "a commit is damaged, key=1-aa"),
    ],
)
def test_failures_are_reported_too(reporting: FaultyStorage, log: ObjectCommitLog, error: Exception, text: str) -> None:
    with pytest.raises(type(error)) as raised, reported(log, 42, lambda: 1_000):
        raise error
    assert raised.value is error
    assert told(reporting) == [("micro-batch-42", text)]


@pytest.mark.parametrize("error", [FencedError("a newer run has begun"), UnavailableError("the reporting is away")])
def test_other_errors_are_not_reported(reporting: FaultyStorage, log: ObjectCommitLog, error: Exception) -> None:
    """A run that was replaced stops; a reporting that is away takes no report."""
    with pytest.raises(type(error)), reported(log, 42):
        raise error
    assert reporting.operations == []


def test_success_costs_no_request(reporting: FaultyStorage, log: ObjectCommitLog) -> None:
    with reported(log, 42):
        pass
    assert reporting.operations == []


def test_a_report_that_cannot_be_stored_hides_no_error(reporting: FaultyStorage, log: ObjectCommitLog) -> None:
    """The query's own failure is what Spark hears of; so is one without durable state, or of unknown number."""
    reporting.faults.append(Fault("fail", action="put", times=None))
    for where, batch_id in ((log, 42), (None, 42), (log, None)):
        with pytest.raises(ValueError, match="no number"), reported(where, batch_id):
            raise ValueError("no number")
    assert told(reporting) == []
