"""When a shard gets a new snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.snapshotter.lineage import Lineage

# Times the wanted length: from here on each micro-batch waits for a snapshot for a while, and here it fails.
_OVERDUE, _FULL = 4, 16


@dataclass(frozen=True)
class SnapshotPolicy:
    """When the background writes a snapshot of a shard: as soon as one of these is reached.

    Attributes
    ----------
    max_commits : int
        Commit objects since the last snapshot.
    max_bytes : int or None
        Bytes of these.
    interval_seconds : int or None
        Time since the last snapshot, if anything was written since.
    """

    max_commits: int = 20
    max_bytes: int | None = None
    interval_seconds: int | None = None

    def is_due(self, lineage: Lineage, age_seconds: float = 0.0) -> bool:
        """Whether the background should write a snapshot of the version with this lineage.

        Parameters
        ----------
        age_seconds : float
            Time since the last snapshot was written; where there is none, since the shard was first seen.
        """
        commits, snapshot = lineage.commits, lineage.snapshot
        # Carried commits stay in the lineage when a snapshot is made of the newest of them.
        is_carried = bool(lineage.since) and (snapshot is None or lineage.since[-1] != snapshot.pointer)
        if not commits and not is_carried:  # nothing was written since
            return False
        return (
            len(commits) >= self.max_commits
            or (self.max_bytes is not None and sum(entry.size_bytes for entry in commits) >= self.max_bytes)
            or (self.interval_seconds is not None and age_seconds >= self.interval_seconds)
        )

    def is_overdue(self, lineage: Lineage) -> bool:
        """Whether the chain is so long that the next commit should wait for a snapshot."""
        return len(lineage.commits) >= _OVERDUE * self.max_commits

    def is_full(self, lineage: Lineage) -> bool:
        """Whether the chain is so long that there must be no more commits without a snapshot."""
        return len(lineage.commits) >= _FULL * self.max_commits
