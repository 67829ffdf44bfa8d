"""Retention of one shard, case by case: what stays, what goes, what a killed clean-up leaves; and the size of state."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, HoldfastError, NotFoundError, UnavailableError
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import (
    SHARDS_READ_MAX,
    Headers,
    OperatorListing,
    StateSizes,
    list_shard,
    list_state_dir,
)
from holdfast.snapshotter.upkeep.retention import (
    GRACE_MS,
    CleanUpPlan,
    History,
    carry_out,
    needed_in_storage,
    plan,
    run_retention,
)
from holdfast.testing.faulty_storage import Action, Fault, FaultyStorage
from tests.model.shard_history import PREFIX, ShardHistory, TimedStorage, Version
from tests.unit.holdfast.commands.conftest import put_record

DAY_MS = 24 * GRACE_MS


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def storage() -> TimedStorage:
    return TimedStorage()


@pytest.fixture
def shard(storage: TimedStorage) -> ShardHistory:
    return ShardHistory(storage)


def clean(storage: ObjectStorage, at: Version, retained: int = 5, **more: object) -> CleanUpPlan:
    """Clean up as the background does, when the query has accepted a version."""
    return run_retention(PrefixedStorage(storage, PREFIX), at.pointer, at.chain, retained=retained, **more)  # type: ignore[arg-type]


def planned_by_command(storage: ObjectStorage, now_ms: int, retained: int = 5) -> CleanUpPlan:
    shard = PrefixedStorage(storage, PREFIX)
    history = History(list_shard(shard), Headers(shard))
    return plan(history, needed_in_storage(retained, history), now_ms, DAY_MS)


def versions(keys: object, kind: str) -> list[int]:
    """Return the version numbers of the commits or snapshots among some keys."""
    found = [key.split("/")[1] for key in keys if key.startswith(kind)]  # type: ignore[attr-defined]
    return sorted(int(name.partition("-")[0]) for name in found)


def test_the_retained_versions_keep_two_ways_and_the_rest_goes(storage: TimedStorage, shard: ShardHistory) -> None:
    """Version 25 is the oldest that may be asked for: its snapshot 20, and 10 in case that is damaged."""
    made = shard.grow(None, 30, snapshot_every=10)
    storage.now_ms += 2 * GRACE_MS
    done = clean(storage, made[-1])
    assert done.needed_from == 10
    assert versions(shard.stored(), "commits") == list(range(10, 31))
    assert versions(shard.stored(), "snapshots") == [10, 20, 30]
    assert all("version 10" in reason for key, reason in done.delete.items() if key.startswith("commits"))
    assert not [key for key in shard.stored() if key.startswith("probes")]


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_nothing_goes_while_a_needed_part_is_missing(storage: TimedStorage, shard: ShardHistory, how: str) -> None:
    """What stands in for that snapshot is what would go; and each later one that shares the file names it, too."""
    made = shard.grow(None, 30, snapshot_every=10)
    storage.now_ms += 2 * GRACE_MS
    (named,) = {m.files[0].parts[0].key for m in shard.manifests.values() if m.pointer.version == 20}
    data = bytes(storage.get(f"{PREFIX}/{named}"))
    storage.delete([f"{PREFIX}/{named}"])
    if how == "cut":
        storage.put(f"{PREFIX}/{named}", data[:-1])
    before = shard.stored()
    with pytest.raises(CorruptionError, match="a part that a snapshot names is missing") as caught:
        clean(storage, made[-1])
    assert caught.value.facts["key"] == f"{PREFIX}/{named}"
    assert shard.stored() == before


@pytest.mark.parametrize(
    ("retained", "needed"), [(9, 10), (10, 1), (19, 1), (0, 10), (1, 10), (29, 1), (30, 0), (1000, 0)]
)
def test_the_horizon_is_exact(storage: TimedStorage, shard: ShardHistory, retained: int, needed: int) -> None:
    """The version at the horizon itself counts: 30 - 10 = 20, whose chain begins at snapshot 10."""
    made = shard.grow(None, 30, snapshot_every=10)
    storage.now_ms += 2 * GRACE_MS
    assert clean(storage, made[-1], retained).needed_from == needed


def test_an_idle_shard_keeps_the_version_it_is_at(storage: TimedStorage, shard: ShardHistory) -> None:
    """Spark's horizon has long passed it, but nothing has taken its place; nothing goes however often one cleans."""
    made = shard.grow(None, 3)
    storage.now_ms += 1000 * DAY_MS
    assert not clean(storage, made[-1], 1).delete
    assert not planned_by_command(storage, storage.now_ms, 1).delete


def test_a_shard_without_any_version_is_cleaned_of_parts_only(storage: TimedStorage, shard: ShardHistory) -> None:
    """Its first snapshot never got to its manifest."""
    shard.begin_snapshot(Version(Pointer(1, "aa"), None, Lineage(), Lineage()))
    storage.now_ms += 2 * DAY_MS
    planned = planned_by_command(storage, storage.now_ms)
    assert set(planned.delete) == shard.stored()
    assert set(planned.delete.values()) == {"no remaining snapshot names it"}


def test_parts_stay_while_a_manifest_that_stays_names_them(storage: TimedStorage, shard: ShardHistory) -> None:
    made = shard.grow(None, 60, snapshot_every=10)
    storage.now_ms += 2 * GRACE_MS
    clean(storage, made[-1], 1)
    left = [m for e, m in shard.manifests.items() if e.key in shard.stored()]
    named = {part.key for manifest in left for file in manifest.files for part in file.parts}
    assert {key for key in shard.stored() if key.startswith("files")} == named
    assert len(named) < sum(manifest.new_bytes > 0 for manifest in shard.manifests.values()) * 2


def test_an_upload_under_way_is_left_alone(storage: TimedStorage, shard: ShardHistory) -> None:
    """T29: parts whose manifest is not there yet are younger than the grace period."""
    made = shard.grow(None, 30, snapshot_every=10)
    storage.now_ms += 2 * GRACE_MS
    manifest = shard.begin_snapshot(made[-1])
    storage.now_ms += GRACE_MS - 100
    clean(storage, made[-1])
    entry = shard.finish_snapshot(manifest)
    after = shard.commit(made[-1])
    assert after.chain[0] == entry
    assert not shard.missing(after, shard.stored())


@pytest.mark.slow(0.5)
def test_an_attempt_that_was_dropped_goes_with_its_time(storage: TimedStorage, shard: ShardHistory) -> None:
    """T35: a thousand of them leave nothing behind once the query has moved on."""
    first = shard.grow(None, 30, snapshot_every=10)
    for _ in range(1000):
        shard.commit(first[-1])
    assert len(shard.stored()) > 1000
    more = shard.grow(shard.commit(first[-1]), 40, snapshot_every=10)
    storage.now_ms += 2 * GRACE_MS
    clean(storage, more[-1])
    assert len(shard.stored()) < 50


def test_a_shard_whose_commits_are_mostly_carried_is_cleaned_too(storage: TimedStorage, shard: ShardHistory) -> None:
    """Snapshots between commit objects name no commits; every version, carried or not, keeps its two ways."""
    made: list[Version] = []
    for number in range(1, 121):
        made.append(shard.commit(made[-1] if made else None, carried=number % 30 != 0))
        if number % 10 == 0:
            shard.snapshot(made[-1])
    storage.now_ms += 2 * DAY_MS
    needed = planned_by_command(storage, storage.now_ms, 15).needed_from
    done = clean(storage, made[-1], 15)
    assert needed == done.needed_from == 50
    assert versions(shard.stored(), "commits") == [60, 90, 120]
    for version in made[104:]:
        assert not shard.missing(version, shard.stored())
        assert shard.restores_without(version, version.chain[0], shard.stored())


def test_a_snapshot_among_carried_commits_stays_until_one_is_stored(storage: TimedStorage, shard: ShardHistory) -> None:
    """Its executor has lost the shard, and nothing that is stored names it; when it is back, a commit builds on it."""
    made = [shard.commit(None, carried=True)]
    made.append(shard.commit(made[-1], carried=True))
    snapshot = shard.snapshot(made[-1], executor=1)
    for _ in range(8):
        made.append(shard.commit(made[-1], carried=True))
    storage.now_ms += 2 * GRACE_MS
    clean(storage, made[-1], 2)
    back = shard.commit(made[-1], executor=1)
    assert back.chain[0] == snapshot
    assert not shard.missing(back, shard.stored())
    newer = shard.snapshot(made[-1], executor=0)
    after = shard.commit(made[-1], carried=True, executor=0)
    assert after.chain == (newer,)
    storage.now_ms += 2 * GRACE_MS
    clean(storage, after, 2)
    assert snapshot.key in shard.stored()


def test_a_version_that_knew_no_newer_snapshot_keeps_its_own(storage: TimedStorage, shard: ShardHistory) -> None:
    """Another executor has written 10 and 20, and the query comes back to it: no manifest says that 25 needs 5."""
    made = shard.grow(None, 10, snapshot_every=5)
    shard.notes[1] = {}
    for number in range(11, 31):
        made.append(shard.commit(made[-1] if number > 11 else made[8], executor=0, step=1 if number > 11 else 2))
        shard.notes[0] = {}
        if number in (15, 20):
            shard.notes[1] = dict(shard.notes[1])
            shard.snapshot(made[-1], executor=1)
    late = made[-5]
    assert late.chain[0].version == 5
    at = shard.commit(made[-1], executor=1)
    assert at.chain[0].version == 20
    storage.now_ms += 2 * GRACE_MS
    clean(storage, at, 5)
    assert not shard.missing(late, shard.stored())
    assert shard.restores_without(late, late.chain[0], shard.stored())


def test_a_query_that_went_far_back_is_at_what_it_wrote_last(storage: TimedStorage, shard: ShardHistory) -> None:
    """The command goes by the time of the newest commit, not by its number: 12 is where the query is, not 60."""
    made = shard.grow(None, 60, snapshot_every=10)
    storage.now_ms += 1000
    back = shard.grow(made[9], 2)
    storage.now_ms += 2 * DAY_MS
    carry_out(shard.objects, planned_by_command(storage, storage.now_ms))
    for version in (*back, made[9]):
        assert not shard.missing(version, shard.stored())


def test_every_version_that_the_query_may_be_at_is_asked(storage: TimedStorage, shard: ShardHistory) -> None:
    """A fork of long ago, above the horizon by its number, may be what the query is at: its beginning stays."""
    made = shard.grow(None, 25, snapshot_every=10)
    fork = shard.commit(made[2], step=40)
    made += shard.grow(made[-1], 5, snapshot_every=10)
    storage.now_ms += 2 * DAY_MS
    assert planned_by_command(storage, storage.now_ms).needed_from == 1
    storage.delete([f"{PREFIX}/{fork.chain[-1].key}"])
    assert planned_by_command(storage, storage.now_ms).needed_from == 10


def test_the_parts_of_a_snapshot_that_stays_for_its_youth_stay_too(storage: TimedStorage, shard: ShardHistory) -> None:
    """An executor that has lost the shard finishes late: its manifest is young, its parts are not."""
    made = shard.grow(None, 60, snapshot_every=10)
    late = shard.begin_snapshot(made[4], executor=1)
    storage.now_ms += 2 * GRACE_MS
    entry = shard.finish_snapshot(late, executor=1)
    clean(storage, made[-1])
    assert {entry.key, *(part.key for file in late.files for part in file.parts)} <= shard.stored()
    storage.now_ms += 2 * GRACE_MS
    clean(storage, made[-1])
    assert not {entry.key, *(part.key for file in late.files for part in file.parts)} & shard.stored()


def test_neighbours_and_strangers_are_left_alone(storage: TimedStorage, shard: ShardHistory) -> None:
    """T38: another shard, an operator of a longer name, and a file whose name we would not write."""
    made = shard.grow(None, 30, snapshot_every=10)
    others = [f"{PREFIX}1/commits/1-aa", "totals/shard-0004/files/0123456789abcdef-0", "totals2/shard-0003/x", "mine"]
    for key in others:
        storage.put(key, b"?")
    strange = ["notes.txt", f"commits/7-{'a' * 65}", f"snapshots/7-{'a' * 65}-{'0' * 16}"]
    for key in strange:
        storage.put(f"{PREFIX}/{key}", b"?")
    storage.now_ms += 2 * GRACE_MS
    storage.put(f"{PREFIX}/commits/07-aa", b"?")
    done = clean(storage, made[-1])
    assert set(others) <= set(storage.objects)
    assert all("not written by holdfast" in done.delete[key] for key in strange)
    assert "younger than the grace period" in done.keep["commits/07-aa"]


@pytest.mark.parametrize("hours", [-1, 1])
def test_only_the_clock_of_the_store_counts(storage: TimedStorage, shard: ShardHistory, hours: int) -> None:
    """T39: it may be an hour off, and round to seconds: what was stored a moment ago stays."""
    storage.now_ms = (storage.now_ms + hours * GRACE_MS) // 1000 * 1000
    made = shard.grow(None, 30, snapshot_every=10)
    manifest = shard.begin_snapshot(made[-1])
    clean(storage, made[-1], 1)
    shard.finish_snapshot(manifest)
    assert not shard.missing(shard.commit(made[-1]), shard.stored())
    storage.now_ms -= 3 * GRACE_MS  # it jumps back
    assert not clean(storage, made[-1], 1).delete


@pytest.mark.parametrize(
    ("harm", "victim"),
    [
        *(("damage", victim) for victim in ("snapshots/20-", "snapshots/30-", "commits/25-")),
        *(("remove", victim) for victim in ("snapshots/20-", "commits/25-", "commits/28-")),
    ],
)
def test_what_is_unreadable_may_be_needed(storage: TimedStorage, shard: ShardHistory, harm: str, victim: str) -> None:
    made = shard.grow(None, 30, snapshot_every=10)
    key = next(key for key in storage.objects if victim in key)
    data, written_ms = storage.objects.pop(key)
    if harm == "damage":
        storage.objects[key] = (data[:10] + b"?" + data[11:], written_ms)
    storage.now_ms += 2 * GRACE_MS
    before = shard.stored()
    with pytest.raises(CorruptionError, match=victim):
        clean(storage, made[-1])
    assert shard.stored() == before
    with pytest.raises(CorruptionError, match=victim):
        planned_by_command(storage, storage.now_ms)


def test_an_object_that_was_moved_here_is_refused(storage: TimedStorage, shard: ShardHistory) -> None:
    """A manifest of another shard may name parts of the same names: what is in it says nothing about this shard."""
    made = shard.grow(None, 30, snapshot_every=10)
    other = ShardHistory(storage, "totals/shard-0001")
    other.snapshot(other.grow(None, 1)[0])
    key = next(key for key in other.stored() if key.startswith("snapshots"))
    storage.put(f"{PREFIX}/{key}", storage.get(f"{other.prefix}/{key}"))
    with pytest.raises(CorruptionError, match="belongs elsewhere"):
        planned_by_command(storage, storage.now_ms, 100)
    assert made


@pytest.mark.parametrize(
    ("action", "error"),
    [*((action, UnavailableError("injected")) for action in ("put", "list", "get")), ("get", NotFoundError("gone"))],
)
def test_a_request_that_fails_deletes_nothing(
    storage: TimedStorage, shard: ShardHistory, action: Action, error: HoldfastError
) -> None:
    """T40, T41: a listing that fails never means "no references", nor does an object that somebody else has deleted."""
    made = shard.grow(None, 30, snapshot_every=10)
    storage.now_ms += 2 * GRACE_MS
    before = shard.stored()
    faulty = FaultyStorage(storage, [Fault("fail", action=action, error=lambda: error)])
    with pytest.raises(type(error), match=error.message):
        clean(faulty, made[-1])
    faulty.assert_all_hit()
    assert before <= shard.stored()
    if isinstance(error, NotFoundError):  # the storage answers, so what read its clock is deleted too
        assert shard.stored() == before


def test_parts_stay_while_objects_that_may_name_them_stay(storage: TimedStorage, shard: ShardHistory) -> None:
    """T37: a failed delete is told, and the next clean-up does the rest."""
    made = shard.grow(None, 40, snapshot_every=10)
    storage.now_ms += 2 * GRACE_MS
    faulty = FaultyStorage(storage, [Fault("fail", action="delete")])
    with pytest.raises(UnavailableError, match="injected"):
        clean(faulty, made[-1])
    faulty.assert_all_hit()
    assert [o.action for o in faulty.operations].count("delete") == 1
    clean(storage, made[-1])
    assert versions(shard.stored(), "snapshots") == [20, 30, 40]


class OneByOne(TimedStorage):
    """Deletes key by key, and is killed before one of them."""

    def __init__(self, survives: int) -> None:
        super().__init__()
        self.survives = survives

    def delete(self, keys: object) -> None:
        for key in keys:  # type: ignore[attr-defined]
            if self.survives == 0:
                raise Killed
            self.survives -= 1
            super().delete([key])


@pytest.mark.slow(0.5)
def test_a_clean_up_that_is_killed_at_any_delete_is_completed_by_the_next() -> None:
    """No manifest that is left names a part that is gone, every retained version restores, and nothing is left over."""
    for survives in itertools.count():
        storage = OneByOne(survives)
        shard = ShardHistory(storage)
        made = shard.grow(None, 40, snapshot_every=10)
        storage.now_ms += 2 * GRACE_MS
        killed = False
        try:
            clean(storage, made[-1])
        except Killed:
            killed = True
        for entry, manifest in shard.manifests.items():
            if entry.key in shard.stored():
                assert {p.key for file in manifest.files for p in file.parts} <= shard.stored()
        storage.survives = 10_000
        storage.now_ms += 2 * GRACE_MS
        clean(storage, made[-1])
        assert versions(shard.stored(), "commits") == list(range(20, 41))
        assert versions(shard.stored(), "snapshots") == [20, 30, 40]
        assert not [key for key in shard.stored() if key.startswith("probes")]
        for version in made[34:]:
            assert not shard.missing(version, shard.stored())
        if not killed:
            assert survives > 20
            return


def test_a_shard_that_hangs_holds_up_no_other(storage: TimedStorage, shard: ShardHistory) -> None:
    """`holdfast gc` reads shards side by side: one slow object must not stop all of them."""
    shard.grow(None, 2, snapshot_every=2)
    is_asked, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        is_asked.set()
        goes_on.wait(20)

    def cleaned(of: ObjectStorage) -> int:
        return History(list_shard(PrefixedStorage(storage, PREFIX)), Headers(PrefixedStorage(of, PREFIX))).cleaned_below

    with ThreadPoolExecutor(2) as threads:
        hanging = threads.submit(cleaned, FaultyStorage(storage, [Fault("delay", wait=hang)]))
        try:
            assert is_asked.wait(20)
            assert threads.submit(cleaned, storage).result(timeout=10) == 0
        finally:
            goes_on.set()
        assert hanging.result() == 0


def test_two_clean_ups_at_once_do_what_one_does(storage: TimedStorage, shard: ShardHistory) -> None:
    """T33: the second one has listed, and deletes what is gone already."""
    made = shard.grow(None, 40, snapshot_every=10)
    storage.now_ms += 2 * DAY_MS
    first = planned_by_command(storage, storage.now_ms)
    second = planned_by_command(storage, storage.now_ms, 15)
    carry_out(shard.objects, first)
    left = shard.stored()
    carry_out(shard.objects, second)
    assert shard.stored() == left
    assert made


def test_a_clean_up_costs_few_requests(storage: TimedStorage, shard: ShardHistory) -> None:
    """And less when it is given what it read the last time."""
    made = shard.grow(None, 200, snapshot_every=20)
    storage.now_ms += 2 * GRACE_MS
    headers = Headers(PrefixedStorage(counting := FaultyStorage(storage), PREFIX))
    clean(counting, made[-1], 100, headers=headers)
    actions = [o.action for o in counting.operations]
    assert [actions.count(a) for a in ("put", "list", "delete")] == [1, 1, 2]
    assert actions.count("get") <= 11
    more = shard.grow(made[-1], 20, snapshot_every=20)
    counting.operations.clear()
    clean(counting, more[-1], 100, headers=headers)
    assert [o.action for o in counting.operations].count("get") <= 3


class CountedStorage(TimedStorage):
    """Counts what is read."""

    reads = 0

    def get(self, key: str, *limit: int) -> memoryview:
        self.reads += 1
        return super().get(key, *limit)


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
    storage, operator = made(3)
    victims = [shard.newest_snapshot for shard in operator.shards.values()]
    for shard, victim in list(zip(operator.shards, victims, strict=True))[:1]:
        assert victim is not None
        storage.objects[f"{shard}/{victim.key}"] = (b"?", storage.now_ms)
    found = StateSizes(storage, executor).of_operator(operator)
    assert found.estimated == 1
    assert len(set(found.of_shards.values())) <= 2
