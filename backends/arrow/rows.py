"""Row-wise operations on Arrow columns, for whole batches at once.

Arrow computes by column; a keyed store needs to know by row which keys are equal, how keys sort, and which keys
repeat. These functions support every key type that Spark can group by, and treat keys as Spark's ``groupBy`` does:

* null is a key like any other, and equal to itself;
* ``-0.0`` equals ``0.0``, and all NaNs are equal (`normalize_keys` makes their bits equal, too).

Rows are ordered by (hash, key). Hashes almost always decide; keys are compared only among rows that
share a hash.

::

    rows of the run                 wanted keys
    0x01…  "ann"                    0x1f… "bob"      first row of its hash: found at once
    0x1f…  "bob"   ┐ a crowd:       0x1f… "dan"      a later row of its hash, or no row: see `_find_in_crowds`
    0x1f…  "cem"   │ rows that
    0x1f…  "dan"   ┘ share a hash
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]
_Number = TypeVar("_Number", bound=np.integer)

#: The limit of Arrow's small variable-width types, in bytes of text or list elements.
SMALL_OFFSETS_MAX = (1 << 31) - 1
_SIGN = np.uint64(1 << 63)
#: With fewer ascending stretches of hashes than this, merging is faster than sorting.
_FEW_STRETCHES = 4


def storage_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type in which a column is stored: large variants of variable-width types, UTC for instants."""
    t = data_type
    if pa.types.is_string(t) or pa.types.is_string_view(t):
        return pa.large_string()
    if pa.types.is_binary(t) or pa.types.is_binary_view(t):
        return pa.large_binary()
    if pa.types.is_timestamp(t) and t.tz is not None:
        return pa.timestamp(t.unit, "UTC")
    if pa.types.is_list(t) or pa.types.is_large_list(t):
        return pa.large_list(t.value_field.with_type(storage_type(t.value_type)))
    if pa.types.is_map(t):
        return pa.map_(storage_type(t.key_type), t.item_field.with_type(storage_type(t.item_type)))
    if pa.types.is_struct(t):
        return pa.struct([f.with_type(storage_type(f.type)) for f in t])
    if pa.types.is_dictionary(t):
        return storage_type(t.value_type)
    return t


def nullable_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type with every struct field and list element nullable, at any depth."""
    t = data_type
    if pa.types.is_struct(t):
        return pa.struct([pa.field(f.name, nullable_type(f.type)) for f in t])
    if pa.types.is_list(t) or pa.types.is_large_list(t):
        element = pa.field(t.value_field.name, nullable_type(t.value_type))
        return pa.large_list(element) if pa.types.is_large_list(t) else pa.list_(element)
    return t


def is_same_kind(given: pa.DataType, stored: pa.DataType) -> bool:
    """Return whether a cast keeps the meaning, if it succeeds; Arrow also parses text, shifts zones, drops fields."""
    if pa.types.is_null(given):
        return True
    if pa.types.is_dictionary(given):
        return is_same_kind(given.value_type, stored)
    if pa.types.is_nested(given) or pa.types.is_nested(stored):
        names = [t.field(i).name for t in (given, stored) for i in range(t.num_fields) if pa.types.is_struct(t)]
        return (
            _kind(given) == _kind(stored)
            and given.num_fields == stored.num_fields
            and names[: len(names) // 2] == names[len(names) // 2 :]
            and all(is_same_kind(given.field(i).type, stored.field(i).type) for i in range(given.num_fields))
        )
    return _kind(given) == _kind(stored)


def _kind(t: pa.DataType) -> str:
    types = pa.types
    kinds = {
        "number": types.is_integer(t) or types.is_floating(t) or types.is_decimal(t),
        "string": types.is_string(t) or types.is_large_string(t) or types.is_string_view(t),
        "binary": any(
            f(t) for f in (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
        ),
        "list": any(f(t) for f in (types.is_list, types.is_large_list, types.is_fixed_size_list)),
        "map": types.is_map(t),
        "struct": types.is_struct(t),
        "date": types.is_date(t),
        "time": types.is_time(t),
        "instant": types.is_timestamp(t) and t.tz is not None,
        "local time": types.is_timestamp(t) and t.tz is None,
    }
    return next((name for name, matches in kinds.items() if matches), str(t.id))


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, copied only if it has several chunks; if too large, in its storage type."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.nbytes > SMALL_OFFSETS_MAX:
        column = column.cast(storage_type(column.type))
    return column.combine_chunks()


def take(batch: pa.RecordBatch, rows: npt.NDArray[np.integer] | pa.Array) -> pa.RecordBatch:
    """Return `rows` in order; a null gives a row of nulls. Unlike Arrow's ``take``, works without columns."""
    indices = rows if isinstance(rows, pa.Array) else pa.array(rows)
    return from_columns([c.take(indices) for c in batch.columns], batch.schema, len(indices))


def take_rows(batches: list[pa.RecordBatch], rows: IntArray) -> pa.Table:
    """Return `rows` of consecutive batches; Arrow's `take` would concatenate them, and fail beyond 2 GiB of text."""
    if len(batches) == 1 or not len(rows):
        return pa.Table.from_batches([batches[0].take(pa.array(rows))])
    starts = np.cumsum([0, *(len(batch) for batch in batches)])
    holder = np.searchsorted(starts, rows, side="right") - 1
    by_holder = np.argsort(holder, kind="stable")
    bounds = np.searchsorted(holder[by_holder], np.arange(len(batches) + 1))
    parts = [
        batches[which].take(pa.array(rows[by_holder[bounds[which] : bounds[which + 1]]] - starts[which]))
        for which in np.flatnonzero(np.diff(bounds)).tolist()
    ]
    if len(parts) == 1:
        return pa.Table.from_batches(parts)
    return pa.Table.from_batches(parts).combine_chunks().take(pa.array(inverse(by_holder)))


def filter_rows(batch: pa.RecordBatch, mask: BoolArray) -> pa.RecordBatch:
    return batch if mask.all() else take(batch, np.flatnonzero(mask))


def from_columns(columns: list[pa.Array], schema: pa.Schema, num_rows: int) -> pa.RecordBatch:
    """Return a batch of `columns`; without columns it keeps its number of rows, unlike Arrow's."""
    if columns:
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    marker = pa.StructArray.from_buffers(pa.struct([]), num_rows, [None])
    return pa.RecordBatch.from_struct_array(marker).replace_schema_metadata(schema.metadata)


def null_rows(schema: pa.Schema, n: int) -> pa.RecordBatch:
    return from_columns([pa.nulls(n, field.type) for field in schema], schema, n)


def normalize_keys(column: pa.Array) -> pa.Array:
    """Normalize a key column like Spark's ``NormalizeFloatingNumbers``: -0.0 becomes 0.0, every NaN the same NaN."""
    t = column.type
    if pa.types.is_floating(t):
        return _normalize_floats(column)
    if not _holds_floats(t):
        return column
    if pa.types.is_struct(t):
        children = [normalize_keys(column.field(i)) for i in range(t.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(t), mask=column.is_null())
    values = normalize_keys(column.flatten())
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths.to_numpy(zero_copy_only=False))])
    builder = pa.LargeListArray if pa.types.is_large_list(t) else pa.ListArray
    offset_type = pa.int64() if pa.types.is_large_list(t) else pa.int32()
    return builder.from_arrays(pa.array(offsets, offset_type), values, type=t, mask=column.is_null())


def _holds_floats(t: pa.DataType) -> bool:
    return pa.types.is_floating(t) or any(_holds_floats(t.field(i).type) for i in range(t.num_fields))


def _normalize_floats(column: pa.Array) -> pa.Array:
    values = pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore"):  # signalling NaNs raise a warning
        is_nan, is_zero = np.isnan(values), values == 0
    if not (is_nan.any() or (np.signbit(values) & is_zero).any()):
        return column
    values = np.where(is_nan, values.dtype.type(np.nan), np.where(is_zero, values.dtype.type(0), values))
    return pa.array(values, type=column.type, mask=column.is_null().to_numpy(zero_copy_only=False))


def rows_equal(left: pa.RecordBatch, right: pa.RecordBatch) -> BoolArray:
    """Return for each i whether row i of `left` and row i of `right` are the same key."""
    equal = np.ones(left.num_rows, np.bool_)
    for mine, other in zip(left.columns, right.columns, strict=True):
        equal &= _values_equal(mine, other)
    return equal


def _values_equal(left: pa.Array, right: pa.Array) -> BoolArray:
    t = left.type
    if pa.types.is_null(t):
        return np.ones(len(left), np.bool_)
    if pa.types.is_struct(t):
        equal = np.ones(len(left), np.bool_)
        for i in range(t.num_fields):
            equal &= _values_equal(left.field(i), right.field(i))
    elif pa.types.is_list(t) or pa.types.is_large_list(t):
        equal = _lists_equal(left, right)
    elif pa.types.is_floating(t):
        mine, other = _floats(left), _floats(right)
        equal = (mine == other) | (np.isnan(mine) & np.isnan(other))
    else:
        equal = to_bools(pc.equal(left, right))
    if left.null_count or right.null_count:
        left_null, right_null = to_bools(left.is_null()), to_bools(right.is_null())
        equal = (equal & ~left_null & ~right_null) | (left_null & right_null)
    return equal


def _lists_equal(left: pa.Array, right: pa.Array) -> BoolArray:
    left_lengths = pc.fill_null(pc.list_value_length(left), -1).to_numpy(zero_copy_only=False)
    right_lengths = pc.fill_null(pc.list_value_length(right), -1).to_numpy(zero_copy_only=False)
    equal: BoolArray = left_lengths == right_lengths
    rows = np.flatnonzero(equal & (left_lengths > 0))
    if len(rows):
        indices = pa.array(rows)
        differs = ~_values_equal(left.take(indices).flatten(), right.take(indices).flatten())
        before = np.concatenate([[0], np.cumsum(differs)])
        ends = np.cumsum(left_lengths[rows])
        equal[rows] = before[ends] == before[ends - left_lengths[rows]]
    return equal


def _floats(column: pa.Array) -> npt.NDArray[np.floating]:
    values: npt.NDArray[np.floating] = pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False)
    return values


def to_bools(column: pa.Array) -> BoolArray:
    """Return a boolean column as a numpy array; null becomes False."""
    bools: BoolArray = pc.fill_null(column, False).to_numpy(zero_copy_only=False)
    return bools


class RowOrder(NamedTuple):
    """Rows ordered by (hash, key); rows with the same key keep their order."""

    rows: IntArray  #: The row at each position
    first: BoolArray  #: True at each position where a new key begins

    @property
    def key_of_row(self) -> IntArray:
        """The index of each row's key, in key order; shape (n,)."""
        index = np.empty(len(self.rows), np.int64)
        index[self.rows] = np.cumsum(self.first) - 1
        return index

    def with_stored(self, exists: BoolArray) -> RowOrder:
        """Return the order with a stored row before the rows of each key that `exists`; stored row j is row n + j."""
        n, stored = len(self.rows), int(exists.sum())
        if not stored:
            return self
        before = np.cumsum(exists)
        starts = np.flatnonzero(self.first)
        rows = np.empty(n + stored, np.int64)
        rows[np.arange(n) + before[np.cumsum(self.first) - 1]] = self.rows
        rows[starts[exists] + before[exists] - 1] = n + np.arange(stored)
        first = np.zeros(n + stored, np.bool_)
        first[starts + before - exists] = True
        return RowOrder(rows, first)


def order_rows(hashes: HashArray, keys: pa.RecordBatch) -> RowOrder:
    """Order rows by (hash, key) and mark where each key begins; sorts hashes, and keys only within a hash."""
    rows = order_numbers(hashes)
    first = np.ones(len(rows), np.bool_)
    sorted_hashes = hashes[rows]
    np.not_equal(sorted_hashes[1:], sorted_hashes[:-1], out=first[1:])
    if not first.all():
        _order_crowds(rows, first, keys)
    return RowOrder(rows, first)


def inverse(order: IntArray) -> IntArray:
    """Return the position of each row in an order of all rows."""
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return places


def order_numbers(numbers: HashArray) -> IntArray:
    """Return ``np.argsort(numbers, kind="stable")`` ten times as fast, by sorting numbers packed with their rows."""
    n = len(numbers)
    if np.count_nonzero(numbers[1:] < numbers[:-1]) < _FEW_STRETCHES:
        return np.argsort(numbers, kind="stable")
    least = numbers.min()
    shift = np.uint64(64 - int(numbers.max() - least).bit_length())
    low = np.uint64((1 << n.bit_length()) - 1)
    packed = (((numbers - least) << shift) & ~low) | np.arange(n, dtype=np.uint64)
    packed.sort()
    rows: IntArray = (packed & low).view(np.int64)
    found = numbers[rows]
    return rows[np.argsort(found, kind="stable")] if (found[1:] < found[:-1]).any() else rows


def _order_crowds(rows: IntArray, first: BoolArray, keys: pa.RecordBatch) -> None:
    """Sort rows that share a hash by key, in place; `first` marks where each hash begins, and on return each key."""
    is_crowded = ~first
    is_crowded[:-1] |= ~first[1:]
    places = np.flatnonzero(is_crowded)
    members, begins = take(keys, rows[places]), first[places]
    repeats = _repeat_last(members)
    differs = ~begins & ~repeats
    if differs.any() and not _ascend(members, begins):
        crowd = np.cumsum(begins) - 1
        is_mixed = np.zeros(crowd[-1] + 1, np.bool_)
        is_mixed[crowd[differs]] = True
        mixed = np.flatnonzero(is_mixed[crowd])
        columns = filter_rows(members, is_mixed[crowd]).columns
        order = np.arange(len(places))
        order[mixed] = mixed[_order([pa.array(crowd[mixed]), *(part for c in columns for part in sortable(c))])]
        rows[places] = rows[places[order]]
        repeats = _repeat_last(take(members, order))
    first[places] = begins | ~repeats


def _repeat_last(keys: pa.RecordBatch) -> BoolArray:
    """Return for each key whether it equals the previous key."""
    return np.append(False, rows_equal(keys.slice(1), keys.slice(0, len(keys) - 1)))


def _ascend(keys: pa.RecordBatch, begins: BoolArray) -> bool:
    """Return whether keys ascend within each hash; False if checking would cost as much as sorting."""
    undecided = ~begins[1:]
    for column in keys.columns:
        if pa.types.is_nested(column.type) or pa.types.is_null(column.type):
            return False
        before, after = column.slice(0, len(keys) - 1), column.slice(1)
        undecided = undecided & ~to_bools(pc.less(before, after))
        if not undecided.any():
            return True
        places = pa.array(np.flatnonzero(undecided))
        if not _values_equal(before.take(places), after.take(places)).all():
            return False
    return True


def _order(columns: list[pa.Array]) -> IntArray:
    """Return the row numbers sorted by `columns`, ascending, nulls last; stable."""
    columns = [column for column in columns if not _is_constant(column)] or columns[:1]
    if len(columns) == 1 and pa.types.is_int64(columns[0].type) and not columns[0].null_count:
        return order_numbers(columns[0].to_numpy().view(np.uint64) ^ _SIGN)
    names = [str(i) for i in range(len(columns))]
    order = pc.sort_indices(pa.table(columns, names=names), sort_keys=[(n, "ascending") for n in names])
    indices: IntArray = order.to_numpy().astype(np.int64)
    return indices


def _is_constant(column: pa.Array) -> bool:
    """Return whether all values are equal, as the times of index rows often are; False if checking is costly."""
    is_whole = pa.types.is_integer(column.type) or pa.types.is_timestamp(column.type)
    if not is_whole or not len(column) or column.null_count:
        return False
    bounds = pc.min_max(column)
    return bool(bounds["min"].equals(bounds["max"]))


def sortable(column: pa.Array) -> list[pa.Array]:
    """Return columns that Arrow can sort and that sort like `column`; see FORMAT.md section 2."""
    t = column.type
    if pa.types.is_null(t):
        return [pa.nulls(len(column), pa.int8())]
    if pa.types.is_struct(t):
        return [column.is_null(), *(part for child in column.flatten() for part in sortable(child))]
    if pa.types.is_list(t) or pa.types.is_large_list(t):
        return [column.is_null(), _ranks_of_elements(column)]
    return [column]


def _ranks_of_elements(column: pa.Array) -> pa.Array:
    """Encode each list as the ranks of its elements, in bytes that sort like the lists."""
    elements = column.flatten()
    parts = sortable(elements)
    order = _order(parts)
    sorted_elements = elements.take(pa.array(order))
    new = np.ones(len(order), np.bool_)
    new[1:] = ~_values_equal(sorted_elements[1:], sorted_elements[:-1])
    ranks = np.empty(len(order), ">u8")
    ranks[order] = np.cumsum(new)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * ranks.itemsize
    buffers = [None, pa.py_buffer(ends.astype(np.int64)), pa.py_buffer(ranks)]
    return pa.Array.from_buffers(pa.large_binary(), len(column), buffers)


def numbers_of(column: pa.Array) -> IntArray | None:
    """Return a column of int64 or timestamps as numbers, 0 for null, without copying if there is none."""
    if not (pa.types.is_int64(column.type) or pa.types.is_timestamp(column.type)):
        return None
    numbers = column.view(pa.int64())
    found: IntArray = (numbers.fill_null(0) if numbers.null_count else numbers).to_numpy()
    return found


def find_sorted(
    hashes: HashArray,
    keys: pa.RecordBatch,
    wanted: HashArray,
    wanted_keys: pa.RecordBatch,
    rows_near: Callable[[HashArray, pa.RecordBatch], IntArray],
) -> IntArray:
    """Return each wanted key's row, or -1. Both hash arrays ascend, and `keys` has no duplicates.

    `rows_near` returns rows that include those of some wanted keys, given their ascending hashes and the keys.
    """
    found = np.full(len(wanted), -1, np.int64)
    places = np.searchsorted(hashes, wanted)
    inside = np.flatnonzero(places < len(hashes))
    inside = inside[hashes[places[inside]] == wanted[inside]]
    places = places[inside]
    hit = rows_equal(take(keys, places), take(wanted_keys, inside))
    found[inside[hit]] = places[hit]
    missed, places = inside[~hit], places[~hit] + 1
    in_crowd = places < len(hashes)
    in_crowd[in_crowd] = hashes[places[in_crowd]] == wanted[missed[in_crowd]]
    missed = missed[in_crowd]
    if len(missed):
        crowded, crowded_keys = wanted[missed], take(wanted_keys, missed)
        found[missed] = _find_in_crowds(hashes, keys, crowded, crowded_keys, rows_near(crowded, crowded_keys))
    return found


def _find_in_crowds(
    hashes: HashArray, keys: pa.RecordBatch, wanted: HashArray, wanted_keys: pa.RecordBatch, rows: IntArray
) -> IntArray:
    """Find keys among `rows`, which share hashes, in one pass, whatever their order."""
    asked = np.arange(len(wanted))
    for stored, sought in zip(keys.columns, wanted_keys.columns, strict=True):
        if is_plain(stored.type):
            rows, asked = _both_have(stored, rows, sought, asked)
    found = np.full(len(wanted), -1, np.int64)
    if len(rows) and len(asked):
        pairs = zip(take(keys, rows).columns, take(wanted_keys, asked).columns, strict=True)
        both = from_columns([pa.concat_arrays(pair) for pair in pairs], keys.schema, len(rows) + len(asked))
        order = order_rows(np.concatenate([hashes[rows], wanted[asked]]), both)
        # Each key's stored row precedes its wanted rows: the first position gives the stored row, if any.
        firsts = order.rows[order.first][np.cumsum(order.first) - 1]
        is_asked = (order.rows >= len(rows)) & (firsts < len(rows))
        found[asked[order.rows[is_asked] - len(rows)]] = rows[firsts[is_asked]]
    return found


def distinct(numbers: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Remove repeats from ascending numbers."""
    is_new = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=is_new[1:])
    return numbers[is_new]


def is_plain(t: pa.DataType) -> bool:
    """Return whether Arrow compares values of a type as we do: no floats, nothing nested."""
    types = pa.types
    is_binary = types.is_large_string(t) or types.is_large_binary(t) or types.is_fixed_size_binary(t)
    return bool(types.is_integer(t) or is_binary or types.is_temporal(t))


def _both_have(stored: pa.Array, rows: IntArray, sought: pa.Array, asked: IntArray) -> tuple[IntArray, IntArray]:
    """Return the `rows` whose value also occurs in `asked`, and vice versa; null counts as a value."""
    mine, others = stored.take(pa.array(rows)), sought.take(pa.array(asked))
    is_sought = to_bools(pc.is_in(mine, value_set=others))
    is_stored = to_bools(pc.is_in(others, value_set=mine.filter(pa.array(is_sought))))
    return rows[is_sought], asked[is_stored]
