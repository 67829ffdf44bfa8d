"""Bytes of Kafka's protocol: fields written in order, and read in order with every size checked before it is used.

::

    plain      int16 int32 int64 bool     string = int16 length, bytes     array = int32 count, items
    flexible   the same numbers           string = varint length + 1       array = varint count + 1      tags after each

An answer comes from outside: a length beyond its end, a count that its bytes cannot hold, a string that is not text
are `MalformedAnswerError`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class MalformedAnswerError(Exception):
    """What a broker sent is not what the protocol says."""


class Fields:
    """A request's body, field after field."""

    def __init__(self, *, flexible: bool = False) -> None:
        self._parts: list[bytes] = []
        self._flexible = flexible

    def number(self, layout: str, *values: object) -> Fields:
        """Append numbers of a `struct` layout, big end first."""
        self._parts.append(struct.pack(f">{layout}", *values))
        return self

    def text(self, value: str) -> Fields:
        """Append a string."""
        return self.blob(value.encode()) if self._flexible else self._plain_text(value.encode())

    def blob(self, value: bytes) -> Fields:
        """Append bytes: a length of 32 bits, or a varint."""
        return self._append(_varint(len(value) + 1) if self._flexible else struct.pack(">i", len(value)), value)

    def array(self, items: Sequence[T] | None, write: Callable[[T], object]) -> Fields:
        """Append an array, whose items `write` appends one by one; None is Kafka's null."""
        count = -1 if items is None else len(items)
        self._append(_varint(count + 1) if self._flexible else struct.pack(">i", count))
        for item in items or ():
            write(item)
        return self

    def tags(self) -> Fields:
        """Append that no tagged fields follow."""
        return self._append(b"\0")

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def _plain_text(self, value: bytes) -> Fields:
        return self._append(struct.pack(">h", len(value)), value)

    def _append(self, *parts: bytes) -> Fields:
        self._parts += parts
        return self


class Answer:
    """The body of an answer, read field by field."""

    def __init__(self, body: bytes, *, flexible: bool = False) -> None:
        self._body = body
        self._at = 0
        self._flexible = flexible

    def number(self, layout: str) -> int:
        """Return one number of a `struct` layout."""
        (value,) = struct.unpack(f">{layout}", self._take(struct.calcsize(f">{layout}")))
        return int(value)

    def text(self) -> str | None:
        """Return a string; None for Kafka's null."""
        length = self._varint() - 1 if self._flexible else self.number("h")
        if length < 0:
            return None
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as exc:
            raise MalformedAnswerError("a string is not text") from exc

    def uuid(self) -> str:
        """Return a UUID as hexadecimal digits."""
        return self._take(16).hex()

    def blob(self) -> bytes:
        """Return bytes; none for Kafka's null."""
        length = self._varint() - 1 if self._flexible else self.number("i")
        return self._take(max(length, 0))

    def array(self, read: Callable[[], T]) -> list[T]:
        """Return an array; `read` reads one item."""
        count = self._varint() - 1 if self._flexible else self.number("i")
        # An item takes a byte at least: what cannot be there is not allocated.
        if count > len(self._body) - self._at:
            raise MalformedAnswerError("an array is longer than the answer")
        return [read() for _ in range(max(count, 0))]

    def tags(self) -> None:
        """Skip tagged fields."""
        if self._flexible:
            for _ in range(self._varint()):
                self._varint()
                self._take(self._varint())

    def _take(self, size: int) -> bytes:
        if size > len(self._body) - self._at:
            raise MalformedAnswerError("the answer ends too early")
        self._at += size
        return self._body[self._at - size : self._at]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            (byte,) = self._take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise MalformedAnswerError("a number has too many digits")


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
