"""Columns that lie in pieces of one mapped file, gathered as if each were one array.

::

    the file     hashes ‖ keys ‖ values    hashes ‖ keys ‖ values    hashes ‖ keys ‖ values   …
    a column              ▒▒▒▒                      ▒▒▒▒                      ▒▒▒▒
    rows wanted            ·  ·                                               ·

Where a value lies follows from its piece and its row there: a few operations on whole arrays find the values of all
rows, however many the pieces are. Arrow's `take` would be called for each piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.backends.arrow.rows import BoolArray, IntArray

_WORD_BYTES = 8


class Places(NamedTuple):
    """Rows of a column in pieces: shape (n,) each, ascending by piece and row, no row twice."""

    piece: IntArray
    row: IntArray


class Spans(NamedTuple):
    """Bytes of the file: where they begin and end, shape (n,) each."""

    begins: IntArray
    ends: IntArray


class PiecedColumn(Protocol):
    """One column; see the module."""

    def take(self, places: Places) -> pa.Array:
        """Return the values of some rows."""

    def spans(self, places: Places) -> Spans | None:
        """Return where `take` reads; of values that others lead to, where those lie. None: not known."""

    def inner_spans(self, places: Places) -> Spans | None:
        """Return where the values lie that others lead to; reads those. None: there are none."""


def pieced(arrays: Sequence[pa.Array], memory: pa.Buffer) -> PiecedColumn:
    """Return a column from its pieces, which lie in `memory` one after the other if it is that of a file."""
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
    """A piece does not lie where it can be addressed."""


class _Loose:
    """Of any type, anywhere: taken piece by piece."""

    def __init__(self, arrays: Sequence[pa.Array]) -> None:
        self._arrays = arrays

    def take(self, places: Places) -> pa.Array:
        if not len(places.row):
            return self._arrays[0].slice(0, 0)
        bounds = np.flatnonzero(np.diff(places.piece, prepend=-1, append=len(self._arrays)))
        parts = [
            self._arrays[places.piece[start]].take(pa.array(places.row[start:end]))
            for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    def spans(self, _places: Places) -> Spans | None:
        return None

    def inner_spans(self, _places: Places) -> Spans | None:
        return None


class _Bits:
    """A bit a row, or none at all for a piece without nulls."""

    def __init__(self, buffers: Sequence[pa.Buffer | None], memory: pa.Buffer) -> None:
        self._bytes = np.frombuffer(memory, np.uint8)
        self._starts = np.array([-1 if b is None else _start(b, memory) * 8 for b in buffers], np.int64)
        self.are_absent = bool((self._starts < 0).all())

    def take(self, places: Places) -> BoolArray:
        starts = self._starts[places.piece]
        bits = starts + places.row
        # Where there are none, what is read lies outside of nothing and does not count.
        found: BoolArray = (self._bytes[bits >> 3] >> (bits & 7).astype(np.uint8) & 1).astype(np.bool_)
        return found | (starts < 0)

    def spans(self, places: Places) -> Spans:
        begins = self._starts[places.piece] + places.row >> 3
        return Spans(begins, begins + 1)


def _validity(bits: _Bits, places: Places) -> pa.Buffer | None:
    valid = None if bits.are_absent else bits.take(places)
    return None if valid is None or valid.all() else _packed(valid)


def _packed(bits: BoolArray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


class _Bools:
    def __init__(self, arrays: Sequence[pa.Array], memory: pa.Buffer) -> None:
        self._valid, self._bits = (_Bits(buffers, memory) for buffers in _buffers(arrays, 2))

    def take(self, places: Places) -> pa.Array:
        buffers = [_validity(self._valid, places), _packed(self._bits.take(places))]
        return pa.Array.from_buffers(pa.bool_(), len(places.row), buffers)

    def spans(self, places: Places) -> Spans | None:
        return self._bits.spans(places)

    def inner_spans(self, _places: Places) -> Spans | None:
        return None


class _Fixed:
    """Values of one width."""

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

    def take(self, places: Places) -> pa.Array:
        found = self._items[self._starts[places.piece] + places.row * self._step]
        buffers = [_validity(self._valid, places), pa.py_buffer(found.view(np.uint8))]
        return pa.Array.from_buffers(self._type, len(places.row), buffers)

    def spans(self, places: Places) -> Spans | None:
        begins = (self._starts[places.piece] + places.row * self._step) * self._unit
        return Spans(begins, begins + self._width)

    def inner_spans(self, _places: Places) -> Spans | None:
        return None


class _Binaries:
    """Values of any length; the offsets of a piece count from its own bytes."""

    def __init__(self, arrays: Sequence[pa.Array], memory: pa.Buffer) -> None:
        self._type, self._memory = arrays[0].type, memory
        valid, offsets, data = _buffers(arrays, 3)
        self._valid = _Bits(valid, memory)
        starts = np.array([_start(b, memory) for b in offsets], np.int64)
        if (starts % _WORD_BYTES).any():
            raise _ElsewhereError
        self._words = np.frombuffer(memory, np.int64, memory.size // _WORD_BYTES)
        self._offsets = starts // _WORD_BYTES
        # A piece whose values are all empty has no bytes: any place between its neighbours' will do.
        places = [_start(b, memory) if b is not None and b.size else at for b, at in zip(data, starts, strict=True)]
        self._data = np.array(places, np.int64)

    def take(self, places: Places) -> pa.Array:
        n = len(places.row)
        begins, ends = self.inner_spans(places)
        # Of all bytes, in their order: a wanted value, then what lies before the next one, and so on.
        cuts = np.empty(2 * n + 1, np.int64)
        cuts[0:-1:2], cuts[1::2] = begins, ends
        cuts[-1] = cuts[-2] if n else 0
        parts = pa.Array.from_buffers(pa.large_binary(), 2 * n, [None, pa.py_buffer(cuts), self._memory])
        taken = parts.take(pa.array(np.arange(0, 2 * n, 2)))
        return pa.Array.from_buffers(self._type, n, [_validity(self._valid, places), *taken.buffers()[1:]])

    def spans(self, places: Places) -> Spans | None:
        begins = (self._offsets[places.piece] + places.row) * _WORD_BYTES
        return Spans(begins, begins + 2 * _WORD_BYTES)

    def inner_spans(self, places: Places) -> Spans:
        at, first = self._offsets[places.piece] + places.row, self._data[places.piece]
        return Spans(self._words[at] + first, self._words[at + 1] + first)


def _buffers(arrays: Sequence[pa.Array], count: int) -> list[list[pa.Buffer | None]]:
    """Return the buffers of all pieces, by kind."""
    if any(array.offset for array in arrays):
        raise _ElsewhereError
    found = [array.buffers() for array in arrays]
    return [[buffers[kind] for buffers in found] for kind in range(count)]


def _start(buffer: pa.Buffer | None, memory: pa.Buffer) -> int:
    """Return where a buffer begins in `memory`."""
    start = -1 if buffer is None else buffer.address - memory.address
    if buffer is None or not 0 <= start <= start + buffer.size <= memory.size:
        raise _ElsewhereError
    return int(start)
