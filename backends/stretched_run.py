"""A run stored as several stretches of a file, looked up as a whole.

::

    stretch     rows            last hash       wanted keys, ascending
    0           0 … 131071      0x02a1…         ┐ one search of the last hashes splits them by stretch,
    1           131072 …        0x0543…         │ one search per stretch finds their rows,
    2           …               0x07e8…         ┘ and one gather per column compares and returns them

The cost of a look-up thus depends on its keys, not on the run's size. If the file is not in memory, a look-up
prefetches for all keys at once: hashes near their expected positions, then rows, then the text that rows refer to.

A value's offset follows from its stretch and row (`PiecedColumn`): a few array operations find all values, while
Arrow's `take` would need a call per stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.backends.arrow.rows import BoolArray, IntArray, from_columns, rows_equal, take, to_bools
from holdfast.backends.local.page_cache import MappedFile
from holdfast.backends.run import Run
from holdfast.backends.schema import Keys

_WORD_BYTES = 8
#: If a sample of this many rows is in memory, all rows are taken to be.
_SAMPLE = 16
_HASH_BYTES = 8
#: With more than one wanted key per this many rows in memory, searching whole stretches costs less.
_DENSE_ROWS = 256


class Positions(NamedTuple):
    """Rows of a column in pieces: shape (n,) each, ascending by piece and row, no row twice."""

    piece: IntArray
    row: IntArray


class Spans(NamedTuple):
    """Byte ranges of the file, shape (n,) each."""

    begins: IntArray
    ends: IntArray


class PiecedColumn(Protocol):
    """One column, stored in pieces; see the module docstring."""

    def take(self, places: Positions) -> pa.Array:
        """Return the values at `places`."""

    def spans(self, places: Positions) -> Spans | None:
        """Return the byte ranges that `take` reads, for variable-width values those of offsets; None if unknown."""
        return None

    def inner_spans(self, places: Positions) -> Spans | None:
        """Read the offsets, and return the byte ranges they refer to; None for a column without offsets."""
        return None


def pieced(arrays: Sequence[pa.Array], memory: pa.Buffer) -> PiecedColumn:
    """Return a column made of pieces; `memory` is the mapped file that holds them, in order."""
    t = arrays[0].type
    try:
        if pa.types.is_boolean(t):
            return _Bools(arrays, memory)
        if pa.types.is_large_string(t) or pa.types.is_large_binary(t):
            return _Binaries(arrays, memory)
        if pa.types.is_primitive(t) or pa.types.is_decimal(t) or pa.types.is_fixed_size_binary(t):
            return _Fixed(arrays, memory)
    except _ElsewhereError:
        pass
    return _Loose(arrays)


class _ElsewhereError(Exception):
    """A piece is misaligned, sliced or outside the mapped memory."""


class _Loose(PiecedColumn):
    """Values of any type at any address, taken piece by piece."""

    def __init__(self, arrays: Sequence[pa.Array]) -> None:
        self._arrays = arrays

    def take(self, places: Positions) -> pa.Array:
        if not len(places.row):
            return self._arrays[0].slice(0, 0)
        bounds = np.flatnonzero(np.diff(places.piece, prepend=-1, append=len(self._arrays)))
        parts = [
            self._arrays[places.piece[start]].take(pa.array(places.row[start:end]))
            for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


class _Bits:
    """One bit per row; a piece without nulls has no bits."""

    def __init__(self, buffers: Sequence[pa.Buffer | None], memory: pa.Buffer) -> None:
        self._bytes = np.frombuffer(memory, np.uint8)
        self._starts = np.array([-1 if b is None else _start(b, memory) * 8 for b in buffers], np.int64)
        self.are_absent = bool((self._starts < 0).all())

    def take(self, places: Positions) -> BoolArray:
        starts = self._starts[places.piece]
        bits = starts + places.row
        found: BoolArray = (self._bytes[bits >> 3] >> (bits & 7).astype(np.uint8) & 1).astype(np.bool_)
        return found | (starts < 0)

    def spans(self, places: Positions) -> Spans:
        begins = self._starts[places.piece] + places.row >> 3
        return Spans(begins, begins + 1)


def _validity(bits: _Bits, places: Positions) -> pa.Buffer | None:
    valid = None if bits.are_absent else bits.take(places)
    return None if valid is None or valid.all() else _packed(valid)


def _packed(bits: BoolArray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


class _Bools(PiecedColumn):
    def __init__(self, arrays: Sequence[pa.Array], memory: pa.Buffer) -> None:
        self._valid, self._bits = (_Bits(buffers, memory) for buffers in _buffers(arrays, 2))

    def take(self, places: Positions) -> pa.Array:
        buffers = [_validity(self._valid, places), _packed(self._bits.take(places))]
        return pa.Array.from_buffers(pa.bool_(), len(places.row), buffers)

    def spans(self, places: Positions) -> Spans | None:
        return self._bits.spans(places)


class _Fixed(PiecedColumn):
    def __init__(self, arrays: Sequence[pa.Array], memory: pa.Buffer) -> None:
        self._type = arrays[0].type
        valid, values = _buffers(arrays, 2)
        self._valid = _Bits(valid, memory)
        self._width = self._type.bit_width // 8
        starts = np.array([_start(b, memory) for b in values], np.int64)
        self._items: npt.NDArray[np.generic]
        if self._width in (1, 2, 4, 8) and not (starts % self._width).any():
            self._step = 1
            self._unit = self._width
            self._starts = starts // self._width
            self._items = np.frombuffer(memory, f"u{self._width}", memory.size // self._width)
        else:
            self._step, self._unit, self._starts = self._width, 1, starts
            bytes_ = np.frombuffer(memory, np.uint8)
            self._items = np.ndarray((len(bytes_) - self._width + 1,), f"V{self._width}", bytes_, strides=(1,))

    def take(self, places: Positions) -> pa.Array:
        found = self._items[self._starts[places.piece] + places.row * self._step]
        buffers = [_validity(self._valid, places), pa.py_buffer(found.view(np.uint8))]
        return pa.Array.from_buffers(self._type, len(places.row), buffers)

    def spans(self, places: Positions) -> Spans | None:
        begins = (self._starts[places.piece] + places.row * self._step) * self._unit
        return Spans(begins, begins + self._width)


class _Binaries(PiecedColumn):
    """Variable-width values; the offsets of a piece are relative to the piece's data."""

    def __init__(self, arrays: Sequence[pa.Array], memory: pa.Buffer) -> None:
        self._type, self._memory = arrays[0].type, memory
        valid, offsets, data = _buffers(arrays, 3)
        self._valid = _Bits(valid, memory)
        starts = np.array([_start(b, memory) for b in offsets], np.int64)
        if (starts % _WORD_BYTES).any():
            raise _ElsewhereError
        self._words = np.frombuffer(memory, np.int64, memory.size // _WORD_BYTES)
        self._offsets = starts // _WORD_BYTES
        # A piece of empty values has no data: any address between its neighbours' data will do.
        places = [_start(b, memory) if b is not None and b.size else at for b, at in zip(data, starts, strict=True)]
        self._data = np.array(places, np.int64)

    def take(self, places: Positions) -> pa.Array:
        n = len(places.row)
        begins, ends = self.inner_spans(places)
        # Splits the memory, in order: a wanted value, the gap before the next wanted value, and so on.
        cuts = np.empty(2 * n + 1, np.int64)
        cuts[0:-1:2], cuts[1::2] = begins, ends
        cuts[-1] = cuts[-2] if n else 0
        parts = pa.Array.from_buffers(pa.large_binary(), 2 * n, [None, pa.py_buffer(cuts), self._memory])
        taken = parts.take(pa.array(np.arange(0, 2 * n, 2)))
        return pa.Array.from_buffers(self._type, n, [_validity(self._valid, places), *taken.buffers()[1:]])

    def spans(self, places: Positions) -> Spans | None:
        begins = (self._offsets[places.piece] + places.row) * _WORD_BYTES
        return Spans(begins, begins + 2 * _WORD_BYTES)

    def inner_spans(self, places: Positions) -> Spans:
        at, first = self._offsets[places.piece] + places.row, self._data[places.piece]
        return Spans(self._words[at] + first, self._words[at + 1] + first)


def _buffers(arrays: Sequence[pa.Array], count: int) -> list[list[pa.Buffer | None]]:
    """Return the buffers of all pieces, by kind."""
    if any(array.offset for array in arrays):
        raise _ElsewhereError
    found = [array.buffers() for array in arrays]
    return [[buffers[kind] for buffers in found] for kind in range(count)]


def _start(buffer: pa.Buffer | None, memory: pa.Buffer) -> int:
    """Return a buffer's offset in `memory`."""
    start = -1 if buffer is None else buffer.address - memory.address
    if buffer is None or not 0 <= start <= start + buffer.size <= memory.size:
        raise _ElsewhereError
    return int(start)


class StretchedRun:
    """A run in ascending stretches of one file, mapped as `memory`; safe for many threads."""

    def __init__(self, parts: Sequence[Run], memory: pa.Buffer, file: MappedFile | None = None) -> None:
        self._parts = list(parts)
        self.schema = parts[0].schema
        self._memory, self._file = memory, file
        self._starts = np.cumsum([0, *map(len, parts)])
        self._first_hashes, self._last_hashes = (
            np.array([part.hashes[end] for part in parts], np.uint64) for end in (0, -1)
        )
        self._hashes_at = np.array([part.hashes.ctypes.data - memory.address for part in parts], np.int64)
        if (
            self._hashes_at % _HASH_BYTES
        ).any() or not 0 <= self._hashes_at.min() <= self._hashes_at.max() < memory.size:
            self._file = None  # the hashes are outside the file

    @property
    def parts(self) -> list[Run]:
        if self._file is not None:
            self._file.expect_scans()
        return self._parts

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def ends(self) -> tuple[int, int]:
        return self._parts[0].ends[0], self._parts[-1].ends[1]

    @cached_property
    def _columns(self) -> list[PiecedColumn]:
        columns = zip(*(part.batch.columns for part in self._parts), strict=True)
        return [pieced(pieces, self._memory) for pieces in columns]

    def find(self, keys: Keys) -> IntArray:
        rows, is_hash = self._search(keys)
        asked = np.flatnonzero(is_hash)
        if self._file is not None:
            self._fetch_rows(rows[asked], self._file)
        wanted = keys.columns if len(asked) == len(keys) else take(keys.columns, asked)
        count = len(self.schema.key)
        stored = from_columns(self._take(2, count, rows[asked]), self.schema.key, len(asked))
        hit = rows_equal(stored, wanted)
        found = np.full(len(keys), -1, np.int64)
        found[asked[hit]] = rows[asked[hit]]
        missed = asked[~hit]
        if len(missed):  # a different row with the same hash may match
            self._find_in_crowds(keys, missed, np.searchsorted(self._starts, rows[missed], side="right") - 1, found)
        return found

    def _search(self, keys: Keys) -> tuple[IntArray, BoolArray]:
        """Return, for each key, the first row whose hash is not less, and whether the hashes are equal."""
        near = None if self._file is None else self._rows_near(keys, self._file)
        if near is not None:
            return near
        rows, is_hash = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
        bounds = np.concatenate([[0], np.searchsorted(keys.hashes, self._last_hashes, side="right")])
        for i in np.flatnonzero(np.diff(bounds)).tolist():
            here = slice(int(bounds[i]), int(bounds[i + 1]))
            hashes = self._parts[i].hashes
            places = np.searchsorted(hashes, keys.hashes[here])
            is_hash[here] = hashes[places] == keys.hashes[here]
            np.add(places, self._starts[i], out=rows[here])
        return rows, is_hash

    def _rows_near(self, keys: Keys, file: MappedFile) -> tuple[IntArray, BoolArray] | None:
        """Search only near the expected positions of hashes; None if that misses, or if there are many keys."""
        stretches = np.minimum(np.searchsorted(self._last_hashes, keys.hashes), len(self._parts) - 1)
        counts, firsts = np.diff(self._starts)[stretches], self._first_hashes[stretches]
        spread = (self._last_hashes[stretches] - firsts).astype(np.float64)
        wanted = np.clip(keys.hashes, firsts, self._last_hashes[stretches])
        rows = (wanted - firsts) / np.maximum(spread, 1) * (counts - 1)
        # Of n uniformly distributed hashes, hardly any is farther from its expected position.
        low, high = (
            np.clip(rows + 2 * far, 0, counts - 1).astype(np.int64) for far in (-np.sqrt(counts), np.sqrt(counts))
        )
        at = self._hashes_at[stretches]
        begins, ends = (at + row * _HASH_BYTES for row in (low, high))
        if not file.are_cached(begins):
            file.expect_look_ups()
            file.prefetch(begins, ends + _HASH_BYTES)
        elif len(keys) * _DENSE_ROWS > len(self):
            return None
        hashes = np.frombuffer(self._memory, np.uint64, self._memory.size // _HASH_BYTES)
        at //= _HASH_BYTES
        if ((hashes[at + high] < wanted) | ((hashes[at + low] >= wanted) & (low > 0))).any():
            return None
        while (low < high).any():
            middle = (low + high) // 2
            is_less = hashes[at + middle] < wanted
            low, high = np.where(is_less, middle + 1, low), np.where(is_less, high, middle)
        return self._starts[stretches] + low, hashes[at + low] == keys.hashes

    def _fetch_rows(self, rows: IntArray, file: MappedFile) -> None:
        """Prefetch all bytes of `rows`, unless a sample of them is in memory."""
        sample = self._places(np.unique(rows[:: max(1, len(rows) // _SAMPLE)]))
        if not len(sample.row) or all(
            file.are_cached(spans.begins)
            for column in self._columns[1:]
            for spans in (column.spans(sample), column.inner_spans(sample))
            if spans is not None
        ):
            return
        file.expect_look_ups()
        places = self._places(np.unique(rows))
        for step in ("spans", "inner_spans"):
            found = [spans for c in self._columns[1:] if (spans := getattr(c, step)(places)) is not None]
            if found:
                file.prefetch(*(np.concatenate(side) for side in zip(*found, strict=True)))

    def _find_in_crowds(self, keys: Keys, missed: IntArray, stretches: IntArray, found: IntArray) -> None:
        for i in np.unique(stretches).tolist():
            here = missed[stretches == i]
            rows = self._parts[i].find(keys.take(here))
            found[here] = np.where(rows < 0, rows, rows + self._starts[i])

    def deleted_at(self, rows: IntArray) -> BoolArray:
        return to_bools(self._take(1, 1, rows)[0])

    def values_at(self, rows: IntArray) -> pa.RecordBatch:
        first = 2 + len(self.schema.key)
        return from_columns(self._take(first, len(self.schema.value), rows), self.schema.value, len(rows))

    def _take(self, first: int, count: int, rows: IntArray) -> list[pa.Array]:
        """Return `count` columns of `rows`, from column `first`."""
        ascends = (rows[1:] > rows[:-1]).all()
        wanted, back = (rows, None) if ascends else np.unique(rows, return_inverse=True)
        places = self._places(wanted)
        columns = [column.take(places) for column in self._columns[first : first + count]]
        return columns if back is None else [column.take(pa.array(back)) for column in columns]

    def _places(self, rows: IntArray) -> Positions:
        stretches = np.searchsorted(self._starts, rows, side="right") - 1
        return Positions(stretches, rows - self._starts[stretches])
