"""Spark's ``xxhash64`` of one key, computed without Spark.

The hash of a key decides its shard and its place there. Spark hashes column by column, each with the hash so far as its
seed, and leaves nulls out::

    42 ──▶ XXH64(user, seed 42) ──▶ XXH64(day as four bytes, seed: the hash so far) ──▶ …

What is hashed of a value are these bytes, little endian: of bool, tinyint, smallint, int, date and float four; of
bigint, timestamps, intervals, double and decimals of up to 18 digits eight; of string and binary all; of larger
decimals those of a big-endian number without superfluous ones. Each element of an array and each field of a struct is
hashed as a column is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from decimal import Context

import pyarrow as pa
import xxhash

_SEED = 42
_LONG_DIGITS = 18
# Of Python's own, 28, a decimal of Spark's may have more.
_ALL_DIGITS = Context(prec=38)
_CANONICAL_NAN = {4: b"\x00\x00\xc0\x7f", 8: b"\x00\x00\x00\x00\x00\x00\xf8\x7f"}


def hash_of_key(key: Iterable[pa.Scalar]) -> int | None:
    """Return the hash of a key, as unsigned; None if a column has a type that only Spark hashes.

    Parameters
    ----------
    key : iterable of pyarrow.Scalar
        The key's columns, in storage types.
    """
    seed = _SEED
    for value in key:
        hashed = _hash(value, seed)
        if hashed is None:
            return None
        seed = hashed
    return seed


def _hash(value: pa.Scalar, seed: int) -> int | None:
    if not value.is_valid:
        return seed if _is_known(value.type) else None
    if isinstance(value, (pa.LargeListScalar, pa.StructScalar)):
        for inner in value.values() if isinstance(value, pa.StructScalar) else value.values:
            hashed = _hash(inner, seed)
            if hashed is None:
                return None
            seed = hashed
        return seed
    data = _bytes_of(value)
    return None if data is None else xxhash.xxh64_intdigest(data, seed)


def _is_known(t: pa.DataType) -> bool:
    """Tell whether values of a type can be hashed here; Spark hashes no maps."""
    if pa.types.is_large_list(t) or pa.types.is_struct(t):
        return all(_is_known(t.field(i).type) for i in range(t.num_fields))
    return not pa.types.is_nested(t)


def _bytes_of(value: pa.Scalar) -> bytes | None:
    t, types = value.type, pa.types
    if types.is_large_string(t) or types.is_large_binary(t):
        return value.as_buffer().to_pybytes()
    if types.is_boolean(t):
        return struct.pack("<i", value.as_py())
    if types.is_integer(t):
        return struct.pack("<q" if t.bit_width == 64 else "<i", value.as_py())
    if types.is_date32(t):
        return struct.pack("<i", value.value)
    if types.is_timestamp(t) or types.is_duration(t):
        return struct.pack("<q", value.value)
    if types.is_float32(t) or types.is_float64(t):
        return _float_bytes(value.as_py(), t.bit_width // 8)
    if types.is_decimal128(t):
        return _decimal_bytes(value)
    return None


def _float_bytes(number: float, width: int) -> bytes:
    if number != number:
        return _CANONICAL_NAN[width]
    return struct.pack("<f" if width == 4 else "<d", number + 0.0)  # -0.0 + 0.0 is 0.0


def _decimal_bytes(value: pa.Scalar) -> bytes:
    unscaled = int(value.as_py().scaleb(value.type.scale, _ALL_DIGITS))
    if value.type.precision <= _LONG_DIGITS:
        return struct.pack("<q", unscaled)
    # As Java's BigInteger.toByteArray: a bit more than the number has, for its sign.
    bits = (unscaled if unscaled >= 0 else ~unscaled).bit_length()
    return unscaled.to_bytes(bits // 8 + 1, "big", signed=True)
