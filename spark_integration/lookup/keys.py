"""Parses and hashes the keys of look-ups, and names the columns of tables shown to users.

Spark's ``xxhash64`` of a key, computed without Spark, determines the key's shard and its place in the shard. Spark
hashes column by column, uses the preceding hash as seed, and skips nulls::

    42 ──▶ XXH64(user, seed 42) ──▶ XXH64(day as four bytes, seed: preceding hash) ──▶ …

These bytes of a value are hashed, in little-endian order: four bytes of bool, tinyint, smallint, int, date and float;
eight bytes of bigint, timestamps, intervals, double and decimals of up to 18 digits; all bytes of string and binary. A
larger decimal is hashed as its shortest big-endian representation. Array elements and struct fields are hashed like
columns.

A table is shown as key columns, then value columns, under distinct names.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import pyarrow as pa
import xxhash

from holdfast.backends.options import did_you_mean
from holdfast.backends.rocksdb.codec.rows import encode_values
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.spark_state.query_location import json_object

_SEED = 42
_LONG_DIGITS = 18
# Spark's decimals may have more digits than Python's default precision of 28.
_ALL_DIGITS = Context(prec=38)
_CANONICAL_NAN = {4: b"\x00\x00\xc0\x7f", 8: b"\x00\x00\x00\x00\x00\x00\xf8\x7f"}
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def hash_of_key(key: Iterable[pa.Scalar]) -> int | None:
    """Return the unsigned hash of a key, or None if only Spark can hash a column's type."""
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
    """Return whether `hash_of_key` supports the type; Spark does not hash maps."""
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
        number, width = value.as_py(), t.bit_width // 8
        if number != number:
            return _CANONICAL_NAN[width]
        return struct.pack("<f" if width == 4 else "<d", number + 0.0)  # -0.0 + 0.0 is 0.0
    if types.is_decimal128(t):
        return _decimal_bytes(value)
    return None


def _decimal_bytes(value: pa.Scalar) -> bytes:
    unscaled = int(value.as_py().scaleb(value.type.scale, _ALL_DIGITS))
    if value.type.precision <= _LONG_DIGITS:
        return struct.pack("<q", unscaled)
    # As in Java's BigInteger.toByteArray, with one bit for the sign.
    bits = (unscaled if unscaled >= 0 else ~unscaled).bit_length()
    return unscaled.to_bytes(bits // 8 + 1, "big", signed=True)


@dataclass(frozen=True)
class ShardRanges:
    """Inclusive ranges of shards."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text like ``0,3-5``; an empty text selects no shards. Raises `InvalidArgumentError`."""
        found = [_RANGE.fullmatch(part.strip()) for part in text.split(",") if part.strip()]
        ranges = tuple((int(one[1]), int(one[2] or one[1])) for one in found if one)
        if not all(found) or (text.strip() and not found) or any(last < first for first, last in ranges):
            raise InvalidArgumentError("the option shards must look like 0,3-5", shards=text[:200])
        return cls(ranges)

    def __contains__(self, shard: int) -> bool:
        return any(first <= shard <= last for first, last in self.ranges)

    def require_below(self, shards: int) -> None:
        """Raise `InvalidArgumentError` if a range exceeds an operator's number of shards."""
        if beyond := [last for _, last in self.ranges if last >= shards]:
            raise InvalidArgumentError("the operator has no such shard", shard=max(beyond), shards=shards)


def shards_option(shards: object) -> str:
    """Encode shards as the text of the `shards` option. Raises `InvalidArgumentError`."""
    found = None if isinstance(shards, str) or not isinstance(shards, Iterable) else list(shards)
    if found is None or any(isinstance(n, bool) or not isinstance(n, Integral) or n < 0 for n in found):
        raise InvalidArgumentError("shards must be a list of whole numbers; omit it for all shards", shards=shards)
    return ",".join(str(int(shard)) for shard in found)


def key_option(key: object) -> str:
    """Encode a key as the text of the `key` option. Raises `InvalidArgumentError`."""
    if not isinstance(key, Mapping) or any(not isinstance(name, str) for name in key):
        raise InvalidArgumentError('a key must name its columns, as in {"user": "ann"}', key=key)
    return json.dumps({name: _as_json(name, value) for name, value in key.items()})


def _as_json(name: str, value: object) -> object:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dt.date):  # and dt.datetime
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    raise InvalidArgumentError(
        f"a key with {name!r} of this type cannot be looked up: filter the DataFrame", given=type(value).__name__
    )


def parse_key(text: str) -> dict[str, Any]:
    """Parse a key like ``{"user": "ann"}``. Raises `InvalidArgumentError`."""
    key = json_object(text)
    if not key:
        raise InvalidArgumentError('the option key must look like {"user": "ann"}', key=text[:200])
    return key


def keys_of(table: TableSchema, grouping: Sequence[str], keys: Sequence[Mapping[str, Any]]) -> Keys:
    """Convert keys with JSON values to a table's keys and hashes. Raises `InvalidArgumentError`."""
    rows, hashes = [], []
    for key in keys:
        if set(key) != set(grouping):
            unknown = next((name for name in key if name not in grouping), "")
            raise InvalidArgumentError(
                f"a key needs a value for each grouping column{did_you_mean(unknown, grouping)}",
                given=", ".join(map(str, key)) or None,
                columns=", ".join(grouping) or None,
            )
        scalars = [_scalar(name, key[name], table.key.field(name).type) for name in grouping]
        hashed = hash_of_key(scalars)
        if hashed is None:
            raise InvalidArgumentError(
                "keys of these types cannot be looked up: filter the DataFrame of holdfast.state",
                columns=", ".join(grouping),
            )
        rows.append(scalars)
        hashes.append(hashed)
    columns = [
        pa.array([row[place].as_py() for row in rows], table.key.field(name).type)
        for place, name in enumerate(grouping)
    ]
    return Keys.of(table.prefix(len(grouping)), np.array(hashes, np.uint64), pa.table(columns, names=list(grouping)))


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse a key from texts like ``user=ann``, or from a single text like ``{"user": null}``."""
    if len(pairs) == 1 and pairs[0].lstrip().startswith("{"):
        return parse_key(pairs[0])
    key: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not (name and separator) or name in key:
            raise InvalidArgumentError('write a key as user=ann, each column once, or as {"user": null}', given=pair)
        key[name] = value
    return key


def _scalar(name: str, value: object, t: pa.DataType) -> pa.Scalar:
    try:
        return pa.scalar(_storable(value, t), t)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, binascii.Error) as exc:
        from holdfast.spark_integration.spark_types import type_name  # late: look-ups need PySpark only here

        raise InvalidArgumentError(f"the key's {name!r} has the wrong type: {exc}", type=type_name(t)) from exc


def _storable(value: object, t: pa.DataType) -> object:
    """Convert a value without loss: if Arrow dropped digits, times or zones, a look-up could find a wrong key."""
    types = pa.types
    if value is None:
        return None
    if types.is_struct(t):
        fields = [t.field(place) for place in range(t.num_fields)]
        if not isinstance(value, Mapping) or set(value) != {field.name for field in fields}:
            raise TypeError(f"it needs a value for each of {', '.join(field.name for field in fields)}")
        return {field.name: _storable(value[field.name], field.type) for field in fields}
    if types.is_large_list(t):
        if not isinstance(value, list | tuple):
            raise TypeError("it must be a list")
        return [_storable(inner, t.value_type) for inner in value]
    if isinstance(value, str) and types.is_large_binary(t):
        return base64.b64decode(value, validate=True)
    if isinstance(value, str) and not types.is_large_string(t):
        return pa.scalar(value).cast(t).as_py()
    if not _is_of_type(value, t):
        raise TypeError(f"it is {type(value).__name__}")
    return value


def _is_of_type(value: object, t: pa.DataType) -> bool:
    types = pa.types
    if types.is_boolean(t) or isinstance(value, bool):
        return types.is_boolean(t) and isinstance(value, bool)
    if types.is_integer(t):
        return isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    if types.is_floating(t):
        return isinstance(value, Real)
    if types.is_decimal(t):
        return isinstance(value, Integral | Decimal)
    if types.is_timestamp(t):
        # A time without a zone is ambiguous.
        return isinstance(value, dt.datetime) and (value.tzinfo is None) == (t.tz is None)
    if types.is_date(t):
        return isinstance(value, dt.date) and not isinstance(value, dt.datetime)
    if types.is_large_string(t):
        return isinstance(value, str)
    if types.is_large_binary(t):
        return isinstance(value, bytes | bytearray)
    return types.is_duration(t) and isinstance(value, dt.timedelta)


def shown_columns(schema: TableSchema) -> pa.Schema:
    """Return a table's columns as shown to users; names that clash, ignoring case, get ``key.`` or ``value.``."""
    names: list[str] = []
    for side, prefix in ((schema.key, "key."), (schema.value, "value.")):
        for name in side.names:
            names.append(free_name(name, names, prefix))
    return pa.schema([f.with_name(n) for f, n in zip([*schema.key, *schema.value], names, strict=True)])


def free_name(name: str, taken: Collection[str], prefix: str) -> str:
    """Return `name`, prefixed until it differs from all `taken` names, ignoring case."""
    folded = {other.casefold() for other in taken}
    while name.casefold() in folded:
        name = prefix + name
    return name


def as_table(schema: TableSchema, runs: Sequence[Run]) -> pa.Table:
    """Concatenate runs into a table with the columns shown to users."""
    columns = shown_columns(schema)
    batches = [pa.RecordBatch.from_arrays([*r.keys.columns, *r.values.columns], schema=columns) for r in runs]
    return pa.Table.from_batches(batches, schema=columns)


def same_rows(one: Mapping[str, pa.Table], other: Mapping[str, pa.Table]) -> bool:
    """Return whether tables hold the same values in the same order; unlike in Arrow, NaN equals NaN."""
    return one.keys() == other.keys() and all(_content(one[name]).equals(_content(other[name])) for name in one)


def _content(table: pa.Table) -> pa.Array:
    columns = [column.combine_chunks() for column in table.columns]
    return encode_values(pa.RecordBatch.from_arrays(columns, schema=table.schema))
