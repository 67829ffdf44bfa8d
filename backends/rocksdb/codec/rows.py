"""Rows in RocksDB: splits columns into leaves, and encodes value columns as bytes.

A column is split into **leaves**. A leaf may be null, and has bytes of a fixed width, or **segments** of any length, or
neither::

    type                         leaves and their content
    number, date, time, bool     one leaf: its bytes                           (fixed width)
    string, binary               one leaf: its bytes                           (one segment)
    struct                       one empty leaf for itself, then the leaves of its fields
    list, map                    one leaf: its elements as rows in this format; if the rows have segments
                                 themselves, preceded by each row's length     (one segment, or two)
    null                         one empty leaf

A **value** is read by position, so the fixed part comes first; integers are little endian::

    null bits, one per leaf ‖ fixed bytes of each leaf ‖ length of each segment, uint32 ‖ the segments

A generation may hold rows of several schemas: each row begins with the number of its schema (`decode_numbered`), is
decoded with the columns of that schema, and projected to the wanted columns.

A **key** concatenates the leaves of the key columns: `holdfast.backends.rocksdb.codec.keys`.

Invariants
----------
* **exact**: decoding returns exactly what was encoded, including types and nulls at every depth.
* **deterministic**: bytes under a null are written as zeros or nothing.
* **bounded**: any bytes either decode into columns that are safe to read, or raise a `CorruptionError`; strings keep
  their bytes, even if they are not UTF-8.

Works on whole columns, never row by row in Python. Source: FORMAT.md section 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import BoolArray, IntArray, from_columns, take
from holdfast.backends.evolution import project
from holdfast.backends.rocksdb.codec import binaries
from holdfast.backends.rocksdb.codec.binaries import ByteArray
from holdfast.errors import CorruptionError, InvalidArgumentError

_LENGTH_BYTES = 4
_SEGMENT_BYTES_MAX = 2**32 - 1
_HEAD = 1


class Slot(NamedTuple):
    """The layout of a leaf, which depends only on its type."""

    type: pa.DataType
    width: int
    segments: int


class Leaf(NamedTuple):
    """A leaf of n rows: nulls, shape (n,), None if no row is null; bytes, shape (n, width); arrays of n binaries."""

    nulls: BoolArray | None
    fixed: ByteArray
    segments: list[pa.Array]


def encode_values(values: pa.RecordBatch, head: bytes = b"") -> pa.Array:
    """Encode value columns as RocksDB's values, each after `head`. Raises `InvalidArgumentError` if it cannot."""
    layout = _RowLayout.of(values.schema)
    rows = np.zeros((values.num_rows, len(head) + layout.width), np.uint8)
    rows[:, : len(head)] = np.frombuffer(head, np.uint8)
    at, segments = len(head) + layout.null_bytes, []
    for i, leaf in enumerate(leaves_of(values)):
        if leaf.nulls is not None:
            rows[:, len(head) + i // 8] |= leaf.nulls.view(np.uint8) << (i % 8)
        binaries.put(rows, at, leaf.fixed)
        at += leaf.fixed.shape[1]
        segments += leaf.segments
    for i, segment in enumerate(segments):
        lengths = _lengths(binaries.offsets_of(segment)).view(np.uint8).reshape(-1, _LENGTH_BYTES)
        binaries.put(rows, at + i * _LENGTH_BYTES, lengths)
    return binaries.join([binaries.from_rows(rows), *segments])


def decode_values(rows: pa.Array, schema: pa.Schema, head: int = 0) -> pa.RecordBatch:
    """Decode values of `encode_values` with `schema`; a null gives an all-null row. Raises `CorruptionError`."""
    layout = _RowLayout.of(schema)
    if rows.null_count:
        rows = pc.fill_null(rows, pa.scalar(bytes(head) + layout.null_row, pa.large_binary()))
    fixed, segments = _split_rows(rows, layout, head)
    leaves = layout.leaves(fixed, segments)
    return from_columns([assemble(f.type, len(rows), leaves) for f in schema], schema, len(rows))


class _RowLayout(NamedTuple):
    """The positions of the leaves in the fixed part of a row."""

    slots: list[Slot]
    null_bytes: int
    fixed_bytes: int
    segments: int

    @classmethod
    def of(cls, schema: pa.Schema) -> _RowLayout:
        slots = slots_of(schema)
        return cls(slots, (len(slots) + 7) // 8, sum(s.width for s in slots), sum(s.segments for s in slots))

    @property
    def width(self) -> int:
        """The number of bytes before a row's segments."""
        return self.null_bytes + self.fixed_bytes + _LENGTH_BYTES * self.segments

    @property
    def null_row(self) -> bytes:
        """The row whose leaves are all null."""
        bits: int = (1 << len(self.slots)) - 1
        return bits.to_bytes(self.null_bytes, "little") + bytes(self.width - self.null_bytes)

    def leaves(self, fixed: ByteArray, segments: list[pa.Array]) -> Iterator[Leaf]:
        """Yield the leaves of rows from their fixed part and their segments."""
        some_null = fixed[:, : self.null_bytes].any()
        at, segment = self.null_bytes, 0
        for i, slot in enumerate(self.slots):
            nulls = (fixed[:, i // 8] & (1 << i % 8)).astype(np.bool_) if some_null else None
            yield Leaf(nulls, binaries.get(fixed, at, slot.width), segments[segment : segment + slot.segments])
            at, segment = at + slot.width, segment + slot.segments


def _split_rows(rows: pa.Array, layout: _RowLayout, head: int) -> tuple[ByteArray, list[pa.Array]]:
    """Return the fixed part of rows after `head` bytes, shape (n, width), and their segments."""
    offsets = binaries.offsets_of(rows)
    if not layout.segments:
        return equal_rows(rows, offsets, head + layout.width)[:, head:], []
    starts, ends = offsets[:-1] + head + layout.width, offsets[1:]
    if (starts > ends).any():
        raise corrupt("a row is truncated")
    fixed = binaries.gather(rows, offsets[:-1] + head, layout.width)
    lengths = binaries.get(fixed, layout.null_bytes + layout.fixed_bytes, _LENGTH_BYTES * layout.segments).view("<u4")
    flat, cuts = binaries.cuts_of(len(rows), layout.segments + 1)
    cuts[:, 0] = starts
    for i in range(layout.segments):
        np.add(cuts[:, i], lengths[:, i], out=cuts[:, i + 1])
    if (cuts[:, -1] != ends).any():
        raise corrupt("the lengths in a row do not add up to its length")
    flat[-1] = ends[-1] if len(ends) else 0
    return fixed, binaries.cut(rows, flat, layout.segments + 1, range(layout.segments))


def slots_of(schema: pa.Schema) -> list[Slot]:
    """Return the slots of all leaves of these columns, in order."""
    return [slot for field in schema for slot in _slots_of_type(field.type)]


def _slots_of_type(t: pa.DataType) -> list[Slot]:
    if pa.types.is_struct(t):
        return [Slot(t, 0, 0), *(slot for field in t for slot in _slots_of_type(field.type))]
    if pa.types.is_null(t):
        return [Slot(t, 0, 0)]
    if pa.types.is_boolean(t):
        return [Slot(t, 1, 0)]
    if _is_bytes(t):
        return [Slot(t, 0, 1)]
    if _is_list(t):
        return [Slot(t, 0, 2 if _RowLayout.of(_elements(t)).segments else 1)]
    if pa.types.is_primitive(t) or pa.types.is_decimal(t) or pa.types.is_fixed_size_binary(t):
        return [Slot(t, t.bit_width // 8, 0)]
    raise InvalidArgumentError("the rocksdb backend cannot store columns of this type: cast them", type=str(t))


def _is_bytes(t: pa.DataType) -> bool:
    types = pa.types
    return types.is_large_string(t) or types.is_large_binary(t) or types.is_string(t) or types.is_binary(t)


def _is_list(t: pa.DataType) -> bool:
    return pa.types.is_large_list(t) or pa.types.is_list(t) or pa.types.is_map(t)


def _elements(t: pa.DataType) -> pa.Schema:
    """Return the columns of the elements of a list, or of the entries of a map."""
    return pa.schema([t.key_field, t.item_field] if pa.types.is_map(t) else [t.value_field])


def leaves_of(batch: pa.RecordBatch) -> Iterator[Leaf]:
    for column in batch.columns:
        yield from _take_apart(column)


def _take_apart(column: pa.Array) -> Iterator[Leaf]:
    t, n = column.type, len(column)
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    nothing = np.empty((n, 0), np.uint8)
    if pa.types.is_struct(t):
        yield Leaf(nulls, nothing, [])
        for child in column.flatten():  # null if the struct is null
            yield from _take_apart(child)
    elif pa.types.is_null(t):
        yield Leaf(nulls, nothing, [])
    elif _is_list(t):
        yield Leaf(nulls, nothing, _list_segments(column, nulls))
    elif _is_bytes(t):
        segment = column.cast(pa.large_binary())
        yield Leaf(nulls, nothing, [segment if nulls is None else pc.fill_null(segment, b"")])
    else:
        fixed = _fixed_bytes(column)
        if nulls is not None:
            fixed = fixed.copy()
            fixed[nulls] = 0
        yield Leaf(nulls, fixed, [])


def _fixed_bytes(column: pa.Array) -> ByteArray:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    n, width, first = len(column), column.type.bit_width // 8, column.offset
    if not n * width:
        return np.empty((n, width), np.uint8)
    return np.frombuffer(column.buffers()[1], np.uint8)[first * width : (first + n) * width].reshape(n, width)


def _list_segments(column: pa.Array, nulls: BoolArray | None) -> list[pa.Array]:
    offsets = column.offsets.to_numpy().astype(np.int64)
    if nulls is not None and np.diff(offsets)[nulls].any():
        column = column.take(pa.array(np.arange(len(column))))  # drops values under a null
        offsets = column.offsets.to_numpy().astype(np.int64)
    children = [column.keys, column.items] if pa.types.is_map(column.type) else [column.values]
    first = offsets[0]
    elements = [child.slice(first, offsets[-1] - first) for child in children]
    rows = encode_values(pa.RecordBatch.from_arrays(elements, schema=_elements(column.type)))
    ends = binaries.offsets_of(rows)
    segment = binaries.from_buffers(ends[offsets - first], rows.buffers()[2])
    if not _RowLayout.of(_elements(column.type)).segments:
        return [segment]
    return [binaries.from_buffers((offsets - first) * _LENGTH_BYTES, pa.py_buffer(_lengths(ends))), segment]


def assemble(t: pa.DataType, n: int, leaves: Iterator[Leaf]) -> pa.Array:
    """Build a column of type `t` from the next leaves; the inverse of `_take_apart`."""
    leaf = next(leaves)
    if pa.types.is_null(t):
        return pa.nulls(n)
    validity = None if leaf.nulls is None else pa.py_buffer(np.packbits(~leaf.nulls, bitorder="little"))
    if pa.types.is_struct(t):
        return pa.Array.from_buffers(t, n, [validity], children=[assemble(f.type, n, leaves) for f in t])
    if _is_list(t):
        return _assemble_list(t, n, validity, leaf.segments)
    if _is_bytes(t):
        _, offsets, data = leaf.segments[0].buffers()
        column = pa.Array.from_buffers(pa.large_binary(), n, [validity, offsets, data])
        # A string may hold any bytes, as in Spark; a cast from binary would require UTF-8.
        large = pa.large_string() if pa.types.is_string(t) or pa.types.is_large_string(t) else pa.large_binary()
        return column.view(large).cast(t)
    if pa.types.is_boolean(t):
        if (leaf.fixed > 1).any():
            raise corrupt("a boolean is neither true nor false")
        fixed = np.packbits(leaf.fixed, bitorder="little")
    else:
        fixed = leaf.fixed
    return pa.Array.from_buffers(t, n, [validity, pa.py_buffer(fixed)])


def _assemble_list(t: pa.DataType, n: int, validity: pa.Buffer | None, segments: list[pa.Array]) -> pa.Array:
    schema = _elements(t)
    places = binaries.offsets_of(segments[-1])
    if len(segments) == 1:
        width = _RowLayout.of(schema).width
        offsets, rest = np.divmod(places, width)
        ends = np.arange(offsets[-1] + 1) * width
    else:
        offsets, rest = np.divmod(binaries.offsets_of(segments[0]), _LENGTH_BYTES)
        ends = np.zeros(offsets[-1] + 1, np.int64)
        np.cumsum(
            binaries.data_of(segments[0])[: offsets[-1] * _LENGTH_BYTES].view("<u4"), dtype=np.int64, out=ends[1:]
        )
    if rest.any() or (ends[offsets] != places).any():
        raise corrupt("the lengths of a list's elements do not add up to the list's length")
    elements = decode_values(binaries.from_buffers(ends, segments[-1].buffers()[2]), schema)
    children = elements.columns
    if pa.types.is_map(t):
        if children[0].null_count:  # Arrow would abort the process
            raise corrupt("a map has a null key")
        children = [pa.StructArray.from_arrays(children, fields=list(schema))]
    offset_type = pa.int64() if pa.types.is_large_list(t) else pa.int32()
    return pa.Array.from_buffers(t, n, [validity, pa.array(offsets, offset_type).buffers()[1]], children=children)


def equal_rows(rows: pa.Array, offsets: IntArray, width: int) -> ByteArray:
    """Return binaries of equal width as shape (n, width), without copying."""
    if (np.diff(offsets) != width).any():
        raise corrupt("a row's length does not match its columns")
    return binaries.data_of(rows)[offsets[0] : offsets[-1]].reshape(len(rows), width)


def _lengths(offsets: IntArray) -> npt.NDArray[np.uint32]:
    lengths = np.diff(offsets)
    if len(lengths) and lengths.max() > _SEGMENT_BYTES_MAX:
        raise InvalidArgumentError("one value of a column is larger than RocksDB can store", size_bytes=lengths.max())
    return lengths.astype("<u4")


def corrupt(problem: str) -> CorruptionError:
    """Return the error for bytes that are not a row or a key of their table."""
    return CorruptionError(f"a row in RocksDB does not match its table: {problem}; restore the state")


def decode_numbered(rows: pa.Array, schemas: Sequence[pa.Schema], wanted: pa.Schema) -> pa.RecordBatch:
    """Return the columns of `wanted` from rows that begin with their schema's number; a null gives an all-null row.

    Raises `CorruptionError` if a row does not match its schema.
    """
    numbers = _numbers(rows)
    found = (1 + np.flatnonzero(np.bincount(numbers)[1:])).tolist() or [len(schemas)]
    if found[-1] > len(schemas):
        raise corrupt("a row names a schema that its table does not have")
    if len(found) == 1:
        return project(decode_values(rows, schemas[found[0] - 1], _HEAD), wanted)
    parts, places = [], []
    for number in found:
        # A null row has no number; it decodes the same with any schema.
        at = np.flatnonzero((numbers == number) | ((numbers == 0) & (number == found[0])))
        parts.append(project(decode_values(rows.take(pa.array(at)), schemas[number - 1], _HEAD), wanted))
        places.append(at)
    return take(pa.concat_batches(parts), np.argsort(np.concatenate(places)))


def _numbers(rows: pa.Array) -> ByteArray:
    """Return the first byte of each row; 0 for a null."""
    offsets, data = binaries.offsets_of(rows), binaries.data_of(rows)
    is_row = slice(None) if not rows.null_count else rows.is_valid().to_numpy(zero_copy_only=False)
    starts, ends = offsets[:-1][is_row], offsets[1:][is_row]
    if (starts == ends).any():
        raise corrupt("a row is empty")
    firsts = data[starts]
    if not firsts.all():
        raise corrupt("a row names a schema that no table has")
    numbers = np.zeros(len(rows), np.uint8)
    numbers[is_row] = firsts
    return numbers
