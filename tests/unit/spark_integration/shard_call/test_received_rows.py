"""Rows of one shard and micro-batch, in memory or in a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.backends.arrow.rows import one_chunk
from holdfast.errors import UnavailableError
from holdfast.spark_integration.shard_call import call
from holdfast.spark_integration.shard_call.call import gather_rows

TABLES = [pa.table({"k": [f"key {i % 3}", None], "v": [i, -i]}) for i in range(7)]
SCHEMA = TABLES[0].schema


@pytest.fixture(params=[call.MEMORY_BYTES, 100, 0], ids=["memory", "some in memory", "file"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How much is kept in memory."""
    monkeypatch.setattr(call, "MEMORY_BYTES", request.param)
    return int(request.param)


@pytest.mark.usefixtures("limit")
def test_all_rows_in_their_order_and_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    """Also while the rows are still in use: a worker that is killed leaves no file."""
    rows = gather_rows(iter(TABLES), SCHEMA, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert rows == pa.concat_tables(TABLES)
    taken = rows.take(pa.array([13, 0, 6]))
    assert one_chunk(taken["v"]).to_pylist() == [-6, 0, 3]


@pytest.mark.usefixtures("limit")
def test_no_rows(tmp_path: Path) -> None:
    assert gather_rows(iter([]), SCHEMA, tmp_path) == SCHEMA.empty_table()


def test_a_disk_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "MEMORY_BYTES", 0)
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match=str(tmp_path)):
        gather_rows(iter(TABLES), SCHEMA, tmp_path / "file")


_ONE_LARGE_KEY = """
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from holdfast.spark_integration.keyed.frames import FrameFormat, KeyFrames
from holdfast.spark_integration.keyed.slabs import KeyOrder
from holdfast.backends.run import Keys, TableSchema
from holdfast.spark_integration.shard_call.call import gather_rows


def anonymous_bytes():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


chunks = int(sys.argv[1])
chunk = pa.table({"key": np.zeros(50_000, np.int64), "text": ["x" * 200] * 50_000})
received = gather_rows((chunk for _ in range(chunks)), chunk.schema, Path(sys.argv[2]))
schema = TableSchema.of("state", pa.schema([("key", pa.int64())]), pa.schema([("n", pa.int64())]))
keys = Keys.of(schema, np.zeros(len(received), np.uint64), received.select(["key"]))
order = KeyOrder.of(keys)
[slab] = KeyFrames(received, order.rows, order.starts, FrameFormat("UTC"), 10_000).slabs()
[frames] = slab
before, seen, rows = anonymous_bytes(), 0, 0
for frame in frames:
    rows += len(frame)
    seen = max(seen, anonymous_bytes())
assert rows == len(received)
print(max(seen, before))
"""


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_key_with_millions_of_rows_streams_in_bounded_memory(tmp_path: Path) -> None:
    """Four million rows more, 0.8 GB of text, cost what their keys and their order do."""

    def peak_bytes(chunks: int) -> int:
        script = [sys.executable, "-c", _ONE_LARGE_KEY, str(chunks), str(tmp_path)]
        return int(subprocess.run(script, check=True, capture_output=True, text=True).stdout)

    fewer, more = peak_bytes(20), peak_bytes(100)
    rows = 80 * 50_000
    assert more - fewer < 120 * rows, f"{(more - fewer) / rows:.0f} bytes a row"
