"""What Spark keeps for each shard in the state of its own operator: the row of the query's pointer.

Commits that are too small for an object of their own travel in it; see `holdfast.snapshotter.commits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.backends.base import Pointer

POINTER_STATE = "version long, commit string, carried binary, earliest_timer_ms long, batch_id long"
POINTER_COLUMNS = ["version", "commit", "carried", "earliest_timer_ms", "batch_id"]


class PointerRow(NamedTuple):
    """The row of one shard.

    Attributes
    ----------
    pointer : Pointer
    carried : bytes or None
        The commit of this version, where it is no object of its own.
    earliest_timer_ms : int or None
        No timer of the shard is due before it; None where the shard has no timer.
    batch_id : int
        The micro-batch that put the row, whether it wrote a version or not.
    """

    pointer: Pointer
    carried: bytes | None
    earliest_timer_ms: int | None
    batch_id: int

    @classmethod
    def read(cls, row: tuple[Any, ...]) -> PointerRow:
        """Return the row that Spark's state gave back, whose binary values are bytes or a bytearray."""
        version, commit_id, carried, earliest_timer_ms, batch_id = row
        carried = None if carried is None else bytes(carried)
        return cls(Pointer(version, commit_id), carried, earliest_timer_ms, batch_id)

    def columns(self) -> tuple[int, str, bytes | None, int | None, int]:
        """Return the row as Spark's state takes it."""
        return (*self.pointer, self.carried, self.earliest_timer_ms, self.batch_id)

    @property
    def carried_commits(self) -> Mapping[Pointer, bytes]:
        """By pointer the commit that the row carries, if any."""
        return {} if self.carried is None else {self.pointer: self.carried}
