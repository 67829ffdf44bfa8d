"""Which directory a query's shard begins in, where other queries have operators of the same name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.run import TableSchema
from holdfast.errors import ConflictError, FencedError, SchemaMismatchError, UnavailableError
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.spark_integration.executor import processes
from holdfast.spark_integration.executor.processes import ProcessId, place_of
from holdfast.spark_integration.shard.pointer_row import directory_of_query, operator_of
from holdfast.spark_integration.shard_call import claiming
from holdfast.spark_integration.shard_call.claiming import begin_directory
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.model.declaring import Declaring
from tests.storage_in_ram import storage_in_ram
from tests.unit.snapshotter.ownership.runs import claimant, claims_of

TABLE = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
SETTINGS = Settings(application="application")
DECLARING: Any = Declaring({"state": TABLE})


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStorage]:
    with storage_in_ram() as storage, FaultyStorage(storage) as opened:
        yield opened


def record(query: str, run: str = "run-1", directory: str = "totals", shards: int = 2) -> OperatorRecord:
    return OperatorRecord.of(directory, query, f"def-{run}", run, shards, {"state": TABLE}, 100)


def begin(storage: FaultyStorage, local: Path, query: str, run: str = "run-1", shards: int = 2) -> str:
    def claim(directory: str) -> None:
        mine = record(query, f"{query}-{run}", directory, shards)
        claiming.tables_once(storage, mine, DECLARING)
        claiming.keep_claim(storage, mine, local / query / directory, 0, SETTINGS)

    return begin_directory(storage, "totals", query, claim, is_run_known=True)[0]


def declare(storage: FaultyStorage, query: str, directory: str, run: str = "run-1") -> None:
    declare_operator(storage, record(query, f"{query}-{run}", directory))


def test_names() -> None:
    assert operator_of("totals") == operator_of(directory_of_query("totals", "q-1")) == "totals"
    assert [operator_of(name) for name in ("", "@", "a@", "@b", "a@b/c", "a/b", "..", "a@b@c")] == [None] * 8


def test_the_first_query_takes_the_name_and_each_other_one_a_directory_of_its_own(
    storage: FaultyStorage, tmp_path: Path
) -> None:
    """While it lives, when it has state, and after a restart of either."""
    assert begin(storage, tmp_path, "q1") == "totals"
    assert begin(storage, tmp_path, "q2") == "totals@q2", "the first one lives, though it has no state yet"
    declare(storage, "q1", "totals")
    declare(storage, "q2", "totals@q2")
    for run in ("run-2", "run-3"):
        assert begin(storage, tmp_path, "q2", run) == "totals@q2"
        assert begin(storage, tmp_path, "q1", run) == "totals"
    assert begin(storage, tmp_path, "q3") == "totals@q3"


def test_a_copy_of_a_query_that_has_no_state_yet_is_refused_too(
    storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the directory that is the query's own, and the first application would be the one to stop."""
    monkeypatch.setattr(claiming, "lives", partial(processes.lives, within_seconds=0))
    first = claimant("q1", "first", driver=place_of(ProcessId.of(os.getpid())))
    claims = claims_of(storage, first)
    held = claims.take(record("q1", "first"), clock.now_ms())
    with pytest.raises(ConflictError, match="another application is running this query"):
        begin(storage, tmp_path, "q1")
    assert not [info.key for info in storage.list("totals@q1/")]
    claims.renew(held)


def test_it_stays_there_when_the_name_becomes_free(storage: FaultyStorage, tmp_path: Path) -> None:
    begin(storage, tmp_path, "q1")
    declare(storage, "q1", "totals")
    assert begin(storage, tmp_path, "q2") == "totals@q2"
    declare(storage, "q2", "totals@q2")
    storage.delete([info.key for info in storage.list("totals/")])
    assert begin(storage, tmp_path, "q2", "run-2") == "totals@q2"


def test_of_two_queries_that_begin_at_once_each_has_a_directory_of_its_own(
    storage: FaultyStorage, tmp_path: Path
) -> None:
    """The second one claims between the first one's looks; at most one keeps the name."""
    found = []
    storage.faults.append(
        Fault("delay", "put", "totals/claims/*", times=1, wait=lambda: found.append(begin(storage, tmp_path, "q2")))
    )
    found.append(begin(storage, tmp_path, "q1"))
    assert len(set(found)) == 2
    assert set(found) <= {"totals", "totals@q1", "totals@q2"}


def test_two_operators_of_one_name_in_one_query_are_refused(storage: FaultyStorage, tmp_path: Path) -> None:
    begin(storage, tmp_path, "q1")
    declare(storage, "q1", "totals")
    twin = replace(record("q1", "q1-run-1"), definition_id="another")

    def claim(_: str) -> None:
        claiming.tables_once(storage, twin, DECLARING)

    with pytest.raises(ConflictError, match="two operators of this query have the same name"):
        begin_directory(storage, "totals", "q1", claim, is_run_known=True)


def test_a_run_that_comes_late_and_another_number_of_shards_are_refused(
    storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(storage, tmp_path, "q1", "run-2")
    declare(storage, "q1", "totals", "run-2")
    with pytest.raises(SchemaMismatchError):
        begin(storage, tmp_path / "other", "q1", "run-3", shards=8)

    def fenced(_: str) -> None:
        raise FencedError("a newer run")

    with pytest.raises(FencedError):
        begin_directory(storage, "totals", "q1", fenced, is_run_known=True)


def test_a_task_that_does_not_know_its_run_joins_nobody(storage: FaultyStorage, tmp_path: Path) -> None:
    """It writes no claim, by which it would stop the run that it belongs to."""
    seen = []

    def look(directory: str) -> None:
        seen.append(directory)
        claiming.tables_once(storage, record("def-1", "def-1", directory), DECLARING)

    assert begin_directory(storage, "totals", "def-1", look, is_run_known=False) == ("totals@def-1", None)
    assert seen == ["totals@def-1"]
    assert not storage.list("")


def test_what_is_stored_is_looked_at_once_in_a_process(storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(storage, "q1", "totals")
    storage.operations.clear()
    mine = record("q1", "run-7")
    for _ in range(3):
        claiming.tables_once(storage, mine, DECLARING)
    assert [operation.action for operation in storage.operations] == ["get", "list"]
    with pytest.raises(ConflictError):
        claiming.tables_once(storage, record("q2", "run-7"), DECLARING)
    storage.faults.append(Fault("fail", action="get"))
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    with pytest.raises(UnavailableError):
        claiming.tables_once(storage, mine, DECLARING)


def test_a_run_id_that_users_have_set_once_does_not_stop_the_query(storage: FaultyStorage, tmp_path: Path) -> None:
    """A record of an earlier release may hold the user's job group: "nightly" in this run and in each later one."""
    declare_operator(storage, replace(record("q1"), run_id="nightly", definition_id="of-then"))
    for run in ("run-1", "run-2"):
        assert begin(storage, tmp_path, "q1", run) == "totals"
