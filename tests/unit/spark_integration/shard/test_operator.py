"""A shard's input."""

from __future__ import annotations

import mmap

import numpy as np
import pyarrow as pa

from holdfast.spark_integration.shard.operator import BatchTimes, ShardInput

HALF = 1_200_000_000


def test_keys_that_arrow_cannot_hold_together_are_shown() -> None:
    """Rows of one shard may have more than 2 GiB of keys, which stand in chunks then; a slab has few of them."""
    text = pa.py_buffer(mmap.mmap(-1, HALF + 3))  # takes no memory, as nobody reads it
    one, other = (
        pa.StringArray.from_buffers(len(ends) - 1, pa.py_buffer(np.array(ends, np.int32)), text)
        for ends in ([0, HALF], [0, HALF, HALF + 3])
    )
    keys = pa.table({"user": pa.chunked_array([one, other])})
    batch = ShardInput("op", 0, 0, keys, keys, pa.array(range(3)), BatchTimes(0, None, None, None))
    assert batch.keys_shown_at(np.array([2, 2])).to_pylist() == [{"user": "\0\0\0"}] * 2
