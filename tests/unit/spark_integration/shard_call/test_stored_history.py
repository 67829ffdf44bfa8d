"""A state directory that was emptied is noticed while the executor still has the state."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.registry import find_backend
from holdfast.clock import new_id
from holdfast.errors import StateLostError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.shard_call.claiming import require_stored_once
from holdfast.testing.faulty_storage import FaultyStorage
from holdfast.testing.state_rows import COUNTS, keys_of, values_of

PREFIX = "totals/shard-0003"
TABLES = {"counts": COUNTS}
RECORD = OperatorRecord.of("totals", "query-1", "def-1", "run-1", 4, TABLES, 100)


class Shard:
    """A shard of an executor, at its newest version."""

    def __init__(self, storage: FaultyStorage, folder: Path, executor: ThreadPoolExecutor, carried_bytes: int) -> None:
        self.log = ObjectCommitLog(storage, PREFIX, TABLES, executor, folder, "filesystem", carried_bytes)
        self.backend = find_backend("filesystem")(folder, TABLES, new_id, {})
        self.store = VersionedStore(self.backend, self.log)
        self.pointer: Pointer | None = None

    def commit(self) -> None:
        """Write another version."""
        with self.store.begin(self.pointer, 1 if self.pointer is None else self.pointer.version + 1) as transaction:
            transaction.put("counts", keys_of(COUNTS, [("ann",)]), values_of(COUNTS, [(1,)]))
            self.pointer = transaction.commit()

    def begin(self, run: str) -> None:
        """Go on in a run, as far as the check."""
        assert self.pointer is not None
        record = OperatorRecord.of("totals", "query-1", "def-1", run, 4, TABLES, 100)
        with self.store.begin(self.pointer) as transaction:
            assert transaction.view is not None
            require_stored_once(self.log, record, self.pointer, Lineage.of(transaction.view.properties))


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultyStorage]:
    with FaultyStorage(open_storage(str(tmp_path / "durable"))) as opened:
        yield opened


@pytest.fixture
def shard(storage: FaultyStorage, tmp_path: Path) -> Iterator[Callable[[int], Shard]]:
    """Return what opens a shard whose commits are carried up to some size."""
    made: list[Shard] = []
    with ThreadPoolExecutor(2) as executor:

        def opened(carried_bytes: int) -> Shard:
            made.append(Shard(storage, tmp_path / "local", executor, carried_bytes))
            return made[-1]

        yield opened
        for one in made:
            one.backend.close()


@pytest.mark.parametrize("commits", [1, 3])
def test_an_emptied_directory_fails_the_query_while_the_executor_has_the_state(
    storage: FaultyStorage, shard: Callable[[int], Shard], tmp_path: Path, commits: int
) -> None:
    """Without the check the shard would go on, and its state would end with the executor."""
    one = shard(0)
    declare_operator(storage, RECORD)
    for _ in range(commits):
        one.commit()
    one.begin("run-1")
    shutil.rmtree(tmp_path / "durable")
    with pytest.raises(StateLostError, match=r"emptied, or is another one.*shard=totals/shard-0003.*missing=commits/"):
        one.begin("run-2")
    # Nor where another shard has begun there since, which has written the record again.
    declare_operator(storage, RECORD)
    with pytest.raises(StateLostError, match="emptied, or is another one"):
        one.begin("run-2")


def test_a_directory_of_which_a_part_is_gone_is_left_to_restoring(
    storage: FaultyStorage, shard: Callable[[int], Shard]
) -> None:
    """It goes around a commit that a snapshot holds, and an old object may be gone for a good reason."""
    one = shard(0)
    declare_operator(storage, RECORD)
    one.commit()
    one.commit()
    storage.put(f"{PREFIX}/snapshots/{one.pointer}-{'f' * 16}", b"")
    storage.delete([f"{PREFIX}/commits/{one.pointer}"])
    one.begin("run-2")


def test_a_directory_that_was_restored_from_an_older_backup_fails_the_query_too(
    storage: FaultyStorage, shard: Callable[[int], Shard], tmp_path: Path
) -> None:
    """Its versions are older than all that the pointer names: what came since is with the executor alone."""
    one = shard(0)
    declare_operator(storage, RECORD)
    one.commit()
    shutil.copytree(tmp_path / "durable", tmp_path / "backup")
    for _ in range(2):
        one.commit()
    shutil.rmtree(tmp_path / "durable")
    shutil.move(tmp_path / "backup", tmp_path / "durable")
    with pytest.raises(StateLostError, match=r"only older versions.*older backup.*missing=commits/3.*newest_stored=1-"):
        one.begin("run-2")


def test_where_the_pointer_carries_all_a_warning_will_do(
    storage: FaultyStorage, shard: Callable[[int], Shard], caplog: pytest.LogCaptureFixture
) -> None:
    """Once for an operator in each run and process: nothing is lost, and whoever set another directory hears of it."""
    one = shard(1 << 16)
    one.commit()
    one.commit()
    declare_operator(storage, RECORD)
    with caplog.at_level(logging.WARNING):
        one.begin("run-1")
        assert not caplog.records
        storage.delete(["totals/operator"])
        for _ in range(2):
            one.begin("run-2")
    (warned,) = caplog.records
    assert "does not know the operator 'totals'" in warned.getMessage()
    assert "else stop the query, and set spark.holdfast.state.dir to the directory that it has" in warned.getMessage()


def test_it_is_checked_once_in_a_run_and_process(
    storage: FaultyStorage, shard: Callable[[int], Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for each micro-batch would cost more than the check is worth; a forked process checks anew."""
    one = shard(0)
    declare_operator(storage, RECORD)
    one.commit()
    storage.operations.clear()
    for _ in range(3):
        one.begin("run-7")
    assert [operation.action for operation in storage.operations] == ["get"]
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    one.begin("run-7")
    assert [operation.action for operation in storage.operations] == ["get", "get"]
