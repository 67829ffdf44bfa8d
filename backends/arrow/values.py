"""Rules for the values of a state column, for values that are put and for values read from storage.

======================  ==============================================================================================
strings                 any bytes: Spark does not validate strings, and ``CAST(value AS STRING)`` accepts any bytes;
                        so they are stored unchanged
decimals                no more digits than the type allows, although Arrow's own sum can return more
nested values           no null in a NOT NULL field, element or map value, at any depth
casts                   lossless, except that a floating-point number may be rounded to the nearest number of a
                        narrower floating-point type
structure               offsets ascend within bounds; children have the required length
======================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import is_same_kind, nullable_type
from holdfast.errors import SchemaMismatchError

#: What pyarrow raises for invalid text, and for times beyond Python's range.
_BEYOND_PYTHON = (ValueError, OverflowError)


def storable(column: pa.Array, field: pa.Field, table: str, shown_key: Callable[[int], str] | None = None) -> pa.Array:
    """Convert a column for a state table; errors name a bad row by `shown_key`. Raises `SchemaMismatchError`."""
    given = column.type
    facts: dict[str, object] = {"table": table, "given": given, "expected": field.type}
    if given != field.type:
        if not is_same_kind(given, field.type):
            raise SchemaMismatchError(
                f"column {field.name!r} has a different type than in the state table: convert it first", **facts
            )
        try:
            column = cast(column, field.type)
        except (ValueError, pa.ArrowNotImplementedError) as exc:
            raise SchemaMismatchError(f"column {field.name!r} cannot be stored: {exc}", **facts) from exc
    try:
        validate(column)
    except ValueError as exc:
        if shown_key is not None:
            facts["key"] = shown_key(first_that_fails(column))
        raise SchemaMismatchError(f"column {field.name!r} cannot be stored: {exc}", **facts) from exc
    return column


def shown(value: pa.Scalar) -> str:
    """Return any value as text for an error."""
    try:
        return repr(value.as_py())[:80]
    except (ValueError, OverflowError):  # not UTF-8, or a time outside Python's range
        is_text = pa.types.is_string(value.type) or pa.types.is_large_string(value.type)
        return repr(value.as_buffer().to_pybytes())[:80] if is_text else f"({value.type})"


def validate(column: pa.Array) -> None:
    """Check every value of a column except the bytes of strings. Raises `ValueError`."""
    t = column.type
    blind = blind_type(t)
    if blind is not t:
        column.validate()  # `view` requires that all buffers exist
        column = column.view(blind)
    validate_blind(column, t)


def validate_blind(column: pa.Array, t: pa.DataType) -> None:
    """Check a column that has the blind type of `t`. Raises `ValueError`."""
    column.validate(full=True)
    if forbidden := _forbidden_null(column, t):
        raise ValueError(f"null in {forbidden}, which is NOT NULL")


def first_that_fails(column: pa.Array) -> int:
    """Return the first row of a column that `validate` refuses; there must be such a row."""
    start, stop = 0, len(column)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:  # not a slice, which keeps the children of the whole column
            validate(column.take(pa.array(range(start, middle))))
            start = middle
        except ValueError:
            stop = middle
    return start


def blind_type(t: pa.DataType) -> pa.DataType:
    """Return a type to read the same memory unvalidated: Arrow aborts the process on a map with a null key."""
    types = pa.types
    if types.is_large_string(t):
        return pa.large_binary()
    if types.is_string(t):
        return pa.binary()
    if types.is_large_list(t):
        return pa.large_list(_blind_field(t.value_field))
    if types.is_list(t):
        return pa.list_(_blind_field(t.value_field))
    if types.is_fixed_size_list(t):
        return pa.list_(_blind_field(t.value_field), t.list_size)
    if types.is_map(t):
        return pa.list_(pa.field("entries", pa.struct([_blind_field(t.key_field), _blind_field(t.item_field)])))
    if types.is_struct(t):
        return pa.struct([_blind_field(field) for field in t])
    return t


def viewed(column: pa.Array, t: pa.DataType) -> pa.Array:
    """View a column of the blind or nullable type of `t` as `t`; `pyarrow.Array.view` refuses nulls below nulls."""
    try:
        return column.view(t)
    except pa.ArrowInvalid:
        if not pa.types.is_nested(t) or pa.types.is_fixed_size_list(t):
            raise
    validity = None
    if column.null_count:
        validity = pa.py_buffer(np.packbits(column.is_valid().to_numpy(zero_copy_only=False), bitorder="little"))
    if pa.types.is_struct(t):
        fields = [viewed(column.field(i), field.type) for i, field in enumerate(t)]
        return pa.Array.from_buffers(t, len(column), [validity], children=fields)
    offsets = column.offsets.to_numpy()
    inner = pa.struct([t.key_field, t.item_field]) if pa.types.is_map(t) else t.value_type
    elements = viewed(column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])), inner)
    return pa.Array.from_buffers(t, len(column), [validity, pa.py_buffer(offsets - offsets[0])], children=[elements])


def _blind_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, blind_type(field.type))


def forbidden_null(column: pa.Array) -> str | None:
    """Return the path of a NOT NULL field or element inside a nested column that has a null; None if there is none."""
    t = column.type
    return _forbidden_null(column.view(blind_type(t)), t) if pa.types.is_nested(t) else None


def _forbidden_null(column: pa.Array, t: pa.DataType) -> str | None:
    if pa.types.is_nested(t) and _forbids_nulls(t):
        for field, child in _children(column, t):
            if child.null_count and not field.nullable:
                return f"{field.name!r}"
            if below := _forbidden_null(child, field.type):
                return f"{field.name!r}: {below}"
    return None


def _forbids_nulls(t: pa.DataType) -> bool:
    if pa.types.is_map(t):
        return True
    return any(not t.field(i).nullable or _forbids_nulls(t.field(i).type) for i in range(t.num_fields))


def _children(column: pa.Array, t: pa.DataType) -> Iterator[tuple[pa.Field, pa.Array]]:
    """Yield the child columns of a column that has the blind type of `t`, without values under a null."""
    if pa.types.is_struct(t):
        whole = column.filter(column.is_valid()) if column.null_count else column
        yield from zip(t, whole.flatten(), strict=True)
    elif pa.types.is_map(t):
        entries = column.flatten()
        yield from zip((t.key_field, t.item_field), entries.flatten(), strict=True)
    elif pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t):
        yield t.value_field, column.flatten()


def cast(column: pa.Array, t: pa.DataType) -> pa.Array:
    """Cast a column to a different type of the same kind; see the rules in the module docstring."""
    if column.type == t:
        return column
    # Arrow refuses every null in a NOT NULL field, even below a null.
    stored = viewed(column.cast(nullable_type(t)), t)
    if not _has_fractions(column.type):
        return stored
    given = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    if pa.types.is_nested(given.type):
        given = given.view(blind_type(given.type))
    _require_equal(given, stored.view(blind_type(t)))
    return stored


def _has_fractions(t: pa.DataType) -> bool:
    """Return whether a type contains floats or decimals, which Arrow's casts may silently change."""
    if pa.types.is_dictionary(t):
        return _has_fractions(t.value_type)
    is_one = pa.types.is_floating(t) or pa.types.is_decimal(t)
    return is_one or any(_has_fractions(t.field(i).type) for i in range(t.num_fields))


def _require_equal(before: pa.Array, after: pa.Array) -> None:
    """Raise `ValueError` if Arrow's cast silently changed a number, at any depth."""
    if pa.types.is_dictionary(before.type):
        before = before.dictionary_decode()
    if pa.types.is_null(before.type):
        return
    pairs = zip(_children(before, before.type), _children(after, after.type), strict=True)
    for (_, child), (_, cast_child) in pairs:
        _require_equal(child, cast_child)
    source, target = before.type, after.type
    if pa.types.is_floating(source) and pa.types.is_floating(target):
        if target.bit_width < source.bit_width:
            _require_rounded(_numbers(before), _numbers(after), target)
    elif pa.types.is_floating(source) and pa.types.is_decimal(target):
        wanted = _numbers(before)
        # Arrow's cast back loses one unit in the last place.
        if (np.abs(_numbers(after.cast(source)) - wanted) > 2 * np.spacing(np.abs(wanted))).any():
            raise ValueError(f"a number has more digits than {target}: round it first")
    elif pa.types.is_decimal(source) and pa.types.is_floating(target) and not after.cast(source).equals(before):
        raise ValueError(f"a number has more digits than {target} can represent: round it first")


def _require_rounded(wide: npt.NDArray[np.floating], narrow: npt.NDArray[np.floating], target: pa.DataType) -> None:
    if (np.isfinite(wide) & ~np.isfinite(narrow)).any() or ((wide != 0) & (narrow == 0)).any():
        raise ValueError(f"a number is too large or too small for {target}")


def _numbers(column: pa.Array) -> npt.NDArray[np.floating]:
    numbers: npt.NDArray[np.floating] = pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False)
    return numbers


def python_rows(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as dicts; values without a Python equivalent become text."""
    try:
        found: list[dict[str, Any]] = rows.to_pylist()
    except _BEYOND_PYTHON:
        columns = [[python_value(value) for value in column] for column in rows.columns]
        found = [dict(zip(rows.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
    return found


def python_value(value: pa.Scalar) -> Any:
    """Return a value, or text if Python has no equivalent: escapes for invalid bytes, a number for a time."""
    try:
        return value.as_py()
    except _BEYOND_PYTHON:
        pass
    t = value.type
    if pa.types.is_string(t) or pa.types.is_large_string(t):
        return value.as_buffer().to_pybytes().decode("utf-8", "backslashreplace")
    if pa.types.is_struct(t):
        return {field.name: python_value(part) for field, part in zip(t, value.values(), strict=True)}
    if pa.types.is_map(t):
        return [tuple(map(python_value, pair.values())) for pair in value.values]
    if pa.types.is_nested(t):
        return [python_value(element) for element in value.values]
    return f"{value.value} {t}"
