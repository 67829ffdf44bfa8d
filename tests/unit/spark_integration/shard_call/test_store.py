"""A shard without a pointer begins empty only where it never had any state."""

from __future__ import annotations

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
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.client.messages import ShardAddress
from holdfast.spark_integration.shard_call.store import ShardStore
from holdfast.testing.faulty_storage import FaultyStorage
from holdfast.testing.state_rows import COUNTS, keys_of, values_of

PREFIX = "totals/shard-0003"
TABLES = {"counts": COUNTS}
Open = Callable[[str], ShardStore]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultyStorage]:
    with FaultyStorage(open_storage(str(tmp_path / "durable"))) as opened:
        yield opened


@pytest.fixture
def open_shard(storage: FaultyStorage, tmp_path: Path) -> Iterator[Open]:
    """Return what opens the shard on an executor of some name."""
    backends = []
    with ThreadPoolExecutor(2) as executor:

        def opened(where: str, backend_name: str = "filesystem", *, durable: bool = True) -> ShardStore:
            directory = tmp_path / where
            found = find_backend(backend_name)
            backend = found(directory, TABLES, new_id, {})
            backends.append(backend)
            log = ObjectCommitLog(storage, PREFIX, TABLES, executor, directory, backend_name, 0) if durable else None
            address = ShardAddress.of(directory, backend_name, {}, TABLES)
            store = VersionedStore(backend, log)
            tables = StoredTables.of_first_run(TABLES)
            return ShardStore(address, tmp_path, PREFIX, backend, log, None, tables, store, SnapshotPolicy(), 100)

        yield opened
        for backend in backends:
            backend.close()


def commit(shard: ShardStore, version: int, base: Pointer | None = None) -> Pointer:
    with shard.begin(base, version) as transaction:
        transaction.put("counts", keys_of(COUNTS, [("ann",)]), values_of(COUNTS, [(version,)]))
        committed = transaction.commit()
    assert committed is not None
    return committed


def test_durable_history_is_found_on_any_executor(open_shard: Open) -> None:
    """Micro-batch 6 commits version 7: before it the shard has no history, after it it has."""
    commit(open_shard("one"), 7)
    other = open_shard("two")
    for micro_batch in (0, 5, 6):
        other.require_no_history(micro_batch)
    for micro_batch in (7, 100, None):
        with pytest.raises(StateLostError, match=r"no pointer to this shard.*shard=totals/shard-0003.*newest=7-"):
            other.require_no_history(micro_batch)


@pytest.mark.parametrize("backend", ["memory", "filesystem", "rocksdb"])
def test_local_history_is_found_where_nothing_is_durable(open_shard: Open, backend: str) -> None:
    shard = open_shard("one", backend, durable=False)
    shard.require_no_history(9)
    commit(shard, 7)
    shard.require_no_history(6)
    with pytest.raises(StateLostError):
        shard.require_no_history(7)


def test_attempts_at_this_micro_batch_prove_nothing(open_shard: Open) -> None:
    """Nor does what is left of later ones, where Spark was set back to before the shard began."""
    shard = open_shard("one")
    for version in (4, 4, 9):
        commit(shard, version)
    shard.require_no_history(3)


@pytest.mark.parametrize("where", ["one", "two"])
def test_what_the_error_names_is_what_keeps_the_shard_from_beginning(
    open_shard: Open, storage: FaultyStorage, where: str
) -> None:
    """An attempt that nobody accepted, and a repetition without rows of the shard: whoever deletes both can go on."""
    commit(open_shard("one"), 4)
    with pytest.raises(StateLostError, match="failed micro-batch was repeated over other input") as raised:
        open_shard(where).require_no_history(4)
    named = raised.value.facts
    storage.delete([info.key for info in storage.list(f"{named['shard']}/")])
    shutil.rmtree(str(named["on_executors"]))
    open_shard(where).require_no_history(4)


def test_where_the_micro_batch_is_not_known_its_attempts_are_version_1(open_shard: Open) -> None:
    shard = open_shard("one")
    first = commit(shard, 1)
    commit(shard, 1)
    shard.require_no_history(None)
    commit(shard, 2, first)
    with pytest.raises(StateLostError):
        shard.require_no_history(None)


def test_it_costs_one_listing_and_in_the_first_micro_batch_none(open_shard: Open, storage: FaultyStorage) -> None:
    shard = open_shard("one")
    shard.require_no_history(0)
    assert not storage.operations
    shard.require_no_history(1)
    assert [(operation.action, operation.keys) for operation in storage.operations] == [("list", (f"{PREFIX}/",))]
