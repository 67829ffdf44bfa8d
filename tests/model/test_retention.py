"""Retention over random histories: whatever a query may still return to restores after every clean-up, in two ways.

The oracle knows what Spark knows: the lineage that it has accepted, and how far back it keeps its own state. Histories
hold commits that were stored, carried and dropped, snapshots that two executors finish late, shards that move, queries
that go back, and clean-ups by executors that have not heard of the newest versions.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from holdfast.snapshotter.snapshots.manifest import Manifest
from holdfast.snapshotter.upkeep.catalogue import Headers, list_shard
from holdfast.snapshotter.upkeep.retention import History, carry_out, needed_in_storage, plan, run_retention
from tests.model.shard_history import PREFIX, ShardHistory, TimedStorage, Version

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
def test_whatever_the_query_may_return_to_restores_after_every_clean_up(
    data: st.DataObject, retained: int, steps: list[str]
) -> None:
    query = Query(lambda n: data.draw(st.integers(0, n - 1)), retained)
    for name in [*steps, *CLEAN_UPS]:
        if name in CLEAN_UPS:
            getattr(query, name)()
            query.check()
        else:
            query.step(name)
