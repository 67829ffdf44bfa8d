"""State as a vectorised function sees it."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.base import Found
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.vectorised.state import ShardState


def test_a_column_that_arrow_cannot_hold_is_named() -> None:
    """Text has offsets of 32 bits; the error says what to do, where Arrow's says nothing."""
    size_bytes = (1 << 31) + 1
    offsets = pa.py_buffer(np.array([0, size_bytes], np.int64))
    nothing = pa.py_buffer(mmap.mmap(-1, size_bytes))  # takes no memory, as nobody reads it
    text = pa.LargeStringArray.from_buffers(1, offsets, nothing)
    found = Found(np.ones(1, np.bool_), pa.RecordBatch.from_arrays([pa.array([1]), text], names=["n", "note"]))

    class Rows:
        def get(self) -> Found:
            return found

    rows: Any = Rows()
    state = ShardState(rows, pa.schema([("n", pa.int64()), ("note", pa.string())]))
    with pytest.raises(InvalidArgumentError, match=r"'note' is too large.*more shards.*keys=1 bytes=2147483"):
        state.get()
