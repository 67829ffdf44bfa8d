"""Schema evolution: columns match by name and can be widened or added; stored rows stay as they are.

::

    stored              declared            held afterwards        an older row reads as
    n int32             n int64             n int64                the same number
                        note string         note string            null
    total double                            total double           (not shown)

A column that is no longer declared stays in stored rows, and is readable again if it is declared again. A schema change
never rewrites rows: each file records the schema of its rows, and reads project them.

Key columns never change, since rows are looked up by them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import from_columns
from holdfast.backends.schema import NEW_QUERY, TableSchema
from holdfast.errors import SchemaMismatchError

#: Narrowest first: as in Avro, each type can hold the numbers of earlier types, rounding large ones.
_NUMBERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
#: The integer types that each float type holds exactly.
_EXACT = {pa.float32(): _NUMBERS[:2], pa.float64(): _NUMBERS[:3]}


def evolved(stored: TableSchema, declared: TableSchema) -> TableSchema:
    """Return a schema that can hold the rows of both `stored` and `declared`."""
    if stored == declared:
        return stored
    changes = [*key_changes(stored, declared), *value_changes(stored, declared)]
    if changes:
        raise SchemaMismatchError(
            "the stored rows cannot be read with the columns that the operator declares: declare the stored columns, "
            f"{NEW_QUERY}",
            table=declared.name,
            changed=changes,
        )
    return TableSchema(stored.name, stored.key, _union(stored.value, declared.value))


def evolved_tables(stored: Mapping[str, TableSchema], declared: Mapping[str, TableSchema]) -> dict[str, TableSchema]:
    """Return tables that can hold the rows of both `stored` and `declared`; see `evolved`."""
    both = {name: evolved(stored[name], schema) for name, schema in declared.items() if name in stored}
    return {**stored, **declared, **both}


def key_changes(stored: TableSchema, declared: TableSchema) -> list[str]:
    """List the key columns that differ between two schemas, as ``name: stored → declared``."""
    if stored.key.equals(declared.key):
        return []
    before, after = ({f.name: str(f.type) for f in schema.key} for schema in (stored, declared))
    names = dict.fromkeys([*before, *after])
    differ = [_change(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]
    return differ or ["the order of the key columns"]


def value_changes(stored: TableSchema, declared: TableSchema, *, exact: bool = False) -> list[str]:
    """List value columns that cannot be read as declared, as ``name: stored → declared``; `exact` forbids rounding."""
    before = {field.name: field.type for field in stored.value}
    return [
        _change(field.name, str(before[field.name]), str(field.type))
        for field in declared.value
        if field.name in before and not is_readable_as(before[field.name], field.type, exact=exact)
    ]


def _change(name: str, before: str | None, after: str | None) -> str:
    return f"{name}: {before or 'absent'} → {after or 'absent'}"


def is_readable_as(stored: pa.DataType, declared: pa.DataType, *, exact: bool = False) -> bool:
    """Return whether values of one type can be read as another; `exact` forbids rounding large integers."""
    return _wider(stored, declared, exact=exact) is not None


def require_readable(stored: TableSchema, held: TableSchema, *, source: str) -> None:
    """Check that rows written with one schema can be read with another without losing values."""
    if stored is held or stored.columns.equals(held.columns):
        return
    types = {field.name: field.type for field in held.value}
    lost = [
        _change(f"value.{f.name}", str(f.type), str(types[f.name]) if f.name in types else None)
        for f in stored.value
        if f.name not in types or not _holds(types[f.name], f.type)
    ]
    changed = [*(f"key.{change}" for change in key_changes(stored, held)), *lost]
    if changed:
        raise SchemaMismatchError(
            f"{source} holds state with a different schema than the operator now declares: declare the stored columns "
            f"again, {NEW_QUERY}",
            table=held.name,
            changed=changed,
        )


def project(values: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Project value columns to another schema: match by name, widen types, fill absent columns with nulls."""
    if values.schema.equals(schema):
        return values
    n, names = values.num_rows, values.schema.names
    columns = [
        _column(values.column(names.index(f.name)), f.type) if f.name in names else pa.nulls(n, f.type) for f in schema
    ]
    return from_columns(columns, schema, n)


def _holds(held: pa.DataType, stored: pa.DataType) -> bool:
    """Return whether one type can hold all values of another; struct fields may be in any order."""
    both = _wider(stored, held)
    return both is not None and held.equals(_wider(held, both))


def _wider(stored: pa.DataType, declared: pa.DataType, *, exact: bool = False) -> pa.DataType | None:
    """Return a type that can hold values of both; None if stored values do not fit the declared type."""
    if stored.equals(declared):
        return stored
    if pa.types.is_struct(stored) and pa.types.is_struct(declared):
        fields = _wider_fields(list(stored), list(declared), exact)
        return None if fields is None else pa.struct(fields)
    if pa.types.is_large_list(stored) and pa.types.is_large_list(declared):
        element = _wider_field(stored.value_field, declared.value_field, exact)
        return None if element is None else pa.large_list(element)
    if pa.types.is_map(stored) and pa.types.is_map(declared):
        item = _wider_field(stored.item_field, declared.item_field, exact)
        return pa.map_(stored.key_type, item) if item is not None and stored.key_type == declared.key_type else None
    return declared if _is_wider_number(stored, declared, exact) else None


def _is_wider_number(stored: pa.DataType, declared: pa.DataType, exact: bool) -> bool:
    if pa.types.is_decimal128(stored) and pa.types.is_decimal128(declared):
        whole_digits = [t.precision - t.scale for t in (stored, declared)]
        return declared.scale >= stored.scale and whole_digits[1] >= whole_digits[0]
    if exact and pa.types.is_integer(stored) and pa.types.is_floating(declared):
        return stored in _EXACT.get(declared, ())
    return any(stored in line and declared in line[line.index(stored) :] for line in (_NUMBERS, _UNSIGNED))


def _wider_field(stored: pa.Field, declared: pa.Field, exact: bool) -> pa.Field | None:
    held = _wider(stored.type, declared.type, exact=exact)
    if held is None or (stored.nullable and not declared.nullable):
        return None
    return pa.field(stored.name, held, stored.nullable or declared.nullable)


def _wider_fields(stored: list[pa.Field], declared: list[pa.Field], exact: bool) -> list[pa.Field] | None:
    """Return struct fields that can hold values of both; a field missing on one side is nullable."""
    after = {field.name: field for field in declared}
    if len({field.name for field in stored}) < len(stored) or len(after) < len(declared):
        return None  # duplicate names are ambiguous
    held: list[pa.Field | None] = [
        _wider_field(field, after.pop(field.name), exact) if field.name in after else field.with_nullable(True)
        for field in stored
    ]
    held += [field if field.nullable else None for field in after.values()]
    return None if any(field is None for field in held) else held


def _union(stored: pa.Schema, declared: pa.Schema) -> pa.Schema:
    after = {field.name: field.type for field in declared}
    held = [f.with_type(_wider(f.type, after.pop(f.name))) if f.name in after else f for f in stored]
    return pa.schema([*held, *(declared.field(name) for name in after)])


def _column(column: pa.Array, t: pa.DataType) -> pa.Array:
    """Cast a column to a type that `_wider` returned, or to a type with fewer fields."""
    if column.type.equals(t):
        return column
    n, validity = len(column), _validity(column)
    if pa.types.is_struct(t):
        names = [field.name for field in column.type]
        fields = [_column(column.field(f.name), f.type) if f.name in names else pa.nulls(n, f.type) for f in t]
        return pa.Array.from_buffers(t, n, [validity], children=fields)
    if pa.types.is_large_list(t) or pa.types.is_map(t):
        offsets = column.offsets.to_numpy()
        first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
        if pa.types.is_map(t):
            parts = [column.keys.slice(first, count), _column(column.items.slice(first, count), t.item_type)]
            elements = pa.StructArray.from_arrays(parts, fields=[t.key_field, t.item_field])
        else:
            elements = _column(column.values.slice(first, count), t.value_type)
        return pa.Array.from_buffers(t, n, [validity, pa.py_buffer(offsets - first)], children=[elements])
    return column.cast(t, safe=False)


def _validity(column: pa.Array) -> pa.Buffer | None:
    if not column.null_count:
        return None
    return pa.py_buffer(np.packbits(column.is_valid().to_numpy(zero_copy_only=False), bitorder="little"))
