"""What a worker checks and opens for its shard, once for each process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.backends.run import TableSchema
from holdfast.errors import ConflictError, InvalidArgumentError, UnavailableError
from holdfast.settings import Settings
from holdfast.snapshotter.operator_record import OperatorRecord
from holdfast.snapshotter.storage import open_storage
from holdfast.spark_integration import task
from holdfast.testing.faulty_storage import Fault, FaultyStorage

TABLE = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
RECORD = OperatorRecord.of("totals", "query-1", "def-1", "run-1", 2, {"state": TABLE})
_numbers = itertools.count()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStorage]:
    monkeypatch.setattr(task, "_claimed", set())
    with FaultyStorage(open_storage(f"memory://task-{next(_numbers)}")) as opened:
        yield opened


def test_one_definition_may_run_under_a_name_in_one_run_of_a_query(tmp_path: Path) -> None:
    operator = tmp_path / "query" / "totals"
    for _ in range(2):
        task.require_one_definition(operator, "run-1", "def-1")
    with pytest.raises(ConflictError, match=r"name='totals'"):
        task.require_one_definition(operator, "run-1", "def-2")
    task.require_one_definition(operator, "run-2", "def-2")
    task.require_one_definition(tmp_path / "query" / "others", "run-1", "def-2")


def test_a_note_that_cannot_be_kept_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "totals" / "runs").mkdir(parents=True, mode=0o700)
    (tmp_path / "totals" / "runs").chmod(0o700)
    (tmp_path / "totals" / "runs" / "run-1").mkdir()
    with pytest.raises(UnavailableError, match=r"run-1.*spark\.holdfast\.local\.dir"):
        task.require_one_definition(tmp_path / "totals", "run-1", "def-1")


def test_a_directory_is_claimed_once_in_a_process_and_again_in_the_next(
    storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch and shard asks; a forked worker must not trust what its parent has seen."""
    for _ in range(3):
        task.claim_once(storage, RECORD, tmp_path)
    asked = [operation.action for operation in storage.operations]
    assert asked == ["put", "get", "list", "delete", "get", "put", "get"], "probe; then look, write, look again"
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    task.claim_once(storage, RECORD, tmp_path)
    assert len(storage.operations) == len(asked) + 1, "one process of the executor probes, each one looks"
    task.claim_once(storage, replace(RECORD, run_id="run-2"), tmp_path)
    assert len(storage.operations) == len(asked) + 1 + 5, "each run probes anew"


def test_a_claim_that_failed_is_made_again(storage: FaultyStorage, tmp_path: Path) -> None:
    storage.faults.append(Fault("fail", action="get", key="totals/operator"))
    with pytest.raises(UnavailableError):
        task.claim_once(storage, RECORD, tmp_path)
    task.claim_once(storage, RECORD, tmp_path)
    with pytest.raises(ConflictError):
        task.claim_once(storage, replace(RECORD, query_id="query-2", definition_id="def-2"), tmp_path)
    storage.assert_all_hit()


def test_a_probe_that_failed_is_made_again(storage: FaultyStorage, tmp_path: Path) -> None:
    """A retried task must not take a directory for tested because its first attempt began to test it."""
    storage.faults.append(
        Fault("fail", action="delete", times=2, error=lambda: InvalidArgumentError("denied", action="delete"))
    )
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"checkpoint\.dir failed its test.*denied.*action=delete"):
            task.claim_once(storage, RECORD, tmp_path)
        assert not [info for info in storage.list("") if info.key.endswith("/operator")]
    task.claim_once(storage, RECORD, tmp_path)
    storage.assert_all_hit()


def test_threads_for_requests_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do not survive a fork: a worker would wait for ever on those of its parent."""
    mine = task.io_executor()
    assert task.io_executor() is mine
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    other = task.io_executor()
    assert other is not mine
    assert other.submit(lambda: 1).result(5) == 1
    other.shutdown()
    task._executor.cache_clear()


def test_outside_a_task_there_is_no_micro_batch_and_no_credential() -> None:
    assert task.StreamingTask.current() is None
    assert task.storage_options(Settings(storage_names=("secret",))) == {}
    assert task.checkpoint_storage(Settings()) is None
