"""The rows of RocksDB: typed Arrow columns as the bytes of a key and of a value, and back.

A column is taken apart into **leaves**. Each leaf may be null, and has bytes of one fixed width, or variable
pieces, or neither::

    type                         leaves, and what they hold
    number, date, time, bool     one: its bytes                                (fixed width)
    string, binary               one: its bytes                                (one piece)
    struct                       one for itself: nothing; then those of its fields
    list, map                    one: the rows of its elements, in this very format; before them, where they
                                 have pieces themselves, the length of each     (one piece, or two)
    null                         one: nothing

A **value** is read by place, so what is fixed stands first; integers are little endian::

    null bits, one a leaf ‖ fixed bytes of each leaf ‖ length of each piece, uint32 ‖ the pieces

A **key** is compared byte by byte, and its first columns are a prefix of the whole::

    table id ‖ hash, big endian ‖ for each leaf: 00 if null, else 01 ‖ fixed bytes ‖ each piece, escaped, and 00

Invariants
----------
* **exact**: what is decoded equals what was encoded, types and nulls at every depth included.
* **injective**: different keys have different bytes and none is the beginning of another, as a piece holds no
  00 of its own: 00 is written 01 01, and 01 is written 01 02, which keeps the order.
* **ordered**: for every leaf but lists and maps, the order of bytes is that of values, nulls first. Fixed bytes are big
  endian; the sign bit is flipped, and of negative floats all others too.
* **deterministic**: what stands under a null is written as zeros or nothing.
* **bounded**: bytes of any content either decode into columns that can be read without harm or are a
  `CorruptionError`; a string has the bytes that were put, also where they are not UTF-8.

All is done for whole columns at once; nothing is done row by row in Python. Source: FORMAT.md section 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import BoolArray, HashArray, IntArray, from_columns
from holdfast.backends.rocksdb import binaries, sortable_bytes
from holdfast.backends.rocksdb.binaries import ByteArray
from holdfast.errors import CorruptionError, InvalidArgumentError

#: Bytes before the key columns: table id and hash.
KEY_HEADER_BYTES = 9

_LENGTH_BYTES = 4
_PIECE_BYTES_MAX = 2**32 - 1


class _Slot(NamedTuple):
    """The place of a leaf: what its type alone decides."""

    type: pa.DataType
    width: int
    pieces: int


class _Leaf(NamedTuple):
    """A leaf of n rows: shape (n,) or None where nothing is null; shape (n, width); arrays of n binaries."""

    nulls: BoolArray | None
    fixed: ByteArray
    pieces: list[pa.Array]


def encode_keys(table_id: int, hashes: HashArray, columns: pa.RecordBatch) -> pa.Array:
    """Return the keys of RocksDB for rows of a state table, or prefixes of keys.

    Parameters
    ----------
    table_id : int
        0 to 255.
    hashes : numpy.ndarray of uint64, shape (n,)
    columns : pyarrow.RecordBatch, shape (n, key columns)
        Normalised, in storage types. With only the first columns of a table's key, the result is a prefix of
        exactly the keys that begin with these values.

    Returns
    -------
    pyarrow.LargeBinaryArray, shape (n,)

    Raises
    ------
    InvalidArgumentError
        A column's type cannot be stored, or the table id is out of range.
    """
    if not 0 <= table_id <= 255:
        raise InvalidArgumentError("a table id is one byte", table_id=table_id)
    n = len(hashes)
    blocks = [[np.full((n, 1), table_id, np.uint8), hashes.astype(">u8").view(np.uint8).reshape(n, 8)]]
    pieces = []
    for slot, leaf in zip(_slots(columns.schema), _leaves(columns), strict=True):
        present = np.ones(n, np.uint8) if leaf.nulls is None else (~leaf.nulls).view(np.uint8)
        fixed = sortable_bytes.to_sortable(slot.type, leaf.fixed)
        if leaf.nulls is not None:
            fixed[leaf.nulls] = 0
        blocks[-1] += [present.reshape(n, 1), fixed]
        for piece in leaf.pieces:
            pieces.append(sortable_bytes.escape(piece))
            blocks.append([np.zeros((n, 1), np.uint8)])
    parts = [binaries.from_rows(binaries.side_by_side(block)) for block in blocks]
    for i, piece in enumerate(pieces):
        parts.insert(2 * i + 1, piece)
    return binaries.join(parts)


def decode_keys(keys: pa.Array, schema: pa.Schema) -> tuple[HashArray, pa.RecordBatch]:
    """Return hashes and key columns of what `encode_keys` made of all columns of `schema`.

    Raises
    ------
    CorruptionError
        Some bytes are not a key of these columns.
    """
    n, slots = len(keys), _slots(schema)
    blocks, pieces = _split_keys(keys, _block_widths(slots))
    hashes = blocks[0][:, 1:KEY_HEADER_BYTES].copy().view(">u8").reshape(n).astype(np.uint64)
    leaves = _key_leaves(slots, blocks, pieces)
    return hashes, from_columns([_assemble(f.type, n, leaves) for f in schema], schema, n)


def encode_values(values: pa.RecordBatch) -> pa.Array:
    """Return the values of RocksDB for rows of value columns; without columns they are empty.

    Parameters
    ----------
    values : pyarrow.RecordBatch, shape (n, value columns)
        In storage types.

    Returns
    -------
    pyarrow.LargeBinaryArray, shape (n,)

    Raises
    ------
    InvalidArgumentError
        A column's type cannot be stored, or one of its values is 4 GiB or more.
    """
    layout = _RowLayout.of(values.schema)
    rows = np.zeros((values.num_rows, layout.width), np.uint8)
    at, pieces = layout.null_bytes, []
    for i, leaf in enumerate(_leaves(values)):
        if leaf.nulls is not None:
            rows[:, i // 8] |= leaf.nulls.view(np.uint8) << (i % 8)
        binaries.put(rows, at, leaf.fixed)
        at += leaf.fixed.shape[1]
        pieces += leaf.pieces
    for i, piece in enumerate(pieces):
        binaries.put(
            rows, at + i * _LENGTH_BYTES, _lengths(binaries.offsets_of(piece)).view(np.uint8).reshape(-1, _LENGTH_BYTES)
        )
    return binaries.join([binaries.from_rows(rows), *pieces])


def decode_values(rows: pa.Array, schema: pa.Schema) -> pa.RecordBatch:
    """Return the value columns of what `encode_values` made of the columns of `schema`.

    Parameters
    ----------
    rows : pyarrow.LargeBinaryArray, shape (n,)
        A null is a row whose columns are all null.

    Raises
    ------
    CorruptionError
        Some bytes are not a row of these columns.
    """
    layout = _RowLayout.of(schema)
    if rows.null_count:
        rows = pc.fill_null(rows, pa.scalar(layout.null_row, pa.large_binary()))
    fixed, pieces = _split_rows(rows, layout)
    leaves = layout.leaves(fixed, pieces)
    return from_columns([_assemble(f.type, len(rows), leaves) for f in schema], schema, len(rows))


class _RowLayout(NamedTuple):
    """Where in the fixed part of a row its leaves stand."""

    slots: list[_Slot]
    null_bytes: int
    fixed_bytes: int
    pieces: int

    @classmethod
    def of(cls, schema: pa.Schema) -> _RowLayout:
        slots = _slots(schema)
        return cls(slots, (len(slots) + 7) // 8, sum(s.width for s in slots), sum(s.pieces for s in slots))

    @property
    def width(self) -> int:
        """Bytes of a row before its pieces."""
        return self.null_bytes + self.fixed_bytes + _LENGTH_BYTES * self.pieces

    @property
    def null_row(self) -> bytes:
        """The row whose leaves are all null."""
        bits: int = (1 << len(self.slots)) - 1
        return bits.to_bytes(self.null_bytes, "little") + bytes(self.width - self.null_bytes)

    def leaves(self, fixed: ByteArray, pieces: list[pa.Array]) -> Iterator[_Leaf]:
        """Yield the leaves of rows, given their fixed part and their pieces."""
        some_null = fixed[:, : self.null_bytes].any()
        at, piece = self.null_bytes, 0
        for i, slot in enumerate(self.slots):
            nulls = (fixed[:, i // 8] & (1 << i % 8)).astype(np.bool_) if some_null else None
            yield _Leaf(nulls, binaries.get(fixed, at, slot.width), pieces[piece : piece + slot.pieces])
            at, piece = at + slot.width, piece + slot.pieces


def _split_rows(rows: pa.Array, layout: _RowLayout) -> tuple[ByteArray, list[pa.Array]]:
    """Return the fixed part of rows, shape (n, width), and their pieces."""
    offsets = binaries.offsets_of(rows)
    if not layout.pieces:
        return _equal_rows(rows, offsets, layout.width), []
    starts, ends = offsets[:-1] + layout.width, offsets[1:]
    if (starts > ends).any():
        raise _corrupt("a row is cut off")
    fixed = binaries.gather(rows, offsets[:-1], layout.width)
    lengths = binaries.get(fixed, layout.null_bytes + layout.fixed_bytes, _LENGTH_BYTES * layout.pieces).view("<u4")
    flat, cuts = binaries.cuts_of(len(rows), layout.pieces + 1)
    cuts[:, 0] = starts
    for i in range(layout.pieces):
        np.add(cuts[:, i], lengths[:, i], out=cuts[:, i + 1])
    if (cuts[:, -1] != ends).any():
        raise _corrupt("the lengths in a row do not add up to its length")
    flat[-1] = ends[-1] if len(ends) else 0
    return fixed, binaries.cut(rows, flat, layout.pieces + 1, range(layout.pieces))


def _block_widths(slots: list[_Slot]) -> list[int]:
    """Return the widths of the stretches of a key that have one, between which its pieces stand."""
    widths = [KEY_HEADER_BYTES]
    for slot in slots:
        widths[-1] += 1 + slot.width
        widths += [1] * slot.pieces  # what ends a piece begins the next stretch
    return widths


def _split_keys(keys: pa.Array, widths: list[int]) -> tuple[list[ByteArray], list[pa.Array]]:
    """Return the stretches of fixed width of keys, each of shape (n, width), and the pieces between them."""
    offsets = binaries.offsets_of(keys)
    if len(widths) == 1:
        return [_equal_rows(keys, offsets, widths[0])], []
    starts, ends = offsets[:-1], offsets[1:]
    pieces = len(widths) - 1
    zeros = _zeros(keys, offsets) if pieces > 1 else offsets
    flat, cuts = binaries.cuts_of(len(keys), 2 * pieces)  # begin and end of each piece
    blocks = [_block(keys, starts, ends, widths[0])]
    for i, width in enumerate(widths[1:]):
        begin = np.add(starts, widths[i], out=cuts[:, 2 * i])
        # Nothing but the last stretch stands behind the last piece: its end need not be searched.
        starts = ends - width if i == pieces - 1 else zeros[np.searchsorted(zeros, begin)]
        if (starts < begin).any():
            raise _corrupt("a key is cut off")
        cuts[:, 2 * i + 1] = starts
        blocks.append(_block(keys, starts, ends, width))
        if blocks[-1][:, 0].any():
            raise _corrupt("a piece of a key has no end")
    flat[-1] = ends[-1] if len(ends) else 0
    return blocks, binaries.cut(keys, flat, 2 * pieces, range(0, 2 * pieces, 2))


def _block(keys: pa.Array, starts: IntArray, ends: IntArray, width: int) -> ByteArray:
    """Return the bytes of keys from `starts` on, shape (n, width), if all lie before `ends`."""
    if (starts + width > ends).any():
        raise _corrupt("a key is cut off")
    return binaries.gather(keys, starts, width)


def _zeros(keys: pa.Array, offsets: IntArray) -> IntArray:
    """Return the places of all zero bytes, and behind them a place that lies behind every key."""
    zeros = np.flatnonzero(binaries.data_of(keys)[offsets[0] : offsets[-1]] == 0) + offsets[0]
    return np.append(zeros, offsets[-1])


def _key_leaves(slots: list[_Slot], blocks: list[ByteArray], pieces: list[pa.Array]) -> Iterator[_Leaf]:
    block, at, piece = 0, KEY_HEADER_BYTES, 0
    for slot in slots:
        present = blocks[block][:, at]
        if (present > 1).any():
            raise _corrupt("a key has a mark that is neither null nor present")
        nulls = None if present.all() else present == 0
        fixed = sortable_bytes.from_sortable(slot.type, binaries.get(blocks[block], at + 1, slot.width))
        yield _Leaf(nulls, fixed, [sortable_bytes.unescape(p) for p in pieces[piece : piece + slot.pieces]])
        piece += slot.pieces
        block, at = (block + slot.pieces, 1) if slot.pieces else (block, at + 1 + slot.width)


def _slots(schema: pa.Schema) -> list[_Slot]:
    return [slot for field in schema for slot in _slots_of(field.type)]


def _slots_of(t: pa.DataType) -> list[_Slot]:
    if pa.types.is_struct(t):
        return [_Slot(t, 0, 0), *(slot for field in t for slot in _slots_of(field.type))]
    if pa.types.is_null(t):
        return [_Slot(t, 0, 0)]
    if pa.types.is_boolean(t):
        return [_Slot(t, 1, 0)]
    if _is_bytes(t):
        return [_Slot(t, 0, 1)]
    if _is_list(t):
        return [_Slot(t, 0, 2 if _RowLayout.of(_elements(t)).pieces else 1)]
    if pa.types.is_primitive(t) or pa.types.is_decimal(t) or pa.types.is_fixed_size_binary(t):
        return [_Slot(t, t.bit_width // 8, 0)]
    raise InvalidArgumentError("RocksDB cannot store columns of this type: cast to another", type=str(t))


def _is_bytes(t: pa.DataType) -> bool:
    types = pa.types
    return types.is_large_string(t) or types.is_large_binary(t) or types.is_string(t) or types.is_binary(t)


def _is_list(t: pa.DataType) -> bool:
    return pa.types.is_large_list(t) or pa.types.is_list(t) or pa.types.is_map(t)


def _elements(t: pa.DataType) -> pa.Schema:
    """Return the columns of the elements of a list, or of the entries of a map."""
    return pa.schema([t.key_field, t.item_field] if pa.types.is_map(t) else [t.value_field])


def _leaves(batch: pa.RecordBatch) -> Iterator[_Leaf]:
    for column in batch.columns:
        yield from _take_apart(column)


def _take_apart(column: pa.Array) -> Iterator[_Leaf]:
    t, n = column.type, len(column)
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    nothing = np.empty((n, 0), np.uint8)
    if pa.types.is_struct(t):
        yield _Leaf(nulls, nothing, [])
        for child in column.flatten():  # null where the struct is
            yield from _take_apart(child)
    elif pa.types.is_null(t):
        yield _Leaf(nulls, nothing, [])
    elif _is_list(t):
        yield _Leaf(nulls, nothing, _list_pieces(column, nulls))
    elif _is_bytes(t):
        piece = column.cast(pa.large_binary())
        yield _Leaf(nulls, nothing, [piece if nulls is None else pc.fill_null(piece, b"")])
    else:
        fixed = _fixed_bytes(column)
        if nulls is not None:
            fixed = fixed.copy()
            fixed[nulls] = 0
        yield _Leaf(nulls, fixed, [])


def _fixed_bytes(column: pa.Array) -> ByteArray:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    n, width, first = len(column), column.type.bit_width // 8, column.offset
    if not n * width:
        return np.empty((n, width), np.uint8)
    return np.frombuffer(column.buffers()[1], np.uint8)[first * width : (first + n) * width].reshape(n, width)


def _list_pieces(column: pa.Array, nulls: BoolArray | None) -> list[pa.Array]:
    offsets = column.offsets.to_numpy().astype(np.int64)
    if nulls is not None and np.diff(offsets)[nulls].any():
        column = column.take(pa.array(np.arange(len(column))))  # leaves out what stands under a null
        offsets = column.offsets.to_numpy().astype(np.int64)
    children = [column.keys, column.items] if pa.types.is_map(column.type) else [column.values]
    first = offsets[0]
    elements = [child.slice(first, offsets[-1] - first) for child in children]
    rows = encode_values(pa.RecordBatch.from_arrays(elements, schema=_elements(column.type)))
    ends = binaries.offsets_of(rows)
    piece = binaries.from_buffers(ends[offsets - first], rows.buffers()[2])
    if not _RowLayout.of(_elements(column.type)).pieces:
        return [piece]
    return [binaries.from_buffers((offsets - first) * _LENGTH_BYTES, pa.py_buffer(_lengths(ends))), piece]


def _assemble(t: pa.DataType, n: int, leaves: Iterator[_Leaf]) -> pa.Array:
    """Return the column of type `t` whose leaves come next; the opposite of `_take_apart`."""
    leaf = next(leaves)
    if pa.types.is_null(t):
        return pa.nulls(n)
    validity = None if leaf.nulls is None else pa.py_buffer(np.packbits(~leaf.nulls, bitorder="little"))
    if pa.types.is_struct(t):
        return pa.Array.from_buffers(t, n, [validity], children=[_assemble(f.type, n, leaves) for f in t])
    if _is_list(t):
        return _assemble_list(t, n, validity, leaf.pieces)
    if _is_bytes(t):
        _, offsets, data = leaf.pieces[0].buffers()
        column = pa.Array.from_buffers(pa.large_binary(), n, [validity, offsets, data])
        # A string may hold any bytes, as Spark's may; a cast would ask for UTF-8.
        large = pa.large_string() if pa.types.is_string(t) or pa.types.is_large_string(t) else pa.large_binary()
        return column.view(large).cast(t)
    if pa.types.is_boolean(t):
        if (leaf.fixed > 1).any():
            raise _corrupt("a boolean is neither true nor false")
        fixed = np.packbits(leaf.fixed, bitorder="little")
    else:
        fixed = leaf.fixed
    return pa.Array.from_buffers(t, n, [validity, pa.py_buffer(fixed)])


def _assemble_list(t: pa.DataType, n: int, validity: pa.Buffer | None, pieces: list[pa.Array]) -> pa.Array:
    schema = _elements(t)
    places = binaries.offsets_of(pieces[-1])
    if len(pieces) == 1:
        width = _RowLayout.of(schema).width
        offsets, rest = np.divmod(places, width)
        ends = np.arange(offsets[-1] + 1) * width
    else:
        offsets, rest = np.divmod(binaries.offsets_of(pieces[0]), _LENGTH_BYTES)
        ends = np.zeros(offsets[-1] + 1, np.int64)
        np.cumsum(binaries.data_of(pieces[0])[: offsets[-1] * _LENGTH_BYTES].view("<u4"), dtype=np.int64, out=ends[1:])
    if rest.any() or (ends[offsets] != places).any():
        raise _corrupt("the lengths of a list's elements do not add up to its length")
    elements = decode_values(binaries.from_buffers(ends, pieces[-1].buffers()[2]), schema)
    children = elements.columns
    if pa.types.is_map(t):
        if children[0].null_count:  # Arrow would end the process
            raise _corrupt("a map has a null among its keys")
        children = [pa.StructArray.from_arrays(children, fields=list(schema))]
    offset_type = pa.int64() if pa.types.is_large_list(t) else pa.int32()
    return pa.Array.from_buffers(t, n, [validity, pa.array(offsets, offset_type).buffers()[1]], children=children)


def _equal_rows(rows: pa.Array, offsets: IntArray, width: int) -> ByteArray:
    """Return binaries that must all have one width, shape (n, width), without a copy."""
    if (np.diff(offsets) != width).any():
        raise _corrupt("a row has another length than its columns")
    return binaries.data_of(rows)[offsets[0] : offsets[-1]].reshape(len(rows), width)


def _lengths(offsets: IntArray) -> npt.NDArray[np.uint32]:
    lengths = np.diff(offsets)
    if len(lengths) and lengths.max() > _PIECE_BYTES_MAX:
        raise InvalidArgumentError("one value of a column is larger than RocksDB can store", size_bytes=lengths.max())
    return lengths.astype("<u4")


def _corrupt(problem: str) -> CorruptionError:
    return CorruptionError(f"the bytes of a row in RocksDB do not fit its table: {problem}; restore the state")
