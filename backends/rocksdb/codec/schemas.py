"""Values whose rows were written with several schemas: each begins with the number of its own.

A row is decoded with the columns that it was written with, and projected to those that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import IntArray, take
from holdfast.backends.evolution import project
from holdfast.backends.rocksdb.codec import binaries
from holdfast.backends.rocksdb.codec.rows import corrupt, decode_values

_HEAD = 1


def decode_numbered(rows: pa.Array, schemas: Sequence[pa.Schema], wanted: pa.Schema) -> pa.RecordBatch:
    """Return value columns of rows, each of which begins with the number of its schema.

    Parameters
    ----------
    rows : pyarrow.LargeBinaryArray, shape (n,)
        A null is a row whose columns are all null.
    schemas : sequence of pyarrow.Schema
        That with the number 1 comes first.
    wanted : pyarrow.Schema
        Holds all that they do.

    Raises
    ------
    CorruptionError
        Some bytes are not a row of its columns.
    """
    numbers = _numbers(rows)
    found = np.unique(numbers[numbers > 0]).tolist() or [len(schemas)]
    if found[-1] > len(schemas):
        raise corrupt("a row names a schema that its table does not have")
    if len(found) == 1:
        return project(decode_values(rows, schemas[found[0] - 1], _HEAD), wanted)
    parts, places = [], []
    for number in found:
        # A null has no number; it reads the same with any schema.
        at = np.flatnonzero((numbers == number) | ((numbers == 0) & (number == found[0])))
        parts.append(project(decode_values(rows.take(pa.array(at)), schemas[number - 1], _HEAD), wanted))
        places.append(at)
    return take(pa.concat_batches(parts), np.argsort(np.concatenate(places)))


def _numbers(rows: pa.Array) -> IntArray:
    """Return the first byte of each row; 0 for a null."""
    numbers = np.zeros(len(rows), np.int64)
    offsets = binaries.offsets_of(rows)
    valid = np.flatnonzero(rows.is_valid().to_numpy(zero_copy_only=False)) if rows.null_count else np.arange(len(rows))
    if (offsets[valid + 1] == offsets[valid]).any():
        raise corrupt("a row is empty")
    numbers[valid] = binaries.data_of(rows)[offsets[valid]]
    if (numbers[valid] == 0).any():
        raise corrupt("a row names a schema that no table has")
    return numbers
