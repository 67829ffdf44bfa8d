"""Two drivers, or three, write to one file sink, of which any may stand still between any two of its requests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from holdfast import clock
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.snapshotter.fence import Fence
from holdfast.snapshotter.sink_log import FOLDER, Entry
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.sinks.coordinator import Coordinator
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.files.parquet import ParquetSink, read_parquet
from holdfast.spark_integration.sinks.files.sink import Attempts
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery, TwoPhaseSink
from tests import sink_drivers
from tests.model.sink_target import CrashingStorage
from tests.model.turns import Act, Objects, OverwritingStorage, Replay, Turns, end_of, every_order
from tests.ram import storage_in_ram
from tests.sink_drivers import (
    Driver,
    World,
    judge,
    judge_ends,
    length,
    restored,
    run_batches,
    saved,
    shown_batches,
    stand_still_anywhere,
)
from tests.tiers import ALL, cases

T = TypeVar("T")
SINKS = cases(["upsert", "parquet", "append"], quick=2)


class FileWorld(World):
    """A sink in a folder; each request to its storage is a step of the driver that makes it."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__(open_storage(str(folder / "state")), SinkQuery("out", clock.new_uuid()))
        self.url, self.kind = str(folder / "target"), kind
        self.inner = open_storage(self.url)

    def sink(self, turns: Turns) -> TwoPhaseSink:
        if self.kind == "parquet":
            return ParquetSink("out", self.url)
        return DeltaSink("out", self.url, keys=["row"] if self.kind == "upsert" else None, create=True)

    def storage_of(self, _url: str, _options: object) -> Any:
        driver = threading.current_thread()
        return CrashingStorage(self.inner, driver.turns) if isinstance(driver, Driver) else self.inner

    def shown(self) -> Sequence[str]:
        try:
            table = read_parquet(self.url) if self.kind == "parquet" else DeltaTable(self.url).to_pyarrow_table()
        except NotFoundError:
            return []
        return [str(row) for row in table["row"].to_pylist()]

    def left(self) -> Sequence[str]:
        keys = [info.key for info in self.inner.list("") if ".ended-" not in info.key]
        return [key for key in keys if "/attempts/" in key or "/staged/" in key]


class _InTurn(Executor):
    """Does at once what a pool would do at some time: a driver makes one request after the other."""

    def submit(self, function: Callable[..., Any], /, *values: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*values, **more))
        except BaseException as exc:  # noqa: BLE001  whoever asks for the result gets it
            done.set_exception(exc)
        return done


_FILES = "holdfast.spark_integration.sinks.files"


@pytest.fixture(autouse=True)
def _one_request_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sink", "location"):
        monkeypatch.setattr(f"{_FILES}.{module}.io_executor", _InTurn)


@pytest.fixture(params=SINKS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], FileWorld]:
    """Return what makes a new world."""
    number = itertools.count()

    def made() -> FileWorld:
        world = FileWorld(request.param, tmp_path / str(next(number)))
        monkeypatch.setattr(f"{_FILES}.sink.storage_of", world.storage_of)
        return world

    return made


@pytest.mark.slow(20)
def test_a_driver_that_stands_still_anywhere(make: Callable[[], FileWorld]) -> None:
    """One stands still before any of its requests, another one starts and stands still, and the first one wakes."""
    stand_still_anywhere(make, first_every=1 if ALL else 9, second_every=5 if ALL else 23)


@pytest.mark.slow(10)
def test_two_that_commit_one_decision(make: Callable[[], FileWorld]) -> None:
    """A start stands still while it commits what it has found; the driver that has decided it is faster."""
    for second in itertools.count(1):
        with make() as world:
            log, one = Fence(world.storage, f"{FOLDER}/out"), Driver(world, "one")
            while len(log.numbers()) < 2:
                one.go(1)
            one.go(1)  # it learns that its decision stands
            other = Driver(world, "other")
            other.go(second)
            has_begun, has_shown = len(log.numbers()) > 2, bool(world.shown())
            one.go()
            other.go()
            if has_begun:
                assert other.error is None, repr(other.error)
            judge(world, one, other)
            if has_shown:
                return


@pytest.mark.slow(20)
@pytest.mark.parametrize("dies", cases([False, True]))
def test_a_query_that_stands_still_anywhere_is_saved_and_restored(make: Callable[[], FileWorld], dies: bool) -> None:
    """The restored one continues the sink and is killed at some time; the saved one wakes, and shows nothing more.

    Nor does it leave anything for good if it dies before it is told.
    """
    steps = length(make())
    for first in range(steps // 3, steps, 1 if ALL else 9):
        for second in range(1, steps, 5 if ALL else 23):
            with make() as world:
                old = Driver(world, "old")
                old.go(first)
                query = saved(world)
                if not query.sinks or query.batch_id < 0:
                    continue
                new_world = restored(world, query)
                new = Driver(new_world, "new")
                new.go(second)
                old.go(4 if dies else None)
                old.kill()
                new.kill()
                judge(new_world)


class _NoTurns(Turns):
    """Lets a driver go on: its requests are answered by a search."""

    def wait(self) -> None:
        pass


def _as_one(method: Callable[..., T]) -> Callable[..., T]:
    """Make each request of a method's call, of which what it returns is all that the driver learns."""

    def call(sink: StoredSink, *given: Any) -> T:
        return sink.world.as_one(partial(method, sink, *given))

    return call


@dataclass(frozen=True)
class StoredSink(ParquetSink):
    """Writes to a storage that is open."""

    world: OneStorage = field(kw_only=True)

    def attempts(self, query: SinkQuery) -> Attempts:
        return Attempts(self.world.inner, query, self.folder)

    open, leftovers = _as_one(ParquetSink.open), _as_one(ParquetSink.leftovers)
    confirm, commit, abort = map(_as_one, (ParquetSink.confirm, ParquetSink.commit, ParquetSink.abort))


class OneStorage(FileWorld):
    """A Parquet sink, the state directory and Spark's log in one storage, so that its objects are all there is."""

    batches, parts = 1, 1

    def __init__(self, storage: ObjectStorage) -> None:
        World.__init__(self, self.state(storage), SinkQuery("out", "query-1"))
        self.inner, self.commits = PrefixedStorage(storage, "target"), PrefixedStorage(storage, "commits")
        self.url, self.kind = self.inner.url, "parquet"
        self.as_one = storage.as_one if isinstance(storage, Replay) else lambda call: call()

    def call(self, method: Any, *given: Any) -> None:
        def left() -> object:  # all that changes in a coordinator
            method(*given)
            return method.__self__._entry, method.__self__._decision, method.__self__._log._kept

        self.as_one(left)

    def state(self, storage: ObjectStorage) -> ObjectStorage:
        return PrefixedStorage(storage, "state")

    def next_batch(self) -> int:
        return len(self.commits.list(""))

    def end(self, batch_id: int) -> None:
        self.commits.put(str(batch_id), b"")

    def sink(self, turns: Turns) -> StoredSink:
        return StoredSink("out", "memory://target", world=self)


def drive(storage: ObjectStorage, name: str) -> None:
    run_batches(OneStorage(storage), name, _NoTurns())


def search(drivers: int, objects: Objects) -> None:
    """Let drivers run in all orders; whichever of them stop for ever, and wherever, a later start goes on."""
    judged = set[Objects]()
    names = ("one", "other", "third")[:drivers]
    acts: dict[str, Act] = {name: partial(drive, name=name) for name in names}
    for moment in every_order(acts, objects, are_alike=True, looks=4 - drivers):
        try:
            if moment.has_ended():
                judge_ends(*moment.actors)
            if moment.objects not in judged:
                judged.add(moment.objects)
                with storage_in_ram() as storage:
                    for key, (data, _) in moment.objects:
                        storage.put(key, data)
                    world = OneStorage(storage)
                    assert {*shown_batches(world)} >= {*range(world.next_batch())}, "readers see what Spark has ended"
                    judge(world)
        except Exception as exc:
            exc.add_note(str(moment))
            raise


def begun(micro_batches: int) -> Objects:
    """Return what the first micro-batches leave."""
    objects: Objects = frozenset()
    for number in range(micro_batches):
        objects = end_of(partial(drive, name=f"first{number}"), objects)
    return objects


@pytest.mark.slow(100 if ALL else 8)
@pytest.mark.parametrize(("drivers", "micro_batches"), cases([(2, 1), (2, 0), (3, 1)]))
def test_drivers_in_any_order(drivers: int, micro_batches: int) -> None:
    """Of a query that has run before, or never."""
    search(drivers, begun(micro_batches))


class Unfenced(Coordinator):
    """Aborts what it finds without making its decision impossible."""

    def _append(self, entry: Entry) -> None:
        if entry.is_decision:
            super()._append(entry)


class ListsLate(Coordinator):
    """Aborts what was there after it has begun."""

    def _begin(self, batch_id: int, schema: pa.Schema, plan: str) -> tuple[Any, int | None]:
        _, shown = super()._begin(batch_id, schema, plan)
        return self._past(), shown


@pytest.mark.parametrize("coordinator", [Unfenced, ListsLate])
def test_a_start_that_leaves_the_past_open_is_found_out(
    coordinator: type[Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    objects = begun(1)
    monkeypatch.setattr(sink_drivers, "Coordinator", coordinator)
    with pytest.raises((AssertionError, CorruptionError), match=r"is gone|nobody has won"):
        search(2, objects)


def test_a_put_without_a_condition_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    objects = begun(1)
    monkeypatch.setattr(OneStorage, "state", lambda _, storage: PrefixedStorage(OverwritingStorage(storage), "state"))
    with pytest.raises((AssertionError, CorruptionError), match="otherwise than as the loser"):
        search(2, objects)
