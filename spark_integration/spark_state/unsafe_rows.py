"""Spark's ``UnsafeRow``: how its state stores keep keys and values.

::

    null bits           8 bytes for each 64 columns, column i is bit i
    a column each       8 bytes: the number, or where the bytes stand: offset << 32 | size, from the row's begin
    bytes               of strings, binaries and structs, which are rows themselves

All of it little endian.
"""

from __future__ import annotations

import struct

from holdfast.errors import CorruptionError

_WORD = 8


class UnsafeRow:
    """One row.

    Parameters
    ----------
    data : memoryview
    columns : int
        How many it has.
    source : str
        What to call the file in an error.

    Raises
    ------
    CorruptionError
        It is too short.
    """

    def __init__(self, data: memoryview, columns: int, source: str) -> None:
        self._data = data
        self._null_bytes = -(-columns // 64) * _WORD
        self._source, self._fixed_bytes = source, self._null_bytes + columns * _WORD
        if len(data) < self._fixed_bytes:
            raise CorruptionError(f"{source} holds a row that is too short", size_bytes=len(data), columns=columns)

    def is_null(self, column: int) -> bool:
        """Tell whether a column is null."""
        return bool(self._data[column // 8] >> column % 8 & 1)

    def binary(self, column: int) -> memoryview | None:
        """Return the bytes of a column; raises `CorruptionError` if they stand elsewhere."""
        if self.is_null(column):
            return None
        size, offset = struct.unpack_from("<II", self._data, self._place(column))
        if offset < self._fixed_bytes or offset + size > len(self._data):
            raise CorruptionError(f"{self._source} holds a row whose bytes stand outside of it", column=column)
        return self._data[offset : offset + size]

    def whole(self, column: int) -> bytes | None:
        """Return a copy of a column of type binary; raises as `binary`."""
        data = self.binary(column)
        return None if data is None else bytes(data)

    def _place(self, column: int) -> int:
        return self._null_bytes + column * _WORD


def unsafe_row(*columns: int | bytes) -> bytes:
    """Return a row without nulls: a number of 64 bits is given as int, a string, a binary or a struct as bytes.

    A number of 32 bits is given without its sign: Spark fills its word with zeros.
    """
    fixed, following = bytearray(-(-len(columns) // 64) * _WORD), bytearray()
    begin = len(fixed) + len(columns) * _WORD
    for column in columns:
        if isinstance(column, int):
            fixed += struct.pack("<q", column)
        else:
            fixed += struct.pack("<II", len(column), begin + len(following))
            following += column + bytes(-len(column) % _WORD)
    return bytes(fixed + following)
