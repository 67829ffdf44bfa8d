"""Timers that fire: one transaction takes the earliest ones away and sets as many later ones, on every backend.

The table has its rows in the order of their due times, so each transaction deletes at its beginning and writes at its
end, as stream time goes by. What is deleted must not be stepped over again: a transaction begins to read at the
earliest timer that the one before it left. So the last line must not be slower than the first. Run with
``make bench-micro``.

==============  ============================================================================
fire            what is due, its removal, new timers, the earliest that is left, commit
earliest        of this, finding the earliest timer
fire_long       as fire, after `LONG` such transactions
of_one_time     the earliest timer, once some of `CROWD` that are due at one time were removed
==============  ============================================================================
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.arrow.rows import IntArray
from holdfast.backends.base import Pointer
from holdfast.backends.registry import backend_names, find_backend
from holdfast.backends.run import Keys
from holdfast.mvcc import VersionedStore
from holdfast.spark_integration.executor.local_dirs import choose_root
from holdfast.spark_integration.tables.timers import Timers, timers_schema

TABLE = "timers"
TIMERS, FIRED = 500_000, 1_000
LONG = 300
CROWD = 200_000
_MERGE_EVERY = 20
_KEYS = timers_schema(TABLE, pa.schema([("key", pa.int64())]))


class TimerShard:
    """One shard of timers, one due in each millisecond.

    Parameters
    ----------
    backend_name : str
    home : pathlib.Path
        An empty directory.
    """

    def __init__(self, backend_name: str, home: Path) -> None:
        self.backend_name = backend_name
        self.backend = find_backend(backend_name)(home / "shard", {TABLE: _KEYS}, clock.new_id)
        self.store = VersionedStore(self.backend)
        self.pointer: Pointer | None = None
        self.earliest_ms = self.end_ms = self.transactions = 0
        with self.store.begin(None) as transaction:
            self._set(Timers(transaction, TABLE), TIMERS)
            self.pointer = transaction.commit()

    def _set(self, timers: Timers, n: int) -> None:
        due_ms: IntArray = np.arange(self.end_ms, self.end_ms + n)
        keys = Keys.of(_KEYS, due_ms.astype(np.uint64), pa.table({"key": due_ms}))
        timers.add(keys, due_ms)
        self.end_ms += n

    def fire(self) -> None:
        """Fire the earliest timers in one transaction."""
        assert self.pointer is not None
        with self.store.begin(self.pointer) as transaction:
            self.store.prune(self.pointer)
            timers, before_ms = Timers(transaction, TABLE), self.earliest_ms + FIRED
            fired = list(timers.due(self.earliest_ms, before_ms, FIRED))
            for due in fired:
                timers.remove(due.keys, due.due_ms)
            self._set(timers, sum(map(len, fired)))
            self.earliest_ms = timers.earliest(before_ms) or 0
            assert self.earliest_ms == before_ms
            self.pointer = transaction.commit()
        self.transactions += 1

    def find_earliest(self) -> None:
        """Find the earliest timer."""
        assert self.pointer is not None
        with self.store.begin(self.pointer) as transaction:
            assert Timers(transaction, TABLE).earliest(self.earliest_ms) == self.earliest_ms

    def merge_sometimes(self) -> None:
        """Do what the state server does in the background."""
        if self.transactions % _MERGE_EVERY == 0:
            assert self.pointer is not None
            self.backend.maintain(self.pointer)


@pytest.fixture(scope="module", params=backend_names())
def shard(request: pytest.FixtureRequest) -> Iterator[TimerShard]:
    """Return a shard on each backend, in RAM if the backend lives there, else on disk."""
    name = str(request.param)
    root = choose_root(None, in_memory=find_backend(name).in_memory)
    home = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=root))
    made = TimerShard(name, home)
    yield made
    made.backend.close()
    shutil.rmtree(home)


def measure(benchmark: Any, shard: TimerShard, function: Callable[[], object]) -> None:
    """Measure `function` again and again."""
    benchmark.extra_info.update(backend=shard.backend_name, keys=TIMERS, value_bytes=8)
    benchmark.pedantic(function, setup=shard.merge_sometimes, rounds=60, warmup_rounds=3)


def test_fire(benchmark: Any, shard: TimerShard) -> None:
    """Fire the first timers of a table."""
    measure(benchmark, shard, shard.fire)


def test_earliest(benchmark: Any, shard: TimerShard) -> None:
    """Find the earliest timer."""
    measure(benchmark, shard, shard.find_earliest)


def test_fire_long(benchmark: Any, shard: TimerShard) -> None:
    """Fire timers where many have fired before."""
    while shard.transactions < LONG:
        shard.fire()
        shard.merge_sometimes()
    measure(benchmark, shard, shard.fire)


def test_of_one_time(benchmark: Any, shard: TimerShard) -> None:
    """Find the earliest timer where many are due together, and some of them were removed just now."""
    first_ms = shard.end_ms
    due_ms, numbers = np.full(CROWD, first_ms), np.arange(CROWD)
    keys = Keys.of(_KEYS, numbers.astype(np.uint64), pa.table({"key": numbers}))
    with shard.store.begin(shard.pointer) as transaction:
        Timers(transaction, TABLE).add(keys, due_ms)
        pointer = transaction.commit()
    assert pointer is not None
    with shard.store.begin(pointer) as transaction:
        timers = Timers(transaction, TABLE)
        timers.remove(keys.take(numbers[:FIRED]), due_ms[:FIRED])
        measure(benchmark, shard, lambda: timers.earliest(first_ms))
        assert timers.earliest(first_ms) == first_ms
