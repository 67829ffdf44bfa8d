"""State as a vectorised function sees it."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.arrow import rows as arrow_rows
from holdfast.backends.base import Found
from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.vectorised.arrays import shown_keys
from holdfast.spark_integration.vectorised.arrow_with_state import StateColumns
from holdfast.spark_integration.vectorised.batch import ShardBatch
from holdfast.spark_integration.vectorised.state import ShardState
from tests.unit.spark_integration.vectorised.operator_shard import OperatorShard


def too_much_text() -> pa.Array:
    """Return one value of 2 GiB, which takes no memory as long as nobody reads it."""
    size_bytes = (1 << 31) + 1
    offsets = pa.py_buffer(np.array([0, size_bytes], np.int64))
    return pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(mmap.mmap(-1, size_bytes)))


def test_a_column_that_arrow_cannot_hold_is_named() -> None:
    """Text has offsets of 32 bits; the error says what to do, where Arrow's says nothing."""
    text = too_much_text()
    found = Found(np.ones(1, np.bool_), pa.RecordBatch.from_arrays([pa.array([1]), text], names=["n", "note"]))

    class Rows:
        def get(self) -> Found:
            return found

    rows: Any = Rows()
    state = ShardState(rows, pa.schema([("n", pa.int64()), ("note", pa.string())]))
    with pytest.raises(InvalidArgumentError, match=r"'note' is too large.*more shards.*keys=1 bytes=2147483"):
        state.get()


def test_keys_that_arrow_cannot_hold_are_named() -> None:
    """As state."""
    keys = Keys(np.zeros(1, np.uint64), pa.RecordBatch.from_arrays([too_much_text()], names=["user"]))
    with pytest.raises(InvalidArgumentError, match=r"key column 'user' is too large.*more shards.*keys=1"):
        shown_keys(keys, pa.schema([("user", pa.string())]))


@pytest.mark.parametrize("where", [None, [True, True]])
def test_chunks_that_arrow_cannot_hold_together_are_put(monkeypatch: pytest.MonkeyPatch, where: object) -> None:
    """State is stored with offsets of 64 bits: what a function gives in chunks may pass 2 GiB, here 10 bytes."""
    monkeypatch.setattr(arrow_rows, "SMALL_OFFSETS_MAX", 10)
    kept: list[pa.Array] = []

    class Rows:
        def __len__(self) -> int:
            return 2

        def put(self, values: pa.Table, rows: object = None) -> None:
            kept.append(arrow_rows.one_chunk(values.column("note")))

    rows: Any = Rows()
    note = pa.chunked_array([["a" * 8], ["b" * 8]])
    ShardState(rows, pa.schema([("note", pa.string())])).put(pa.table({"note": note}), where=where)
    assert [(one.type, one.to_pylist()) for one in kept] == [(pa.large_string(), note.to_pylist())]


@pytest.mark.parametrize("where", [None, [True, False]])
def test_text_and_bytes_in_views_are_put(tmp_path: Path, where: object) -> None:
    """Other libraries hand Arrow their text so, such as polars; Arrow takes no rows of it."""
    types = pa.schema([("text", pa.string()), ("data", pa.binary()), ("names", pa.list_(pa.string()))])
    text, data = pa.array(["a", "b"], pa.string_view()), pa.array([b"a", b"b"], pa.binary_view())
    names = pa.ListArray.from_arrays([0, 1, 2], text)

    def step(batch: ShardBatch) -> list[dict[str, Any]]:
        batch.state.put(pa.table({"text": text, "data": data, "names": names}), where=where)
        return batch.state.get().filter(batch.state.exists()).to_pylist()

    found = OperatorShard(tmp_path / "shard", {STATE_TABLE: StateColumns(types, None)}, "None").run(["x", "y"], 0, step)
    wanted = [{"text": "a", "data": b"a", "names": ["a"]}, {"text": "b", "data": b"b", "names": ["b"]}]
    assert found == (wanted if where is None else wanted[:1])


def test_an_unknown_column_is_told_which_there_are(tmp_path: Path) -> None:
    """pyarrow says only that it does not exist; what is meant stands in the same error."""
    shard = OperatorShard(
        tmp_path, {STATE_TABLE: StateColumns(pa.schema([("n", pa.int64()), ("last", pa.string())]), None)}, "None"
    )
    with pytest.raises(KeyError, match="nn") as caught:
        shard.run(["a"], 0, lambda batch: batch.state.get()["nn"])
    assert caught.value.__notes__ == ["columns of the state: n, last; keys: user; rows: user, v; did you mean 'n'?"]
    with pytest.raises(KeyError, match="mine") as caught:
        shard.run(["a"], 0, lambda batch: {}["mine"])
    assert not hasattr(caught.value, "__notes__"), "the user's own KeyError is none of ours"


def test_an_unknown_table_is_told_which_there_are(tmp_path: Path) -> None:
    columns = StateColumns(pa.schema([("n", pa.int64())]), None)
    shard = OperatorShard(tmp_path, {"carts": columns, "seen": columns}, "None")
    with pytest.raises(KeyError, match="no state table 'cart'; it has carts, seen; did you mean 'carts'"):
        shard.run(["a"], 0, lambda batch: batch.states["cart"])


def test_a_default_stands_where_null_would(tmp_path: Path) -> None:
    """For keys without state, and where a stored value is null: in all columns, or in those that are named."""
    types = pa.schema([("n", pa.int64()), ("total", pa.float64()), ("tags", pa.list_(pa.string()))])
    shard = OperatorShard(tmp_path, {STATE_TABLE: StateColumns(types, None)}, "None")
    numbers = pa.table({"n": [None], "total": [2.5], "tags": [["a"]]}, schema=types)
    shard.run(["ann"], 1, lambda batch: batch.state.put(numbers))

    def step(batch: ShardBatch) -> dict[Any, Any]:
        found = batch.state.get(default={"n": 0, "tags": []})
        assert found.schema == types
        return dict(zip(batch.keys["user"].to_pylist(), found.to_pylist(), strict=True))

    found = shard.run(["bob", "ann"], 2, step)
    assert found == {"bob": {"n": 0, "total": None, "tags": []}, "ann": {"n": 0, "total": 2.5, "tags": ["a"]}}
    for default, text in (({"m": 0}, "no state column: 'm'"), (0, "no value of state column 'tags'.*by column")):
        with pytest.raises(InvalidArgumentError, match=text):
            shard.run(["ann"], 3, lambda batch, default=default: batch.state.get(default))
