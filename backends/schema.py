"""Schemas of state tables: typed columns, batches of keys, and the tables that an operator declares.

A table has key columns and value columns, each in its **storage type** (`holdfast.backends.arrow.rows.storage_type`).
Rows are looked up by hash and key; `holdfast.backends.run` shows how they are stored.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from holdfast.backends.arrow import rows as arrow_rows
from holdfast.backends.arrow import values as arrow_values
from holdfast.backends.arrow.rows import BoolArray, HashArray, IntArray, take
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, SchemaMismatchError

T = TypeVar("T")
#: Prefixes of key and value columns in a run, and in `TableSchema.not_null`.
KEY_SIDE, VALUE_SIDE = "key.", "value."
#: Ends an error about stored state that does not match the operator.
NEW_QUERY = "or start over with a new checkpointLocation"


@dataclass(frozen=True)
class TableSchema:
    """Name and typed columns of one state table."""

    name: str
    #: At least one column, in storage types (`TableSchema.of` converts). Any part of a key may be null, whatever is
    #: declared: the nullability that Spark infers can change with any edit of a query, and must not change a key.
    key: pa.Schema
    value: pa.Schema
    #: The columns, named as in `columns`, that the operator declares NOT NULL. The operator must enforce it: stored
    #: rows may have nulls anywhere, and schemas that differ only in `not_null` are equal.
    not_null: frozenset[str] = dataclass_field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        if any(pa.types.is_nested(field.type) for field in self.key):
            object.__setattr__(self, "key", pa.schema(map(_nullable_within, self.key)))

    @classmethod
    def of(cls, name: str, key: pa.Schema, value: pa.Schema) -> TableSchema:
        """Return the schema with each column in its storage type; non-nullable columns are in `not_null`."""
        if not len(key):
            raise InvalidArgumentError("a state table needs at least one key column", table=name)
        for side in (key, value):
            repeated = {n for n in side.names if side.names.count(n) > 1}
            if repeated:
                raise InvalidArgumentError("column names must be unique", table=name, repeated=sorted(repeated))
        return cls(name, _stored(key), _stored(value), _not_null(key, KEY_SIDE) | _not_null(value, VALUE_SIDE))

    @classmethod
    def of_sides(cls, name: str, key: pa.Schema, value: pa.Schema) -> TableSchema:
        """Return the schema with key and value columns as `sides` returns them."""
        return cls(name, _nullable(key), _nullable(value), _not_null(key, KEY_SIDE) | _not_null(value, VALUE_SIDE))

    @classmethod
    def of_columns(cls, name: str, columns: pa.Schema) -> TableSchema:
        """Return the schema of a run with these `columns`."""
        sides = [
            pa.schema([f.with_name(f.name.removeprefix(side)) for f in columns if f.name.startswith(side)])
            for side in (KEY_SIDE, VALUE_SIDE)
        ]
        return cls(name, *sides)

    @cached_property
    def columns(self) -> pa.Schema:
        """The columns of a run of this table."""
        return pa.schema(
            [pa.field("hash", pa.uint64(), nullable=False), pa.field("deleted", pa.bool_(), nullable=False)]
            + [f.with_name(KEY_SIDE + f.name) for f in self.key]
            + [f.with_name(VALUE_SIDE + f.name) for f in self.value]
        )

    def sides(self) -> tuple[pa.Schema, pa.Schema]:
        """Return the key and value columns; columns in `not_null` are not nullable."""
        key, value = (
            pa.schema([f.with_nullable(side + f.name not in self.not_null) for f in schema])
            for side, schema in ((KEY_SIDE, self.key), (VALUE_SIDE, self.value))
        )
        return key, value

    def prefix(self, columns: int) -> TableSchema:
        """Return the schema with the key cut to its first columns. Raises `InvalidArgumentError` if it has fewer."""
        if not 0 < columns <= len(self.key):
            raise InvalidArgumentError("no such prefix of the key", table=self.name, columns=columns, key=len(self.key))
        return TableSchema(self.name, pa.schema(list(self.key)[:columns]), self.value)

    def conform(self, data: pa.Table | pa.RecordBatch, side: str, keys: Keys | None = None) -> pa.RecordBatch:
        """Return `data` as one batch in the storage types of the ``"key"`` or ``"value"`` columns."""
        schema = self.key if side == "key" else self.value
        if sorted(data.schema.names) != sorted(schema.names):
            raise SchemaMismatchError(
                f"the {side} columns do not match the state table",
                table=self.name,
                given=list(data.schema.names),
                expected=list(schema.names),
            )
        columns = []
        for field in schema:
            column = arrow_rows.one_chunk(data.column(field.name))
            column = arrow_values.storable(column, field, self.name, None if keys is None else keys.shown)
            columns.append(arrow_rows.normalize_keys(column) if side == "key" else column)
        return arrow_rows.from_columns(columns, schema, data.num_rows)


def _not_null(schema: pa.Schema, side: str) -> frozenset[str]:
    return frozenset(side + f.name for f in schema if not f.nullable)


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([f.with_nullable(True) for f in schema])


def _nullable_within(field: pa.Field) -> pa.Field:
    return field.with_type(arrow_rows.nullable_type(field.type))


def _stored(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, arrow_rows.storage_type(f.type), metadata=f.metadata) for f in schema])


@dataclass(frozen=True)
class Keys:
    """A batch of keys to look up or write: hashes and key columns, row by row."""

    hashes: HashArray  #: The hash of each key: Spark's ``xxhash64``, as unsigned integers
    columns: pa.RecordBatch  #: Normalised, in storage types: see `Keys.of`.

    @classmethod
    def of(cls, schema: TableSchema, hashes: HashArray, columns: pa.Table | pa.RecordBatch) -> Keys:
        """Conform key columns to a schema, with their hashes. Raises `SchemaMismatchError`, `InvalidArgumentError`."""
        batch = schema.conform(columns, "key")
        given = np.asarray(hashes)
        if given.dtype not in (np.dtype(np.int64), np.dtype(np.uint64)) or given.ndim != 1:
            raise InvalidArgumentError("hashes must be 64-bit integers", given=str(given.dtype), shape=given.shape)
        hashes = np.ascontiguousarray(given).view(np.uint64)
        if len(hashes) != batch.num_rows:
            raise InvalidArgumentError("there must be one hash for each key", hashes=len(hashes), keys=batch.num_rows)
        return cls(hashes, batch)

    def __len__(self) -> int:
        return len(self.hashes)

    def take(self, rows: IntArray) -> Keys:
        """Return the keys of `rows`."""
        return Keys(self.hashes[rows], take(self.columns, rows))

    def slice(self, start: int, end: int) -> Keys:
        """Return the keys from `start` to `end`, without copying."""
        return Keys(self.hashes[start:end], self.columns.slice(start, max(0, end - start)))

    def shown(self, row: int) -> str:
        """Return one key as text, for errors."""
        pairs = zip(self.columns.schema.names, self.columns.columns, strict=True)
        return ", ".join(f"{name}={arrow_values.shown(column[row])}" for name, column in pairs)

    @staticmethod
    def concat(parts: Sequence[Keys]) -> Keys:
        """Concatenate one or more batches of keys."""
        hashes = np.concatenate([part.hashes for part in parts])
        return Keys(hashes, pa.concat_batches([part.columns for part in parts]))

    @cached_property
    def is_sorted(self) -> bool:
        """Whether the hashes ascend."""
        return bool((self.hashes[1:] >= self.hashes[:-1]).all())


@dataclass(frozen=True)
class KeyRanges(Keys):
    """Prefixes of keys, each with a range of the next key column, an int64 or a timestamp.

    A prefix may repeat with disjoint ranges. No range contains null.
    """

    first: IntArray  #: As integers
    last: IntArray  #: Inclusive

    def take(self, rows: IntArray) -> KeyRanges:
        own = super().take(rows)
        return KeyRanges(own.hashes, own.columns, self.first[rows], self.last[rows])

    def slice(self, start: int, end: int) -> KeyRanges:
        own = super().slice(start, end)
        return KeyRanges(own.hashes, own.columns, self.first[start:end], self.last[start:end])

    def hold(self, key_of_range: IntArray, key: IntArray, at: IntArray) -> BoolArray:
        """Return whether each `at` is in a range of its `key` (-1 for no key), given the key of each range."""
        ranges = key
        if (key_of_range[1:] <= key_of_range[:-1]).any():  # else each key has one range, in order
            # For each key, find its last range that begins at or before `at`.
            known, rank = np.unique(self.first, return_inverse=True)
            width = len(known) + 1
            places = np.where(self.first <= self.last, key_of_range * width + rank + 1, -1 - width)
            order = np.argsort(places)
            wanted = key * width + np.searchsorted(known, at, "right")
            ranges = order[np.searchsorted(places[order], wanted, "right") - 1]
        return (key >= 0) & (key_of_range[ranges] == key) & (self.first[ranges] <= at) & (at <= self.last[ranges])


def find_table(tables: Mapping[str, T], table: str) -> T:
    """Return a table's entry in `tables`. Raises `NotFoundError`."""
    if table not in tables:
        raise NotFoundError("no such table: use a table that the operator declares", table=table, tables=sorted(tables))
    return tables[table]


def require_declared(stored: Iterable[str], declared: Mapping[str, object]) -> None:
    """Raise `SchemaMismatchError` if stored state has a table that the operator does not declare."""
    unknown = sorted(set(stored) - declared.keys())
    if unknown:
        raise SchemaMismatchError(
            f"the stored state has tables that the operator does not declare: declare them again, {NEW_QUERY}",
            tables=unknown,
        )


def encode_schemas(tables: Mapping[str, TableSchema]) -> dict[str, list[str]]:
    """Encode the key schema and the value schema of each table as text."""
    return {name: [encode_schema(side) for side in schema.sides()] for name, schema in tables.items()}


def decode_schemas(encoded: Mapping[str, Sequence[str]]) -> dict[str, TableSchema]:
    """Decode the schemas that `encode_schemas` wrote. Raises `CorruptionError` if they are invalid."""
    try:
        return {name: TableSchema.of_sides(name, *map(decode_schema, sides)) for name, sides in encoded.items()}
    except (pa.ArrowException, OSError, ValueError, TypeError) as exc:
        raise CorruptionError(f"the schema of a state table cannot be read: {exc}", tables=list(encoded)) from exc


def encode_schema(schema: pa.Schema) -> str:
    """Encode a schema as text."""
    return base64.b64encode(schema.serialize()).decode()


def decode_schema(text: str) -> pa.Schema:
    """Decode the schema that `encode_schema` wrote; raises Arrow's or Python's own errors if it is invalid."""
    schema = ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
    for field in schema:
        _read_names(field)
    if len(set(schema.names)) < len(schema):
        raise ValueError("two columns share a name")
    return schema


def _read_names(field: pa.Field) -> None:
    """Raise UnicodeDecodeError if a name is not UTF-8: Arrow accepts it, but cannot read it."""
    _ = field.name
    for i in range(field.type.num_fields):
        _read_names(field.type.field(i))
