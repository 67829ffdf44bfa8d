"""Tasks whose rows belong to hundreds of partitions: what the driver decides does not grow with the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from holdfast import clock
from holdfast.errors import CorruptionError, HoldfastError, StateLostError, UnavailableError
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.files.parquet import ParquetSink, read_parquet
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery, TwoPhaseSink
from holdfast.testing.sink_scenario import HANDLE_BYTES_MAX

pytestmark = pytest.mark.slow(20)

DAYS, TASKS = 365, 3
SCHEMA = pa.schema([("day", pa.date32()), ("task", pa.int32()), ("n", pa.int64())])


class Backfill:
    """A year, written by each task of a micro-batch."""

    def __init__(self, sink: TwoPhaseSink) -> None:
        self.sink, self.query = sink, SinkQuery("out", clock.new_uuid())
        sink.open(self.query, SCHEMA)

    def prepared(self, batch_id: int, days: int = DAYS) -> list[Handle]:
        handles = []
        for task in range(TASKS):
            attempt = SinkAttempt(self.query, batch_id, task, clock.new_id() + clock.new_id())
            transaction = self.sink.begin(attempt, SCHEMA)
            dates = [date(2025, 1, 1) + timedelta(days=day) for day in range(days)]
            transaction.write(pa.record_batch([dates, [task] * days, range(days)], schema=SCHEMA))
            handles.append(transaction.prepare())
        return handles


@pytest.fixture
def delta(tmp_path: Path) -> Backfill:
    return Backfill(DeltaSink("out", str(tmp_path), partition_by=["day"], create=True))


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
    data = bytearray(note.read_bytes())
    data[len(data) // 2] ^= 1
    note.write_bytes(data)


def _lose_a_file(folder: Path) -> None:
    next(folder.rglob("part-*.parquet")).unlink()


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


def test_a_parquet_sink_reads_its_notes_too(tmp_path: Path) -> None:
    """A task that writes many files has a small handle."""
    sink = ParquetSink("out", str(tmp_path))
    backfill = Backfill(sink)
    transaction = sink.begin(SinkAttempt(backfill.query, 0, 0, clock.new_id() + clock.new_id()), SCHEMA)
    transaction._file_bytes = 1  # type: ignore[attr-defined]  # each batch is a file
    for n in range(40):
        transaction.write(pa.record_batch([[date(2025, 1, 1)], [0], [n]], schema=SCHEMA))
    handle = transaction.prepare()
    assert len(json.dumps(handle)) < 300
    sink.confirm(backfill.query, 0, [handle])
    for _ in range(2):
        sink.commit(backfill.query, 0, [handle])
        assert sorted(read_parquet(str(tmp_path))["n"].to_pylist()) == list(range(40))
    assert sink.leftovers(backfill.query) == []
