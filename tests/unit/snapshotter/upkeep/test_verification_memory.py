"""What verification holds of a shard: a little of each object, however much its header repeats."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.snapshotter.upkeep.verification import verify_shard
from tests.model.shard_history import ShardHistory, TimedStorage

pytestmark = [pytest.mark.all, pytest.mark.slow(5)]


def peak_bytes(commits: int) -> int:
    """Return what it takes to verify so many commits, in chains of up to a hundred objects."""
    history = ShardHistory(TimedStorage())
    history.grow(None, commits, snapshot_every=100)
    with ThreadPoolExecutor(2) as executor:
        tracemalloc.start()
        try:
            report = verify_shard(history.objects, executor, commits)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert report.versions == commits
    assert not report.damages
    return peak


def test_chains_are_held_once() -> None:
    """Alone, a header takes 25 KB on average, nearly all of which stands in the header before it, too."""
    assert (peak_bytes(800) - peak_bytes(300)) / 500 < 3_000
