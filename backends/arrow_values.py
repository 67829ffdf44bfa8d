"""What a column of state may hold: one rule for what is put and for what is read from storage.

======================  ==============================================================================================
strings                 any bytes. Spark does not validate what it calls a string, and ``CAST(value AS STRING)`` makes
                        them of any bytes, so they are carried as they are
decimals                no more digits than their type has, although Arrow's own sum can return more
nested values           no null in a field, an element or a map's value that is NOT NULL, at any depth
casts                   none that loses: a floating-point number may be rounded to the nearest one of a narrower type,
                        which is what such a type means; nothing else changes
structure               offsets ascend and stay inside; children are as long as they must be
======================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow_rows import is_same_kind
from holdfast.errors import SchemaMismatchError


def storable(column: pa.Array, field: pa.Field, table: str, shown_key: Callable[[int], str] | None = None) -> pa.Array:
    """Return a column that is put as the column `field` of a state table.

    Parameters
    ----------
    shown_key : callable, optional
        Returns the key of a row for the error.

    Raises
    ------
    SchemaMismatchError
        It has another type, or a value that cannot be stored in it without loss.
    """
    facts = {"table": table, "given": str(column.type), "expected": str(field.type)}
    if not is_same_kind(column.type, field.type):
        raise SchemaMismatchError(
            f"column {field.name!r} has another type than the state table: convert it first", **facts
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
    """Return a value for an error, whatever it is."""
    try:
        return repr(value.as_py())[:80]
    except (ValueError, OverflowError):  # not UTF-8, or a time that Python does not know
        return str(value)[:80]


def validate(column: pa.Array) -> None:
    """Check every value of a column but the bytes of its strings.

    Parameters
    ----------
    column : pyarrow.Array
        In a storage type: without dictionaries.

    Raises
    ------
    ValueError
        Memory would be read that is not the column's, or a value is none of its type, or a null stands where none may.
    """
    given, blind = column, _with_bytes_for_text(column.type)
    if blind != column.type:
        column.validate()  # viewing needs the buffers to be there
        column = column.view(blind)
    column.validate(full=True)
    forbidden = null_where_none_may_be(given)
    if forbidden:
        raise ValueError(f"null in {forbidden}, which is NOT NULL")


def first_that_fails(column: pa.Array) -> int:
    """Return the first row of a column that `validate` refuses; the column must have one."""
    start, stop = 0, len(column)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:  # not a slice: the children of one are those of the whole
            validate(column.take(pa.array(range(start, middle))))
            start = middle
        except ValueError:
            stop = middle
    return start


def _with_bytes_for_text(t: pa.DataType) -> pa.DataType:
    """Return the type of the same memory in which strings are binaries, and all that is inside may be null."""
    if pa.types.is_large_string(t):
        return pa.large_binary()
    if pa.types.is_string(t):
        return pa.binary()
    if pa.types.is_large_list(t):
        return pa.large_list(_field_with_bytes(t.value_field))
    if pa.types.is_list(t):
        return pa.list_(_field_with_bytes(t.value_field))
    if pa.types.is_fixed_size_list(t):
        return pa.list_(_field_with_bytes(t.value_field), t.list_size)
    if pa.types.is_map(t):
        key = t.key_field.with_type(_with_bytes_for_text(t.key_type))
        return pa.map_(key, _field_with_bytes(t.item_field), keys_sorted=t.keys_sorted)
    if pa.types.is_struct(t):
        return pa.struct([_field_with_bytes(field) for field in t])
    return t


def _field_with_bytes(field: pa.Field) -> pa.Field:
    return field.with_type(_with_bytes_for_text(field.type)).with_nullable(True)


def null_where_none_may_be(column: pa.Array) -> str | None:
    """Return what inside of a nested column is NOT NULL and has a null: ``an element`` or the path of a field."""
    for field, child in _children(column):
        if child.null_count and not field.nullable:
            return f"{field.name!r}"
        if below := null_where_none_may_be(child):
            return f"{field.name!r}: {below}"
    return None


def _children(column: pa.Array) -> Iterator[tuple[pa.Field, pa.Array]]:
    """Yield the columns inside of a nested one, without what stands under a null."""
    t = column.type
    if pa.types.is_struct(t):
        whole = column.filter(column.is_valid()) if column.null_count else column
        yield from zip(t, whole.flatten(), strict=True)
    elif pa.types.is_map(t):
        whole = column.filter(column.is_valid()) if column.null_count else column
        offsets = whole.offsets
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        yield t.key_field, whole.keys.slice(first, last - first)
        yield t.item_field, whole.items.slice(first, last - first)
    elif pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t):
        yield t.value_field, column.flatten()


def cast(column: pa.Array, t: pa.DataType) -> pa.Array:
    """Return a column in another type of the same kind; see the module for what may change.

    Raises
    ------
    ValueError, pyarrow.ArrowNotImplementedError
        A value would be another one in that type, or there is no such cast.
    """
    if column.type == t:
        return column
    if not is_same_kind(column.type, t):
        raise ValueError("a value of this type means something else than one of that")
    stored = column.cast(t)
    for before, after in zip(_leaves(_decoded(column)), _leaves(stored), strict=True):
        _require_equal(before, after)
    return stored


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    """Yield the columns of a nested one that have no others inside."""
    if not pa.types.is_nested(column.type):
        yield column
    for _, child in _children(column):
        yield from _leaves(_decoded(child))


def _require_equal(before: pa.Array, after: pa.Array) -> None:
    """Raise ValueError where Arrow has cast a number to another one without a word."""
    source, target = before.type, after.type
    if pa.types.is_floating(source) and pa.types.is_floating(target):
        if target.bit_width < source.bit_width:
            _require_rounded(_numbers(before), _numbers(after), target)
    elif pa.types.is_floating(source) and pa.types.is_decimal(target):
        wanted = _numbers(before)
        # Arrow is one unit in the last place off on its way back.
        if (np.abs(_numbers(after.cast(source)) - wanted) > 2 * np.spacing(np.abs(wanted))).any():
            raise ValueError(f"a number has more digits than {target}: round it first")
    elif pa.types.is_decimal(source) and pa.types.is_floating(target) and not after.cast(source).equals(before):
        raise ValueError(f"a number has more digits than {target} can tell apart: round it first")


def _require_rounded(wide: npt.NDArray[np.floating], narrow: npt.NDArray[np.floating], target: pa.DataType) -> None:
    if (np.isfinite(wide) & ~np.isfinite(narrow)).any() or ((wide != 0) & (narrow == 0)).any():
        raise ValueError(f"a number is too large or too small for {target}")


def _numbers(column: pa.Array) -> npt.NDArray[np.floating]:
    numbers: npt.NDArray[np.floating] = pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False)
    return numbers
