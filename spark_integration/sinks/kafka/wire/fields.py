"""Kafka's wire format by layouts; every size is checked before use.

::

    b h i q ?   numbers, as `struct` names them       u   a UUID, as 32 hexadecimal digits
    s           a string, or null                     y   bytes
    […]         an array of what is inside, or null   (…) a struct

    plain       string = int16 length, bytes          array = int32 count, items
    flexible    string = varint length + 1            array = varint count + 1      tags after each struct

An answer comes from outside: a length beyond its end, a count that its bytes cannot hold, a string that is not text
are `MalformedAnswerError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any


class MalformedAnswerError(Exception):
    """A broker's answer violates the protocol."""


@cache
def _parsed(layout: str) -> tuple[Any, ...]:
    """Return a layout's fields: letters, and pairs of a bracket and the fields inside."""
    fields: list[Any] = []
    around: list[list[Any]] = []
    for letter in layout.replace(" ", ""):
        if letter in "[(":
            around.append(fields)
            fields = []
        elif letter in "])":
            inside, fields = tuple(fields), around.pop()
            fields.append((letter, inside))
        else:
            fields.append(letter)
    return tuple(fields)


def encoded(layout: str, *values: object, flexible: bool = False) -> bytes:
    """Return the body of a request."""
    out = bytearray()
    _write_struct(out, _parsed(layout), values, flexible=flexible)
    return bytes(out)


def _write_struct(out: bytearray, fields: Sequence[Any], values: Sequence[Any], *, flexible: bool) -> None:
    for field, value in zip(fields, values, strict=True):
        _write(out, field, value, flexible=flexible)
    if flexible:
        out += b"\0"  # no tags follow


def _write(out: bytearray, field: Any, value: Any, *, flexible: bool) -> None:
    kind, inside = field if isinstance(field, tuple) else (field, ())
    if kind == ")":
        _write_struct(out, inside, value, flexible=flexible)
    elif kind in "]sy":
        data = value.encode() if kind == "s" else value
        length = -1 if data is None else len(data)
        out += _varint(length + 1) if flexible else struct.pack(">h" if kind == "s" else ">i", length)
        if kind != "]":
            out += data
        else:
            for item in data or ():
                _write(out, inside[0], item, flexible=flexible)
    else:
        out += bytes.fromhex(value) if kind == "u" else struct.pack(f">{kind}", value)


class Answer:
    """A broker's answer."""

    def __init__(self, body: bytes, *, flexible: bool = False) -> None:
        self._body = body
        self._at = 0
        self._flexible = flexible

    def read(self, layout: str) -> tuple[Any, ...]:
        """Return what comes next: numbers, text or None, bytes, lists for arrays, and tuples for structs.

        Raises `MalformedAnswerError` if something else comes.
        """
        return tuple(map(self._field, _parsed(layout)))

    def skip_tags(self) -> None:
        """Skip tagged fields, which an answer may have at the end of each struct."""
        if self._flexible:
            for _ in range(self._varint()):
                self._varint()
                self._take(self._varint())

    def _field(self, field: Any) -> Any:
        kind, inside = field if isinstance(field, tuple) else (field, ())
        if kind == ")":
            values = tuple(map(self._field, inside))
            self.skip_tags()
            return values
        if kind == "]":
            return self._array(inside[0])
        if kind == "u":
            return self._take(16).hex()
        if kind in "sy":
            return self._text() if kind == "s" else self._take(max(self._length("i"), 0))
        (number,) = struct.unpack(f">{kind}", self._take(struct.calcsize(f">{kind}")))
        return int(number)

    def _array(self, item: Any) -> list[Any]:
        count = self._length("i")
        # An item takes a byte at least: what cannot be there is not allocated.
        if count > len(self._body) - self._at:
            raise MalformedAnswerError("an array is longer than the answer")
        return [self._field(item) for _ in range(max(count, 0))]

    def _text(self) -> str | None:
        length = self._length("h")
        try:
            return None if length < 0 else self._take(length).decode()
        except UnicodeDecodeError as exc:
            raise MalformedAnswerError("a string is not text") from exc

    def _length(self, plain: str) -> int:
        return self._varint() - 1 if self._flexible else int(self._field(plain))

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
