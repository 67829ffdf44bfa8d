"""The coordinator of a two-phase commit against a model: drivers die at any request, workers at any step.

The target is a plain dict that keeps the seam's contract; Spark is a number, the micro-batch after the last one that it
ended. Each attempt at a micro-batch writes rows of its own, so that two that are mixed, or shown twice, are seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.decisions import Decision, Decisions
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
)
from tests.repetitions import LONG

if TYPE_CHECKING:
    from typing_extensions import Buffer

SCHEMA = pa.schema({"row": pa.string()})
_numbers = itertools.count()


class Killed(BaseException):
    """The driver's end: nobody catches it, and nothing is cleaned up."""


@dataclass
class Crash:
    """Kills the driver, or makes a request fail, before or after what it asks for was done."""

    at: int | None = None
    after: bool = False
    kills: bool = True
    calls: int = 0

    @contextmanager
    def around(self) -> Iterator[None]:
        self.calls += 1
        hit = self.calls == self.at
        if hit and not self.after:
            raise self._error()
        yield
        if hit:
            raise self._error()

    def _error(self) -> BaseException:
        return Killed() if self.kills else UnavailableError("injected fault")


@dataclass
class Target:
    """What survives: parts by handle, prepared and visible; the newest micro-batch, if it keeps a mark."""

    has_mark: bool
    prepared: dict[str, int] = field(default_factory=dict)
    visible: dict[str, int] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    newest: int = -1
    last: dict[str, Sequence[Handle]] = field(default_factory=dict)

    def shown(self, batch_id: int) -> set[str]:
        return {handle for handle, batch in self.visible.items() if batch == batch_id}


class CrashingStorage(WrappedStorage):
    """A storage of which each request is one of the driver's calls."""

    def __init__(self, inner: ObjectStorage, crash: Crash) -> None:
        super().__init__(inner)
        self._crash = crash

    def put(self, key: str, data: Buffer) -> None:
        with self._crash.around():
            super().put(key, data)

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        with self._crash.around():
            return super().get(key, limit_bytes)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        with self._crash.around():
            return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        with self._crash.around():
            super().delete(keys)


class ModelSink(TwoPhaseSink):
    """The seam upon a `Target`."""

    name = "model"

    def __init__(self, target: Target, crash: Crash) -> None:
        self.target, self.crash = target, crash

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        with self.crash.around():
            return self.target.newest if self.target.has_mark else None

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        raise NotImplementedError

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        with self.crash.around():
            if any(str(handle["id"]) not in self.target.prepared for handle in handles):
                raise UnavailableError("something is gone")

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        # One part after the other: a driver may die between two.
        for handle in handles:
            with self.crash.around():
                self._commit(str(handle["id"]))
        self.target.newest = max(self.target.newest, batch_id)
        self.target.last[query.query_id] = handles

    def _commit(self, handle: str) -> None:
        if handle in self.target.forgotten:
            raise StateLostError("the target does not know it any more")
        if handle in self.target.prepared:
            self.target.visible[handle] = self.target.prepared.pop(handle)
        elif handle not in self.target.visible:
            raise StateLostError("the target has lost it")

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        for handle in handles:
            with self.crash.around():
                assert str(handle["id"]) not in self.target.visible, "what is visible cannot be aborted"
                self.target.prepared.pop(str(handle["id"]), None)

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        # A list may lag: what was just committed may be among them.
        with self.crash.around():
            return [*({"id": handle} for handle in self.target.prepared), *self.target.last.get(query.query_id, [])]


class CoordinatorModel(RuleBasedStateMachine):
    """One query that is killed and begun again; see the module."""

    @initialize(has_mark=st.booleans())
    def begin(self, has_mark: bool) -> None:
        self.target = Target(has_mark)
        self.crash = Crash()
        self.storage = CrashingStorage(open_storage(f"memory://sinks-{next(_numbers)}"), self.crash)
        self.run: Coordinator | None = None
        self.batch_id = 0
        #: By micro-batch what each attempt prepared to be shown, and what the last one to end left visible.
        self.attempts: dict[int, list[set[str]]] = {}
        self.ended: dict[int, set[str]] = {}

    @rule(
        parts=st.integers(0, 3),
        at=st.none() | st.integers(1, 14),
        after=st.booleans(),
        kills=st.booleans(),
        repeated=st.booleans(),
        fails=st.booleans(),
    )
    def micro_batch(self, parts: int, at: int | None, after: bool, kills: bool, repeated: bool, fails: bool) -> None:
        """Spark runs a micro-batch; the driver may die, or a request fail, at any of its calls."""
        self.crash.at, self.crash.after, self.crash.kills, self.crash.calls = at, after, kills, 0
        try:
            self._run(parts, repeated=repeated, fails=fails)
        except (Killed, UnavailableError):
            self.run = None
        else:
            self.batch_id += 1

    def _run(self, parts: int, *, repeated: bool, fails: bool) -> None:
        batch_id = self.batch_id
        if self.run is None:
            run = Coordinator(
                ModelSink(self.target, self.crash), SinkQuery("model", "query-1"), self.storage, retained=3
            )
            run.start(batch_id, SCHEMA)
            assert not self.target.prepared, "a start leaves nothing half-done"
            self.run = run
        if self.run.is_decided(batch_id):
            self.ended[batch_id] = next(a for a in self.attempts[batch_id] if a and a == self.target.shown(batch_id))
            return
        assert not self.ended.get(batch_id), "what was shown is not written again"
        try:
            prepared = self._prepare(batch_id, parts, repeated=repeated)
            if fails:
                raise UnavailableError("a task failed")
            self.run.finish(batch_id, prepared)
        except UnavailableError:
            self.run.give_up()
            raise
        self.ended[batch_id] = self.attempts[batch_id][-1]
        if repeated and self.crash.at is None:
            assert not self.target.prepared, "attempts that do not count are given up at once"

    def _prepare(self, batch_id: int, parts: int, *, repeated: bool) -> Prepared:
        """Write one attempt; where tasks were repeated, one that does not count is prepared as well."""
        handles = [f"attempt-{next(_numbers)}" for _ in range(parts)]
        self.attempts.setdefault(batch_id, []).append(set(handles))
        twins = [f"twin-{next(_numbers)}"] if repeated else []
        self.target.prepared |= dict.fromkeys([*handles, *twins], batch_id)
        return Prepared(tuple({"id": handle} for handle in handles), parts, repeated)

    @rule()
    def restart(self) -> None:
        """The driver ends between two micro-batches."""
        self.run = None

    @rule()
    @precondition(
        lambda self: self.run is None and self.batch_id - 1 in self.ended and self.batch_id not in self.attempts
    )
    def repeat(self) -> None:
        """Spark had not noted the end of the last micro-batch when the driver died: it repeats that one."""
        if not self.target.forgotten & self.ended[self.batch_id - 1]:
            self.batch_id -= 1

    @rule()
    @precondition(lambda self: self.run is None)
    def days_go_by(self) -> None:
        """The query is stopped for so long that the target forgets what Spark has ended."""
        self.target.forgotten |= {h for batch, handles in self.ended.items() if batch < self.batch_id for h in handles}

    @rule()
    def a_zombie_prepares(self) -> None:
        """A worker of an attempt that is over prepares late."""
        self.target.prepared[f"zombie-{next(_numbers)}"] = self.batch_id

    @invariant()
    def what_is_shown_is_of_one_attempt(self) -> None:
        for batch_id, attempts in getattr(self, "attempts", {}).items():
            shown = self.target.shown(batch_id)
            assert any(shown <= attempt for attempt in attempts), "no attempts are mixed"
            if batch_id < self.batch_id:
                assert shown == self.ended[batch_id], "what Spark has ended is visible, whole and once"


TestCoordinator = CoordinatorModel.TestCase
TestCoordinator.settings = settings(max_examples=2_000 if LONG else 200, stateful_step_count=30, deadline=None)


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
def url() -> str:
    return f"memory://sinks-{next(_numbers)}"


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


@pytest.mark.parametrize(
    ("batch_id", "newest", "error"),
    [
        pytest.param(1, 3, ConflictError, id="checkpoint location turned back"),
        pytest.param(4, -1, StateLostError, id="target emptied"),
        pytest.param(3, 1, StateLostError, id="target older than the last micro-batch but one"),
        pytest.param(4, 4, StateLostError, id="target ahead of the decisions"),
    ],
)
def test_stories_that_differ_are_refused(url: str, batch_id: int, newest: int, error: type[HoldfastError]) -> None:
    """Where checkpoint, decisions and target disagree, to go on would lose or double results."""
    target = Target(has_mark=True)
    show(url, target, QUERY, 0, 1, 2, 3)
    target.newest = newest
    with pytest.raises(error, match="another name"):
        coordinator(url, target, QUERY).start(batch_id, SCHEMA)


@pytest.mark.parametrize(("batch_id", "newest"), [(3, 2), (3, 3), (4, 3)])
def test_stories_that_agree_go_on(url: str, batch_id: int, newest: int) -> None:
    """A decided micro-batch may be visible or not yet, and Spark may repeat it or go on."""
    target = Target(has_mark=True)
    show(url, target, QUERY, 0, 1, 2, 3)
    target.newest = newest
    run = coordinator(url, target, QUERY)
    run.start(batch_id, SCHEMA)
    assert run.is_decided(batch_id) == (batch_id == 3)


def test_a_lost_directory_of_decisions_is_no_loss_once_spark_has_ended_all(url: str) -> None:
    """The checkpoint directory was deleted; the target's mark and Spark agree, so nothing is doubled."""
    target = Target(has_mark=True)
    show(url, target, QUERY, 0, 1)
    target.last.clear()
    show(f"{url}-new", target, QUERY, 2)
    with pytest.raises(StateLostError, match="shown=2"):
        coordinator(f"{url}-other", target, QUERY).start(2, SCHEMA)


def test_a_twin_that_prepares_late_is_aborted_in_the_same_run(url: str) -> None:
    """Who waits for open transactions, as Kafka's consumers do, does not wait for the next start."""
    target = Target(has_mark=False)
    run = show(url, target, QUERY, 0)
    target.prepared["part"] = 1
    run.finish(1, Prepared(({"id": "part"},), 1, repeated=True))
    target.prepared |= {"late": 1, "next": 2}
    run.finish(2, Prepared(({"id": "next"},), 1))
    assert not target.prepared


def test_a_driver_that_wakes_late_ends_nothing_that_its_successor_has_decided(url: str) -> None:
    """Cluster managers start a second driver where the first one is only silent: it may fail between two requests."""
    target = Target(has_mark=False)
    late = show(url, target, QUERY, 0)
    target.prepared["late"] = 1
    successor = coordinator(url, target, QUERY)
    successor.start(1, SCHEMA)
    target.prepared["decided"] = 1
    Decisions(open_storage(url), "model", "query-1").put(Decision("model", "query-1", 1, 1, ({"id": "decided"},)))
    with pytest.raises(UnavailableError):
        late.finish(1, Prepared(({"id": "late"},), 1))
    late.give_up()
    assert target.prepared == {"decided": 1}
    coordinator(url, target, QUERY).start(1, SCHEMA)
    assert set(target.visible) == {"query-1-0", "decided"}


class _Broken(ModelSink):
    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        if query == QUERY and "part" in self.target.visible:
            raise KeyError("password")
        return super().leftovers(query)


def test_what_a_sink_raises_while_it_gives_up_hides_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The micro-batch is visible, or has failed for a reason of its own; a foreign error's text is not told."""
    target = Target(has_mark=False)
    run = Coordinator(_Broken(target, Crash()), QUERY, open_storage(url), 100)
    run.start(0, SCHEMA)
    target.prepared["part"] = 0
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


def test_a_damaged_decision_stops_the_query(url: str) -> None:
    """What is decided is not guessed: a decision that cannot be read is an error that names it."""
    target = Target(has_mark=False)
    show(url, target, QUERY, 0, 1)
    open_storage(url).put("_sinks/model/query-1/decided-1", b"nonsense")
    with pytest.raises(CorruptionError, match="decided-1"):
        coordinator(url, target, QUERY).start(2, SCHEMA)
