"""Numbered objects that are put once, and a sink's log, which is made of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import pytest
from typing_extensions import Buffer

from holdfast.backends import stored_file
from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import ConflictError, CorruptionError, FencedError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.fence import Fence, looks
from holdfast.snapshotter.ownership.queries import QueryOrigin, declare_origin
from holdfast.snapshotter.savepoints.manifest import SavedSink, sinks_of
from holdfast.snapshotter.sink_log import Entry, SinkLog, damages, parse_key, plan_of
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from holdfast.snapshotter.upkeep.catalogue import list_state_dir
from tests import sink_logs
from tests.ram import storage_in_ram

HANDLES = {"gid": "a", "at": [1, {"x": None}]}, {"gid": "b"}
BEGUN = Entry("totals", 1, "q-1", "a1", ending=("q-0",))
DECISION = Entry(
    "totals", 2, "q-1", "a1", 2, (), 7, 5, 30, HANDLES, "0123456789abcdef.42-7", 1_790_000_000_000, "1f" * 16
)
KEY = "_sinks/totals/00000000000000000002"


@pytest.fixture
def log(storage: ObjectStorage) -> SinkLog:
    return SinkLog(storage, "totals")


def test_entries_are_read_as_they_were_stored(log: SinkLog) -> None:
    """Handles are the sink's own JSON, and come back as they were."""
    assert log.newest() is None
    log.append(BEGUN)
    assert (log.newest(), log.decision(log.newest())) == (BEGUN, None)
    log.append(DECISION)
    assert (log.newest(), log.decision(log.newest())) == (DECISION, DECISION)
    log.append(replace(BEGUN, number=3, decided=2))
    assert log.decision(log.newest()) == DECISION
    log.append(replace(BEGUN, number=4, query_id="q-2", decided=2, stands_for=1))
    assert log.newest() == replace(BEGUN, number=4, query_id="q-2", decided=2, stands_for=1)
    with pytest.raises(NotFoundError):
        log.read(5)


def test_whose_a_decision_is_is_told_as_of_an_entry() -> None:
    """A restored query's first micro-batch may be decided by the query before it, until it decides one itself."""
    begun = replace(BEGUN, number=3, decided=2)
    assert (begun.newest_batch(DECISION, "q-1"), begun.newest_batch(None, "q-1")) == (7, -1)
    assert begun.newest_batch(DECISION, "q-2") is None
    restored = replace(begun, query_id="q-2", stands_for=1)
    assert (restored.newest_batch(DECISION, "q-1"), restored.newest_batch(DECISION, "q-2")) == (7, 1)
    assert (restored.newest_batch(None, "q-1"), restored.newest_batch(None, "q-2")) == (None, 1)


def test_of_the_queries_before_it_an_entry_names_those_that_ended_last() -> None:
    """None twice, nor those that are still to be ended, nor its own, which may have come back."""
    entry = replace(BEGUN, ended=("q-7", "q-8", "q-0"), ending=("q-0", "q-9"))
    assert entry.ended_before("q-1", ()) == ("q-0", "q-9")
    assert entry.ended_before("q-9", ("q-0", "q-1")) == ("q-7", "q-8")


def test_a_plan_is_told_by_its_time_and_what_the_sources_will_have_read() -> None:
    batch, pinned = '{"batchTimestampMs": 7, "conf": {}}', '{"batchTimestampMs": 7, "conf": {"a": "b"}}'
    ends = [("left", '{"t":{"0":3}}'), ("right", "-")]
    assert plan_of(batch, ends) == plan_of(pinned, ends[::-1])
    assert plan_of(batch, ends) != plan_of('{"batchTimestampMs": 8, "conf": {}}', ends)
    others = [[("left", "-"), ("right", '{"t":{"0":3}}')], [("left", '{"t":{"0":4}}'), ("right", "-")], ends[:1], []]
    assert len({plan_of(batch, each) for each in [ends, *others]}) == 5


def test_what_is_unknown_is_no_other_plan() -> None:
    """Over Spark Connect nobody knows it, before or now."""
    unknown = replace(DECISION, plan="")
    assert [DECISION.is_of_plan(plan) for plan in (DECISION.plan, "", "2f" * 16)] == [True, True, False]
    assert all(unknown.is_of_plan(plan) for plan in ("", DECISION.plan))


def test_who_appends_to_an_older_entry_is_second(storage: ObjectStorage, log: SinkLog) -> None:
    """However two drivers take turns, each appends only to what it has read, also where old entries are deleted."""
    log.append(BEGUN)
    log.append(BEGUN)  # the same request again, of which the reply was lost
    with pytest.raises(FencedError):
        log.append(replace(BEGUN, driver="b2"))
    for batch_id in range(40):
        sink_logs.decide(storage, "totals", "q-1", batch_id, {})
    newest = replace(BEGUN, number=42, driver="c3", decided=41)
    log.append(newest)
    log.prune(newest, 2)
    with pytest.raises(NotFoundError):
        log.read(2)
    # Its number is free again, so that the storage takes it; but nobody reads it.
    with pytest.raises(ConflictError, match="has taken this number"):
        log.append(replace(DECISION, driver="b2"))
    assert log.newest() == newest


def test_who_sleeps_between_list_and_get_reads_what_is_the_newest_by_then(storage: ObjectStorage) -> None:
    """Others may have gone on so far meanwhile that what was the newest is deleted."""

    class Sleeping(WrappedStorage):
        def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
            if key.endswith("01"):
                sink_logs.begin(storage, "totals", "q-1")
                storage.delete([key])
            return super().get(key, limit_bytes)

    SinkLog(storage, "totals").append(BEGUN)
    newest = SinkLog(Sleeping(storage), "totals").newest()
    assert newest is not None
    assert newest.number == 2


def test_what_others_put_into_the_folder_is_no_entry(storage: ObjectStorage, log: SinkLog) -> None:
    """Hadoop marks folders in S3, and file managers leave notes."""
    log.append(BEGUN)
    for foreign in ("_$folder$", ".DS_Store", "9", "00000000000000000009/x", "00000000000000000000", "9" * 21):
        storage.put(f"_sinks/totals/{foreign}", b"")
    assert log.newest() == BEGUN


@pytest.mark.parametrize("text", ["\ud83d", "part-\udcff.csv"])
def test_what_no_start_could_read_is_not_decided(log: SinkLog, text: str) -> None:
    """As the name of a file that is not UTF-8, in a handle of a sink that somebody else has written."""
    log.append(BEGUN)
    with pytest.raises(InvalidArgumentError, match="lone surrogate"):
        log.append(replace(DECISION, handles=({"file": text},)))
    assert log.newest() == BEGUN
    log.append(replace(DECISION, handles=({"file": "\N{WAVE DASH}\N{OCTOPUS}"},)))
    assert log.read(2).handles == ({"file": "\N{WAVE DASH}\N{OCTOPUS}"},)


@pytest.mark.parametrize(
    "change",
    [
        *({"sink": "other"}, {"sink": "../totals"}, {"number": 3}, {"query_id": "q/2"}, {"query_id": None}),
        *({"driver": "../a"}, {"decided": 3}, {"decided": 1}, {"batch_id": None}, {"batch_id": True}, {"before": -2}),
        *({"ending": ["../q"]}, {"ending": [1]}, {"ended": ["../q"]}, {"rows": -1}),
        *({"handles": handles} for handles in ({}, ["gid"], [{}, None])),
        *({"process": "42-7"}, {"at_ms": -1}, {"surplus": 1}),
    ],
)
def test_what_cannot_be_is_refused(storage: ObjectStorage, log: SinkLog, change: dict[str, Any]) -> None:
    """What comes from storage is hostile: a sink is handed nothing of an entry that is not this log's."""
    values = asdict(DECISION) | {"handles": [dict(handle) for handle in HANDLES]}
    storage.put(KEY, stored_file.encode("sink-entry", {**values, **change})[0])
    with pytest.raises(CorruptionError, match="00000000000000000002"):
        log.newest()


def test_handles_that_no_reader_would_take_are_not_stored(storage: ObjectStorage, log: SinkLog) -> None:
    with pytest.raises(InvalidArgumentError, match="fewer partitions"):
        log.append(replace(DECISION, handles=({"gid": "x" * (16 << 20)},)))
    assert storage.list("") == []


def test_the_newest_entries_stay(storage: ObjectStorage, log: SinkLog) -> None:
    """Old ones go many at a time; the decision that a start needs stays, however often drivers have begun since."""
    for batch_id in range(39):
        sink_logs.decide(storage, "totals", "q-1", batch_id, {})
    newest = replace(DECISION, number=40, decided=40)
    log.append(newest)
    log.prune(newest, 10)
    assert [int(info.key[-20:]) for info in storage.list("")] == list(range(31, 41))
    newest = replace(DECISION, number=41, decided=41)
    log.append(newest)
    log.prune(newest, 1)
    assert len(storage.list("")) == 11, "not one by one"
    for _ in range(39):
        sink_logs.begin(storage, "totals", "q-1")
    begun = replace(BEGUN, number=81, decided=41)
    log.append(begun)
    log.prune(begun, 10)
    assert [int(info.key[-20:]) for info in storage.list("")] == [41, *range(72, 82)]
    assert log.decision(log.newest()) == newest


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (KEY, ("totals", 2)),
        *((f"_sinks/totals/{name}", None) for name in ("2", f"{0:020}", "other")),
        *((f"{folder}/{2:020}", None) for folder in ("_sinks/a.b", "_sinks", "totals/shard-0000")),
    ],
)
def test_only_names_that_we_would_give_are_ours(key: str, found: tuple[str, int] | None) -> None:
    assert parse_key(key) == found


def test_a_directory_lists_its_sinks(storage: ObjectStorage, log: SinkLog) -> None:
    log.append(BEGUN)
    log.append(DECISION)
    storage.put("_sinks/totals/foreign", b"")
    listing = list_state_dir(storage)
    (sink,) = listing.sinks
    assert (sink.sink, sink.numbers) == ("totals", (1, 2))
    assert [info.key for info in listing.unknown] == ["_sinks/totals/foreign"]
    assert damages(storage, sink) == []
    storage.put(KEY, b"damaged")
    gone = replace(sink, numbers=(2, 3))
    assert [key for key, _ in damages(storage, gone)] == [KEY]


def _empty(storage: ObjectStorage) -> None:
    storage.put(KEY, b"")


def _cut_each(storage: ObjectStorage) -> None:
    for info in storage.list("_sinks/totals/"):
        storage.put(info.key, bytes(storage.get(info.key))[:-1])


def _lose_the_decision(storage: ObjectStorage) -> None:
    sink_logs.begin(storage, "totals", "q-1")
    storage.delete([KEY])


def _cut_the_decision(storage: ObjectStorage) -> None:
    """Another query has begun to take the sink over, and its start has failed."""
    SinkLog(storage, "totals").append(replace(BEGUN, number=3, query_id="q-3", decided=2, ending=()))
    storage.put(KEY, bytes(storage.get(KEY))[:-1])


@pytest.mark.parametrize("damage", [_empty, _cut_each, _lose_the_decision, _cut_the_decision])
def test_a_damaged_log_stops_the_savepoints_of_its_own_query_only(
    storage: ObjectStorage, damage: Callable[[ObjectStorage], None], caplog: pytest.LogCaptureFixture
) -> None:
    sink_logs.begin(storage, "totals", "q-1")
    sink_logs.decide(storage, "totals", "q-1", 7, *HANDLES)
    sink_logs.decide(storage, "other", "q-2", 5)
    damage(storage)
    assert sinks_of(storage, "q-2") == (SavedSink("other", 1, 5),)
    assert "ignoring the damaged log of sink 'totals', which this query does not use" in caplog.text
    with pytest.raises(CorruptionError, match=r"write to a sink whose log is damaged.*sink=totals query=q-1"):
        sinks_of(storage, "q-1")


def test_a_damaged_log_stops_the_savepoints_of_all_that_may_have_taken_the_sink_over(storage: ObjectStorage) -> None:
    """The beginning and the decision of a successor name nobody any more."""
    sink_logs.decide(storage, "totals", "q-1", 7)
    sink_logs.begin(storage, "totals", "q-2")
    sink_logs.decide(storage, "totals", "q-2", 0)
    for info in storage.list("_sinks/totals/")[1:]:
        storage.put(info.key, b"")
    for query_id in ("q-1", "q-2"):
        with pytest.raises(CorruptionError, match="the query appears to write to a sink"):
            sinks_of(storage, query_id)


def test_a_damaged_log_stops_the_savepoints_of_a_restored_query_that_may_continue_the_sink(
    storage: ObjectStorage,
) -> None:
    """Its first entry says which of its micro-batches the sink shows already; a clone continues no sink."""
    sink_logs.decide(storage, "totals", "q-1", 7)
    storage.put(KEY, b"")
    declare_origin(storage, QueryOrigin("q-2", "q-2", "q-1", 6, {}))
    declare_origin(storage, QueryOrigin("q-3", "q-1", "q-1", 6, {}))
    with pytest.raises(CorruptionError, match="the query appears to write to a sink"):
        sinks_of(storage, "q-2")
    assert sinks_of(storage, "q-3") == ()


@pytest.mark.parametrize("before", [{"ending": ("q-1",)}, {"ending": (), "ended": ("q-0", "q-1")}])
def test_a_damaged_log_stops_the_savepoints_of_the_second_query_that_was_restored_from_one(
    storage: ObjectStorage, before: dict[str, Any]
) -> None:
    """The first one has continued the sink, has perhaps begun, and has shown nothing: then another one may continue."""
    sink_logs.decide(storage, "totals", "q-1", 7)
    SinkLog(storage, "totals").append(replace(BEGUN, number=2, query_id="q-2", decided=1, stands_for=-1, **before))
    storage.put("_sinks/totals/00000000000000000003", b"")
    declare_origin(storage, QueryOrigin("q-3", "q-3", "q-1", 7, {}))
    with pytest.raises(CorruptionError, match="the query appears to write to a sink"):
        sinks_of(storage, "q-3")
    assert sinks_of(storage, "q-4") == ()


def test_a_log_that_goes_on_after_a_damaged_entry_is_whole(storage: ObjectStorage, log: SinkLog) -> None:
    """A driver at work decides its next micro-batch without reading what came before."""
    log.append(BEGUN)
    log.append(DECISION)
    storage.put(KEY, b"")
    log.append(replace(DECISION, number=3, decided=3, batch_id=8))
    assert sinks_of(storage, "q-1") == (SavedSink("totals", 3, 8),)


def test_a_query_that_was_replaced_does_not_mind_its_successors_damage(storage: ObjectStorage) -> None:
    sink_logs.decide(storage, "totals", "q-1", 7)
    sink_logs.decide(storage, "totals", "q-2", 0)
    storage.put(KEY.replace("2", "3"), b"")
    assert sinks_of(storage, "q-1") == ()


def test_a_query_that_was_ended_does_not_mind_its_successors_damage(storage: ObjectStorage, log: SinkLog) -> None:
    """Each entry of the successor names it, so that a start aborts what it prepares late."""
    sink_logs.decide(storage, "totals", "q-1", 7)
    ended = replace(DECISION, query_id="q-2", ended=("q-1",))
    log.append(ended)
    storage.put(KEY.replace("2", "3"), b"")
    assert sinks_of(storage, "q-1") == ()
    log.append(replace(ended, number=4, batch_id=None, handles=()))
    storage.put(KEY, bytes(storage.get(KEY))[:-1])
    assert sinks_of(storage, "q-1") == ()
    with pytest.raises(CorruptionError):
        sinks_of(storage, "q-2")


class Crowded(WrappedStorage):
    """Before each of our puts somebody else has put, so many times."""

    others = 0

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if self.others:
            self.others -= 1
            self.inner.put_if_absent(key, b"other")
        super().put_if_absent(key, data)


def take(storage: Crowded) -> int:
    """Take the next number as everybody does."""
    fence = Fence(storage, "f")
    for _ in looks(storage.url):
        number, _ = fence.newest()
        with suppress(ConflictError):
            return fence.take(number + 1, b"mine")[-1]
    raise AssertionError("unreachable: the last look raises")


def test_many_may_begin_at_once() -> None:
    """As queries that a program starts upon one Delta table; nobody waits for ever for who writes without end."""
    with storage_in_ram() as inner:
        storage = Crowded(inner)
        storage.others = 40
        assert take(storage) == 41
        storage.others = 10**9
        with pytest.raises(ConflictError, match="other processes were first at every attempt"):
            take(storage)
