"""The row streams of Spark's state stores: all rows of a version, or its changes.

::

    row         key size, key, value size, value       sizes: 4 bytes, big endian; of a deleted row -1, and no value
    end         a key size of -1

    changelog of RocksDB, by format
        v1      rows
        v2      "v2" ‖ each row after a byte that says what it is, 0 for the end
        v3      "v3" ‖ lineage ‖ rows as in v1             where state stores have ids: which versions stand before this
        v4      "v4" ‖ lineage ‖ rows as in v2

Texts are Java's: 2 bytes for their size, then UTF-8.

Source: Spark 4.3's ``HDFSBackedStateStoreProvider`` and ``StateStoreChangelog``.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any, NamedTuple

from holdfast.errors import CorruptionError

Rows = dict[bytes, bytes]
"""Keys and values of a store, as it has them."""

_SIZE, _TEXT_SIZE = struct.Struct(">i"), struct.Struct(">H")
#: A pointer and its key have about 200; a row of Python's takes as much, however small it is.
ROW_BYTES = 200
_NONE = -1
_END, _PUT, _DELETE = 0x00, 0x01, 0x10
_UNIQUE_ID = re.compile(r"[0-9A-Za-z-]{1,64}")


class Named(NamedTuple):
    """A version of a store; where stores have ids, with that of the attempt that made it.

    Attributes
    ----------
    version : int
    unique_id : str or None
    """

    version: int
    unique_id: str | None = None

    def __str__(self) -> str:
        return f"{self.version}" if self.unique_id is None else f"{self.version}_{self.unique_id}"


def stream_of_rows(rows: Rows) -> bytes:
    """Return the plain bytes of a file that puts rows: of all, or of what a version of none has changed."""
    found = bytearray()
    for row in rows.items():
        for part in row:
            found += _SIZE.pack(len(part)) + part
    return bytes(found + _SIZE.pack(_NONE))


class RowStream:
    """The plain bytes of a file, read from their begin.

    Parameters
    ----------
    data : bytes
    source : str
        What to call the file in an error.
    limit_bytes : int
        See `require_few`.
    """

    def __init__(self, data: bytes, source: str, limit_bytes: int) -> None:
        self._data, self._at, self._source = memoryview(data), 0, source
        self._rows_max = limit_bytes // ROW_BYTES

    def apply_to(self, rows: Rows) -> None:
        """Read rows to the end of the file, and change `rows` accordingly; raises `CorruptionError`."""
        while (size := self._size()) != _NONE:
            self._apply_row(rows, self._bytes(size))

    def apply_changelog_to(self, rows: Rows) -> None:
        """Read a changelog of any format, and change `rows` accordingly; raises `CorruptionError`."""
        number, _ = self._head()
        if number in (1, 3):
            self.apply_to(rows)
            return
        while (kind := self._bytes(1)[0]) != _END:
            if kind not in (_PUT, _DELETE):  # pointers are put, never appended to
                raise CorruptionError(f"{self._source} holds a change to no row", kind=kind, offset=self._at)
            self._apply_row(rows, self._bytes(self._size()))

    def lineage(self) -> list[Named]:
        """Return the versions listed before a changelog; raises `CorruptionError`."""
        return self._head()[1]

    def _apply_row(self, rows: Rows, key: bytes) -> None:
        size = self._size()
        if size == _NONE:
            rows.pop(key, None)
        else:
            rows[key] = self._bytes(size)
            if len(rows) > self._rows_max:
                raise _too_much(self._source, rows=len(rows))

    def _head(self) -> tuple[int, list[Named]]:
        """Return the number of a changelog's format, and its lineage, if it has one."""
        begin = bytes(self._data[:4])
        if begin not in (b"\0\2v2", b"\0\2v3", b"\0\2v4"):
            return 1, []
        self._at = len(begin)
        number = int(begin[3:])
        return number, [] if number == 2 else self._read_lineage()

    def _read_lineage(self) -> list[Named]:
        text = self._bytes(_TEXT_SIZE.unpack(self._bytes(_TEXT_SIZE.size))[0])
        try:
            return [_named(item) for item in json.loads(text)]
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise CorruptionError(f"{self._source} names no versions before its own") from exc

    def _size(self) -> int:
        return int(_SIZE.unpack(self._bytes(_SIZE.size))[0])

    def _bytes(self, size: int) -> bytes:
        if not 0 <= size <= len(self._data) - self._at:
            raise CorruptionError(f"{self._source} is cut off, or damaged", offset=self._at, size_bytes=size)
        self._at += size
        return bytes(self._data[self._at - size : self._at])


def require_few(rows: Rows, limit_bytes: int, source: str) -> None:
    """Raise CorruptionError if the rows of a version take more than `limit_bytes`."""
    size_bytes = sum(len(key) + len(value) for key, value in rows.items())
    if size_bytes > limit_bytes:
        raise _too_much(source, limit_bytes=limit_bytes)


def _too_much(source: str, **facts: int) -> CorruptionError:
    return CorruptionError(f"{source} holds more than Spark stores there", **facts)


def _named(item: Any) -> Named:
    version, unique_id = item["version"], item["checkpointUniqueId"]
    return Named(checked_version(version), checked_unique_id(unique_id))


def checked_version(version: object) -> int:
    """Return a version's number; raises ValueError for anything else."""
    if type(version) is not int or version < 0:
        raise ValueError("not the number of a version")
    return version


def checked_unique_id(unique_id: object) -> str:
    """Return an id, which becomes part of a file's name; raises ValueError for anything else."""
    if not isinstance(unique_id, str) or not _UNIQUE_ID.fullmatch(unique_id):
        raise ValueError("not the id of a version")
    return unique_id
