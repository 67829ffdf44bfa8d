"""Scans of a transaction that go on while it writes, and reads that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import ClosedError, InvalidArgumentError, NotFoundError, StateLostError, UnavailableError
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.mvcc.transaction import ChangedRows
from holdfast.testing.state_rows import COUNTS, P1, TABLES

ROWS = 40_000
# Counts what Arrow allocates; no buffer may outlive it.
COUNTING = pa.proxy_memory_pool(pa.default_memory_pool())


def keys(start: int, end: int) -> Keys:
    """Return the keys from one number to another, each its own hash."""
    numbers = np.arange(start, end, dtype=np.uint64)
    return Keys.of(COUNTS, numbers, pa.record_batch({"user": pa.array(numbers).cast(pa.string())}))


def put(transaction: Transaction, start: int, end: int, value: int) -> None:
    values = pa.record_batch({"n": pa.array(np.full(end - start, value))})
    transaction.put("counts", keys(start, end), values)


def found(scan: Iterable[Run]) -> dict[int, int]:
    """Return the values by hash."""
    rows: dict[int, int] = {}
    for run in scan:
        rows.update(zip(run.hashes.tolist(), run.values.column(0).to_pylist(), strict=True))
    return rows


@pytest.fixture(params=[MemoryBackend, RocksDBBackend])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VersionedStore]:
    backend_class: type[Backend] = request.param
    with backend_class(tmp_path / "shard", TABLES, clock.new_id) as backend:
        yield VersionedStore(backend)


def test_rows_are_deleted_and_written_while_they_are_scanned(store: VersionedStore) -> None:
    """As timers fire: each is deleted, and sets another, in the midst of the scan that found it."""
    with store.begin(None) as first:
        put(first, 0, ROWS, 1)
        accepted = first.commit()
    with store.begin(accepted) as transaction:
        put(transaction, 100, 200, 2)
        seen: dict[int, int] = {}
        for run in transaction.scan("counts"):
            seen.update(found([run]))
            low, high = int(run.hashes[0]), int(run.hashes[-1]) + 1
            transaction.delete("counts", keys(low, high))
            put(transaction, ROWS + low, ROWS + high, 3)
        assert seen == {i: 2 if 100 <= i < 200 else 1 for i in range(ROWS)}
        assert found(transaction.scan("counts")) == dict.fromkeys(range(ROWS, 2 * ROWS), 3)
        assert found(transaction.scan("counts", ROWS - 5, ROWS + 1)) == {ROWS: 3, ROWS + 1: 3}


def test_deletions_take_effect_together(store: VersionedStore) -> None:
    """Rows that end are read in slices: no look-up meets what slices before it have deleted, and the next one does."""
    with store.begin(None) as first:
        put(first, 0, 9, 1)
        accepted = first.commit()
    with store.begin(accepted) as transaction:
        put(transaction, 3, 5, 2)
        with transaction.deleting() as delete:
            for start in (0, 3, 6):
                delete("counts", keys(start, start + 2))
                assert transaction.get("counts", keys(0, 9)).exists.all()
        assert found(transaction.scan("counts")) == dict.fromkeys((2, 5, 8), 1)
        accepted = transaction.commit()
    with store.begin(accepted) as transaction:
        assert found(transaction.scan("counts")) == dict.fromkeys((2, 5, 8), 1)


def test_a_state_that_was_only_just_written_is_scanned_in_pieces(store: VersionedStore) -> None:
    """The first batch of a query has nothing below its writes, and may write much."""
    with store.begin(None) as transaction:
        put(transaction, 0, ROWS, 1)
        transaction.delete("counts", keys(0, 10))
        first = next(transaction.scan("counts"))
        assert first.hashes[0] == 10
        assert len(first) < ROWS / 2
        assert found(transaction.scan("counts")) == dict.fromkeys(range(10, ROWS), 1)


def test_there_is_one_row_of_values_for_each_key(store: VersionedStore) -> None:
    with store.begin(None) as transaction, pytest.raises(InvalidArgumentError, match=r"per key.*rows=3 keys=2"):
        transaction.put("counts", keys(0, 2), pa.record_batch({"n": pa.array([1, 2, 3])}))


def test_a_scan_ends_with_its_transaction(store: VersionedStore) -> None:
    with store.begin(None) as first:
        put(first, 0, ROWS, 1)
        accepted = first.commit()
    for writes in (False, True):
        transaction = store.begin(accepted)
        if writes:
            put(transaction, 0, 1, 2)
        scan = transaction.scan("counts")
        assert len(next(scan))
        transaction.abort()
        with pytest.raises(ClosedError):
            next(scan)


READS: dict[str, Callable[[Transaction], object]] = {
    "get": lambda transaction: transaction.get("counts", keys(0, 1)),
    "scan": lambda transaction: found(transaction.scan("counts")),
    "scan_prefix": lambda transaction: found(transaction.scan_prefix("counts", keys(0, 1))),
}


@pytest.mark.parametrize("read", READS)
def test_a_failed_read_fails_the_commit(store: VersionedStore, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's function that catches the error would go on without state, and write over what there is."""
    with store.begin(None) as first:
        put(first, 0, 10, 1)
        accepted = first.commit()
    assert accepted is not None
    before = sorted(store._backend.versions())
    with store.begin(accepted) as transaction:
        with monkeypatch.context() as broken:
            broken.setattr(type(transaction.view), read, _fails)
            with pytest.raises(UnavailableError, match="the disk is away"):
                READS[read](transaction)
        READS[read](transaction)
        put(transaction, 0, 1, 2)
        with pytest.raises(UnavailableError, match="the disk is away"):
            transaction.commit()
    assert sorted(store._backend.versions()) == before
    with store.begin(accepted) as transaction:
        with pytest.raises(NotFoundError):
            transaction.get("no such table", keys(0, 1))
        put(transaction, 0, 1, 2)
        assert transaction.commit() not in before, "what was asked wrongly is no failure of the version"


def _fails(*_: object, **__: object) -> None:
    raise UnavailableError("the disk is away")


def test_two_states_of_one_place_are_told_from_one_that_was_lost(store: VersionedStore) -> None:
    """As where the output of an operator stands in a query twice: each drops the other's version."""
    with store.begin(None) as transaction:
        put(transaction, 0, 10, 1)
        one = transaction.commit()
    with store.begin(None) as transaction:
        put(transaction, 0, 10, 2)
        other = transaction.commit()
    assert store.prune(one) == [other]
    with pytest.raises(StateLostError, match="a query uses the operator's output twice"):
        store.begin(other)


@pytest.mark.parametrize("is_in_order", [True, False])
def test_a_large_commit_takes_twice_its_size(is_in_order: bool) -> None:
    """A micro-batch that replaces 2 GB of state must not need 6: its writes go before their rows are put in order."""
    tables = {"large": TableSchema.of("large", COUNTS.key, pa.schema([("value", pa.binary())]))}
    kept: list[Run] = []

    def commit(transaction: Transaction, runs: Mapping[str, Run]) -> Pointer:
        kept.append(runs["large"])
        return P1

    every = range(0, 200, 20) if is_in_order else range(180, -1, -20)
    before, held_bytes = pa.default_memory_pool(), COUNTING.bytes_allocated()
    pa.set_memory_pool(COUNTING)
    try:
        with Transaction(None, 1, None, tables, commit) as transaction:
            for start in every:
                values = pa.record_batch({"value": pa.array([b"x" * 100_000] * 20, pa.binary())})
                transaction.put("large", keys(start, start + 20), values)
            del values
            transaction.commit()
        peak_bytes = COUNTING.max_memory() - held_bytes
    finally:
        pa.set_memory_pool(before)
    assert kept[0].hashes.tolist() == list(range(200))
    assert peak_bytes < 2.2 * kept[0].size_bytes


def users(*users: str, hash_of: int | None = None) -> Keys:
    """Return users in this order, all of one hash if it is given."""
    hashes = [int.from_bytes(user.encode()) if hash_of is None else hash_of for user in users]
    return Keys.of(COUNTS, np.array(hashes, np.uint64), pa.record_batch({"user": pa.array(users)}))


def put_users(transaction: Transaction, given: Keys) -> None:
    transaction.put("counts", given, pa.record_batch({"n": pa.array(range(len(given)), pa.int64())}))


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[VersionedStore]:
    with MemoryBackend(tmp_path / "shard", TABLES, clock.new_id) as backend:
        yield VersionedStore(backend)


def test_every_row_of_the_first_version_is_new(measured: VersionedStore) -> None:
    with measured.begin(None) as transaction:
        put_users(transaction, users("a", "b", "a"))
        transaction.commit()
    assert transaction.measures.changes == {"counts": ChangedRows(put=2, new=2)}
    assert transaction.measures.commit_ns > 0


@pytest.mark.parametrize("hash_of", [None, 7], ids=["hashes", "one hash"])
@pytest.mark.parametrize("asked", ["abcd", "cd", "dcbaab"])
def test_new_and_removed_are_told_by_what_was_looked_up(
    measured: VersionedStore, asked: str, hash_of: int | None
) -> None:
    """In any order, twice, or not at all; also where different users share a hash."""
    with measured.begin(None) as transaction:
        put_users(transaction, users("a", "b", hash_of=hash_of))
        pointer = transaction.commit()
    with measured.begin(pointer) as transaction:
        transaction.get("counts", users(*asked, hash_of=hash_of))
        put_users(transaction, users("a", "c", "d", hash_of=hash_of))
        transaction.get("counts", users("c", hash_of=hash_of))
        transaction.delete("counts", users("b", "d", hash_of=hash_of))
        transaction.commit()
    removed = 1 if "b" in asked else 0
    assert transaction.measures.changes == {"counts": ChangedRows(put=2, deleted=2, new=1, removed=removed)}
    assert transaction.measures.look_up_ns > 0


def test_what_is_written_unread_is_only_counted_as_written(measured: VersionedStore) -> None:
    with measured.begin(None) as transaction:
        put_users(transaction, users("a"))
        pointer = transaction.commit()
    with measured.begin(pointer) as transaction:
        put_users(transaction, users("a", "b"))
        transaction.delete("counts", users("c"))
        transaction.commit()
    assert transaction.measures.changes == {"counts": ChangedRows(put=2, deleted=1)}


def test_scans_count_as_reading_but_what_is_done_between_does_not(measured: VersionedStore) -> None:
    """Time in the user's function is not time in state."""
    with measured.begin(None) as transaction:
        put_users(transaction, users("a", "b"))
        ticks = iter(range(0, 1_000, 10))
        transaction.measures.monotonic_ns = lambda: next(ticks)
        for _ in transaction.scan("counts"):
            for _ in range(20):
                next(ticks)
        assert transaction.measures.look_up_ns == 20  # one run, and the end
