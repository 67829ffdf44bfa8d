"""Parses stored headers and notes, which are JSON objects, into typed, frozen values.

A stored file is untrusted until this module has checked it: its checksum proves integrity, not authorship. The
annotations of a stored dataclass define how it is read::

    @dataclass(frozen=True)
    class ShardTimes(Stored):
        shard: Annotated[int, range(1 << 31)]       a number within bounds
        earliest_timer_ms: int | None
        tables: Mapping[str, Annotated[list[str], 2]]

    ShardTimes.read(header, source)    ShardTimes(…).to_json()

Invariants
----------
* **exact**: every field is present, has exactly its type (``true`` is not a number) and is within its bounds. An
  unknown field is refused, since it may change the meaning of other fields; only notices for people
  (``notice=True``) may have unknown fields.
* **one error**: every fault is a `CorruptionError` that names the object and the field.
* **bounded**: no value is used before it is checked, and no error message repeats a large value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, NoReturn, Self, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.schema import decode_schemas, encode_schemas
from holdfast.errors import CorruptionError, InvalidArgumentError

#: Exceeds any size, count or time, and leaves room below the largest 64-bit integer.
NUMBER_LIMIT = 1 << 62
DIGEST = re.compile(r"[0-9a-f]{32}")
QUERY_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
#: Annotated types: text with a pattern, and numbers with a range.
Digest = Annotated[str, DIGEST]
PositiveInt = Annotated[int, range(1, NUMBER_LIMIT)]
#: A number that may be negative, such as a time before 1970.
SignedInt = Annotated[int, range(1 - NUMBER_LIMIT, NUMBER_LIMIT)]
#: Marks a field that has a default and is not stored.
NOT_STORED = "not stored"
_SHOWN_MAX = 80
#: Returns a field's value from decoded JSON, given the object's name for errors.
_Read = Callable[[Any, str], Any]
#: By class, the readers and writers of its fields.
_KNOWN: dict[type[Any], tuple[_Reader, ...]] = {}


class Stored:
    """A dataclass that is stored as a JSON object; see the module docstring.

    ``Annotated`` constrains a field by a pattern, range, length or `Coding`; a plain int is 0 or more. Newer releases
    may add fields to a class with ``notice=True``. `KIND` is the kind of file that `encode` makes.
    """

    KIND: ClassVar[str] = ""
    _IS_NOTICE: ClassVar[bool] = False

    def __init_subclass__(cls, *, kind: str = "", notice: bool = False) -> None:
        cls.KIND, cls._IS_NOTICE = kind, notice

    @classmethod
    def read(cls, values: object, source: str) -> Self:
        """Parse decoded JSON; errors name it `source`. Raises `CorruptionError`."""
        readers = _readers(cls)
        header = Fields(values, source, {reader.key for reader in readers}, is_notice=cls._IS_NOTICE)
        found = cls(**{reader.name: header.value(reader.key, reader.read) for reader in readers})
        found.require(header)
        return found

    @classmethod
    def decode(cls, data: Any, source: str, **expected: object) -> Self:
        """Parse the file that `encode` made; these fields must be as `expected`. Raises `CorruptionError`."""
        found = cls.read(stored_file.decode(data, source=source, kind=cls.KIND, plain_bytes_max=0).header, source)
        facts = {name: getattr(found, name) for name in expected}
        if facts != expected:
            refuse_stray(source, **facts)
        return found

    def encode(self) -> pa.Buffer:
        """Return a stored file without sections. Raises `InvalidArgumentError` if it is larger than readers accept."""
        return stored_file.encode(self.KIND, self.to_json())[0]

    def require(self, header: Fields) -> None:
        """Refuse values that contradict each other; subclasses override this."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `read` parses."""
        return {r.key: _plain(r.encode(getattr(self, r.name))) for r in _readers(type(self))}


@dataclass(frozen=True)
class Coding:
    """How to store a value that JSON cannot represent: as a different type, optionally under a different name."""

    stored: Any  #: The annotation of the stored type
    decode: Callable[[Any], Any]  #: Raises ValueError or `CorruptionError`
    encode: Callable[[Any], Any]
    key: str | None = None


def coding_of_tables(key: str | None = None) -> Coding:
    """Return the coding of a mapping from table names to key and value schemas; for `key`, see `Coding`."""
    return Coding(Mapping[str, Annotated[list[str], 2]], decode_schemas, encode_schemas, key)


class _Unfit(Exception):  # noqa: N818
    """A value has the wrong type or is out of bounds."""

    def __init__(self, value: object) -> None:
        self.value = value


@dataclass(frozen=True)
class _Reader:
    name: str
    key: str
    read: _Read
    encode: Callable[[Any], Any]


def _readers(cls: type[Any]) -> tuple[_Reader, ...]:
    if cls not in _KNOWN:
        _KNOWN[cls] = tuple(_made_readers(cls))
    return _KNOWN[cls]


def _made_readers(cls: type[Any]) -> Iterator[_Reader]:
    kinds = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        if NOT_STORED in getattr(kinds[field.name], "__metadata__", ()):
            continue
        coding = _coding(kinds[field.name])
        key = (coding.key if coding else None) or field.name
        encode = coding.encode if coding else lambda value: value
        yield _Reader(field.name, key, _read_of(kinds[field.name]), encode)


def _coding(kind: Any) -> Coding | None:
    return next((one for one in getattr(kind, "__metadata__", ()) if isinstance(one, Coding)), None)


def _read_of(kind: Any, bound: Any = None) -> _Read:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        coding = _coding(kind)
        return _read_of(inner[0], inner[1]) if coding is None else _decoded(coding)
    if origin in (Union, UnionType):
        read = _read_of(next(one for one in inner if one is not NoneType))
        return lambda value, source: None if value is None else read(value, source)
    if origin in (list, tuple):
        return _list_of(_read_of(inner[0]), origin, bound)
    if origin is not None:
        return _mapping_of(_read_of(inner[1]))
    if isinstance(kind, type) and issubclass(kind, Stored):
        return kind.read
    return _PLAIN[kind](bound)


def _checked(kind: type, fits: Callable[[Any], object] = lambda value: True) -> _Read:
    def read(value: Any, source: str) -> Any:
        if type(value) is not kind or not fits(value):
            raise _Unfit(value)
        return value

    return read


def _pointer(value: Any, source: str) -> Pointer:
    try:
        return Pointer.parse(value if type(value) is str and len(value) <= 2 * _SHOWN_MAX else None)
    except InvalidArgumentError as exc:
        raise _Unfit(value) from exc


#: By type, a function that makes a reader from a bound: a range or a pattern.
_PLAIN: Mapping[Any, Callable[[Any], _Read]] = {
    int: lambda bound: _checked(int, (bound or range(NUMBER_LIMIT)).__contains__),
    str: lambda bound: _checked(str, bound.fullmatch) if bound else _checked(str),
    bool: lambda _: _checked(bool),
    Pointer: lambda _: _pointer,
    Any: lambda _: lambda value, source: value,
}


def _list_of(each: _Read, kind: type, length: int | None) -> _Read:
    def read(value: Any, source: str) -> Any:
        if type(value) is not list or length not in (None, len(value)):
            raise _Unfit(value)
        return kind(each(one, source) for one in value)

    return read


def _mapping_of(each: _Read) -> _Read:
    def read(value: Any, source: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise _Unfit(value)
        return {key: each(one, source) for key, one in value.items()}

    return read


def _decoded(coding: Coding) -> _Read:
    stored = _read_of(coding.stored)

    def read(value: Any, source: str) -> Any:
        found = stored(value, source)
        try:
            return coding.decode(found)
        except CorruptionError as exc:
            raise CorruptionError(f"{source}: {exc}") from exc
        except ValueError as exc:
            raise _Unfit(value) from exc

    return read


def _plain(value: Any) -> Any:
    if isinstance(value, Stored):
        return value.to_json()
    if isinstance(value, Pointer):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


class Fields:
    """The fields of one JSON object."""

    def __init__(self, values: object, source: str, names: AbstractSet[str], *, is_notice: bool) -> None:
        self.source = source
        if not isinstance(values, dict):
            self.refuse("has a header part that is not a JSON object", found=_shown(values))
        missing, unknown = names - values.keys(), set() if is_notice else values.keys() - names
        if missing or unknown:
            self.refuse(
                "has different fields than this release of holdfast reads: open it with the release that wrote it, or "
                "restore the file if it was altered",
                missing=sorted(missing) or None,
                unknown=[_shown(name) for name in sorted(unknown)[:10]] or None,
            )
        self._values: dict[str, Any] = values

    def refuse(self, message: str, **facts: object) -> NoReturn:
        """Raise a `CorruptionError` about the object: ``<source> <message>``."""
        refuse(self.source, message, **facts)

    def refuse_value(self, name: str, value: object) -> NoReturn:
        """Raise a `CorruptionError` about a field."""
        self.refuse("has an invalid field", field=name, found=_shown(value))

    def value(self, name: str, read: _Read) -> Any:
        """Return a field's value, parsed by `read`."""
        try:
            return read(self._values[name], self.source)
        except _Unfit as exc:
            self.refuse_value(name, exc.value)


def refuse(source: str, message: str, **facts: object) -> NoReturn:
    """Raise a `CorruptionError` about an object: ``<source> <message>``."""
    short = {name: fact[:_SHOWN_MAX] if isinstance(fact, str) else fact for name, fact in facts.items()}
    raise CorruptionError(f"{source} {message}", **short)


def refuse_stray(source: str, **facts: object) -> NoReturn:
    """Raise a `CorruptionError` about an object that was moved or copied."""
    refuse(source, "belongs elsewhere: it was moved or copied", **facts)


def _shown(value: object) -> str:
    """Return a value as text for an error; only the type of nested and huge values."""
    if isinstance(value, str):
        return ascii(value[:_SHOWN_MAX])
    if value is None or (isinstance(value, int | float) and abs(value) < 1 << 64):
        return str(value)
    return f"a {type(value).__name__}"
