"""Bytes that compare as the values do from which they are made: the parts of a key.

Bytes of one width are turned to big endian. The sign bit is flipped, so that negative numbers come first; of negative
floats all other bits too, since they grow away from zero. Binaries of any length are compared up to the byte 00
that ends them, so they may hold none: 00 is written 01 01, and 01 is written 01 02.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import BoolArray
from holdfast.backends.rocksdb.codec import binaries
from holdfast.backends.rocksdb.codec.binaries import ByteArray
from holdfast.errors import CorruptionError


def to_sortable(t: pa.DataType, fixed: ByteArray) -> ByteArray:
    """Return fixed bytes of a type in the order of a key."""
    if pa.types.is_boolean(t) or pa.types.is_fixed_size_binary(t) or not fixed.size:
        return fixed
    word = min(fixed.shape[1], 8)
    words = np.ascontiguousarray(fixed).view(f"<u{word}")[:, ::-1].copy()
    words[:, 0] ^= _flipped_bits(t, words[:, 0] >> (8 * word - 1) == 1, words.dtype)
    return words.astype(f">u{word}").view(np.uint8)


def from_sortable(t: pa.DataType, fixed: ByteArray) -> ByteArray:
    """Return the fixed bytes that `to_sortable` was given."""
    if pa.types.is_boolean(t) or pa.types.is_fixed_size_binary(t) or not fixed.size:
        return fixed
    word = min(fixed.shape[1], 8)
    words = fixed.view(f">u{word}").astype(f"<u{word}")
    words[:, 0] ^= _flipped_bits(t, words[:, 0] >> (8 * word - 1) == 0, words.dtype)
    return np.ascontiguousarray(words[:, ::-1]).view(np.uint8)


def _flipped_bits(t: pa.DataType, negative: BoolArray, dtype: np.dtype[np.unsignedinteger]) -> npt.NDArray[np.integer]:
    """Return for each number which bits of its highest word differ between its own form and that of a key."""
    sign = dtype.type(1 << (8 * dtype.itemsize - 1))
    if pa.types.is_floating(t):
        return np.where(negative, dtype.type(2 ** (8 * dtype.itemsize) - 1), sign)
    return np.asarray(0 if pa.types.is_unsigned_integer(t) else sign, dtype)


def escape(segment: pa.Array) -> pa.Array:
    """Return binaries without a byte 00, in the same order, none the beginning of another's with a 00 behind it."""
    if not (binaries.data_of(segment)[slice(*binaries.offsets_of(segment)[[0, -1]])] <= 1).any():
        return segment
    ones = pc.replace_substring(segment, pattern=b"\1", replacement=b"\1\2")
    return pc.replace_substring(ones, pattern=b"\0", replacement=b"\1\1")


def unescape(segment: pa.Array) -> pa.Array:
    """Return the binaries that `escape` was given.

    Raises `CorruptionError` for bytes that it never returned.
    """
    if not (binaries.data_of(segment)[: binaries.offsets_of(segment)[-1]] <= 1).any():
        return segment
    zeros = pc.replace_substring(segment, pattern=b"\1\1", replacement=b"\0")
    plain = pc.replace_substring(zeros, pattern=b"\1\2", replacement=b"\1")
    if not escape(plain).equals(segment):
        raise CorruptionError("a key in RocksDB is not escaped as it must be; restore the state")
    return plain
