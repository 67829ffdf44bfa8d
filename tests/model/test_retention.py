"""Retention in all orders: beside commits and snapshots, and beside restores."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.clock import new_id
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.snapshots import Manifest
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, list_shard
from holdfast.snapshotter.upkeep.retention import GRACE_MS, History, carry_out, needed_in_storage, plan, run_retention
from holdfast.snapshotter.upkeep.verification import verify_shard
from holdfast.testing.state_rows import COUNTS, contents, keys_of, values_of
from tests.model.built_in import ram_directory
from tests.model.shard_history import PREFIX, ShardHistory, TimedStorage, Version
from tests.tiers import repetitions

HOUR_MS = 60 * 60_000
STEPS = ["commit"] * 6 + ["carry"] * 5 + ["drop", "drop", "snapshot", "snapshot", "slow", "finish", "move", "back"]


class Query:
    """A query, what it may return to, and the executors that keep its shard."""

    def __init__(self, choose: Callable[[int], int], retained: int) -> None:
        self.choose = choose
        self.retained = retained
        self.storage = TimedStorage()
        self.shard = ShardHistory(self.storage)
        self.accepted: list[Version] = []
        self.newest = 0
        self.executor = 0
        self.slow: list[tuple[int, Manifest]] = []

    def returnable(self) -> list[Version]:
        """Return the versions that Spark may still ask for: of the horizon, and what was current at its beginning."""
        horizon = self.newest - self.retained
        above = [v for v in self.accepted if v.pointer.version > horizon]
        below = [v for v in self.accepted if v.pointer.version <= horizon]
        return [*below[-1:], *above]

    def commit(self, *, carried: bool = False, accept: bool = True) -> None:
        parent = self.accepted[-1] if self.accepted else None
        step = self.choose(3) + 1
        made = self.shard.commit(parent, step=step, carried=carried, executor=self.executor)
        if accept:
            self.accepted.append(made)
        # Of a dropped attempt, too: Spark forgets what lies behind when a micro-batch begins.
        self.newest = max(self.newest, made.pointer.version)

    def snapshot(self, *, at_once: bool) -> None:
        if not self.accepted or self.executor in [executor for executor, _ in self.slow]:
            return
        version = self.accepted[-1 - self.choose(min(2, len(self.accepted)))]
        manifest = self.shard.begin_snapshot(version, self.executor)
        if at_once:
            self.shard.finish_snapshot(manifest, self.executor)
        else:
            self.slow.append((self.executor, manifest))

    def step(self, name: str) -> None:
        if not self.slow:  # a snapshot takes no longer than the grace period
            self.storage.now_ms += self.choose(20) * 60_000
        if name in ("commit", "carry", "drop"):
            self.commit(carried=name == "carry", accept=name != "drop")
        elif name in ("snapshot", "slow"):
            self.snapshot(at_once=name == "snapshot")
        elif name == "finish" and self.slow:
            self.shard.finish_snapshot(self.slow[0][1], self.slow.pop(0)[0])
        elif name == "move":
            self.executor = 1 - self.executor
        elif name == "back" and self.accepted:
            kept = self.returnable()
            self.accepted = self.accepted[: self.accepted.index(kept[self.choose(len(kept))]) + 1]

    def clean_in_the_background(self) -> None:
        if self.accepted:
            kept = self.returnable()  # an executor may not have heard of the newest
            known = kept[self.choose(len(kept))] if self.choose(3) == 0 else self.accepted[-1]
            run_retention(self.shard.objects, known.pointer, known.chain, retained=self.retained, grace_ms=HOUR_MS)

    def clean_by_command(self) -> None:
        history = History(list_shard(self.shard.objects), Headers(self.shard.objects))
        planned = plan(history, needed_in_storage(self.retained, history), self.storage.now_ms, HOUR_MS)
        carry_out(self.shard.objects, planned)

    def check(self) -> None:
        there, ever = self.shard.stored(), {key.removeprefix(f"{PREFIX}/") for key in self.storage.ever}
        for version in self.returnable():
            assert not self.shard.missing(version, there), version.pointer
            first = version.chain[0] if version.chain else None
            if first and first.kind == "snapshot" and self.shard.restores_without(version, first, ever):
                assert self.shard.restores_without(version, first, there), f"{version.pointer}: no way around {first}"


CLEAN_UPS = ["clean_in_the_background", "clean_by_command"]


@given(st.data(), st.integers(1, 12), st.lists(st.sampled_from([*STEPS, *CLEAN_UPS]), max_size=80))
def test_what_may_be_returned_to_outlives_clean_ups(data: st.DataObject, retained: int, steps: list[str]) -> None:
    query = Query(lambda n: data.draw(st.integers(0, n - 1)), retained)
    for name in [*steps, *CLEAN_UPS]:
        if name in CLEAN_UPS:
            getattr(query, name)()
            query.check()
        else:
            query.step(name)


TABLES = {"counts": COUNTS}
RESTORE_STEPS = 90
RETAINED = 4
State = dict[str, int]


class OnExecutor:
    """The shard on one executor; carried commits come with the query's pointer, whoever asks."""

    def __init__(
        self, storage: ObjectStorage, executor: Executor, directory: Path, carried: dict[Pointer, bytes]
    ) -> None:
        self.backend = MemoryBackend(directory, TABLES, new_id)
        self.log = ObjectCommitLog(storage, PREFIX, TABLES, executor, directory, "memory", 2500, carried)
        self.store = VersionedStore(self.backend, self.log)

    def write(self, base: Pointer | None, version: int, rows: State) -> Pointer:
        with self.store.begin(base, version) as transaction:
            keys = keys_of(COUNTS, [(name,) for name in rows])
            transaction.put("counts", keys, values_of(COUNTS, [(n,) for n in rows.values()]))
            pointer = transaction.commit()
        assert pointer is not None
        return pointer

    def lineage(self, pointer: Pointer) -> Lineage:
        with self.store.read_at(pointer) as view:
            return Lineage.of(view.properties)

    def state(self, pointer: Pointer) -> State:
        with self.store.read_at(pointer) as view:
            return {str(key[0]): int(value[0]) for key, value in contents(view, "counts").items()}


class RestoringQuery:
    """A query whose executors come and go."""

    def __init__(self, storage: TimedStorage, executor: Executor, home: Path, chance: random.Random) -> None:
        self.storage, self.executor, self.home, self.chance = storage, executor, home, chance
        self.carried: dict[Pointer, bytes] = {}
        self.opened = 0
        self.at = [self.open(), self.open()]
        self.here = 0
        self.accepted: list[tuple[Pointer, State]] = []
        self.newest = 0

    def open(self) -> OnExecutor:
        self.opened += 1
        return OnExecutor(self.storage, self.executor, self.home / str(self.opened), self.carried)

    def commit(self, *, accept: bool) -> None:
        base, state = self.accepted[-1] if self.accepted else (None, {})
        version = (base.version if base else 0) + self.chance.randint(1, 2)
        few = self.chance.random() < 0.7
        rows = {f"u{self.chance.randint(0, 400)}": version for _ in range(3 if few else 200)}
        pointer = self.at[self.here].write(base, version, rows)
        if accept:
            self.accepted.append((pointer, state | rows))
            self.newest = max(self.newest, version)

    def step(self) -> None:
        self.storage.now_ms += 2 * GRACE_MS
        name = self.chance.choices(["commit", "drop", "snapshot", "move", "back", "new executor"], [12, 2, 7, 2, 1, 1])[
            0
        ]
        if name in ("commit", "drop") or not self.accepted:
            self.commit(accept=name != "drop")
        elif name == "snapshot":
            pointer, _ = self.accepted[-1]
            self.at[self.here].state(pointer)
            self.at[self.here].log.write_snapshot(self.at[self.here].backend, pointer)
        elif name == "move":
            self.here = 1 - self.here
        elif name == "back":
            kept = self.returnable()
            self.accepted = self.accepted[: self.accepted.index(self.chance.choice(kept)) + 1]
        else:
            self.at[self.here].backend.close()
            self.at[self.here] = self.open()

    def returnable(self) -> list[tuple[Pointer, State]]:
        horizon = self.newest - RETAINED
        below = [v for v in self.accepted if v[0].version <= horizon]
        return [*below[-1:], *(v for v in self.accepted if v[0].version > horizon)]

    @property
    def objects(self) -> PrefixedStorage:
        return PrefixedStorage(self.storage, PREFIX)

    def clean_up(self) -> None:
        if self.chance.random() < 0.5:
            pointer, _ = self.accepted[-1]
            chain = self.at[self.here].lineage(pointer).chain
            run_retention(self.objects, pointer, chain, retained=RETAINED)
        else:
            history = History(list_shard(self.objects), Headers(self.objects))
            needed = needed_in_storage(RETAINED, history)
            carry_out(self.objects, plan(history, needed, self.storage.now_ms, GRACE_MS))

    def check(self) -> None:
        assert verify_shard(self.objects, self.executor, RETAINED).damages == ()
        for pointer, state in self.returnable():
            anew = self.open()
            assert anew.state(pointer) == state
            snapshot = anew.lineage(pointer).snapshot
            anew.backend.close()
            if snapshot is not None:
                taken = self.storage.objects.pop(f"{PREFIX}/{snapshot.key}")
                without = self.open()
                assert without.state(pointer) == state, f"no way around {snapshot.key}"
                without.backend.close()
                self.storage.objects[f"{PREFIX}/{snapshot.key}"] = taken


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.mark.parametrize("seed", repetitions(1, 60))
def test_every_version_within_the_horizon_is_restored_in_two_ways(executor: Executor, seed: int) -> None:
    storage = TimedStorage()
    with ram_directory() as home:
        query = RestoringQuery(storage, executor, home, random.Random(seed))
        for number in range(RESTORE_STEPS):
            query.step()
            if number % 9 == 8 and query.accepted:
                query.clean_up()
                query.check()
    gone = {key for key in storage.ever - storage.objects.keys() if "/probes/" not in key}
    assert len(gone) > 5, "a history that shows nothing"
