"""Converts the arrays that a user's function passes and receives; orders values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import (
    BoolArray,
    IntArray,
    RowOrder,
    normalize_keys,
    one_chunk,
    storage_type,
    to_bools,
)
from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError


def array_of(values: Any, what: str, keys: int | None) -> pa.Array:
    """Convert `values` to an array with one value per key, or of any length if `keys` is None."""
    if not isinstance(values, (pa.Array, pa.ChunkedArray)):
        try:
            values = pa.array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
            raise InvalidArgumentError(
                f"{what} must be an array with one value for each key: {exc}", given=type(values).__name__
            ) from exc
    if keys is not None and len(values) != keys:
        raise InvalidArgumentError(f"{what} must have one value for each key", values=len(values), keys=keys)
    return one_chunk(values)


def without_views(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Convert a column to one array without string views, which Arrow's ``take`` does not support."""
    whole = one_chunk(column)
    return whole.cast(storage_type(whole.type)) if _has_views(whole.type) else whole


def _has_views(t: pa.DataType) -> bool:
    is_view = pa.types.is_string_view(t) or pa.types.is_binary_view(t)
    return is_view or any(_has_views(t.field(i).type) for i in range(t.num_fields))


def rows_where(where: object, keys: int) -> IntArray:
    """Return the indices of keys for which `where` is true; null counts as false. Raises `InvalidArgumentError`."""
    given = array_of(where, "where", keys)
    if pa.types.is_null(given.type):
        given = given.cast(pa.bool_())
    if not pa.types.is_boolean(given.type):
        raise InvalidArgumentError("where must be boolean", given=str(given.type))
    mask: BoolArray = pc.fill_null(given, False).to_numpy(zero_copy_only=False)
    return np.flatnonzero(mask)


def seen(columns: pa.RecordBatch, types: pa.Schema, what: str) -> pa.Table:
    """Convert stored columns to the function's types, with 32-bit offsets. Raises `InvalidArgumentError`."""
    return pa.table([_seen(*pair, what) for pair in zip(columns.columns, types, strict=True)], schema=types)


def shown_keys(keys: Keys, types: pa.Schema) -> dict[str, pa.ChunkedArray]:
    """Return key columns by name, in the types of the function and its output; raises the errors of `seen`."""
    shown = seen(keys.columns, types, "key column")
    return dict(zip(shown.schema.names, shown.columns, strict=True))


def _seen(column: pa.Array, field: pa.Field, what: str) -> pa.Array:
    try:
        return column.cast(field.type)
    except pa.ArrowInvalid as exc:
        raise InvalidArgumentError(
            f"{what} {field.name!r} exceeds 2 GiB for the keys of one shard's call: use smaller micro-batches, or more "
            "shards (holdfast rescale)",
            keys=len(column),
            bytes=column.nbytes,
        ) from exc


def comparable(column: pa.Array | pa.ChunkedArray) -> list[npt.NDArray[Any]]:
    """Convert values to columns of numbers that compare lexicographically like the values: null least, NaN largest.

    Raises `InvalidArgumentError`, as `ranks` does.
    """
    values, t = one_chunk(column), column.type
    is_valid = [to_bools(values.is_valid())] if values.null_count else []
    if pa.types.is_struct(t):
        return [*is_valid, *(part for field in values.flatten() for part in comparable(field))]
    if pa.types.is_temporal(t) and not pa.types.is_interval(t):
        values = values.view(pa.int32() if t.bit_width == 32 else pa.int64())
    elif not (pa.types.is_integer(t) or pa.types.is_floating(t)):
        return [ranks(values)]
    numbers = values.fill_null(0).to_numpy()
    if not pa.types.is_floating(t):
        return [*is_valid, numbers]
    is_nan = np.isnan(numbers)
    return [*is_valid, is_nan, np.where(is_nan, 0, numbers)]


def best_rows(order: RowOrder, columns: Iterable[npt.NDArray[Any]], *, largest: bool) -> RowOrder:
    """Return each key's largest or smallest rows by `comparable` columns; equal rows are all returned."""
    rows, first = order
    choose = np.maximum if largest else np.minimum
    for numbers in columns:
        if first.all():
            break
        values, key = numbers[rows], np.cumsum(first) - 1
        best = choose.reduceat(values, np.flatnonzero(first))
        kept = np.flatnonzero(values == best[key])
        rows, first = rows[kept], np.diff(key[kept], prepend=-1) > 0
    return RowOrder(rows, first)


def ranks(column: pa.Array | pa.ChunkedArray) -> IntArray:
    """Return the dense rank of each value, from 1; 0 for null. Raises `InvalidArgumentError`.

    Structs are ordered by their first field, then by the second, and so on.
    """
    values = normalize_keys(one_chunk(column))
    if pa.types.is_struct(values.type):
        return np.where(values.is_null().to_numpy(zero_copy_only=False), 0, _struct_ranks(values))
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    try:
        found: IntArray = pc.rank(values, tiebreaker="dense").to_numpy().astype(np.int64)
    except pa.ArrowNotImplementedError as exc:
        raise InvalidArgumentError("values of this type have no order", type=str(values.type)) from exc
    found[values.is_null().to_numpy(zero_copy_only=False)] = 0  # Arrow ranks null last
    return found


def _struct_ranks(values: pa.StructArray) -> IntArray:
    fields = np.array([ranks(field) for field in values.flatten()])
    order = np.lexsort(fields[::-1])
    is_new = np.any(np.diff(fields[:, order]) != 0, axis=0)
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(np.append(1, is_new)[: len(order)])
    return found
