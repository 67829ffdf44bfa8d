"""Each request of a file sink fails once, or its reply is lost: rows are shown once, and what is left is found."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from holdfast import clock
from holdfast.errors import (
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.files.parquet import ParquetSink, read_parquet
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery, TwoPhaseSink
from holdfast.testing.faulty_storage import Fault, FaultyStorage, Kind
from holdfast.testing.sink_scenario import HANDLE_BYTES_MAX
from tests.damage import flip
from tests.model.sink_target import Killed
from tests.model.turns import OverwritingStorage
from tests.sink_drivers import prepared
from tests.unit.spark_integration.sinks.test_coordinator import KeepsAll

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
        faulty = FaultyStorage(self.inner, faults)
        self.storage = faulty
        return faulty

    def prepared(self, batch_id: int) -> Handle:
        transaction = self.sink.begin(SinkAttempt(self.query, batch_id, 0, clock.new_id() + clock.new_id()), SCHEMA)
        transaction.write(pa.record_batch([[batch_id]], schema=SCHEMA))
        try:
            return transaction.prepare()
        except HoldfastError:
            transaction.abort()
            raise

    def shown(self) -> list[int]:
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


@pytest.fixture(params=SINKS)
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    made = Target(request.param, tmp_path)
    monkeypatch.setattr("holdfast.spark_integration.sinks.files.sink.storage_of", lambda _url, _options: made.storage)
    made.sink.open(made.query, SCHEMA)
    yield made
    made.inner.close()


def requests(target: Target) -> int:
    faulty = target.fail()
    handle = target.prepared(0)
    target.sink.confirm(target.query, 0, [handle])
    target.sink.commit(target.query, 0, [handle])
    return len(faulty.operations)


@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_fails_loses_and_doubles_nothing(target: Target, kind: Kind) -> None:
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


@pytest.mark.parametrize("store", [KeepsAll, OverwritingStorage])
def test_a_store_that_cannot_do_all_is_refused_before_anything_is_decided(
    target: Target, store: Callable[[ObjectStorage], ObjectStorage]
) -> None:
    """What was decided could be shown, and not ended: each start would fail of it."""
    target.storage = store(target.inner)
    target.inner.delete([info.key for info in target.inner.list("_holdfast/")])
    with pytest.raises(InvalidArgumentError, match="URL failed the check at its first start"):
        target.sink.open(target.query, SCHEMA)
    target.storage = target.inner
    target.sink.open(target.query, SCHEMA)
    target.storage = store(target.inner)
    target.sink.open(target.query, SCHEMA)


def test_an_abort_that_fails_is_done_again(target: Target) -> None:
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


@pytest.mark.parametrize("hours", [-5, 0, 5])
def test_a_file_after_its_attempts_end_is_found(target: Target, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """Its worker dies before it learns that; a start that comes so late that no other file can, takes it away.

    `hours`: by which the driver's clock is ahead of the store's.
    """

    def start() -> None:
        target.sink.abort(target.query, target.sink.leftovers(target.query))

    put, now_ms = type(target.inner).put, clock.now_ms
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms() + hours * 3600_000)

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
    (mark,) = Path(target.url).rglob("*.ended-*")
    os.utime(mark, (now_ms() / 1000 - 2 * 3600,) * 2)
    start()
    assert [info.key for info in target.inner.list("") if "part-" in info.key or "/attempts/" in info.key] == []
    target.sink.commit(target.query, 1, [target.prepared(1)])
    assert target.shown() == [1]


def test_what_many_attempts_have_left_is_ended_at_once(target: Target) -> None:
    """A driver died with 200 tasks at work: a start that ended one after the other would wait for each request."""
    for batch in range(30):
        target.prepared(batch)
    faulty = target.fail()
    target.sink.abort(target.query, target.sink.leftovers(target.query))
    assert sum(operation.action == "delete" for operation in faulty.operations) == 2
    assert target.files() == 0


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


def _ended_before(target: Target, ending: str, *, is_answered: bool = True) -> None:
    """Let somebody end all attempts just before a file of this name is put, and go on; the reply may be lost."""
    zombie = target.fail()
    original = zombie.put

    def put(key: str, data: object) -> None:
        if key.endswith(ending):
            target.storage = target.inner
            target.sink.abort(target.query, target.sink.leftovers(target.query))
        original(key, data)  # type: ignore[arg-type]
        if key.endswith(ending) and not is_answered:
            raise UnavailableError("the reply is lost")

    zombie.put = put  # type: ignore[method-assign]


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_zombie_that_was_ended_leaves_nothing(target: Target, is_answered: bool) -> None:
    """Its note is taken away before its file comes: it notices, or its put has failed, and it takes the file away."""
    _ended_before(target, ".parquet", is_answered=is_answered)
    with pytest.raises(HoldfastError, match="ended" if is_answered else "the reply is lost"):
        target.prepared(0)
    assert target.files() == 0


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


def test_a_file_on_its_way_while_another_fails_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


DAYS, TASKS = 365, 3
MANY_SCHEMA = pa.schema([("day", pa.date32()), ("task", pa.int32()), ("n", pa.int64())])


class Backfill:
    """A year, written by each task of a micro-batch."""

    def __init__(self, sink: TwoPhaseSink) -> None:
        self.sink, self.query = sink, SinkQuery("out", clock.new_uuid())
        sink.open(self.query, MANY_SCHEMA)

    def prepared(self, batch_id: int, days: int = DAYS) -> list[Handle]:
        dates = [date(2025, 1, 1) + timedelta(days=day) for day in range(days)]
        parts = [pa.record_batch([dates, [task] * days, range(days)], schema=MANY_SCHEMA) for task in range(TASKS)]
        return [prepared(self.sink, self.query, part, batch_id, task) for task, part in enumerate(parts)]


@pytest.fixture
def delta(tmp_path: Path) -> Backfill:
    return Backfill(DeltaSink("out", str(tmp_path), partition_by=["day"], create=True))


@pytest.mark.slow(20)
@pytest.mark.all
def test_a_handle_is_small_however_many_files_there_are(delta: Backfill, tmp_path: Path) -> None:
    """A year of 478 bytes a file, times 90 tasks, was more than a decision holds: found after all was written."""
    handles = delta.prepared(0)
    assert max(len(json.dumps(handle)) for handle in handles) < 300
    assert sorted(map(str, delta.sink.leftovers(delta.query))) == sorted(map(str, handles)), "as a start finds them"
    delta.sink.confirm(delta.query, 0, handles)
    for _ in range(2):  # again after the notes are gone
        delta.sink.commit(delta.query, 0, handles)
        shown = DeltaTable(str(tmp_path)).to_pyarrow_table()
        assert shown.num_rows == DAYS * TASKS
        assert len(shown["day"].unique()) == DAYS
    assert delta.sink.leftovers(delta.query) == []
    other = delta.prepared(0, days=40)
    with pytest.raises(StateLostError, match="other rows"):
        delta.sink.commit(delta.query, 0, other)


@pytest.mark.slow(20)
def test_few_files_stand_in_the_handle(delta: Backfill) -> None:
    """So that the driver asks for nothing more than before."""
    handles = delta.prepared(0, days=2)
    assert all(handle["files"] for handle in handles)
    assert all(len(json.dumps(handle)) < HANDLE_BYTES_MAX for handle in handles)


def _notes(folder: Path) -> list[Path]:
    return sorted(Path(folder, "_holdfast").rglob("*.0"))


def _swap(folder: Path) -> None:
    """Put an attempt's note in the place of the next one's: a whole note, and another's."""
    first, second, *_ = _notes(folder)
    second.write_bytes(first.read_bytes())


def _damage(folder: Path) -> None:
    note = _notes(folder)[1]
    flip(note, note.stat().st_size // 2)


def _lose_a_file(folder: Path) -> None:
    next(folder.rglob("part-*.parquet")).unlink()


@pytest.mark.slow(20)
@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (lambda folder: _notes(folder)[1].unlink(), UnavailableError, StateLostError),
        (_lose_a_file, UnavailableError, StateLostError),
        (_swap, CorruptionError, CorruptionError),
        (_damage, CorruptionError, CorruptionError),
    ],
    ids=["note", "file", "swapped", "damaged"],
)
@pytest.mark.parametrize("is_decided", [False, True])
def test_what_the_notes_said_is_what_is_shown(
    delta: Backfill,
    tmp_path: Path,
    change: Callable[[Path], object],
    before: type[HoldfastError],
    after: type[HoldfastError],
    is_decided: bool,
) -> None:
    """Else nothing is: a decision that names notes is as good as one that holds what they say."""
    handles = delta.prepared(0, days=20)
    change(tmp_path)
    with pytest.raises(after if is_decided else before):
        (delta.sink.commit if is_decided else delta.sink.confirm)(delta.query, 0, handles)
    assert DeltaTable(str(tmp_path)).to_pyarrow_table().num_rows == 0


@pytest.mark.slow(20)
def test_a_parquet_sink_reads_its_notes_too(tmp_path: Path) -> None:
    sink = ParquetSink("out", str(tmp_path))
    backfill = Backfill(sink)
    transaction = sink.begin(SinkAttempt(backfill.query, 0, 0, clock.new_id() + clock.new_id()), MANY_SCHEMA)
    transaction._file_bytes = 1  # type: ignore[attr-defined]  # each batch is a file
    for n in range(40):
        transaction.write(pa.record_batch([[date(2025, 1, 1)], [0], [n]], schema=MANY_SCHEMA))
    handle = transaction.prepare()
    assert len(json.dumps(handle)) < 300
    sink.confirm(backfill.query, 0, [handle])
    for _ in range(2):
        sink.commit(backfill.query, 0, [handle])
        assert sorted(read_parquet(str(tmp_path))["n"].to_pylist()) == list(range(40))
    assert sink.leftovers(backfill.query) == []
