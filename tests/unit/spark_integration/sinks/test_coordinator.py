"""The coordinator of a two-phase commit: stories that differ, queries that follow each other, two drivers at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typing_extensions import Buffer

from holdfast import clock, sinks
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    FencedError,
    HoldfastError,
    InvalidArgumentError,
    StateLostError,
    UnavailableError,
)
from holdfast.sinks import TwoPhaseSink
from holdfast.snapshotter.ownership.queries import QueryOrigin, declare_origin
from holdfast.snapshotter.sink_log import Entry, SinkLog
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from holdfast.spark_integration.executor.processes import ProcessId
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.exactly_once import warn_of_other_sinks
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery
from tests.model.sink_target import SCHEMA, Crash, CrashingStorage, Killed, ModelSink, Target
from tests.ram import storage_in_ram

if TYPE_CHECKING:
    import pyarrow as pa


def coordinator(url: str, target: Target, query: SinkQuery, retained: int = 100) -> Coordinator:
    return Coordinator(ModelSink(target, Crash()), query, open_storage(url), retained)


def show(url: str, target: Target, query: SinkQuery, *batch_ids: int, retained: int = 100) -> Coordinator:
    """Run a query over some micro-batches, each of one part."""
    run = coordinator(url, target, query, retained)
    run.start(batch_ids[0], SCHEMA)
    for batch_id in batch_ids:
        handle = f"{query.query_id}-{batch_id}"
        target.prepared[handle] = batch_id
        run.finish(batch_id, Prepared(({"id": handle},), 1))
    return run


@pytest.fixture
def url() -> Iterator[str]:
    with storage_in_ram() as storage:
        yield storage.url


QUERY, HEIR = SinkQuery("model", "query-1"), SinkQuery("model", "query-2", "query-1")


def test_a_second_query_is_refused_and_a_named_successor_is_not(url: str) -> None:
    """Two queries under one name would each abort what the other prepares; by consent one takes the other's place."""
    target = Target(has_mark=False)
    show(url, target, QUERY, 0, 1)
    with pytest.raises(ConflictError, match="other_query=query-1"):
        coordinator(url, target, SinkQuery("model", "query-2")).start(0, SCHEMA)
    show(url, target, HEIR, 0)
    with pytest.raises(ConflictError, match="other_query=query-2"):
        coordinator(url, target, QUERY).start(2, SCHEMA)
    assert set(target.visible) == {"query-1-0", "query-1-1", "query-2-0"}


def test_what_a_replaced_query_decided_is_committed_first(url: str) -> None:
    """A decision outlives the query that made it, and what else it prepared is given up."""
    target = Target(has_mark=False)
    show(url, target, QUERY, 0)
    target.prepared["query-1-0"] = target.visible.pop("query-1-0")
    target.prepared["leftover"] = 1
    show(url, target, HEIR, 0)
    assert set(target.visible) == {"query-1-0", "query-2-0"}
    assert not target.prepared


@pytest.mark.parametrize("at", range(1, 12))
def test_a_successor_that_dies_while_it_begins_begins_again(url: str, at: int) -> None:
    """Of all that the replaced query has shown, its target knows the handles of the last micro-batch only."""
    target = Target(has_mark=False)
    show(url, target, QUERY, 8, 9, 10)
    target.forgotten = {"query-1-8", "query-1-9"}
    target.prepared["leftover"] = 11
    crash = Crash(at=at)
    with suppress(Killed):
        Coordinator(ModelSink(target, crash), HEIR, CrashingStorage(open_storage(url), crash), 100).start(0, SCHEMA)
    show(url, target, HEIR, 0)
    assert set(target.visible) == {"query-1-8", "query-1-9", "query-1-10", "query-2-0"}
    assert not target.prepared


def test_a_successor_that_cannot_begin_is_not_in_the_first_ones_way(url: str) -> None:
    """What the replaced query decided cannot be shown for now, so it may have to go on itself."""
    target = Target(has_mark=False)
    show(url, target, QUERY, 0)
    with pytest.raises(UnavailableError):
        Coordinator(ModelSink(target, Crash(at=1, kills=False)), HEIR, open_storage(url), 100).start(0, SCHEMA)
    show(url, target, QUERY, 1)
    show(url, target, SinkQuery("model", "query-3", "query-1"), 0)


def test_a_restored_query_shows_nothing_again_by_naming_the_one_before_it(url: str) -> None:
    """It was saved after micro-batch 1. What the other one has shown since is in no savepoint; nobody continues it."""
    target, storage = Target(has_mark=False), open_storage(url)
    declare_origin(storage, QueryOrigin("query-2", "query-2", "query-1", 1, {}))
    with pytest.raises(ConflictError, match=r"copy _sinks/model from its state directory.*saved=1"):
        coordinator(url, target, HEIR).start(1, SCHEMA)
    show(url, target, QUERY, 0, 1, 2)
    with pytest.raises(ConflictError, match=r"--continue-sinks.*saved=1 shown=2"):
        coordinator(url, target, HEIR).start(1, SCHEMA)
    show(url, target, QUERY, 3)
    declare_origin(storage, QueryOrigin("query-2", "query-2", "query-1", 3, {}))
    show(url, target, HEIR, 1)
    show(url, target, HEIR, 2)
    assert target.visible.keys() == {*(f"query-1-{batch}" for batch in range(4)), "query-2-1", "query-2-2"}


def test_a_continued_sink_keeps_the_plan_until_its_query_decides(url: str) -> None:
    """Rows that Spark has planned anew are not those that the sink shows, however often the query has begun since."""
    target, log = Target(has_mark=False), SinkLog(open_storage(url), "model")
    show(url, target, QUERY, 0, 1)
    target.prepared["leftover"] = 9
    _, decision = log.latest()
    assert decision is not None
    restored = Entry("model", decision.number + 1, "query-2", "aa", decision.number, ("query-1",))
    log.append(replace(restored, stands_for=1, plan="a" * 32))
    again = SinkQuery("model", "query-2")
    for _ in range(2):
        coordinator(url, target, again).start(1, SCHEMA, "a" * 32)
    with pytest.raises(ConflictError, match="planned this micro-batch again"):
        coordinator(url, target, again).start(1, SCHEMA, "b" * 32)


def test_a_restored_query_shows_nothing_again_by_naming_another_restored_one(url: str) -> None:
    """Both were restored from one savepoint, of after micro-batch 1: what the first has shown is not in the second."""
    target, storage = Target(has_mark=False), open_storage(url)
    show(url, target, QUERY, 0, 1)
    for query_id, of_query, batch_id in (
        ("query-2", "query-1", 1),
        ("query-3", "query-2", 1),
        ("query-4", "query-1", 1),
        ("query-5", "query-1", 0),
    ):
        declare_origin(storage, QueryOrigin(query_id, query_id, of_query, batch_id, {}))
    coordinator(url, target, HEIR).start(1, SCHEMA)
    with pytest.raises(ConflictError, match=r"saved=0 shown=1 by=query-1"):
        coordinator(url, target, SinkQuery("model", "query-5", "query-2")).start(1, SCHEMA)
    show(url, target, HEIR, 1)
    after_it = SinkQuery("model", "query-4", "query-2")
    with pytest.raises(ConflictError, match=r"--continue-sinks.*saved=1 shown=1 by=query-2"):
        coordinator(url, target, after_it).start(1, SCHEMA)
    coordinator(url, target, SinkQuery("model", "query-3", "query-2")).start(1, SCHEMA)
    with pytest.raises(ConflictError, match=r"saved=1 shown=1 by=query-2"):
        coordinator(url, target, SinkQuery("model", "query-4", "query-3")).start(1, SCHEMA)
    assert target.visible.keys() == {"query-1-0", "query-1-1", "query-2-1"}


@pytest.mark.parametrize(
    ("batch_id", "newest", "error"),
    [
        pytest.param(1, 3, ConflictError, id="checkpoint location turned back"),
        pytest.param(4, -1, StateLostError, id="target emptied"),
        pytest.param(3, 1, StateLostError, id="target older than the last micro-batch but one"),
        pytest.param(4, 4, StateLostError, id="target ahead of the decisions"),
        *((batch_id, newest, None) for batch_id, newest in ((3, 2), (3, 3), (4, 3))),
    ],
)
def test_stories_that_differ_are_refused(
    url: str, batch_id: int, newest: int, error: type[HoldfastError] | None
) -> None:
    """Of Spark, the decisions and the target; those that agree go on."""
    target = Target(has_mark=True)
    show(url, target, QUERY, 0, 1, 2, 3)
    target.newest = newest
    run = coordinator(url, target, QUERY)
    with pytest.raises(error, match="another name") if error else nullcontext():
        run.start(batch_id, SCHEMA)
        assert run.is_decided(batch_id) == (batch_id == 3)


def test_a_lost_directory_of_decisions_is_no_loss_once_spark_has_ended_all(url: str) -> None:
    """The state directory was deleted; the target's mark and Spark agree, so nothing is doubled."""
    target = Target(has_mark=True)
    show(url, target, QUERY, 0, 1)
    target.last.clear()
    show(f"{url}/new", target, QUERY, 2)
    with pytest.raises(StateLostError, match="shown=2"):
        coordinator(f"{url}/other", target, QUERY).start(2, SCHEMA)


def test_a_twin_that_prepares_late_is_aborted_in_the_same_run(url: str) -> None:
    """Who waits for open transactions, as Kafka's consumers do, does not wait for the next start."""
    target = Target(has_mark=False)
    run = show(url, target, QUERY, 0)
    target.prepared["part"] = 1
    run.finish(1, Prepared(({"id": "part"},), 1, repeated=True))
    target.prepared |= {"late": 1, "next": 2}
    run.finish(2, Prepared(({"id": "next"},), 1))
    assert not target.prepared


def test_what_came_after_the_successors_start_is_not_left(url: str) -> None:
    """The one before is a saved query, whose place a restored one has taken, and which may not start for months."""
    target = Target(has_mark=False)
    run = coordinator(url, target, QUERY)
    run.start(0, SCHEMA)
    show(url, target, HEIR, 0)
    target.prepared["late"] = 0
    with pytest.raises(FencedError):
        run.finish(0, Prepared(({"id": "ended"}, {"id": "late"}), 2))
    assert not target.prepared
    assert set(target.visible) == {"query-2-0"}


class _Apart(ModelSink):
    """Tells queries' parts from each other, as all real sinks do."""

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        return [each for each in super().leftovers(query) if str(each["id"]).startswith(query.query_id)]


def test_what_ended_queries_prepare_late_is_aborted_by_the_next_start(url: str) -> None:
    """A driver that was frozen wakes up, its tasks prepare, and it dies: its parts may hold locks.

    Each look costs: of the queries that followed each other, the last two are asked for.
    """
    target, queries = Target(has_mark=False), [f"query-{number}" for number in range(1, 5)]
    for before, query_id in zip([None, *queries], queries, strict=False):
        query = SinkQuery("model", query_id, before)
        Coordinator(_Apart(target, Crash()), query, open_storage(url), 100).start(0, SCHEMA)
    target.prepared |= dict.fromkeys([f"{query_id}-late" for query_id in queries], 0)
    for _ in range(2):
        Coordinator(_Apart(target, Crash()), query, open_storage(url), 100).start(0, SCHEMA)
        assert list(target.prepared) == ["query-1-late"]


class _Landing(WrappedStorage):
    """A put lands, and its repeat by the client is refused, as where credentials have expired in between."""

    loses = False

    def put_if_absent(self, key: str, data: Buffer) -> None:
        super().put_if_absent(key, data)
        if self.loses:
            raise InvalidArgumentError("access denied")


def test_a_decision_that_landed_unseen_keeps_what_it_names(url: str) -> None:
    """An error of the put is no proof that the decision does not stand: the next start finds it, and all its parts."""
    target = Target(has_mark=True)
    show(url, target, QUERY, 0)
    landing = _Landing(open_storage(url))
    run = Coordinator(ModelSink(target, Crash()), QUERY, landing, 100)
    run.start(1, SCHEMA)
    landing.loses = True
    target.prepared["part"] = 1
    with pytest.raises(InvalidArgumentError):
        run.finish(1, Prepared(({"id": "part"},), 1))
    coordinator(url, target, QUERY).start(1, SCHEMA)
    assert target.shown(1) == {"part"}


def test_a_driver_that_sleeps_while_decisions_are_pruned_decides_nothing(url: str) -> None:
    """Of its micro-batch no decision is left, of later ones there are."""
    target = Target(has_mark=False)
    late = show(url, target, QUERY, 0)
    show(url, target, QUERY, *range(1, 60), retained=2)
    target.prepared["late"] = 1
    with pytest.raises(ConflictError, match="newer driver of this query has started"):
        late.finish(1, Prepared(({"id": "late"},), 1))
    assert target.shown(1) == {"query-1-1"}


def test_a_commit_whose_error_was_swallowed_is_made_up_for(url: str) -> None:
    """A user's function caught the error, so Spark went on; the target, which keeps a mark, still has all parts."""
    target = Target(has_mark=True)
    show(url, target, QUERY, 0, 1)
    target.prepared |= {"part-0": 2, "part-1": 2}
    crash = Crash(at=3, kills=False)  # after confirm and one part
    failing = Coordinator(ModelSink(target, crash), QUERY, open_storage(url), 100)
    failing.resume(3)
    with pytest.raises(UnavailableError):
        failing.finish(2, Prepared(({"id": "part-0"}, {"id": "part-1"}), 2))
    assert (target.newest, target.shown(2)) == (1, {"part-0"})
    show(url, target, QUERY, 3)
    assert target.shown(2) == {"part-0", "part-1"}
    target.newest, target.forgotten = 2, {"query-1-3"}
    with pytest.raises(StateLostError, match="does not know it any more"):
        coordinator(url, target, QUERY).start(4, SCHEMA)


def test_a_micro_batch_that_is_planned_anew_is_refused_and_ends_nobody(url: str) -> None:
    """By a start from an older location, and by one of a query that was restored: the driver that works goes on."""
    target = Target(has_mark=True)
    run = show(url, target, QUERY, 0)
    target.prepared["one"] = 1
    run.finish(1, Prepared(({"id": "one"},), 1), "1a" * 16)
    for plan in ("1a" * 16, ""):
        again = coordinator(url, target, QUERY)
        again.start(1, SCHEMA, plan)
        assert again.is_decided(1)
    with pytest.raises(ConflictError, match=r"planned this micro-batch again.*batch=1"):
        coordinator(url, target, QUERY).start(1, SCHEMA, "2b" * 16)
    target.prepared["two"] = 2
    again.finish(2, Prepared(({"id": "two"},), 1))
    assert target.shown(2) == {"two"}


def test_rows_that_are_dropped_are_told_of_where_they_are_others(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A location that was turned back by one micro-batch looks like a repeat, but for what it reads."""
    target = Target(has_mark=False)
    show(url, target, QUERY, 0, 1)
    run = coordinator(url, target, QUERY)
    run.start(1, SCHEMA)
    assert run.is_decided(1)
    run.warn_of_dropped_rows(1)
    assert not caplog.records
    run.warn_of_dropped_rows(7)
    assert "micro-batch 1 was decided with 1 rows" in caplog.text


class _Broken(ModelSink):
    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        raise KeyError("password")


def test_what_a_sink_raises_while_it_gives_up_hides_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    target = Target(has_mark=False)
    run = Coordinator(_Broken(target, Crash()), QUERY, open_storage(url), 100)
    run.start(0, SCHEMA)
    target.prepared |= {"part": 0, "twin": 0}
    run.finish(0, Prepared(({"id": "part"},), 1, repeated=True))
    assert "KeyError" in caplog.text
    assert "password" not in caplog.text


class _Refusing(ModelSink):
    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        raise InvalidArgumentError("there is no table")


def test_a_query_that_was_never_taken_is_in_nobodys_way(url: str) -> None:
    """Its target was refused at its first start; a query of a new location needs no consent of it."""
    target = Target(has_mark=False)
    with pytest.raises(InvalidArgumentError, match="no table"):
        Coordinator(_Refusing(target, Crash()), QUERY, open_storage(url), 100).start(0, SCHEMA)
    show(url, target, SinkQuery("model", "query-3"), 0)


def test_decisions_do_not_pile_up(url: str) -> None:
    """A query of a hundred thousand micro-batches stores no more objects than one of a hundred."""
    target = Target(has_mark=False)
    show(url, target, QUERY, *range(100), retained=10)
    assert len(open_storage(url).list("")) < 30


@pytest.mark.parametrize("query", [SinkQuery("a.b", "q"), SinkQuery("../a", "q"), SinkQuery("a", "q/1")])
def test_names_that_would_lead_elsewhere_are_refused(url: str, query: SinkQuery) -> None:
    """Names become keys, and prefixes of settings."""
    with pytest.raises(InvalidArgumentError):
        coordinator(url, Target(has_mark=False), query)


class KeepsAll(WrappedStorage):
    """A storage of which somebody has taken the right to delete away."""

    def delete(self, keys: Iterable[str]) -> None:
        raise InvalidArgumentError("access denied", action="delete")


def test_old_entries_that_cannot_be_deleted_stop_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A micro-batch that is shown does not fail of what is cleaned up after it."""
    target = Target(has_mark=False)
    show(url, target, QUERY, 0)
    run = Coordinator(ModelSink(target, Crash()), QUERY, KeepsAll(open_storage(url)), 2)
    run.start(1, SCHEMA)
    for batch_id in range(1, 40):
        target.prepared[str(batch_id)] = batch_id
        run.finish(batch_id, Prepared(({"id": str(batch_id)},), 1))
    assert len(target.visible) == 40
    assert "old entries stay" in caplog.text


def test_a_damaged_decision_stops_the_query(url: str) -> None:
    """What is decided is not guessed: a decision that cannot be read is an error that names it."""
    target = Target(has_mark=False)
    show(url, target, QUERY, 0, 1)
    open_storage(url).put("_sinks/model/00000000000000000003", b"nonsense")
    with pytest.raises(CorruptionError, match="00000000000000000003"):
        coordinator(url, target, QUERY).start(2, SCHEMA)


def test_a_process_of_this_machine_that_lives_is_not_fenced(url: str) -> None:
    """A copy of the checkpoint location that is started beside its original must not end it; a restart may."""
    target = Target(has_mark=True)

    def begun(process: int, now_ms: Callable[[], int] = clock.now_ms) -> Coordinator:
        run = Coordinator(
            ModelSink(target, Crash()), QUERY, open_storage(url), 100, ProcessId.of(process), now_ms=now_ms
        )
        run.start(0, SCHEMA)
        return run

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        running = begun(other.pid)
        with pytest.raises(ConflictError, match=rf"another process on this machine.*process={other.pid}"):
            begun(os.getpid())
        target.prepared["part"] = 0
        running.finish(0, Prepared(({"id": "part"},), 1))
        other.communicate()
    begun(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        # Whose last micro-batch is long ago is idle, or has stopped: its state makes way then, too.
        begun(other.pid, lambda: clock.now_ms() + 400_000)
        # The clock is set back.
        begun(os.getpid(), lambda: clock.now_ms() - 400_000)
        other.communicate()
    assert target.shown(0) == {"part"}


def test_a_copy_of_the_location_does_not_end_its_original(url: str) -> None:
    """On whatever machine, and exactly as far; a restart may, and one whose location was moved, later."""
    target = Target(has_mark=True)

    def begun(location: str | None, later_ms: int = 0, process: int | None = None) -> Coordinator:
        run = Coordinator(
            ModelSink(target, Crash()),
            QUERY,
            open_storage(url),
            100,
            ProcessId.of(process) if process else None,
            now_ms=lambda: clock.now_ms() + later_ms,
            location=location,
        )
        run.start(0, SCHEMA)
        return run

    original = begun("s3://bucket/query")
    with pytest.raises(ConflictError, match=r"another checkpoint location.*a copy of a location needs its own"):
        begun("s3://bucket/copy")
    target.prepared["part"] = 0
    original.finish(0, Prepared(({"id": "part"},), 1))
    for location in ("s3a://bucket/query/", None, "s3://bucket/query"):
        begun(location)
    with pytest.raises(ConflictError, match="another checkpoint location"):
        begun("/query")
    begun("s3://bucket/moved", 301_000)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        begun("s3://bucket/moved", 302_000, other.pid)
        other.communicate()
    begun("s3://bucket/again", 303_000, os.getpid())
    assert target.shown(0) == {"part"}


SINKS: list[Callable[[str], TwoPhaseSink]] = [
    lambda name: sinks.parquet(name, "/data/out"),
    lambda name: sinks.delta(name, "/data/out"),
    lambda name: sinks.postgres(name, "totals"),
    lambda name: sinks.kafka(name, "alerts"),
]


@pytest.mark.parametrize("make", SINKS)
@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "a.b", "ä", "a" * 101])
def test_a_name_that_no_key_can_hold_is_refused(make: Callable[[str], TwoPhaseSink], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="invalid sink name: use at most 100 letters"):
        make(name)


@pytest.mark.parametrize("make", SINKS)
def test_the_longest_name_is_taken(make: Callable[[str], TwoPhaseSink]) -> None:
    assert make("a" * 100).name == "a" * 100


def test_settings_of_a_misspelt_sink_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing would read them. A name that another sink of the program has, or may have elsewhere, is none."""
    sinks.exactly_once(sinks.parquet("orders-us", "/data/out"))

    def told(*names: str) -> list[str]:
        caplog.clear()
        warn_of_other_sinks({f"spark.holdfast.sink.{name}.secret": "not-to-be-seen" for name in names}, "orders-eu")
        assert "not-to-be-seen" not in caplog.text
        return [record.getMessage().split(".*")[0] for record in caplog.records]

    assert told() == told("orders-eu") == told("orders-eu", "orders-us") == told("orders-eu", "alerts") == []
    assert told("orders-eu", "order-eu", "alerts") == ["spark.holdfast.sink.order-eu"]
    assert told("orders-eu", "ORDERS-EU") == ["spark.holdfast.sink.ORDERS-EU"]
    assert told("postgres", "orders-us") == ["spark.holdfast.sink.postgres"]
