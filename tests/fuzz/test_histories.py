"""Histories of a shard against plain dictionaries: whatever was done, each version reads as it was written.

Executors come and go, attempts are dropped, the query is set back, snapshots are made of any version and lost, and
what is restored goes in steps. The model is a dictionary by version; it shares nothing with what is tested but Arrow.
"""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Keys, TableSchema
from holdfast.errors import NotFoundError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from tests.fuzz.arrow_columns import TEXTS, exact, random_column, random_type
from tests.ram import storage_in_ram
from tests.tiers import LONG, repetitions

SHARD = "o/shard-0000"
STEPS = 200 if LONG else 50
EXECUTORS = 3
KEY = pa.schema([("text", pa.string()), ("n", pa.int64())])

Key = tuple[bytes | None, bytes]
State = dict[Key, tuple[Any, ...]]


class History:
    """What a query and its executors do to one shard, and what each version must hold."""

    def __init__(self, seed: int, backend_name: str, folder: Path, resources: ExitStack) -> None:
        self.chance = random.Random(f"{seed} {backend_name}")
        self.backend_name, self.folder, self.resources = backend_name, folder, resources
        values = [random_type(self.chance, 2, is_key=False) for _ in range(2)]
        self.tables = {"t": TableSchema.of("t", KEY, pa.schema([(f"v{i}", t) for i, t in enumerate(values)]))}
        self.value_types = values
        self.storage = resources.enter_context(storage_in_ram())
        self.threads = resources.enter_context(ThreadPoolExecutor(2))
        self.rows: dict[Pointer, bytes] = {}  # carried commits, which Spark keeps
        self.states: dict[Pointer, State] = {}
        self.said: list[str] = []
        self.executors: list[Any] = [None] * EXECUTORS
        for number in range(EXECUTORS):
            self.lose(number)

    def lose(self, number: int) -> None:
        """Begin with an executor that has nothing."""
        directory = self.folder / f"executor-{number}"
        if self.executors[number]:
            self.executors[number][0].close()
        shutil.rmtree(directory, ignore_errors=True)
        backend = find_backend(self.backend_name)(directory, self.tables, clock.new_id)
        step_bytes = self.chance.choice([1, 2000, 64 << 20])
        carried = self.chance.choice([0, 1500, 16 << 10])
        log = ObjectCommitLog(
            self.storage, SHARD, self.tables, self.threads, directory, self.backend_name, carried, step_bytes=step_bytes
        )
        log.carried = self.rows
        self.executors[number] = backend, log, VersionedStore(backend, log)
        self.resources.callback(backend.close)

    def keys(self, chosen: list[tuple[bytes | None, int]]) -> Keys:
        texts = pa.array([text for text, _ in chosen], pa.binary()).view(pa.string())
        columns = pa.table([texts, pa.array([n for _, n in chosen], pa.int64())], names=KEY.names)
        hashes = [(len(text or b"") % 3) << 62 | n % 2 for text, n in chosen]
        return Keys.of(self.tables["t"], np.array(hashes, np.uint64), columns)

    def step(self) -> None:
        number = self.chance.randrange(EXECUTORS)
        way = self.chance.choice([self.commit] * 6 + [self.read, self.snapshot, self.snapshot, self.lose, self.drop])
        self.said.append(f"{way.__name__} on {number}")
        way(number)

    def newest(self) -> Pointer | None:
        """Return where the query is: at the version written last, or now and then set back, or at another attempt."""
        pointers = list(self.states)
        if not pointers:
            return None
        return pointers[-1] if self.chance.random() < 0.85 else self.chance.choice(pointers)

    def commit(self, number: int) -> None:
        _, _, store = self.executors[number]
        base = self.newest()
        state = dict(self.states[base]) if base else {}
        with store.begin(base, (base.version if base else 0) + self.chance.choice([1, 1, 3])) as attempt:
            for _ in range(self.chance.randrange(1, 4)):
                texts = [self.chance.choice([*TEXTS, None]) for _ in range(self.chance.randrange(1, 12))]
                chosen = list({(text, self.chance.randrange(3)) for text in texts})
                names = [(text, n.to_bytes(8, "little")) for text, n in chosen]
                if self.chance.random() < 0.3:
                    attempt.delete("t", self.keys(chosen))
                    for name in names:
                        state.pop(name, None)
                    continue
                columns = [random_column(t, len(chosen), self.chance) for t in self.value_types]
                attempt.put("t", self.keys(chosen), pa.table(columns, names=["v0", "v1"]))
                state |= zip(names, zip(*(exact(column) for column in columns), strict=True), strict=True)
            pointer = attempt.commit()
        assert pointer is not None
        self.states[pointer] = state
        self.said[-1] += f": {base} -> {pointer}"

    def read(self, number: int, pointer: Pointer | None = None) -> None:
        """Read any version, on an executor that has it or not."""
        if not self.states:
            return
        pointer = pointer or self.chance.choice(list(self.states))
        with self.executors[number][2].read_at(pointer) as view:
            found: State = {}
            for run in view.scan("t"):
                names = zip(*(exact(column) for column in run.keys.columns), strict=True)
                found |= zip(names, zip(*(exact(column) for column in run.values.columns), strict=True), strict=True)
            assert found == self.states[pointer], f"{pointer} on {number}"

    def snapshot(self, number: int) -> None:
        backend, log, _ = self.executors[number]
        for pointer in backend.versions()[-1:]:
            log.write_snapshot(backend, pointer)
        if self.chance.random() < 0.2:  # and lose one: the commits since the one before do as well
            listed = [info.key for info in self.storage.list(f"{SHARD}/snapshots/")]
            self.storage.delete(self.chance.sample(listed, min(1, len(listed))))

    def drop(self, number: int) -> None:
        """Forget what was before some version, as the next micro-batch does."""
        backend, _, store = self.executors[number]
        for pointer in backend.versions():
            if self.chance.random() < 0.3:
                store.prune(pointer)
                with pytest.raises(NotFoundError):
                    backend.view(Pointer(10**9, "aa"))
                break


@pytest.mark.parametrize("seed", repetitions(1, 60))
@pytest.mark.parametrize("backend_name", ["memory", "rocksdb"])
@pytest.mark.timeout(1200)
def test_every_version_reads_as_it_was_written(backend_name: str, seed: int, ram_path: Path) -> None:
    """Random steps, then every version on an executor that has nothing."""
    with ExitStack() as resources:
        history = History(seed, backend_name, ram_path, resources)
        try:
            for _ in range(STEPS):
                history.step()
            for pointer in random.Random(seed).sample(list(history.states), min(8, len(history.states))):
                history.lose(0)
                history.read(0, pointer)
        except BaseException as exc:
            exc.add_note(f"seed {seed}: " + "; ".join(history.said))
            raise
    assert len(history.states) > STEPS // 4
