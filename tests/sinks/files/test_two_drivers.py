"""Two drivers write to one file sink, of which any may stand still between any two of its requests."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from holdfast import clock
from holdfast.errors import NotFoundError
from holdfast.snapshotter.fence import Fence
from holdfast.snapshotter.sink_log import FOLDER
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.files.parquet import ParquetSink, read_parquet
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery, TwoPhaseSink
from holdfast.spark_integration.sinks.writing import write_rows
from tests.model.sink_target import CrashingStorage
from tests.model.turns import Turns
from tests.sink_drivers import SCHEMA, Driver, World, judge, length, restored, saved, stand_still_anywhere
from tests.tiers import ALL, cases

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

    def prepare(self, sink: TwoPhaseSink, turns: Turns, batch_id: int, part: int, row: str) -> Handle:
        attempt = SinkAttempt(self.query, batch_id, part, clock.new_id() + clock.new_id())
        _, handle = write_rows(sink, attempt, SCHEMA, [pa.record_batch([[row]], schema=SCHEMA)])
        return dict(json.loads(handle))

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


@pytest.fixture(params=SINKS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], FileWorld]:
    """Return what makes a new world."""
    number = itertools.count()
    sinks = "holdfast.spark_integration.sinks"

    def made() -> FileWorld:
        world = FileWorld(request.param, tmp_path / str(next(number)))
        monkeypatch.setattr(f"{sinks}.files.sink.storage_of", world.storage_of)
        return world

    for module in ("sink", "location"):
        monkeypatch.setattr(f"{sinks}.files.{module}.io_executor", _InTurn)
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
def test_a_query_that_stands_still_anywhere_is_saved_and_restored(make: Callable[[], FileWorld]) -> None:
    """The restored one continues the sink and is killed at some time; the saved one wakes, and shows nothing more."""
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
                old.go()
                new.kill()
                judge(new_world)
