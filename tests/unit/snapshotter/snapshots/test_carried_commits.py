"""Small commits that travel with the query's pointer."""

from __future__ import annotations

import pytest

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, StateLostError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from tests.unit.snapshotter.snapshots.shard import SHARD, Opener, states


@pytest.mark.slow(1)
def test_small_commits_cost_no_requests_and_become_an_object_when_they_are_large(
    shard_of: Opener, storage: ObjectStorage
) -> None:
    one = shard_of(carried_bytes=3000)
    pointers: list[Pointer] = []
    for n in range(150):
        pointers.append(one.write(pointers[-1] if pointers else None, range(n, n + 2), n))
    objects = [info.key for info in storage.list(f"{SHARD}/commits/")]
    assert 1 < len(objects) < 40
    assert all(len(data) <= 3000 for data in one.log.carried.values())
    for pointer in pointers[::10]:
        other = shard_of(carried_bytes=3000)
        carried = one.log.carried.get(pointer)
        other.log.carried.update({pointer: carried} if carried else {})
        n = pointers.index(pointer)
        assert other.state(pointer) == {str(i): min(i, n) for i in range(n + 2)}
        after = other.write(pointer, range(1), 999)
        assert other.state(after)["0"] == 999


def test_a_carried_commit_goes_on_over_a_snapshot(shard_of: Opener, storage: ObjectStorage) -> None:
    """Versions whose commits are carried have snapshots too, and the next chain begins there."""
    one = shard_of(carried_bytes=4000)
    first = one.write(None, range(2000), 1)  # an object
    second = one.write(first, range(5), 2)
    entry, _ = one.snapshot(second)
    third = one.write(one.write(second, range(3), 3), range(1), 4)
    lineage = one.lineage(third)
    assert lineage.chain == (entry,)
    assert lineage.since[0] == second
    other = shard_of(carried_bytes=4000)
    other.log.carried = {third: one.log.carried[third]}
    wanted = states((range(2000), 1), (range(5), 2), (range(3), 3), (range(1), 4))
    assert other.state(third) == wanted
    storage.delete([f"{SHARD}/{entry.key}"])
    third_executor = shard_of(carried_bytes=4000)
    third_executor.log.carried = {third: one.log.carried[third]}
    assert third_executor.state(third) == wanted, "the commit objects and the carried one are enough"


def test_what_a_snapshot_of_a_carried_version_has_stored_stays_known(shard_of: Opener) -> None:
    """A process that looks for the snapshots of others finds this one again; all was then sent anew."""
    one = shard_of(carried_bytes=4000)
    second = one.write(one.write(None, range(2000), 1), range(5), 2)
    one.snapshot(second)
    third = one.write(second, range(3), 3)
    one.log.snapshots.discover(one.lineage(third))
    _, manifest = one.snapshot(third)
    assert 0 < manifest.new_bytes < manifest.stored_bytes / 4


def test_a_carried_commit_that_did_not_come_is_an_error(shard_of: Opener) -> None:
    """Never a state without it."""
    one, other = shard_of(carried_bytes=4000), shard_of(carried_bytes=4000)
    second = one.write(one.write(None, range(3), 1), range(3), 2)
    with pytest.raises(StateLostError):
        other.store.begin(second)
    one.log.carried.clear()
    with pytest.raises(StateLostError, match="its own checkpoint location"):
        one.write(second, range(1), 3)


def test_a_carried_commit_that_was_altered_is_refused(shard_of: Opener) -> None:
    one, other = shard_of(carried_bytes=4000), shard_of(carried_bytes=4000)
    pointer = one.write(None, range(3), 1)
    data = bytearray(one.log.carried[pointer])
    data[40] ^= 1
    other.log.carried[pointer] = bytes(data)
    with pytest.raises(CorruptionError, match="the commit that the query carries"):
        other.store.begin(pointer)
