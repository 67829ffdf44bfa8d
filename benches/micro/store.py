"""Single operations of the store on every backend, by the size of the state and the width of its rows.

Each touches at most `TOUCHED` keys, drawn evenly from the state; keys have 16 characters. Hit rate and batch size vary
at one size of the state. Run with ``make bench-micro``.

==========  ====================================================================================
get         read the touched keys at the newest version
scan        read every page of all live rows
put         a transaction that writes the touched keys: begin, prune, put, commit
commit      only the commit of a put
rollback    put, while a newer version exists that the query has dropped
restore     create a version from complete state
get_absent  get of keys without state; get_half_absent: half of them have state
get_of_n    get of 100 or 100,000 keys; put_of_n: put of as many
fire        a transaction that removes the earliest `FIRED` timers and sets as many later ones
fire_long   fire, after `LONG` such transactions: deleted timers must cost nothing
==========  ====================================================================================
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import Backend, Pointer, View
from holdfast.backends.registry import backend_names, find_backend
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.benches.jobs.rows import TABLE, keys_of, table_of, values_of
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.spark_integration.executor.local_dirs import choose_root
from holdfast.spark_integration.timers import Timers, timers_schema

TOUCHED = 10_000
# One size with all widths, and one width with all sizes.
MATRIX = [(1_000, 100), (100_000, 16), (100_000, 100), (100_000, 1000), (1_000_000, 100)]
MIDDLE = (100_000, 100)
ROUNDS = {1_000: 30, 100_000: 10, 1_000_000: 3}
TIMERS, FIRED, LONG, MERGE_EVERY = 500_000, 1_000, 300, 20
Setup = Callable[[], object]
Call = Callable[[Any], object]


class Shard:
    """A shard on one backend, with its state loaded as version 1."""

    def __init__(self, backend_name: str, rows: int, value_bytes: int, home: Path) -> None:
        self.backend_name, self.rows, self.value_bytes, self.home = backend_name, rows, value_bytes, home
        self.chance = np.random.default_rng(0)
        self.table = table_of(value_bytes)
        keys = keys_of(self.table, np.arange(rows))
        self.state = Run.build(self.table, keys, values_of(self.table, rows, value_bytes, self.chance))
        self.backend = self._open("shard")
        self.pointer = Pointer(1, "loaded")
        self.backend.load(self.pointer, {TABLE: self.state}, {})
        self.store = VersionedStore(self.backend)
        self._empty: Backend | None = None
        self._view: View | None = None

    def _open(self, name: str) -> Backend:
        return find_backend(self.backend_name)(self.home / name, {TABLE: self.table}, clock.new_id)

    def empty(self) -> Backend:
        """Return a backend on an empty directory, closing the previous one."""
        if self._empty is not None:
            self._empty.close()
            shutil.rmtree(self._empty.directory)
        self._empty = self._open("empty")
        return self._empty

    def view(self) -> View:
        """Return a view of the newest version, closing the previous view."""
        if self._view is not None:
            self._view.close()
        self._view = self.store.read_at(self.pointer)
        return self._view

    def some_keys(self, touched: int, hit_rate: float = 1.0) -> Keys:
        """Draw keys, of which the share `hit_rate` has state."""
        numbers = self.chance.integers(0, self.rows, touched)
        absent = self.chance.random(touched) >= hit_rate
        return keys_of(self.table, np.where(absent, numbers + self.rows, numbers))

    def some_rows(self, touched: int) -> tuple[Keys, pa.RecordBatch]:
        """Draw keys that have state, and values to write."""
        touched = min(self.rows, touched)
        return self.some_keys(touched), values_of(self.table, touched, self.value_bytes, self.chance)

    def write(self, rows: tuple[Keys, pa.RecordBatch]) -> Transaction:
        transaction = self.store.begin(self.pointer)
        self.store.prune(self.pointer)
        transaction.put(TABLE, *rows)
        return transaction

    def commit(self, transaction: Transaction) -> None:
        committed = transaction.commit()
        assert committed is not None
        self.pointer = committed

    def put(self, rows: tuple[Keys, pa.RecordBatch]) -> None:
        self.commit(self.write(rows))

    def close(self) -> None:
        for opened in (self._view, self._empty, self.backend):
            if opened is not None:
                opened.close()


def _get(touched: int, hit_rate: float = 1.0) -> Callable[[Shard], tuple[Call, Setup]]:
    def of(shard: Shard) -> tuple[Call, Setup]:
        view = shard.view()
        return partial(view.get, TABLE), lambda: shard.some_keys(min(shard.rows, touched), hit_rate)

    return of


def _put(touched: int) -> Callable[[Shard], tuple[Call, Setup]]:
    return lambda shard: (shard.put, lambda: shard.some_rows(touched))


def _commit(shard: Shard) -> tuple[Call, Setup]:
    return shard.commit, lambda: shard.write(shard.some_rows(TOUCHED))


def _rollback(shard: Shard) -> tuple[Call, Setup]:
    def drop_one() -> object:
        accepted = shard.pointer
        shard.put(shard.some_rows(TOUCHED))
        shard.pointer = accepted
        return shard.some_rows(TOUCHED)

    return shard.put, drop_one


def _scan(shard: Shard) -> tuple[Call, Setup]:
    def scan(view: View) -> None:
        assert sum(map(read_pages, view.scan(TABLE))) == shard.rows

    return scan, shard.view


def read_pages(run: Run) -> int:
    """Read a byte of each page, since a mapped run costs nothing until it is read; return the number of rows."""
    for column in run.batch.columns:
        for buffer in column.buffers():
            if buffer is not None:
                np.frombuffer(buffer, np.uint8)[:: mmap.PAGESIZE].sum()
    return len(run)


def _restore(shard: Shard) -> tuple[Call, Setup]:
    pointer = Pointer(1, "restored")
    return (lambda backend: backend.load(pointer, {TABLE: shard.state}, {})), shard.empty


_ANY_SIZE = {
    "get": _get(TOUCHED),
    "scan": _scan,
    "put": _put(TOUCHED),
    "commit": _commit,
    "rollback": _rollback,
    "restore": _restore,
}
_ONE_SIZE = {
    "get_absent": _get(TOUCHED, 0.0),
    "get_half_absent": _get(TOUCHED, 0.5),
    "get_of_100": _get(100),
    "get_of_100_000": _get(100_000),
    "put_of_100": _put(100),
    "put_of_100_000": _put(100_000),
}


def _home(backend_name: str) -> Path:
    """Create a directory, in RAM if the backend keeps its state there."""
    root = choose_root(None, in_memory=find_backend(backend_name).in_memory)
    return Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=root))


@pytest.fixture(scope="module", params=backend_names())
def backend_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shard(backend_name: str, request: pytest.FixtureRequest) -> Iterator[Shard]:
    rows, value_bytes = request.param
    made = Shard(backend_name, rows, value_bytes, _home(backend_name))
    yield made
    made.close()
    shutil.rmtree(made.home)


#: The sizes of a shard, and the operations at each.
CASES = [
    pytest.param(size, operation, id=f"{size[0]}x{size[1]}-{operation}")
    for size in MATRIX
    for operation in [*_ANY_SIZE, *(_ONE_SIZE if size == MIDDLE else [])]
]


@pytest.mark.parametrize(("shard", "operation"), CASES, indirect=["shard"])
def test_store(benchmark: Any, shard: Shard, operation: str) -> None:
    call, setup = (_ANY_SIZE | _ONE_SIZE)[operation](shard)
    about = {"backend": shard.backend_name, "keys": shard.rows, "value_bytes": shard.value_bytes}
    benchmark.extra_info.update(operation=operation, **about)
    benchmark.pedantic(call, setup=lambda: ((setup(),), {}), rounds=ROUNDS[shard.rows], warmup_rounds=1)


class TimerShard:
    """A shard with one timer per millisecond, in a new directory."""

    def __init__(self, backend_name: str, home: Path, timers: int = TIMERS) -> None:
        self.table: TableSchema = timers_schema("timers", pa.schema([("key", pa.int64())]))
        self.backend = find_backend(backend_name)(home / "shard", {"timers": self.table}, clock.new_id)
        self.store = VersionedStore(self.backend)
        self.earliest_ms = self.end_ms = self.transactions = 0
        with self.store.begin(None) as transaction:
            self._set(Timers(transaction, "timers"), timers)
            self.pointer = transaction.commit()

    def _set(self, timers: Timers, n: int) -> None:
        due_ms = np.arange(self.end_ms, self.end_ms + n)
        timers.add(Keys.of(self.table, due_ms.astype(np.uint64), pa.table({"key": due_ms})), due_ms)
        self.end_ms += n

    def fire(self) -> None:
        """Fire the earliest timers in one transaction."""
        assert self.pointer is not None
        with self.store.begin(self.pointer) as transaction:
            self.store.prune(self.pointer)
            timers, before_ms = Timers(transaction, "timers"), self.earliest_ms + FIRED
            fired = list(timers.due(self.earliest_ms, before_ms, FIRED))
            for due in fired:
                timers.remove(due.keys, due.due_ms)
            self._set(timers, sum(map(len, fired)))
            self.earliest_ms = timers.earliest(before_ms) or 0
            assert self.earliest_ms == before_ms
            self.pointer = transaction.commit()
        self.transactions += 1

    def merge_sometimes(self) -> None:
        """Merge, as the state server does in the background."""
        if self.transactions % MERGE_EVERY == 0:
            assert self.pointer is not None
            self.backend.maintain(self.pointer)


@pytest.mark.parametrize(("operation", "before"), [("fire", 0), ("fire_long", LONG)])
def test_timers(benchmark: Any, backend_name: str, operation: str, before: int) -> None:
    home = _home(backend_name)
    shard = TimerShard(backend_name, home)
    for _ in range(before):
        shard.fire()
        shard.merge_sometimes()
    benchmark.extra_info.update(operation=operation, backend=backend_name, keys=TIMERS, value_bytes=8)
    benchmark.pedantic(shard.fire, setup=shard.merge_sometimes, rounds=60, warmup_rounds=3)
    shard.backend.close()
    shutil.rmtree(home)
