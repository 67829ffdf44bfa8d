"""When a shard gets a new snapshot.

A chain of commits is bounded in objects and in bytes. By default the bytes follow the state: a restore reads at most
about twice the snapshot, so a large shard is not uploaded again for a few changes, and a small one does not grow a
chain many times its size.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.snapshotter.lineage import Lineage

# Multiples of the wanted length: above the first, each micro-batch waits a while for a snapshot; above the second it
# fails.
_OVERDUE, _FULL = 4, 16
#: Fewer bytes of commits do not count: reading them is cheaper than a snapshot.
MIN_BYTES = 64 << 20


@dataclass(frozen=True)
class SnapshotPolicy:
    """When the background writes a snapshot of a shard: as soon as one of these is reached."""

    max_commits: int = 20  #: Commit objects since the last snapshot
    #: Bytes of these. None follows the state: as many as the snapshot has, and `MIN_BYTES` at least.
    max_bytes: int | None = None
    interval_seconds: int | None = None  #: Time since the last snapshot, if anything was written since

    def is_due(self, lineage: Lineage, age_seconds: float = 0.0) -> bool:
        """Whether the background should write a snapshot of the version with this lineage.

        `age_seconds`: time since the last snapshot was written; where there is none, since the shard was first seen.
        """
        snapshot = lineage.snapshot
        # Carried commits stay in the lineage when a snapshot is made of the newest of them.
        is_carried = bool(lineage.since) and (snapshot is None or lineage.since[-1] != snapshot.pointer)
        if not lineage.commits and not is_carried:  # nothing was written since
            return False
        return self._is_longer(lineage, 1, self.max_bytes or _bytes_of_state(lineage)) or (
            self.interval_seconds is not None and age_seconds >= self.interval_seconds
        )

    def is_overdue(self, lineage: Lineage) -> bool:
        """Whether the chain is so long that the next commit should wait for a snapshot."""
        return self._is_longer(lineage, _OVERDUE, self._bearable_bytes(lineage))

    def is_full(self, lineage: Lineage) -> bool:
        """Whether the chain is so long that no further commit may go without a snapshot."""
        return self._is_longer(lineage, _FULL, self._bearable_bytes(lineage))

    def _bearable_bytes(self, lineage: Lineage) -> int:
        """Return the bytes whose multiples delay or fail a commit; early snapshots must not cause early failures."""
        return max(self.max_bytes or 0, _bytes_of_state(lineage))

    def _is_longer(self, lineage: Lineage, times: int, wanted_bytes: int) -> bool:
        """Whether the commits since the snapshot exceed a multiple of the policy, in number or in bytes."""
        commits = lineage.commits
        stored_bytes = sum(entry.stored_bytes for entry in commits)
        # At least so many commits: however large one is, there must be time for a snapshot after it.
        by_bytes = len(commits) >= times and stored_bytes >= times * wanted_bytes
        return len(commits) >= times * self.max_commits or by_bytes


def _bytes_of_state(lineage: Lineage) -> int:
    """Return the size of the state: of the snapshot or, before the first one, of the largest commit."""
    largest = max((entry.stored_bytes for entry in lineage.commits), default=0)
    return max(MIN_BYTES, lineage.snapshot.stored_bytes if lineage.snapshot else largest)
