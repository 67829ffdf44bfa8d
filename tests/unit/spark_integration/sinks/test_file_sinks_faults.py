"""Each request of a file sink fails once, or its reply is lost: rows are shown once, and what is left is found."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from holdfast import clock
from holdfast.errors import HoldfastError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.files.parquet import ParquetSink, read_parquet
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery, TwoPhaseSink
from holdfast.testing.faulty_storage import Fault, FaultyStorage, Kind
from tests.model.sink_target import Killed

SCHEMA = pa.schema([("key", pa.int64())])
SINKS = ["parquet", "append", "upsert"]
KINDS: list[Kind] = ["fail", "lose_reply"]


class Target:
    """A sink on a storage that can be made to fail."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.url = str(folder / "target")
        self.sink: TwoPhaseSink = ParquetSink("out", self.url)
        if kind != "parquet":
            self.sink = DeltaSink("out", self.url, keys=["key"] if kind == "upsert" else None, create=True)
        self.query = SinkQuery("out", clock.new_uuid())
        self.inner = open_storage(self.url)
        self.storage: ObjectStorage = self.inner

    def fail(self, *faults: Fault) -> FaultyStorage:
        """Make the storage fail from here on."""
        faulty = FaultyStorage(self.inner, faults)
        self.storage = faulty
        return faulty

    def prepared(self, batch_id: int) -> Handle:
        """Write and prepare a row."""
        transaction = self.sink.begin(SinkAttempt(self.query, batch_id, 0, clock.new_id() + clock.new_id()), SCHEMA)
        transaction.write(pa.record_batch([[batch_id]], schema=SCHEMA))
        try:
            return transaction.prepare()
        except HoldfastError:
            transaction.abort()
            raise

    def shown(self) -> list[int]:
        """What readers see."""
        try:
            is_delta = isinstance(self.sink, DeltaSink)
            table = DeltaTable(self.url).to_pyarrow_table() if is_delta else read_parquet(self.url)
        except NotFoundError:
            return []
        return sorted(table["key"].to_pylist())

    def files(self) -> int:
        """How many objects there are besides claims, manifests, Delta's log, and marks of ended attempts."""
        kept = ("queries/", "/batches/", "_delta_log/", ".ended-")
        return sum(not any(part in info.key for part in kept) for info in self.inner.list(""))


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    made = Target(request.param, tmp_path)
    monkeypatch.setattr("holdfast.spark_integration.sinks.files.sink.storage_of", lambda _url, _options: made.storage)
    made.sink.open(made.query, SCHEMA)
    yield made
    made.inner.close()


def requests(target: Target) -> int:
    """Return how many requests a micro-batch makes."""
    faulty = target.fail()
    handle = target.prepared(0)
    target.sink.confirm(target.query, 0, [handle])
    target.sink.commit(target.query, 0, [handle])
    return len(faulty.operations)


@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", SINKS, indirect=True)
def test_a_request_that_fails_loses_and_doubles_nothing(target: Target, kind: Kind) -> None:
    """At each request of writing and committing; then the next start does what a coordinator does."""
    shown = [0]
    for nth in range(1, requests(target) + 1):
        batch = nth
        faulty = target.fail(Fault(kind, nth=nth))
        handles: list[Handle] = []
        decided = False
        with suppress(HoldfastError):
            handles.append(target.prepared(batch))
            target.sink.confirm(target.query, batch, handles)
            decided = True
            target.sink.commit(target.query, batch, handles)
        faulty.assert_all_hit()
        target.storage = target.inner
        target.sink.open(target.query, SCHEMA)
        if decided:
            target.sink.commit(target.query, batch, handles)
        else:
            assert target.shown() == shown
        target.sink.abort(target.query, target.sink.leftovers(target.query))
        assert target.sink.leftovers(target.query) == []
        if not decided:
            target.sink.commit(target.query, batch, [target.prepared(batch)])
        shown.append(batch)
        assert target.shown() == shown
    committed_files = 0 if isinstance(target.sink, DeltaSink) and target.sink.keys else len(shown)
    merged = [path for path in Path(target.url).glob("*.parquet") if not path.name.startswith("part-0000000000")]
    assert target.files() - len(merged) == committed_files, "nothing is left of dead attempts"


@pytest.mark.parametrize("target", SINKS, indirect=True)
def test_an_abort_that_fails_is_done_again(target: Target) -> None:
    """At each of its requests: never shown, and in the end gone."""
    nth = 0
    while True:
        nth += 1
        handle = target.prepared(0)
        faulty = target.fail(Fault("fail", nth=nth))
        with suppress(HoldfastError):
            target.sink.abort(target.query, [handle])
        target.storage = target.inner
        if faulty.operations and len(faulty.operations) >= nth:
            with suppress(HoldfastError):
                target.sink.abort(target.query, target.sink.leftovers(target.query))
            assert target.files() == 0
            with pytest.raises(HoldfastError):
                target.sink.commit(target.query, 0, [handle])
            continue
        break
    assert target.shown() == []
    assert nth > 3


@pytest.mark.parametrize("target", SINKS, indirect=True)
def test_a_file_that_comes_after_its_attempt_was_ended_is_found(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker dies before it learns that; a start that comes so late that no other file can, takes it away."""

    def start() -> None:
        target.sink.abort(target.query, target.sink.leftovers(target.query))

    put, now_ms = type(target.inner).put, clock.now_ms()

    def put_late(storage: ObjectStorage, key: str, data: bytes) -> None:
        if key.endswith(".parquet"):
            start()
            put(storage, key, data)
            raise Killed
        put(storage, key, data)

    with monkeypatch.context() as patched:
        patched.setattr(type(target.inner), "put", put_late)
        with pytest.raises(Killed):
            target.prepared(0)
    assert target.files() == 1
    start()
    assert target.files() == 1, "another one may come"
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms + 2 * 3600_000)
    start()
    assert [info.key for info in target.inner.list("") if "part-" in info.key or "/attempts/" in info.key] == []
    target.sink.commit(target.query, 1, [target.prepared(1)])
    assert target.shown() == [1]


@pytest.mark.parametrize("target", SINKS, indirect=True)
def test_what_many_attempts_have_left_is_ended_at_once(target: Target) -> None:
    """A driver died with 200 tasks at work: a start that ended one after the other would wait for each request."""
    for batch in range(30):
        target.prepared(batch)
    faulty = target.fail()
    target.sink.abort(target.query, target.sink.leftovers(target.query))
    assert sum(operation.action == "delete" for operation in faulty.operations) == 2
    assert target.files() == 0


@pytest.mark.parametrize("target", SINKS, indirect=True)
def test_a_file_that_comes_late_is_found_by_the_next_start(target: Target) -> None:
    """The store did not answer in time, the attempt was given up, and its file has come since: a note names it."""
    faulty, late = target.fail(), list[tuple[str, bytes]]()
    original = faulty.put

    def put(key: str, data: pa.Buffer) -> None:
        if key.endswith(".parquet"):
            late.append((key, bytes(data)))
            raise UnavailableError("no answer in time")
        original(key, data)

    faulty.put = put  # type: ignore[method-assign, assignment]
    with pytest.raises(UnavailableError, match="in time"):
        target.prepared(0)
    target.storage = target.inner
    for key, data in late:
        target.inner.put(key, data)
    target.sink.abort(target.query, target.sink.leftovers(target.query))
    assert target.files() == 0


def _ended_before(target: Target, ending: str) -> None:
    """Let somebody end all attempts just before a file of this name is put, and go on."""
    zombie = target.fail()
    original = zombie.put

    def put(key: str, data: object) -> None:
        if key.endswith(ending):
            target.storage = target.inner
            target.sink.abort(target.query, target.sink.leftovers(target.query))
        original(key, data)  # type: ignore[arg-type]

    zombie.put = put  # type: ignore[method-assign]


@pytest.mark.parametrize("target", SINKS, indirect=True)
def test_a_zombie_that_was_ended_leaves_nothing(target: Target) -> None:
    """Its note is taken away before its file comes: it notices, and takes the file away."""
    _ended_before(target, ".parquet")
    with pytest.raises(HoldfastError, match="ended"):
        target.prepared(0)
    assert target.files() == 0


@pytest.mark.parametrize("target", SINKS, indirect=True)
def test_a_zombie_that_goes_on_after_its_end_leaves_nothing(target: Target) -> None:
    """It was ended before its first file came, and has put notes and files since."""
    _ended_before(target, "000000.parquet")
    object.__setattr__(target.sink, "file_mb", 1)
    transaction = target.sink.begin(SinkAttempt(target.query, 0, 0, clock.new_id() + clock.new_id()), SCHEMA)
    for _ in range(2):
        transaction.write(pa.record_batch([[*range(1 << 17)]], schema=SCHEMA))
    with pytest.raises(HoldfastError, match="ended"):
        transaction.prepare()
    transaction.abort()
    assert target.files() == 0


@pytest.mark.parametrize("target", SINKS, indirect=True)
def test_a_zombie_whose_put_fails_leaves_nothing(target: Target) -> None:
    """It was ended before its file came, and learns nothing of that: the reply to its put is lost."""
    zombie = target.fail()
    original = zombie.put

    def put(key: str, data: object) -> None:
        if key.endswith(".parquet"):
            target.storage = target.inner
            target.sink.abort(target.query, target.sink.leftovers(target.query))
        original(key, data)  # type: ignore[arg-type]
        if key.endswith(".parquet"):
            raise UnavailableError("the reply is lost")

    zombie.put = put  # type: ignore[method-assign]
    transaction = target.sink.begin(SinkAttempt(target.query, 0, 0, clock.new_id() + clock.new_id()), SCHEMA)
    transaction.write(pa.record_batch([[0]], schema=SCHEMA))
    with pytest.raises(UnavailableError):
        transaction.prepare()
    transaction.abort()
    assert target.files() == 0


def test_a_file_that_is_on_its_way_while_another_fails_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of partitions are put at once: what comes after the attempt was ended would stay, and no note names it."""
    sink = DeltaSink("out", str(tmp_path / "target"), partition_by=["key"], create=True)
    query, storage = SinkQuery("out", clock.new_uuid()), open_storage(sink.url)
    schema = pa.schema([*SCHEMA, ("n", pa.int64())])
    sink.open(query, schema)
    original, is_on_its_way, has_come = storage.put, threading.Event(), threading.Event()

    def put(key: str, data: pa.Buffer) -> None:
        if key.endswith("-000000.parquet"):
            is_on_its_way.wait(10)
            raise UnavailableError("the storage is away")
        is_file = key.endswith(".parquet")
        if is_file:
            is_on_its_way.set()
            clock.sleep_ms(200)
        original(key, data)
        if is_file:
            has_come.set()

    monkeypatch.setattr(storage, "put", put)
    monkeypatch.setattr("holdfast.spark_integration.sinks.files.sink.storage_of", lambda _url, _options: storage)
    transaction = sink.begin(SinkAttempt(query, 0, 0, clock.new_id() + clock.new_id()), schema)
    transaction.write(pa.record_batch([[0, 1], [0, 1]], schema=schema))
    with pytest.raises(UnavailableError):
        transaction.prepare()
    transaction.abort()
    assert has_come.wait(10)
    assert not [info.key for info in storage.list("") if info.key.endswith(".parquet")]
