"""Verification of a shard to which a query writes: what it cleans up meanwhile is not missing."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest

from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.retention import run_retention
from holdfast.snapshotter.upkeep.verification import verify_shard
from tests.model.shard_history import PREFIX, ShardHistory, TimedStorage, Version

RETAINED = 100


class RunningQuery:
    """A query that goes on, and cleans up, while its shard is read."""

    def __init__(self) -> None:
        self.shard = ShardHistory(TimedStorage())
        self.newest: Version | None = None
        self.go_on(120)

    def go_on(self, versions: int) -> None:
        self.newest = self.shard.grow(self.newest, versions, snapshot_every=20)[-1]
        run_retention(
            PrefixedStorage(self.shard.storage, PREFIX),
            self.newest.pointer,
            self.newest.chain,
            retained=RETAINED,
            grace_ms=0,
        )


@pytest.mark.parametrize("after", [1, 50, 150], ids=lambda after: f"after {after} objects")
def test_what_is_cleaned_up_meanwhile_is_not_missing(executor: Executor, after: int) -> None:
    """The listing is older than what stands in for the objects that it names."""
    query, read = RunningQuery(), 0

    def one_more(_size_bytes: int) -> None:
        nonlocal read
        read += 1
        if read == after:
            query.go_on(60)

    report = verify_shard(query.shard.objects, executor, RETAINED, one_more)
    assert report.damages == ()
    assert report.versions >= RETAINED
    assert report.objects == len(query.shard.stored()), "as of a listing, not of a mixture of two"


def test_real_damage_is_told_whatever_goes_on(executor: Executor) -> None:
    """No number of listings ends it, and none explains it away."""
    shard = ShardHistory(TimedStorage())
    *_, newest = shard.grow(None, 30, snapshot_every=20)

    def go_on(_size_bytes: int) -> None:
        nonlocal newest
        newest = shard.commit(newest)

    lost = f"{PREFIX}/{newest.chain[-2].key}"
    shard.storage.delete([lost])
    report = verify_shard(shard.objects, executor, RETAINED, go_on)
    assert [damage.key for damage in report.damages] == [lost]
