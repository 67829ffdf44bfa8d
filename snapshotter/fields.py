"""The fields of a stored header, each read with its expected type.

A stored file is hostile until validated here: its checksum proves that it is whole, not who wrote it. One reader per
kind of object takes the header apart with `Fields` and returns a frozen, typed value; nothing else looks into a header.

Invariants
----------
* **exact**: a field is present, has exactly its type (``true`` is no number) and lies within its bounds. An unknown
  field is refused, since it may change what the others mean; only what tells people something may have one
  (`Fields.of_notice`).
* **one error**: every fault is a `CorruptionError` that names the object and the field.
* **bounded**: no value is used before it is checked, and no error repeats a large one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn, Self

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, InvalidArgumentError

#: No size, count or time reaches it: sums of thousands of them still fit into what other languages read.
NUMBER_LIMIT = 1 << 62
DIGEST = re.compile(r"[0-9a-f]{32}")
_SHOWN_MAX = 80


class Fields:
    """One JSON object.

    Raises `CorruptionError` if it is not a JSON object with exactly these fields.

    Parameters
    ----------
    values : object
        Decoded JSON.
    source : str
        What to call the stored file in an error: a path or a URL without credentials.
    *names : str
        The fields that it has: all of these, and no others.
    """

    def __init__(self, values: object, source: str, *names: str) -> None:
        self.source = source
        if not isinstance(values, dict):
            self.refuse("has a header part that is not a JSON object", found=_shown(values))
        if values.keys() != set(names):
            self.refuse(
                "has other fields than this release of holdfast reads: open it with the release that wrote it, or "
                "restore the file if it was altered",
                missing=sorted(set(names) - values.keys()) or None,
                unknown=[_shown(name) for name in sorted(values.keys() - set(names))[:10]] or None,
            )
        self._values: dict[str, Any] = values

    @classmethod
    def of_notice(cls, values: object, source: str, *names: str) -> Self:
        """Return the fields of an object for people to read, to which a newer release may add.

        Raises `CorruptionError` if it is not a JSON object with these fields.
        """
        return cls(
            {name: values[name] for name in names if name in values} if isinstance(values, dict) else values,
            source,
            *names,
        )

    def refuse(self, message: str, **facts: object) -> NoReturn:
        """Raise a `CorruptionError` about the object: ``<source> <message>``."""
        short = {name: fact[:_SHOWN_MAX] if isinstance(fact, str) else fact for name, fact in facts.items()}
        raise CorruptionError(f"{self.source} {message}", **short)

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """Return a text that the whole pattern matches."""
        value = self._values[name]
        if type(value) is not str or (pattern is not None and not pattern.fullmatch(value)):
            self._refuse_value(name, value)
        return value

    def text_or_none(self, name: str) -> str | None:
        """Return a text, or None."""
        return None if self._values[name] is None else self.text(name)

    def number(self, name: str, least: int = 0, limit: int = NUMBER_LIMIT) -> int:
        """Return an integer, from `least` to below `limit`."""
        value = self._values[name]
        if type(value) is not int or not least <= value < limit:
            self._refuse_value(name, value)
        return value

    def number_or_none(self, name: str) -> int | None:
        """Return an integer from 0 on, or None."""
        return None if self._values[name] is None else self.number(name)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._values[name]
        if type(value) is not bool:
            self._refuse_value(name, value)
        return value

    def integer_or_none(self, name: str) -> int | None:
        """Return an integer that may be negative, as a time before 1970 is, or None."""
        value = self._values[name]
        if value is not None and not (type(value) is int and abs(value) < NUMBER_LIMIT):
            self._refuse_value(name, value)
        return value

    def pointer(self, name: str) -> Pointer:
        """Return a pointer."""
        return self._pointer(name, self._values[name])

    def pointers(self, name: str) -> tuple[Pointer, ...]:
        """Return a list of pointers."""
        return tuple(self._pointer(name, value) for value in self._list(name))

    def numbers(self, name: str) -> dict[str, int]:
        """Return a mapping of texts to numbers from 0 on."""
        values = self.mapping(name)
        for value in values.values():
            if type(value) is not int or not 0 <= value < NUMBER_LIMIT:
                self._refuse_value(name, value)
        return values

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a mapping of unread values."""
        value = self._values[name]
        if not isinstance(value, dict):
            self._refuse_value(name, value)
        return value

    def mapping_of_texts(self, name: str) -> dict[str, str]:
        """Return a mapping of texts to texts."""
        values = self.mapping(name)
        for value in values.values():
            if type(value) is not str:
                self._refuse_value(name, value)
        return values

    def all_texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        return self._texts(name, self._list(name), len(self._list(name)))

    def texts_by_name(self, name: str, length: int) -> dict[str, list[str]]:
        """Return a mapping of texts to lists of so many texts."""
        return {key: self._texts(name, values, length) for key, values in self.mapping(name).items()}

    def texts(self, name: str, length: int) -> list[str]:
        """Return a list of so many texts."""
        return self._texts(name, self._values[name], length)

    def integers(self, name: str, length: int) -> list[int]:
        """Return a list of so many numbers from 0 on, of any size that JSON gave."""
        values = self._list(name)
        if len(values) != length or any(type(value) is not int or value < 0 for value in values):
            self._refuse_value(name, values)
        return values

    def inner(self, name: str, *names: str) -> Fields:
        """Return an object inside this one."""
        return Fields(self._values[name], self.source, *names)

    def inner_or_none(self, name: str, *names: str) -> Fields | None:
        """Return an object inside this one, or None."""
        return None if self._values[name] is None else self.inner(name, *names)

    def each(self, name: str, *names: str) -> Iterator[Fields]:
        """Yield the objects of a list."""
        for value in self._list(name):
            yield Fields(value, self.source, *names)

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return a list of objects, unchecked: the caller checks their fields."""
        values = self._list(name)
        if any(not isinstance(value, dict) for value in values):
            self._refuse_value(name, values)
        return values

    def _list(self, name: str) -> list[Any]:
        value = self._values[name]
        if not isinstance(value, list):
            self._refuse_value(name, value)
        return value

    def _texts(self, name: str, values: Any, length: int) -> list[str]:
        if not isinstance(values, list) or len(values) != length or any(type(value) is not str for value in values):
            self._refuse_value(name, values)
        return values

    def _pointer(self, name: str, value: object) -> Pointer:
        try:
            return Pointer.parse(value if type(value) is str and len(value) <= 2 * _SHOWN_MAX else None)
        except InvalidArgumentError:
            self._refuse_value(name, value)

    def _refuse_value(self, name: str, value: object) -> NoReturn:
        self.refuse("has an invalid field", field=name, found=_shown(value))


def _shown(value: object) -> str:
    """Return a value as an error shows it: nested and huge values as their type only."""
    if isinstance(value, str):
        return ascii(value[:_SHOWN_MAX])
    if value is None or (isinstance(value, int | float) and abs(value) < 1 << 64):
        return str(value)
    return f"a {type(value).__name__}"
