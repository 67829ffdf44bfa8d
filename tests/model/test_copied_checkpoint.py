"""A copy of a query's checkpoint, at work beside the query: what the query may return to outlives all its clean-ups."""

from __future__ import annotations

import random

import pytest

from holdfast.snapshotter.ownership.claims import Tenure
from holdfast.snapshotter.upkeep.retention import run_retention
from tests.model.shard_history import ShardHistory, TimedStorage, Version
from tests.tiers import repetitions
from tests.unit.snapshotter.ownership.runs import claimant

RETAINED = 10


def lost(history: ShardHistory, versions: list[Version]) -> list[str]:
    """Return what is missing of the versions that the query may return to, by either way of restoring them."""
    there = history.stored()
    recent = versions[-RETAINED - 1 :]
    missing = [key for version in recent for key in history.missing(version, there)]
    without = [
        str(version.pointer)
        for version in recent
        for first in version.chain[:1]
        if first.kind == "snapshot" and not history.restores_without(version, first, there)
    ]
    return missing + without


def copied(chance: random.Random, *, is_beside: bool) -> int:
    """Run a query and its copy by turns, the copy far ahead; return how often a clean-up took what the query needs."""
    history = ShardHistory(TimedStorage())
    query = history.grow(None, chance.randrange(30, 90), snapshot_every=chance.choice((5, 20)))
    copy = [*query]
    history.notes[1] = dict(history.notes.get(0, {}))
    every = {0: chance.choice((3, 10, 40)), 1: chance.choice((2, 20))}
    took = 0
    query += [history.commit(query[-1]) for _ in range(chance.randrange(15))]  # before the copy was started
    for _ in range(25):
        for executor, versions, steps in ((0, query, chance.randrange(4)), (1, copy, chance.randrange(1, 12))):
            for _ in range(steps):
                versions.append(history.commit(versions[-1], executor=executor))
                if len(versions) % every[executor] == 0:
                    history.snapshot(versions[-1], executor)
        newest = copy[-1]
        at = newest.pointer.version
        held = Tenure(claimant(), since_ms=0 if is_beside else None)
        retained = held.retained(RETAINED, at)
        run_retention(history.objects, newest.pointer, newest.chain, retained=retained, grace_ms=0)
        if lost(history, query):
            took += 1
            break
    return took


@pytest.mark.parametrize("seed", repetitions(2, 60))
def test_a_copy_beside_the_query_takes_nothing_from_it(seed: int) -> None:
    assert copied(random.Random(seed), is_beside=True) == 0


def test_a_copy_in_its_place_would() -> None:
    """So the test above can fail."""
    assert sum(copied(random.Random(seed), is_beside=False) for seed in range(4)) > 1
