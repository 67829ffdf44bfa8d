"""What a transaction says that it has done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.run import Keys
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.mvcc.transaction import Changes
from holdfast.testing.state_rows import COUNTS, TABLES


def keys(*users: str, hash_of: int | None = None) -> Keys:
    """Return keys in this order, all of one hash if it is given."""
    hashes = [int.from_bytes(user.encode()) if hash_of is None else hash_of for user in users]
    return Keys.of(COUNTS, np.array(hashes, np.uint64), pa.record_batch({"user": pa.array(users)}))


def put(transaction: Transaction, given: Keys) -> None:
    transaction.put("counts", given, pa.record_batch({"n": pa.array(range(len(given)), pa.int64())}))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VersionedStore]:
    with MemoryBackend(tmp_path / "shard", TABLES, clock.new_id) as backend:
        yield VersionedStore(backend)


def test_every_row_of_the_first_version_is_new(store: VersionedStore) -> None:
    with store.begin(None) as transaction:
        put(transaction, keys("a", "b", "a"))
        transaction.commit()
    assert transaction.measures.changes == {"counts": Changes(put=2, new=2)}
    assert transaction.measures.commit_ns > 0


@pytest.mark.parametrize("hash_of", [None, 7], ids=["hashes", "one hash"])
@pytest.mark.parametrize("asked", ["abcd", "cd", "dcbaab"])
def test_new_and_removed_are_told_by_what_was_looked_up(store: VersionedStore, asked: str, hash_of: int | None) -> None:
    """In any order, twice, or not at all; also where different keys share a hash."""
    with store.begin(None) as transaction:
        put(transaction, keys("a", "b", hash_of=hash_of))
        pointer = transaction.commit()
    with store.begin(pointer) as transaction:
        transaction.get("counts", keys(*asked, hash_of=hash_of))
        put(transaction, keys("a", "c", "d", hash_of=hash_of))
        transaction.get("counts", keys("c", hash_of=hash_of))
        transaction.delete("counts", keys("b", "d", hash_of=hash_of))
        transaction.commit()
    removed = 1 if "b" in asked else 0
    assert transaction.measures.changes == {"counts": Changes(put=2, deleted=2, new=1, removed=removed)}
    assert transaction.measures.look_up_ns > 0


def test_what_is_written_unread_is_only_counted_as_written(store: VersionedStore) -> None:
    with store.begin(None) as transaction:
        put(transaction, keys("a"))
        pointer = transaction.commit()
    with store.begin(pointer) as transaction:
        put(transaction, keys("a", "b"))
        transaction.delete("counts", keys("c"))
        transaction.commit()
    assert transaction.measures.changes == {"counts": Changes(put=2, deleted=1)}


def test_scans_count_as_reading_but_what_is_done_between_does_not(store: VersionedStore) -> None:
    """Time in the user's function is not time in state."""
    with store.begin(None) as transaction:
        put(transaction, keys("a", "b"))
        ticks = iter(range(0, 1_000, 10))
        transaction.measures.monotonic_ns = lambda: next(ticks)
        for _ in transaction.scan("counts"):
            for _ in range(20):
                next(ticks)
        assert transaction.measures.look_up_ns == 20  # one run, and the end
