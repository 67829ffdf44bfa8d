"""What a call of a shard says about itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.backends.base import Pointer
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.spark_integration.shard_call import call as shard_call

DURABLE: Any = SimpleNamespace(log=object())


def entry(kind: str, version: int) -> ChainEntry:
    return ChainEntry(kind, Pointer(version, "aa"), 1, "0" * 64)


FIRST, SECOND = entry("commit", 50_001), entry("commit", 50_020)


@pytest.mark.parametrize(
    ("read", "behind"),
    [
        (None, 1),
        (Lineage(since=(FIRST.pointer, SECOND.pointer)), 30),
        (Lineage((FIRST, SECOND), (), SECOND), 30),
        (Lineage((FIRST,), (SECOND.pointer,), FIRST), 30),
        (Lineage((entry("snapshot", 50_010), SECOND), (), SECOND), 20),
        (Lineage((entry("snapshot", 50_020),), (SECOND.pointer,), FIRST), 10),
    ],
)
def test_a_shard_that_began_late_is_not_behind_since_the_first_micro_batch(read: Lineage | None, behind: int) -> None:
    """Else its first key raises an alarm about snapshots, in a query that has run for a month."""
    watch = shard_call._Watch(read)
    assert watch._lag_versions(DURABLE, Pointer(50_030, "bb")) == behind
