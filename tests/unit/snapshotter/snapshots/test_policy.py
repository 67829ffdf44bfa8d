"""When a shard gets a snapshot, when batches wait for one, and when they fail without: by commits, bytes and time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.backends.base import Pointer
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy


def test_the_policy_looks_at_commits_their_bytes_and_the_time() -> None:
    commit = ChainEntry("commit", Pointer(1, "aa"), 100, "00")
    snapshot = replace(commit, kind="snapshot")

    def of(commits: int) -> Lineage:
        return Lineage((snapshot, *[commit] * commits), (), commit)

    policy = SnapshotPolicy(max_commits=3)
    assert [policy.is_due(of(n), 1e9) for n in (2, 3)] == [False, True]
    assert [policy.is_overdue(of(n)) for n in (11, 12)] == [False, True]
    assert [policy.is_full(of(n)) for n in (47, 48)] == [False, True]
    assert [SnapshotPolicy(max_bytes=200).is_due(of(n)) for n in (1, 2)] == [False, True]
    by_time = SnapshotPolicy(interval_seconds=60)
    assert [by_time.is_due(of(1), age) for age in (59.0, 60.0)] == [False, True]
    assert by_time.is_due(Lineage((snapshot,), (Pointer(2, "bb"),), commit), 60.0), "a carried commit is something new"
    assert not by_time.is_due(Lineage((snapshot,), (), commit), 60.0), "nothing was written since"


MIB = 1 << 20


@pytest.mark.parametrize(
    ("snapshot_mib", "commits_mib", "is_due"),
    [
        (None, [63], False),  # too little to count
        (None, [64], True),  # a first load
        (None, [900], True),
        (1, [30, 30], False),
        (1, [30, 40], True),
        (1000, [300, 300], False),
        (1000, [300, 300, 400], True),
        (1000, [1000], True),
    ],
)
def test_by_default_the_bytes_of_a_chain_follow_the_state(
    snapshot_mib: int | None, commits_mib: list[int], is_due: bool
) -> None:
    """What is restored is about twice the snapshot at most, or 64 MiB more."""
    lineage = grown(snapshot_mib, commits_mib)
    assert SnapshotPolicy().is_due(lineage) is is_due


def grown(snapshot_mib: int | None, commits_mib: list[int]) -> Lineage:
    commits = [ChainEntry("commit", Pointer(i, "aa"), mib * MIB, "00") for i, mib in enumerate(commits_mib, start=2)]
    snapshot = ChainEntry("snapshot", Pointer(1, "aa"), 0, "00", (snapshot_mib or 0) * MIB)
    return Lineage((*([snapshot] if snapshot_mib else []), *commits), (), commits[-1])


def test_a_chain_cannot_grow_without_bound_in_bytes() -> None:
    """Large commits wait for a snapshot, and then fail, as many commits do; a few never fail, however large."""
    policy = SnapshotPolicy()
    assert [policy.is_overdue(grown(100, [100] * n)) for n in (3, 4)] == [False, True]
    assert [policy.is_full(grown(100, [100] * n)) for n in (15, 16)] == [False, True]
    assert not policy.is_overdue(grown(100, [5000] * 3)), "there must be time for a snapshot"
    assert [policy.is_full(grown(100, [5000] * n)) for n in (15, 16)] == [False, True]
    assert not policy.is_full(grown(None, [100] * 15))
    early = SnapshotPolicy(max_bytes=MIB)
    assert early.is_due(grown(100, [1]))
    assert not early.is_full(grown(100, [1] * 100)), "who wants snapshots early does not want to fail early"
    assert not SnapshotPolicy(max_commits=1000).is_overdue(grown(100, [1] * 399))
