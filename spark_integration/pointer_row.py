"""What Spark keeps for each shard in the state of its own operator: the row of the query's pointer.

Commits that are too small for an object of their own travel in it; see `holdfast.snapshotter.commits`.
"""

from __future__ import annotations

from typing import Any

from holdfast.backends.base import Pointer

POINTER_STATE = "version long, commit string, carried binary"
POINTER_COLUMNS = ["version", "commit", "carried"]


def read_pointer(row: tuple[Any, ...]) -> tuple[Pointer, dict[Pointer, bytes]]:
    """Return the pointer that a row holds, and by pointer the commit that it carries, if any."""
    version, commit_id, carried = row
    pointer = Pointer(version, commit_id)
    return pointer, {} if carried is None else {pointer: bytes(carried)}
