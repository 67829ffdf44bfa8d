"""Rows of state for benches of the store alone.

The key is a string of 16 digits. The value is two integers; a wider one adds a string, half of it random letters and
half constant, like URLs and names.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import HashArray, IntArray
from holdfast.backends.run import Keys, TableSchema

TABLE = "state"
KEY_CHARACTERS = 16
_NUMBERS_BYTES = 16


def table_of(value_bytes: int) -> TableSchema:
    """Return a table whose values have `value_bytes` bytes, at least 16."""
    numbers = [pa.field("n", pa.int64()), pa.field("total", pa.int64())]
    text = [pa.field("page", pa.large_string())] if value_bytes > _NUMBERS_BYTES else []
    return TableSchema.of(TABLE, pa.schema([("key", pa.large_string())]), pa.schema(numbers + text))


def keys_of(table: TableSchema, numbers: IntArray) -> Keys:
    """Return the keys with these numbers; keys and hashes are unique."""
    digits = pc.utf8_lpad(pa.array(numbers).cast(pa.large_string()), KEY_CHARACTERS, "0")
    return Keys.of(table, hashes_of(numbers), pa.table({"key": digits}))


def values_of(table: TableSchema, n: int, value_bytes: int, chance: np.random.Generator) -> pa.RecordBatch:
    columns = {"n": pa.array(chance.integers(0, 1000, n)), "total": pa.array(chance.integers(0, 1 << 40, n))}
    width = value_bytes - _NUMBERS_BYTES
    if width:
        letters = np.full((n, width), ord("."), np.uint8)
        letters[:, width // 2 :] = chance.integers(ord("a"), ord("z") + 1, (n, width - width // 2), np.uint8)
        offsets = pa.py_buffer(np.arange(n + 1, dtype=np.int64) * width)
        columns["page"] = pa.LargeStringArray.from_buffers(n, offsets, pa.py_buffer(letters))
    return table.conform(pa.table(columns), "value")


def hashes_of(numbers: IntArray) -> HashArray:
    """Return the hashes of numbered keys, by splitmix64 (Steele, Lea, Flood 2014)."""
    z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
