"""Single operations of the store on every backend, by the size of the state and the width of its rows.

Each touches at most `TOUCHED` keys, drawn evenly from the state; a row has a key of 16 characters and a value of so
many bytes. Hit rate and batch size vary at one size of the state. Run with ``make bench-micro``;
``HOLDFAST_BENCH_MATRIX=full`` runs all sizes with all widths, more often.

==========  ====================================================================================
get         values of the touched keys, at the newest version
scan        all live rows, every page of them read
put         one whole transaction that writes the touched keys: begin, prune, put, commit
commit      of this, the commit alone
rollback    as put, but beside a newer version, which the query has dropped
restore     make a version from complete state
get_absent  as get, but no key has state; get_half_absent: half of them have
get_of_n    as get, of 100 keys, or of 100,000; put_of_n: the same of put
==========  ====================================================================================
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import Backend, Pointer, View
from holdfast.backends.registry import backend_names, find_backend
from holdfast.backends.run import Keys, Run
from holdfast.benches.jobs.rows import TABLE, keys_of, table_of, values_of
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.spark_integration.executor.local_dirs import choose_root

TOUCHED = 10_000
FULL = os.environ.get("HOLDFAST_BENCH_MATRIX") == "full"
SIZES, WIDTHS = (1_000, 100_000, 1_000_000), (16, 100, 1000)
# By default one size with all widths, and one width with all sizes.
MATRIX = [(n, width) for n, width in itertools.product(SIZES, WIDTHS) if FULL or n == 100_000 or width == 100]
MIDDLE = (100_000, 100)
FEW, ALL = 100, 100_000
ROUNDS = {1_000: 30, 100_000: 10, 1_000_000: 3}
_MORE_ROUNDS = 3
Rows = tuple[Keys, pa.RecordBatch]


@dataclass
class Shard:
    """One shard on one backend, with its whole state loaded as version 1."""

    backend_name: str
    rows: int
    value_bytes: int
    home: Path
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        self.table = table_of(self.value_bytes)
        keys = keys_of(self.table, np.arange(self.rows))
        self.state = Run.build(self.table, keys, values_of(self.table, self.rows, self.value_bytes, self.chance))
        self.backend = self._open("shard")
        self.pointer = Pointer(1, "loaded")
        self.backend.load(self.pointer, {TABLE: self.state}, {})
        self.store = VersionedStore(self.backend)
        self._empty: Backend | None = None

    def _open(self, name: str) -> Backend:
        return find_backend(self.backend_name)(self.home / name, {TABLE: self.table}, clock.new_id)

    def empty(self) -> Backend:
        """Return a backend on an empty directory, in the place of the one that was returned before."""
        self._drop_empty()
        self._empty = self._open("empty")
        return self._empty

    def _drop_empty(self) -> None:
        if self._empty is not None:
            self._empty.close()
            shutil.rmtree(self._empty.directory)

    @property
    def touched(self) -> int:
        """Keys that an operation touches."""
        return min(self.rows, TOUCHED)

    def some_keys(self, touched: int, hit_rate: float = 1.0) -> Keys:
        """Return keys drawn anew, of which such a share has state."""
        numbers = self.chance.integers(0, self.rows, touched)
        absent = self.chance.random(touched) >= hit_rate
        return keys_of(self.table, np.where(absent, numbers + self.rows, numbers))

    def some(self, touched: int | None = None) -> Rows:
        """Return keys that have state, drawn anew, and values to write."""
        touched = touched or self.touched
        return self.some_keys(touched), values_of(self.table, touched, self.value_bytes, self.chance)

    def begin(self) -> Transaction:
        """Begin at the newest version, and forget those before it."""
        transaction = self.store.begin(self.pointer)
        self.store.prune(self.pointer)
        return transaction

    def put(self, rows: Rows) -> None:
        """Write rows in one whole transaction."""
        transaction = self.begin()
        transaction.put(TABLE, *rows)
        self.commit(transaction)

    def commit(self, transaction: Transaction) -> None:
        """Commit, and go on from there."""
        committed = transaction.commit()
        assert committed is not None
        self.pointer = committed

    def close(self) -> None:
        """Close and delete everything."""
        self._drop_empty()
        self.backend.close()
        shutil.rmtree(self.home)


@pytest.fixture(scope="module", params=backend_names())
def backend_name(request: pytest.FixtureRequest) -> str:
    """Return each backend that is installed."""
    return str(request.param)


@pytest.fixture(scope="module", params=MATRIX, ids=lambda size: f"{size[0]}x{size[1]}")
def shard(backend_name: str, request: pytest.FixtureRequest) -> Iterator[Shard]:
    """Return a shard of each size."""
    yield from opened(backend_name, *request.param)


@pytest.fixture(scope="module")
def middle(backend_name: str) -> Iterator[Shard]:
    """Return a shard of `MIDDLE` rows."""
    yield from opened(backend_name, *MIDDLE)


def opened(backend_name: str, rows: int, value_bytes: int) -> Iterator[Shard]:
    """Yield a shard, in RAM if its backend lives there, else on disk."""
    root = choose_root(None, in_memory=find_backend(backend_name).in_memory)
    made = Shard(backend_name, rows, value_bytes, Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=root)))
    yield made
    made.close()


def read_pages(run: Run) -> int:
    """Return the number of rows, having read something of each page: a mapped run costs nothing until it is read."""
    for column in run.batch.columns:
        for buffer in column.buffers():
            if buffer is not None:
                np.frombuffer(buffer, np.uint8)[:: mmap.PAGESIZE].sum()
    return len(run)


def measure(benchmark: Any, shard: Shard, function: Callable[..., object], setup: Callable[[], object]) -> None:
    """Measure `function`, called with what `setup` returned."""
    benchmark.extra_info.update(backend=shard.backend_name, keys=shard.rows, value_bytes=shard.value_bytes)
    rounds = ROUNDS[shard.rows] * (_MORE_ROUNDS if FULL else 1)
    benchmark.pedantic(function, setup=lambda: ((setup(),), {}), rounds=rounds, warmup_rounds=1)


def test_get(benchmark: Any, shard: Shard) -> None:
    """Read the touched keys."""
    get(benchmark, shard, shard.touched)


def get(benchmark: Any, shard: Shard, touched: int, hit_rate: float = 1.0) -> None:
    """Measure a read of so many keys."""
    with shard.store.read_at(shard.pointer) as view:
        measure(benchmark, shard, lambda keys: view.get(TABLE, keys), lambda: shard.some_keys(touched, hit_rate))


def test_get_absent(benchmark: Any, middle: Shard) -> None:
    """Read keys without state."""
    get(benchmark, middle, TOUCHED, hit_rate=0.0)


def test_get_half_absent(benchmark: Any, middle: Shard) -> None:
    """Read keys, half of them without state."""
    get(benchmark, middle, TOUCHED, hit_rate=0.5)


def test_get_of_100(benchmark: Any, middle: Shard) -> None:
    """Read few keys."""
    get(benchmark, middle, FEW)


def test_get_of_100_000(benchmark: Any, middle: Shard) -> None:
    """Read as many keys as there are."""
    get(benchmark, middle, ALL)


def test_put_of_100(benchmark: Any, middle: Shard) -> None:
    """Write few keys in a transaction."""
    measure(benchmark, middle, middle.put, lambda: middle.some(FEW))


def test_put_of_100_000(benchmark: Any, middle: Shard) -> None:
    """Write as many keys as there are in a transaction."""
    measure(benchmark, middle, middle.put, lambda: middle.some(ALL))


def test_scan(benchmark: Any, shard: Shard) -> None:
    """Read everything."""

    def scan(view: View) -> None:
        assert sum(map(read_pages, view.scan(TABLE))) == shard.rows

    with shard.store.read_at(shard.pointer) as view:
        measure(benchmark, shard, scan, lambda: view)


def test_put(benchmark: Any, shard: Shard) -> None:
    """Write the touched keys in a transaction."""
    measure(benchmark, shard, shard.put, shard.some)


def test_commit(benchmark: Any, shard: Shard) -> None:
    """Commit what was written."""

    def written() -> Transaction:
        transaction = shard.begin()
        transaction.put(TABLE, *shard.some())
        return transaction

    measure(benchmark, shard, shard.commit, written)


def test_rollback(benchmark: Any, shard: Shard) -> None:
    """Write beside an attempt that was dropped."""

    def drop_one() -> Rows:
        accepted = shard.pointer
        shard.put(shard.some())
        shard.pointer = accepted
        return shard.some()

    measure(benchmark, shard, shard.put, drop_one)


def test_restore(benchmark: Any, shard: Shard) -> None:
    """Load complete state into an empty shard."""
    pointer = Pointer(1, "restored")
    measure(benchmark, shard, lambda backend: backend.load(pointer, {TABLE: shard.state}, {}), shard.empty)
