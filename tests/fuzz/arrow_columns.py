"""Columns of everything that Spark and Arrow can hand over, and what they hold, bit by bit.

`exact` reads buffers by itself, so that no conversion that is tested has a part in the comparison.
"""

from __future__ import annotations

import decimal
import itertools
import random
from typing import Any

import numpy as np
import pyarrow as pa

TEXTS = [
    b"",
    b"a",
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"ab\xc3",
    "ünï".encode(),
    b"\x01\x01",
    b"x" * 40,
    b"\xf4\x90\x80\x80",
]
NAN_BITS = [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF]
WHOLE = [0, 1, -1, 2**31 - 1, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63), 10**18]

FLAT = [
    pa.bool_(),
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.float32(), pa.float64()),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
    *(pa.decimal128(5, 2), pa.decimal128(38, 0), pa.decimal128(38, 18)),
    *(pa.date32(), pa.timestamp("us"), pa.timestamp("us", "Asia/Tokyo"), pa.duration("us"), pa.time64("us")),
    pa.null(),
]


def random_type(chance: random.Random, depth: int, *, is_key: bool, inside: bool = False) -> pa.DataType:
    """Return a type that Spark's state can have; a key has no maps.

    Inside of others there is no column of nothing: Arrow's cast of a list of them is not valid, and refused when put.
    """
    if depth == 0 or chance.random() < 0.5:
        return chance.choice(FLAT[:-1] if inside else FLAT)
    kind = chance.randrange(2 if is_key else 3)
    if kind == 0:
        return pa.list_(random_type(chance, depth - 1, is_key=is_key, inside=True))
    if kind == 1:
        inner = [
            (name, random_type(chance, depth - 1, is_key=is_key, inside=True))
            for name in "xyz"[: chance.randrange(1, 4)]
        ]
        return pa.struct(inner)
    keys = chance.choice([pa.string(), pa.int64(), pa.binary()])
    return pa.map_(keys, random_type(chance, depth - 1, is_key=False, inside=True))


def random_column(t: pa.DataType, n: int, chance: random.Random, *, nulls: bool = True) -> pa.Array:
    """Return n values of a type, extremes among them, and what is no UTF-8."""
    mask = np.array([nulls and chance.random() < 0.2 for _ in range(n)], np.bool_)
    if pa.types.is_null(t):
        return pa.nulls(n)
    if pa.types.is_struct(t):
        return pa.StructArray.from_arrays(
            [random_column(f.type, n, chance) for f in t], fields=list(t), mask=pa.array(mask)
        )
    if pa.types.is_list(t) or pa.types.is_map(t):
        lengths = np.where(mask, 0, [chance.randrange(4) for _ in range(n)])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        validity = pa.py_buffer(np.packbits(~mask, bitorder="little"))
        if pa.types.is_map(t):
            sides = [random_column(t.key_type, offsets[-1], chance, nulls=False)]
            sides.append(random_column(t.item_type, offsets[-1], chance))
            child: pa.Array = pa.StructArray.from_arrays(sides, fields=[t.key_field, t.item_field])
        else:
            child = random_column(t.value_type, offsets[-1], chance)
        return pa.Array.from_buffers(t, n, [validity, pa.py_buffer(offsets)], children=[child])
    values = [None if gone else _random_value(t, chance) for gone in mask]
    return _flat(t, values)


def _flat(t: pa.DataType, values: list[Any]) -> pa.Array:
    if pa.types.is_string(t) or pa.types.is_large_string(t):
        return pa.array(values, pa.binary() if pa.types.is_string(t) else pa.large_binary()).view(t)
    if pa.types.is_temporal(t):
        return pa.array(values, pa.int64() if t.bit_width == 64 else pa.int32()).view(t)
    if pa.types.is_floating(t):
        return pa.array(values, pa.uint64() if t.bit_width == 64 else pa.uint32()).view(t)
    return pa.array(values, t)


def _random_value(t: pa.DataType, chance: random.Random) -> Any:
    types = pa.types
    if types.is_boolean(t):
        return chance.random() < 0.5
    if types.is_time(t):
        return chance.choice([0, 1, 86_399_999_999, chance.randrange(86_400_000_000)])
    if types.is_integer(t) or types.is_temporal(t):
        number = chance.choice([*WHOLE, chance.getrandbits(64) - 2**63])
        return (number + 2 ** (t.bit_width - 1)) % 2**t.bit_width - 2 ** (t.bit_width - 1)
    if types.is_floating(t):
        bits = chance.choice([0, 1 << 63, *NAN_BITS, chance.getrandbits(64), 0x3FF8000000000000])
        return bits if t.bit_width == 64 else bits >> 32
    if types.is_decimal(t):
        digits = chance.choice([0, 1, 10**t.precision - 1, chance.randrange(10**t.precision)])
        sign = chance.choice([1, -1])
        return decimal.Decimal(sign * digits).scaleb(-t.scale, decimal.Context(prec=76))
    return chance.choice([*TEXTS, chance.randbytes(chance.randrange(12))])


def exact(column: pa.Array) -> list[Any]:
    """Return what a column holds, bit by bit: text as bytes, floats as their bits, times as numbers."""
    t, valid = column.type, column.is_valid().to_pylist()
    types = pa.types
    if types.is_null(t):
        return [None] * len(column)
    if types.is_struct(t):
        children = [exact(column.field(i)) for i in range(t.num_fields)]
        values: list[Any] = [tuple(child[i] for child in children) for i in range(len(column))]
    elif types.is_map(t):
        pairs = list(zip(exact(column.keys), exact(column.items), strict=True))
        values = _cut(pairs, column.offsets.to_pylist())
    elif types.is_list(t) or types.is_large_list(t):
        values = _cut(exact(column.values), column.offsets.to_pylist())
    elif types.is_string(t) or types.is_binary(t) or types.is_large_string(t) or types.is_large_binary(t):
        values = _binaries(column)
    elif types.is_boolean(t):
        values = column.to_pylist()
    else:
        width = t.bit_width // 8
        data = column.buffers()[1]
        raw = data.to_pybytes() if data is not None else b""
        starts = [(column.offset + i) * width for i in range(len(column))]
        values = [raw[start : start + width] for start in starts]
    return [value if there else None for value, there in zip(values, valid, strict=True)]


def _cut(values: list[Any], offsets: list[int]) -> list[tuple[Any, ...]]:
    return [tuple(values[start:end]) for start, end in itertools.pairwise(offsets)]


def _binaries(column: pa.Array) -> list[bytes]:
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, places, data = column.buffers()
    offsets = np.frombuffer(places, np.int64 if large else np.int32)[column.offset : column.offset + len(column) + 1]
    raw = data.to_pybytes() if data is not None else b""
    return [raw[start:end] for start, end in itertools.pairwise(offsets)]
