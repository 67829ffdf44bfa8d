"""What is large between a worker and the state server: of runs little is in memory, and of what is looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends import run_stack
from holdfast.backends.base import Found
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.client import streams as state_streams
from holdfast.testing.state_rows import COUNTS, counts

TABLE = TableSchema.of("t", pa.schema([("k", pa.int64())]), pa.schema([("v", pa.binary())]))
MIB = 1 << 20


def large_run(rows: int = 20_000, value_bytes: int = 1000) -> Run:
    keys = pa.RecordBatch.from_arrays([pa.array(np.arange(rows))], schema=TABLE.key)
    values = [i.to_bytes(4, "big") * (value_bytes // 4) for i in range(rows)]
    hashes = np.arange(rows, dtype=np.uint64)
    return Run.build(
        TABLE,
        Keys.of(TABLE, hashes, keys),
        pa.RecordBatch.from_arrays([pa.array(values, pa.large_binary())], schema=TABLE.value),
    )


def sent(*runs: Run) -> tuple[dict[str, int], list[pa.RecordBatch]]:
    """Return what a worker announces and sends of runs."""
    encoded = {run.schema.name: state_streams.encode_run(run) for run in runs}
    sizes = {table: sum(buffer.size for buffer in buffers) for table, buffers in encoded.items()}
    return sizes, list(state_streams.byte_slices(b for buffers in encoded.values() for b in buffers))


def mapped_bytes() -> int:
    """Return how much of files without a name this process has in memory."""
    found, resident = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = line.endswith("(deleted)")
        elif found and line.startswith("Rss:"):
            resident += int(line.split()[1]) << 10
    return resident


@pytest.mark.parametrize("file_bytes", [1 << 30, 1000], ids=["memory", "file"])
def test_runs_arrive_as_they_were_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int) -> None:
    """Several tables in one message, wherever they are received; no file is left."""
    monkeypatch.setattr(state_streams, "FILE_BYTES", file_bytes)
    small, large = counts(("ann", 1), ("bob", None))["counts"], large_run(100)
    sizes, received = sent(small, large)
    runs = state_streams.receive_runs(sizes, received, {"counts": COUNTS, "t": TABLE}, tmp_path)
    assert {table: run.batch for table, run in runs.items()} == {"counts": small.batch, "t": large.batch}
    assert list(tmp_path.iterdir()) == []
    chunks = [chunk.batch for chunk in runs["t"].chunks(7, MIB)]
    assert pa.Table.from_batches(chunks) == pa.Table.from_batches([large.batch])
    assert max(chunk.num_rows for chunk in chunks) == 7


@pytest.mark.slow(1)
def test_of_a_large_run_only_the_piece_that_is_read_is_in_memory(tmp_path: Path) -> None:
    """The budget of the state server does not hang on the size of a commit; and the file goes with the run."""
    sizes, received = sent(large_run())
    assert sum(sizes.values()) > state_streams.FILE_BYTES
    before = mapped_bytes()
    run = state_streams.receive_runs(sizes, iter(received), {"t": TABLE}, tmp_path)["t"]
    most, rows = 0, 0
    for chunk in run.chunks(1 << 20, MIB):
        assert chunk.values.column(0).to_pylist()[-1][:4] == (rows + len(chunk) - 1).to_bytes(4, "big")
        rows += len(chunk)
        most = max(most, mapped_bytes() - before)
    assert rows == 20_000
    assert MIB // 2 < most < 6 * MIB
    assert pa.Table.from_batches([run.batch]).column("hash").to_pylist() == list(range(20_000)), "nothing is lost"
    del run, chunk
    assert mapped_bytes() == before


def test_a_connection_that_breaks_gives_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little is an attempt to repeat, too much is a defect; neither leaves a file."""
    monkeypatch.setattr(state_streams, "FILE_BYTES", 1000)
    sizes, received = sent(large_run(100))

    def receive(chunks: list[pa.RecordBatch]) -> dict[str, Run]:
        return state_streams.receive_runs(sizes, chunks, {"t": TABLE}, tmp_path)

    with pytest.raises(UnavailableError, match="broke"):
        receive(received[:-1])
    with pytest.raises(InvalidArgumentError, match="different bytes"):
        receive([*received, *received])
    with pytest.raises(UnavailableError, match=r"spark\.holdfast\.local\.dir"):
        state_streams.receive_runs(sizes, received, {"t": TABLE}, tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []


def rows_of(chunks: Iterator[Run]) -> list[int]:
    return [len(chunk) for chunk in chunks]


def test_pieces_are_bounded_in_rows_and_in_bytes() -> None:
    """Wide rows make small chunks, and one row is a chunk however wide it is."""
    run = large_run(100)
    assert rows_of(run.chunks(40, MIB)) == [40, 40, 20]
    assert rows_of(run.chunks(100, MIB)) == [100]
    assert set(rows_of(run.chunks(100, 10_300))) == {10}
    assert rows_of(run.chunks(100, 0)) == [1] * 100
    assert rows_of(counts()["counts"].chunks(10, 10)) == []


class RunView:
    """What a look-up asks of a view: the rows of one run, and how many keys each look-up had."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.asked: list[int] = []

    def get(self, table: str, keys: Keys) -> Found:
        self.asked.append(len(keys))
        return run_stack.look_up([self.run], keys, TABLE)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("piece_bytes", "pieces"),
    [(8 * MIB, [128, 672, 1200]), (101_000, [128, *[100] * 6, 72, *[100] * 12]), (500, [128, *[1] * 1872])],
    ids=["small", "large", "huge"],
)
def test_a_look_up_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, piece_bytes: int, pieces: list[int]) -> None:
    """Of rows of 100 KB the state server had 32,768 in memory, 3 GB, for each worker that asked."""
    monkeypatch.setattr(state_streams, "PIECE_BYTES", piece_bytes)
    run = large_run(2000)
    view: Any = RunView(run)
    asked = state_streams.encode_keys(TABLE, Keys(run.hashes, run.keys))
    known: dict[str, int] = {}
    found = list(state_streams.look_up(view, TABLE, [asked.slice(0, 800), asked.slice(800)], known))
    assert view.asked == pieces
    assert pa.Table.from_batches(found).column("value.v").to_pylist() == run.values.column(0).to_pylist()
    assert list(state_streams.look_up(view, TABLE, [asked.slice(0, 0)], known)) == []
    view.asked.clear()
    assert len(list(state_streams.look_up(view, TABLE, [asked.slice(0, 1200)], known))) == len(view.asked)
    assert view.asked[0] == min(1200, *known.values()), "the next look-up begins with what this one has learned"


def test_keys_without_rows_say_nothing_about_the_size_of_rows() -> None:
    """They are read in growing pieces, and the next look-up, which may find rows, begins with few again."""
    view: Any = RunView(large_run(0))
    asked = large_run(3000)
    known: dict[str, int] = {}
    keys = state_streams.encode_keys(TABLE, Keys(asked.hashes, asked.keys))
    assert sum(len(found) for found in state_streams.look_up(view, TABLE, [keys], known)) == 3000
    assert (view.asked, known) == ([128, 2048, 824], {})
