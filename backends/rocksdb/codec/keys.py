"""Keys in RocksDB: encodes key columns of a state table as bytes that sort like the values, and decodes them.

Keys are compared byte by byte, and a key's first columns encode to a prefix of it. A key consists of the leaves of its
columns (`holdfast.backends.rocksdb.codec.rows` defines leaves and their segments)::

    table id ‖ hash, big endian ‖ for each leaf: 00 if null, else 01 ‖ fixed bytes ‖ each segment, escaped, and 00

Invariants
----------
* **exact**: decoding returns exactly what was encoded.
* **injective**: different keys have different bytes and no key is a prefix of another, because segments contain no 00:
  00 is escaped as 01 01, and 01 as 01 02, which preserves the order.
* **ordered**: for every leaf except lists and maps, bytes sort like values, nulls first. Fixed bytes are big endian;
  the sign bit is flipped, and for negative floats all other bits, too.
* **bounded**: any bytes either decode into columns that are safe to read, or raise a `CorruptionError`.

Source: FORMAT.md section 6.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import BoolArray, HashArray, IntArray, from_columns
from holdfast.backends.rocksdb.codec import binaries
from holdfast.backends.rocksdb.codec.binaries import ByteArray
from holdfast.backends.rocksdb.codec.rows import Leaf, Slot, assemble, corrupt, equal_rows, leaves_of, slots_of
from holdfast.errors import CorruptionError, InvalidArgumentError

#: Bytes before the key columns: table id and hash.
KEY_HEADER_BYTES = 9


def to_sortable(t: pa.DataType, fixed: ByteArray) -> ByteArray:
    """Convert fixed bytes of a type to bytes that sort like the values."""
    if pa.types.is_boolean(t) or pa.types.is_fixed_size_binary(t) or not fixed.size:
        return fixed
    word = min(fixed.shape[1], 8)
    words = np.ascontiguousarray(fixed).view(f"<u{word}")[:, ::-1].copy()
    words[:, 0] ^= _flipped_bits(t, words[:, 0] >> (8 * word - 1) == 1, words.dtype)
    return words.astype(f">u{word}").view(np.uint8)


def from_sortable(t: pa.DataType, fixed: ByteArray) -> ByteArray:
    """Return the fixed bytes that were passed to `to_sortable`."""
    if pa.types.is_boolean(t) or pa.types.is_fixed_size_binary(t) or not fixed.size:
        return fixed
    word = min(fixed.shape[1], 8)
    words = fixed.view(f">u{word}").astype(f"<u{word}")
    words[:, 0] ^= _flipped_bits(t, words[:, 0] >> (8 * word - 1) == 0, words.dtype)
    return np.ascontiguousarray(words[:, ::-1]).view(np.uint8)


def _flipped_bits(t: pa.DataType, negative: BoolArray, dtype: np.dtype[np.unsignedinteger]) -> npt.NDArray[np.integer]:
    """Return, for each number, the bits of its highest word that a key flips."""
    sign = dtype.type(1 << (8 * dtype.itemsize - 1))
    if pa.types.is_floating(t):
        return np.where(negative, dtype.type(2 ** (8 * dtype.itemsize) - 1), sign)
    return np.asarray(0 if pa.types.is_unsigned_integer(t) else sign, dtype)


def escape(segment: pa.Array) -> pa.Array:
    """Escape binaries to contain no 00, in the same order; with 00 appended, none is a prefix of another."""
    if not (binaries.data_of(segment)[slice(*binaries.offsets_of(segment)[[0, -1]])] <= 1).any():
        return segment
    ones = pc.replace_substring(segment, pattern=b"\1", replacement=b"\1\2")
    return pc.replace_substring(ones, pattern=b"\0", replacement=b"\1\1")


def unescape(segment: pa.Array) -> pa.Array:
    """Return the binaries that were passed to `escape`. Raises `CorruptionError` for bytes it cannot have returned."""
    if not (binaries.data_of(segment)[: binaries.offsets_of(segment)[-1]] <= 1).any():
        return segment
    zeros = pc.replace_substring(segment, pattern=b"\1\1", replacement=b"\0")
    plain = pc.replace_substring(zeros, pattern=b"\1\2", replacement=b"\1")
    if not escape(plain).equals(segment):
        raise CorruptionError("a key in RocksDB has an invalid escape; restore the state")
    return plain


def encode_keys(table_id: int, hashes: HashArray, columns: pa.RecordBatch) -> pa.Array:
    """Encode RocksDB's keys for rows of a state table; fewer columns give prefixes of exactly their keys.

    Raises `InvalidArgumentError` if a column's type cannot be stored, or the table id is out of range.
    """
    if not 0 <= table_id <= 255:
        raise InvalidArgumentError("a table id is one byte", table_id=table_id)
    n = len(hashes)
    blocks = [[np.full((n, 1), table_id, np.uint8), hashes.astype(">u8").view(np.uint8).reshape(n, 8)]]
    segments = []
    for slot, leaf in zip(slots_of(columns.schema), leaves_of(columns), strict=True):
        present = np.ones(n, np.uint8) if leaf.nulls is None else (~leaf.nulls).view(np.uint8)
        fixed = to_sortable(slot.type, leaf.fixed)
        if leaf.nulls is not None:
            fixed[leaf.nulls] = 0
        blocks[-1] += [present.reshape(n, 1), fixed]
        for segment in leaf.segments:
            segments.append(escape(segment))
            blocks.append([np.zeros((n, 1), np.uint8)])
    parts = [binaries.from_rows(binaries.side_by_side(block)) for block in blocks]
    for i, segment in enumerate(segments):
        parts.insert(2 * i + 1, segment)
    return binaries.join(parts)


def decode_keys(keys: pa.Array, schema: pa.Schema) -> tuple[HashArray, pa.RecordBatch]:
    """Decode keys with all columns of `schema` into hashes and key columns. Raises `CorruptionError`."""
    n, slots = len(keys), slots_of(schema)
    blocks, segments = _split_keys(keys, _block_widths(slots))
    hashes = blocks[0][:, 1:KEY_HEADER_BYTES].copy().view(">u8").reshape(n).astype(np.uint64)
    leaves = _key_leaves(slots, blocks, segments)
    return hashes, from_columns([assemble(f.type, n, leaves) for f in schema], schema, n)


def _block_widths(slots: list[Slot]) -> list[int]:
    """Return the widths of the fixed-width blocks of a key, which enclose its segments."""
    widths = [KEY_HEADER_BYTES]
    for slot in slots:
        widths[-1] += 1 + slot.width
        widths += [1] * slot.segments  # the 00 that ends a segment begins the next block
    return widths


def _split_keys(keys: pa.Array, widths: list[int]) -> tuple[list[ByteArray], list[pa.Array]]:
    """Return the fixed-width blocks of keys, each of shape (n, width), and the segments between them."""
    offsets = binaries.offsets_of(keys)
    if len(widths) == 1:
        return [equal_rows(keys, offsets, widths[0])], []
    starts, ends = offsets[:-1], offsets[1:]
    segments = len(widths) - 1
    zeros = _zeros(keys, offsets) if segments > 1 else offsets
    flat, cuts = binaries.cuts_of(len(keys), 2 * segments)  # begin and end of each segment
    blocks = [_block(keys, starts, ends, widths[0])]
    for i, width in enumerate(widths[1:]):
        begin = np.add(starts, widths[i], out=cuts[:, 2 * i])
        # Only the last block follows the last segment, so the segment's end need not be searched.
        starts = ends - width if i == segments - 1 else zeros[np.searchsorted(zeros, begin)]
        if (starts < begin).any():
            raise corrupt("a key is truncated")
        cuts[:, 2 * i + 1] = starts
        blocks.append(_block(keys, starts, ends, width))
        if blocks[-1][:, 0].any():
            raise corrupt("a segment of a key has no end")
    flat[-1] = ends[-1] if len(ends) else 0
    return blocks, binaries.cut(keys, flat, 2 * segments, range(0, 2 * segments, 2))


def _block(keys: pa.Array, starts: IntArray, ends: IntArray, width: int) -> ByteArray:
    """Return `width` bytes of each key from `starts`, shape (n, width); they must end by `ends`."""
    if (starts + width > ends).any():
        raise corrupt("a key is truncated")
    return binaries.gather(keys, starts, width)


def _zeros(keys: pa.Array, offsets: IntArray) -> IntArray:
    """Return the positions of all zero bytes, and the end of the last key."""
    zeros = np.flatnonzero(binaries.data_of(keys)[offsets[0] : offsets[-1]] == 0) + offsets[0]
    return np.append(zeros, offsets[-1])


def _key_leaves(slots: list[Slot], blocks: list[ByteArray], segments: list[pa.Array]) -> Iterator[Leaf]:
    block, at, segment = 0, KEY_HEADER_BYTES, 0
    for slot in slots:
        present = blocks[block][:, at]
        if (present > 1).any():
            raise corrupt("a key has an invalid null mark")
        nulls = None if present.all() else present == 0
        fixed = from_sortable(slot.type, binaries.get(blocks[block], at + 1, slot.width))
        yield Leaf(nulls, fixed, [unescape(p) for p in segments[segment : segment + slot.segments]])
        segment += slot.segments
        block, at = (block + slot.segments, 1) if slot.segments else (block, at + 1 + slot.width)
