"""How large state is: what the newest version is made of, whatever else is stored."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.snapshotter.upkeep.catalogue import SHARDS_READ_MAX, OperatorListing, StateSizes, list_state_dir
from tests.model.shard_history import ShardHistory, TimedStorage
from tests.unit.holdfast.commands.state_dir import put_record


class CountedStorage(TimedStorage):
    """Counts what is read."""

    reads = 0

    def get(self, key: str, *limit: int) -> memoryview:
        self.reads += 1
        return super().get(key, *limit)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def made(shards: int, snapshot_every: int = 5) -> tuple[CountedStorage, OperatorListing]:
    storage = CountedStorage()
    put_record(storage, "totals", shards)
    for shard in range(shards):
        ShardHistory(storage, f"totals/shard-{shard:04d}").grow(None, 22, snapshot_every)
    storage.reads = 0
    return storage, list_state_dir(storage).operators["totals"]


def test_older_versions_do_not_count(executor: ThreadPoolExecutor) -> None:
    """The parts of the newest snapshot, and the commits since; twenty versions and four snapshots lie there."""
    storage, operator = made(1)
    (shard,) = operator.shards.values()
    found = StateSizes(storage, executor).of_operator(operator)
    history = ShardHistory(storage, shard.prefix)
    assert shard.newest_snapshot is not None
    parts = StateSizes(storage, executor).snapshot_bytes(shard.prefix, shard.newest_snapshot)
    later = sum(o.size_bytes for o in shard.of_kind("commit") if o.version in (21, 22))
    assert found.of_shards == {shard.prefix: (parts or 0) + later}
    assert found.estimated == 0
    assert 0 < found.state_bytes < shard.stored_bytes / 2
    assert history.stored() == set(shard.objects)


def test_without_a_snapshot_all_commits_are_the_state(executor: ThreadPoolExecutor) -> None:
    """A restore reads each of them."""
    storage, operator = made(1, snapshot_every=0)
    (shard,) = operator.shards.values()
    found = StateSizes(storage, executor).of_operator(operator)
    assert found.state_bytes == sum(o.size_bytes for o in shard.of_kind("commit"))
    assert storage.reads == 0


@pytest.mark.slow(1)
def test_of_many_shards_some_are_read_once(executor: ThreadPoolExecutor) -> None:
    """The others are as large as those for what they store; and what was read is remembered."""
    storage, operator = made(100)
    sizes = StateSizes(storage, executor)
    found = sizes.of_operator(operator)
    assert storage.reads == SHARDS_READ_MAX
    assert found.estimated == 100 - SHARDS_READ_MAX
    values = sorted(found.of_shards.values())
    assert values[-1] - values[0] <= 0.02 * values[0]  # all are alike
    assert sizes.of_operator(operator) == found
    assert storage.reads == SHARDS_READ_MAX


def test_a_damaged_manifest_is_estimated(executor: ThreadPoolExecutor) -> None:
    """The others tell; where none can be read, what is stored counts."""
    storage, operator = made(3)
    victims = [shard.newest_snapshot for shard in operator.shards.values()]
    for shard, victim in list(zip(operator.shards, victims, strict=True))[:1]:
        assert victim is not None
        storage.objects[f"{shard}/{victim.key}"] = (b"?", storage.now_ms)
    found = StateSizes(storage, executor).of_operator(operator)
    assert found.estimated == 1
    assert len(set(found.of_shards.values())) <= 2
