"""Values whose rows were written with several schemas: each begins with the number of its own.

A row is decoded with the columns that it was written with, and projected to those that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import take
from holdfast.backends.evolution import project
from holdfast.backends.rocksdb.codec import binaries
from holdfast.backends.rocksdb.codec.binaries import ByteArray
from holdfast.backends.rocksdb.codec.rows import corrupt, decode_values

_HEAD = 1


def decode_numbered(rows: pa.Array, schemas: Sequence[pa.Schema], wanted: pa.Schema) -> pa.RecordBatch:
    """Return the value columns of rows that begin with their schema's number.

    A null is a row whose columns are all null. The schema with the number 1 comes first; `wanted` holds all that they
    do. Raises `CorruptionError` if some bytes are not a row of its columns.
    """
    numbers = _numbers(rows)
    found = (1 + np.flatnonzero(np.bincount(numbers)[1:])).tolist() or [len(schemas)]
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


def _numbers(rows: pa.Array) -> ByteArray:
    """Return the first byte of each row; 0 for a null."""
    offsets, data = binaries.offsets_of(rows), binaries.data_of(rows)
    is_row = slice(None) if not rows.null_count else rows.is_valid().to_numpy(zero_copy_only=False)
    starts, ends = offsets[:-1][is_row], offsets[1:][is_row]
    if (starts == ends).any():
        raise corrupt("a row is empty")
    firsts = data[starts]
    if not firsts.all():
        raise corrupt("a row names a schema that no table has")
    numbers = np.zeros(len(rows), np.uint8)
    numbers[is_row] = firsts
    return numbers
