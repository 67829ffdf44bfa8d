"""What tasks tell the driver of their query becomes a note in the state directory, and harms nothing."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.accumulators import Accumulator

from holdfast.errors import CorruptionError, InvalidArgumentError
from holdfast.snapshotter.ownership.queries import NotedLocation, find_noted, note_location
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.plan import noting
from holdfast.spark_integration.shard import news
from holdfast.spark_integration.shard.news import ActiveQuery, NewsParam, report_to_driver
from holdfast.spark_integration.shard.task import QUERY_PROPERTY
from tests.faults.executor_process import eventually

QUERY = "cb5e9d3c-9e6a-4f6e-9a94-0d5d1b6f7b16"


class Context:
    """Spark's context, as far as it makes accumulators."""

    def __init__(self) -> None:
        self.made: list[Accumulator[Any]] = []

    def accumulator(self, value: Any, param: Any) -> Accumulator[Any]:
        self.made.append(Accumulator(1_000 + len(self.made), value, param))
        return self.made[-1]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(noting, "_active", [])
    return SimpleNamespace(sparkContext=Context())


@pytest.fixture
def locations(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where Spark says that its queries are."""
    found: dict[str, str] = {}
    monkeypatch.setattr(noting, "running_location", lambda _session, query_id: found.get(query_id))
    return found


def told(monkeypatch: pytest.MonkeyPatch, accumulator: bytes, properties: dict[str, str], state_dir: str | None) -> Any:
    """Return what a task tells; None if it has not unpickled the accumulator."""
    seen: list[Any] = []

    def loads(_: bytes) -> Any:
        seen.append(Accumulator(1, frozenset(), NewsParam()))
        return seen[-1]

    monkeypatch.setattr(news, "pickle", SimpleNamespace(loads=loads))
    context = SimpleNamespace(getLocalProperty=properties.get)
    monkeypatch.setattr(news, "TaskContext", SimpleNamespace(get=lambda: context))
    report_to_driver(accumulator, "state-1", state_dir)
    return seen[0]._value if seen else None


def threads_ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "holdfast-note":
            thread.join()


def test_what_a_task_tells_is_noted(
    session: Any, locations: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the location that Spark has then: a run that starts elsewhere is noted anew, one that stays is not."""
    accumulator = noting.news_of(session, str(tmp_path), {})
    sent = told(monkeypatch, accumulator, {QUERY_PROPERTY: QUERY}, str(tmp_path))
    assert sent == {ActiveQuery(QUERY, "state-1", str(tmp_path))}
    (driver,) = session.sparkContext.made
    assert type(pickle.loads(pickle.dumps(driver.accum_param))) is NewsParam
    for number, place in enumerate(("file:/data/a b", "file:/data/a b", "s3a://bucket/q"), 1):
        locations[QUERY] = place
        driver += sent
        if number > 1:  # the first is waited for: a program may end with its only micro-batch
            threads_ended()
        assert driver.value == frozenset()
        with open_storage(str(tmp_path)) as storage:
            noted = find_noted(storage, "state-1")
            assert noted is not None
            assert (noted.query_id, noted.location) == (QUERY, place)
            assert len(storage.list("_queries/state-1.locations/")) == (1 if number < 3 else 2)
    with open_storage(str(tmp_path)) as storage:  # another driver was at work in a copy
        note_location(storage, NotedLocation("state-1", QUERY, "file:/data/copy", "host"))
        for rest_ms, place in ((60_000, "file:/data/copy"), (0, "s3a://bucket/q")):
            monkeypatch.setattr(noting, "_RECHECK_AFTER_MS", rest_ms)
            driver += sent
            threads_ended()
            noted = find_noted(storage, "state-1")
            assert noted is not None
            assert noted.location == place


def test_each_run_is_noted_that_ends_with_its_only_micro_batch(
    session: Any, locations: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Spark knows a query no longer once its task's news has been heard."""

    def look(_: Any, query_id: str) -> str | None:
        time.sleep(0.05)
        return locations.get(query_id)

    monkeypatch.setattr(noting, "running_location", look)
    recorder = noting.LocationRecorder(session)
    for place in ("file:/data/a", "file:/data/b"):
        locations[QUERY] = place
        recorder.store(ActiveQuery(QUERY, "state-1", str(tmp_path)))
        del locations[QUERY]
        threads_ended()
        with open_storage(str(tmp_path)) as storage:
            noted = find_noted(storage, "state-1")
        assert noted is not None
        assert noted.location == place


@pytest.mark.parametrize(
    ("accumulator", "properties", "state_dir"),
    [(b"", {QUERY_PROPERTY: QUERY}, "/data"), (b"x", {}, "/data"), (b"x", {QUERY_PROPERTY: QUERY}, None)],
    ids=["over Connect", "in a user's thread", "without a state directory"],
)
def test_a_task_without_news_unpickles_nothing(
    monkeypatch: pytest.MonkeyPatch, accumulator: bytes, properties: dict[str, str], state_dir: str | None
) -> None:
    assert told(monkeypatch, accumulator, properties, state_dir) is None


@pytest.mark.parametrize(
    "location", [None, "", "file:/a\x1b[31m", "/a\nb", "/" + 2048 * "a", "s3a://key:secret@bucket/q"], ids=ascii
)
def test_what_cannot_be_noted_is_not(
    session: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    location: str | None,
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setattr(noting, "running_location", lambda *_: location)
    noting.LocationRecorder(session).store(ActiveQuery(QUERY, "state-1", str(tmp_path)))
    threads_ended()
    assert not list(tmp_path.rglob("*"))
    assert "secret@" not in caplog.text


def test_a_storage_that_the_driver_cannot_write_stops_nobody(
    session: Any, locations: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    locations[QUERY] = "/data/q"
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level("INFO", noting.__name__):
        noting.LocationRecorder(session).store(ActiveQuery(QUERY, "state-1", str(tmp_path / "file")))
        threads_ended()
    assert "cannot store the location" in caplog.text


def test_a_storage_that_hangs_holds_up_nobody(
    session: Any, locations: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither other queries, nor Spark's scheduler twice; and threads do not pile up behind it."""
    locations[QUERY] = "/data/q"
    monkeypatch.setattr(noting, "_WAIT_S", 0.2)
    answers, asked = threading.Event(), list[str]()

    def note(storage: Any, noted: NotedLocation) -> None:
        asked.append(noted.state_id)
        if noted.state_id.startswith("slow"):
            answers.wait()

    monkeypatch.setattr(noting, "note_location", note)
    recorder = noting.LocationRecorder(session)
    began = time.monotonic()
    for number in range(40):
        recorder.store(ActiveQuery(QUERY, f"slow-{number % 20}", str(tmp_path)))
    recorder.store(ActiveQuery(QUERY, "state-1", str(tmp_path)))
    waited = time.monotonic() - began
    eventually(lambda: "state-1" in asked)
    answers.set()
    threads_ended()
    assert len(asked) == len(set(asked)) == 21
    assert waited < 20 * 0.2


def test_a_driver_without_threads_keeps_its_accumulators(
    session: Any, locations: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An error would end the connection that brings what all tasks of the application tell, the user's too."""
    locations[QUERY] = "/data/q"
    told = ActiveQuery(QUERY, "state-1", str(tmp_path))
    recorder = noting.LocationRecorder(session)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuses)
        recorder.store(told)
    recorder.store(told)
    threads_ended()
    with open_storage(str(tmp_path)) as storage:
        assert find_noted(storage, "state-1") is not None


def refuses(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_application_has_one_accumulator(session: Any, tmp_path: Path) -> None:
    """However many threads define operators at once; the next application has its own."""
    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(lambda n: noting.news_of(session, str(tmp_path / str(n)), {"n": str(n)}), range(200)))
    assert len(made) == len(session.sparkContext.made) == 1
    assert len(noting._active[0][2].options) == 200
    other: Any = SimpleNamespace(sparkContext=Context())
    noting.news_of(other, str(tmp_path), {})
    assert len(noting._active) == 1


def test_notes_of_several_drivers_follow_each_other(tmp_path: Path) -> None:
    """The newest counts; a damaged one is replaced; a moved one is refused, and so is what no driver notes."""
    with open_storage(str(tmp_path)) as storage, ThreadPoolExecutor(8) as threads:
        every = [NotedLocation("state-1", QUERY, f"/data/{n % 3}", "host") for n in range(40)]
        list(threads.map(lambda one: note_location(storage, one), every))
        assert find_noted(storage, "state-1") in every
        assert find_noted(storage, "state-2") is None
        key = storage.list("_queries/state-1.locations/")[-1].key
        data = bytes(storage.get(key))
        storage.put("_queries/state-2.locations/" + "1".zfill(20), data)
        with pytest.raises(CorruptionError, match="belongs elsewhere"):
            find_noted(storage, "state-2")
        note_location(storage, NotedLocation("state-2", QUERY, "/data/q", "host"))
        assert find_noted(storage, "state-2") == NotedLocation("state-2", QUERY, "/data/q", "host")
        for host in ("\x1b[31m", 256 * "h"):
            note_location(storage, NotedLocation("state-2", QUERY, "/data/q", host))
            with pytest.raises(CorruptionError, match="invalid field"):
                find_noted(storage, "state-2")
        for number, place in enumerate(("/data/hidden\x1b[31m", "s3://key:hidden@bucket/q", "dbfs:/hidden"), 100):
            refused = NotedLocation("state-2", QUERY, place, "host")
            with pytest.raises(InvalidArgumentError):
                note_location(storage, refused)
            storage.put(f"_queries/state-2.locations/{number:020d}", refused.encode())
            with pytest.raises(CorruptionError, match="holds an invalid checkpoint location") as caught:
                find_noted(storage, "state-2")
            assert "hidden" not in str(caught.value)
