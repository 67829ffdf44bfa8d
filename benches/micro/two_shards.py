"""Two shards on `rocksdb` at the same time: one after the other, in two threads of a process, in a process each.

A round is what the state server does for a micro-batch of job A: of each shard's 500,000 keys it looks 316,000 up and
writes them. Run ``python -m holdfast.benches.micro.two_shards [ROUNDS]``; it prints the seconds of each round, for both
shards; the first one warms up. Background work of RocksDB is in the times as far as it holds rounds up.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Keys, Run
from holdfast.benches.jobs.rows import TABLE, keys_of, table_of, values_of

KEYS, TOUCHED, VALUE_BYTES, ASKED_AT_ONCE = 500_000, 316_000, 16, 1 << 17
SHARDS = ("first", "second")
Round = Callable[[], None]
_PATIENCE_S = 120.0


@contextmanager
def shard(home: Path, name: str) -> Iterator[Callable[[], Round]]:
    """Give what prepares the next round of a shard: a call that looks its keys up and writes them."""
    table, chance = table_of(VALUE_BYTES), np.random.default_rng(SHARDS.index(name))
    counted = itertools.count(2)
    with find_backend("rocksdb")(home / name, {TABLE: table}, clock.new_id) as backend:
        held = [Pointer(1, "loaded")]
        state = Run.build(table, keys_of(table, np.arange(KEYS)), values_of(table, KEYS, VALUE_BYTES, chance))
        backend.load(held[0], {TABLE: state}, {})

        def prepare() -> Round:
            keys = keys_of(table, np.sort(chance.choice(KEYS, TOUCHED, replace=False)))
            run = Run.build(table, keys, values_of(table, TOUCHED, VALUE_BYTES, chance))

            def call() -> None:
                new = Pointer(next(counted), "written")
                with backend.view(held[-1]) as view:
                    for start in range(0, TOUCHED, ASKED_AT_ONCE):
                        part = slice(start, start + ASKED_AT_ONCE)
                        view.get(TABLE, Keys(run.hashes[part], run.keys.slice(start, ASKED_AT_ONCE)))
                backend.apply(held[-1], new, {TABLE: run}, {})
                held.append(new)
                backend.drop(held[:-2])

            return call

        yield prepare


def in_one_process(home: Path, rounds: int, run: Callable[[list[Round]], None]) -> list[float]:
    """Return the seconds of each round, both shards held by this process."""
    with ExitStack() as stack:
        shards = [stack.enter_context(shard(home, name)) for name in SHARDS]
        times = []
        for _ in range(rounds):
            calls = [prepare() for prepare in shards]
            begun_s = time.perf_counter()
            run(calls)
            times.append(time.perf_counter() - begun_s)
    return times


def one_after_the_other(calls: list[Round]) -> None:
    """Carry calls out in this thread."""
    for call in calls:
        call()


def in_threads(calls: list[Round]) -> None:
    """Carry each call out in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        for done in [threads.submit(call) for call in calls]:
            done.result()


def in_processes(home: Path, rounds: int) -> list[float]:
    """Return the seconds of each round, each shard held by a process of its own: of the one that takes longer."""
    processes = multiprocessing.get_context("spawn")
    barrier = processes.Barrier(len(SHARDS))
    with processes.Pool(len(SHARDS), initializer=_take_barrier, initargs=(barrier,)) as pool:
        by_shard = pool.starmap(_alone, [(home, name, rounds) for name in SHARDS], chunksize=1)
    return [max(times) for times in zip(*by_shard, strict=True)]


_barriers: list[Barrier] = []


def _take_barrier(barrier: Barrier) -> None:
    _barriers.append(barrier)


def _alone(home: Path, name: str, rounds: int) -> list[float]:
    times = []
    with shard(home, name) as prepare:
        for _ in range(rounds):
            call = prepare()
            _barriers[0].wait(_PATIENCE_S)  # not for ever: the other one may have failed
            begun_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun_s)
    return times


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    ways: dict[str, Callable[[Path], list[float]]] = {
        "one after the other": lambda home: in_one_process(home, rounds, one_after_the_other),
        "in two threads": lambda home: in_one_process(home, rounds, in_threads),
        "in two processes": lambda home: in_processes(home, rounds),
    }
    for name, way in ways.items():
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as home:
            print(f"{name:20s}", *(f"{seconds:5.2f}" for seconds in way(Path(home))), flush=True)


if __name__ == "__main__":
    main()
