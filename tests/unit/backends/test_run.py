"""Runs: what a file of rows holds, and how its blocks are read."""

from __future__ import annotations

import math
import os
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends import block_io, stored_file
from holdfast.backends.arrow import rows as arrow_rows
from holdfast.backends.arrow.rows import BoolArray
from holdfast.backends.base import MAX_HASH
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs
from holdfast.errors import CorruptionError, SchemaMismatchError
from holdfast.testing.state_rows import COUNTS, PAIRS, keys_of, run_of, values_of

names = st.sampled_from([None, "", "a", "b", "c", "d"])

writes = st.lists(st.tuples(names, st.none() | st.integers(-2, 2) | st.just("delete")), max_size=12)


def hashes_of(rows: list[Any]) -> list[int]:
    return [(0 if name is None else len(name) + (name == "d")) << 62 for name, _ in rows]


def build(rows: list[Any]) -> Run:
    changes = [((name,), None if n == "delete" else (n,)) for name, n in rows]
    return run_of(COUNTS, changes, hashes_of(rows))


def content(run: Run) -> dict[Any, Any]:
    """Return key → value or "delete"; fails where the run breaks its promises."""
    assert (run.hashes[1:] >= run.hashes[:-1]).all()
    keys, values = run.keys.column(0).to_pylist(), run.values.column(0).to_pylist()
    assert len(set(keys)) == len(keys)
    assert all(v is None for v, gone in zip(values, run.deleted, strict=True) if gone)
    return {k: "delete" if gone else v for k, v, gone in zip(keys, values, run.deleted, strict=True)}


def read_back(run: Run, compression: str | None) -> Run:
    sink = pa.BufferOutputStream()
    run.write(sink, compression=compression)
    return Run.read(sink.getvalue(), run.schema, source="memory")


@pytest.mark.slow(0.5)
@given(st.lists(writes, min_size=1, max_size=4), st.booleans(), st.sampled_from([None, "lz4"]))
def test_merging_is_writing_one_after_the_other(history: list[Any], drop: bool, compression: str | None) -> None:
    """The law of runs: newest wins, within a write and between writes; files change nothing."""
    model: dict[Any, Any] = {}
    runs = []
    for rows in history:
        run = build(rows)
        assert content(run) == dict(rows)
        assert content(read_back(run, compression)) == dict(rows)
        runs.append(run)
        model |= dict(rows)
    merged = merge_runs(runs, drop_deletes=drop)
    assert content(merged) == {k: v for k, v in model.items() if not (drop and v == "delete")}
    wanted: list[Any] = [(n, None) for n in ("d", "a", None, "", "x", "a")]
    rows = merged.find(keys_of(COUNTS, [(n,) for n, _ in wanted], hashes_of(wanted)))
    in_run = merged.keys.column(0).to_pylist()
    assert [None if r < 0 else in_run[r] for r in rows] == [n if n in in_run else None for n, _ in wanted]
    for first, last in ((0, 0), (1, 1 << 62), (1 << 63, MAX_HASH), (5, 4)):
        part = merged.slice(first, last)
        expected = [h for h in merged.hashes.tolist() if first <= h <= last]
        assert part.hashes.tolist() == expected
        assert content(read_back(part, compression)) == content(part)


crowd_keys = st.tuples(
    st.sampled_from([None, -1, 0, 1]),
    st.sampled_from([None, 0.0, -1.5, math.nan]),
    st.sampled_from([None, "", "a", "b"]),
)


@given(
    st.lists(st.tuples(st.sampled_from([0, 7, MAX_HASH]), crowd_keys), max_size=20),
    st.lists(st.tuples(st.sampled_from([0, 7, 8, MAX_HASH]), crowd_keys), max_size=20),
    st.randoms(),
)
def test_keys_are_found_among_rows_of_one_hash(stored: list[Any], wanted: list[Any], random: Random) -> None:
    """Several columns, nulls and NaN among them; rows of one hash in any order, as backends have them."""
    rows = {(hash_, repr(key)): (hash_, key) for hash_, key in stored}
    placed = sorted(rows.values(), key=lambda row: (row[0], random.random()))
    keys = keys_of(PAIRS, [key for _, key in placed], [h for h, _ in placed])
    values = values_of(PAIRS, [(None, None)] * len(placed))
    columns = [pa.array(keys.hashes), pa.array(np.zeros(len(keys), np.bool_)), *keys.columns.columns, *values.columns]
    run = Run(PAIRS, pa.RecordBatch.from_arrays(columns, schema=PAIRS.columns))
    places = {(hash_, repr(key)): i for i, (hash_, key) in enumerate(placed)}
    found = run.find(keys_of(PAIRS, [key for _, key in wanted], [h for h, _ in wanted]))
    assert found.tolist() == [places.get((hash_, repr(key)), -1) for hash_, key in wanted]


@pytest.mark.parametrize("n", [10, 4_000])
def test_as_many_steps_find_many_keys_of_one_hash_as_few(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements of a list and timers of one time share a hash: finding them all must not take a round for each."""
    compared: list[int] = []
    values_equal = arrow_rows._values_equal

    def counted(left: pa.Array, right: pa.Array) -> BoolArray:
        compared.append(len(left))
        return values_equal(left, right)

    monkeypatch.setattr(arrow_rows, "_values_equal", counted)
    keys = keys_of(COUNTS, [(str(i),) for i in range(n)], [7] * n)
    run = Run.build(COUNTS, keys, values_of(COUNTS, [(i,) for i in range(n)]))
    compared.clear()
    assert run.values.column(0).take(pa.array(run.find(keys))).to_pylist() == list(range(n))
    assert len(compared) <= 4
    assert sum(compared) <= 6 * n


def test_a_run_of_another_schema_names_the_columns() -> None:
    other = TableSchema.of(
        "counts", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int32()), ("m", pa.int8())])
    )
    sink = pa.BufferOutputStream()
    build([("a", 1)]).write(sink)
    with pytest.raises(SchemaMismatchError, match=r"file\.arrow holds state with a different schema") as caught:
        Run.read(sink.getvalue(), other, source="file.arrow")
    assert "value.n: int64 → int32" in str(caught.value)
    assert "value.m" not in str(caught.value), "a column that was added is null in stored rows"


def test_what_is_no_run_is_refused_before_it_is_used() -> None:
    """A file from elsewhere, whole but wrong: unsorted, of several batches, with broken offsets, or nulls for marks.

    Or of Arrow's format version 4, in which a batch may be compressed without a word in the place that is checked: one
    of 0.8 MB became 200 MB.
    """
    good = build([("a", 1), ("d", 2)]).batch

    def written(*batches: pa.RecordBatch, version: pa.ipc.MetadataVersion = pa.ipc.MetadataVersion.V5) -> pa.Buffer:
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(metadata_version=version)
        with pa.ipc.new_stream(sink, COUNTS.columns, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return sink.getvalue()

    backwards = pa.RecordBatch.from_arrays([c.take(pa.array([1, 0])) for c in good.columns], schema=COUNTS.columns)
    offsets = pa.py_buffer(np.array([0, 1 << 40, 2], np.int64))
    broken = pa.Array.from_buffers(pa.large_string(), 2, [None, offsets, pa.py_buffer(b"ad")])
    columns = [*good.columns]
    columns[2] = broken
    wild = pa.RecordBatch.from_arrays(columns, schema=COUNTS.columns)
    nulls = [pa.array([1, None], pa.uint64()), pa.array([None, False])]
    without_hash = pa.RecordBatch.from_arrays([nulls[0], *good.columns[1:]], schema=COUNTS.columns)
    without_mark = pa.RecordBatch.from_arrays([good.column(0), nulls[1], *good.columns[2:]], schema=COUNTS.columns)
    for data, message in (
        (written(backwards), "not sorted"),
        (written(without_hash), "lack a hash or a delete mark"),
        (written(without_mark), "lack a hash or a delete mark"),
        (written(good, good), "one batch"),
        (written(), "one batch"),
        (written(good, version=pa.ipc.MetadataVersion.V4), "a format version other than"),
        (written(wild), "no readable run"),
        (written(good)[:100], "no readable run"),
        (pa.py_buffer(b""), "no readable run"),
        (pa.py_buffer(b"not arrow at all, but long enough to look"), "no readable run"),
    ):
        with pytest.raises(CorruptionError, match=message):
            Run.read(data, COUNTS, source="x")


def test_a_run_file_opens_with_arrow_alone() -> None:
    """Section 1 lies at offset 0: any Arrow stream reader opens the file as it is."""
    run = build([("a", 1), ("b", None), ("c", "delete")])
    data, _ = stored_file.encode("run", {}, {"counts": run.write})
    table = pa.ipc.open_stream(data).read_all()
    assert table.column("key.user").to_pylist() == ["a", "b", "c"]
    assert table.schema.metadata == {b"holdfast.table": b"counts"}


@pytest.mark.all
@pytest.mark.slow
def test_more_than_2_gib_of_text_in_one_run() -> None:
    """Large types all the way: built, merged, looked up, written and read."""
    schema = TableSchema.of("big", pa.schema([("k", pa.int64())]), pa.schema([("text", pa.string())]))
    rows, width = 257, 8 << 20

    def run(first: int, number: int) -> Run:
        ids = np.arange(first, first + number)
        offsets = pa.py_buffer(np.arange(number + 1, dtype=np.int64) * width)
        data = np.repeat(np.frombuffer(b"abcdefghij", np.uint8)[ids % 10], width)
        text = pa.Array.from_buffers(pa.large_string(), number, [None, offsets, pa.py_buffer(data)])
        keys = Keys.of(schema, ids, pa.table({"k": ids}))
        return Run.build(schema, keys, schema.conform(pa.table({"text": text}), "value"))

    merged = merge_runs([run(0, rows), run(rows - 10, 10)], drop_deletes=True)
    assert len(merged) == rows
    assert merged.size_bytes > 2**31
    space = pa.allocate_buffer(merged.size_bytes + (1 << 20), resizable=False)
    size, _ = stored_file.write_to(pa.FixedSizeBufferWriter(space), "run", {}, {"big": merged.write})
    del merged
    stored = stored_file.decode(space.slice(0, size), source="big", kind="run", verify=False)
    back = Run.read(stored.section("big", "big"), schema, source="big", trusted=True)
    found = back.find(keys_of(schema, [(rows - 1,), (0,), (-1,)], [rows - 1, 0, 2**64 - 1]))
    assert found.tolist() == [rows - 1, 0, -1]
    text = back.values.column(0)[rows - 1].as_py()
    assert text == "abcdefghij"[(rows - 1) % 10] * width


def test_values_of_deleted_rows_are_not_kept() -> None:
    """A delete carries no data: what a user deletes is gone from the run."""
    keys = keys_of(COUNTS, [("a",), ("b",)], [1, 2])
    run = Run.build(COUNTS, keys, values_of(COUNTS, [(1,), (2,)]), np.array([True, False]))
    assert content(run) == {"a": "delete", "b": 2}
    assert content(Run.build(COUNTS, keys, None)) == {"a": "delete", "b": "delete"}


def test_a_map_with_a_null_among_its_keys_is_corrupt() -> None:
    """Arrow ends the process where it makes such a map; from storage it may come."""
    schema = TableSchema.of("t", pa.schema([("k", pa.int64())]), pa.schema([("m", pa.map_(pa.string(), pa.int64()))]))
    pairs = pa.list_(pa.struct([("key", pa.large_string()), ("value", pa.int64())]))
    columns = [
        pa.array([1], pa.uint64()),
        pa.array([False]),
        pa.array([1]),
        pa.array([[{"key": None, "value": 1}]], pairs),
    ]
    batch = pa.RecordBatch.from_arrays(columns, names=schema.columns.names)
    # The columns that are declared, and then a batch of the same layout.
    data = schema.columns.serialize().to_pybytes() + batch.serialize().to_pybytes() + b"\xff\xff\xff\xff\0\0\0\0"
    with pytest.raises(CorruptionError, match="null in 'key', which is NOT NULL"):
        Run.read(pa.py_buffer(data), schema, source="x")


def test_pieces_are_all_bytes_in_order() -> None:
    data = os.urandom(2 * block_io.BLOCK_BYTES + 3)
    found = list(block_io.in_blocks(memoryview(data)))
    assert [len(block) for block in found] == [block_io.BLOCK_BYTES, block_io.BLOCK_BYTES, 3]
    assert b"".join(found) == data
    assert list(block_io.in_blocks(b"")) == []


def test_a_write_of_which_the_kernel_takes_a_part_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:1000], offset))
    data = os.urandom(block_io.BLOCK_BYTES + 7)
    with (tmp_path / "file").open("w+b") as file:
        block_io.write_at(file.fileno(), data, 5)
    assert (tmp_path / "file").read_bytes() == bytes(5) + data


def test_a_read_of_which_the_kernel_gives_a_part_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:1000]], offset))
    data = os.urandom(10_000)
    (tmp_path / "file").write_bytes(data)
    room = bytearray(6_000)
    with (tmp_path / "file").open("rb") as file:
        assert block_io.read_at(file.fileno(), memoryview(room), 1) == 6_000
        assert bytes(room) == data[1:6_001]
        assert block_io.read_at(file.fileno(), memoryview(room), 7_000) == 3_000
        assert bytes(room[:3_000]) == data[7_000:]
