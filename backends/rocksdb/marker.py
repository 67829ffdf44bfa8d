"""The marker of a database: which version its files hold, and how the tables are laid out.

::

    key      0x00 'm'            table id 0, which no state table has
    value    a stored file (`holdfast.backends.stored_file`) of kind "rocksdb", its header:
             rows       format of keys and values (`holdfast.backends.rocksdb.codec.keys`, `rows`)
             pointer    version that the rows make up; null while a version of several batches is written
             properties what was kept with the version
             tables     by name: id (the first byte of each key), key schema, and the value schemas that its rows were
                        written with, of which each row names one by its number (Arrow IPC, base64)
             undo       null, or pointer and properties of another version, whose rows that differ stand below 0x00 'u'

    key      0x00 'u' <key>      undo row, only in a database that was closed cleanly
    value    0x01 <value>        the row's value in the other version
             0x00                the row is absent there

The marker is part of every batch, so it is true after any crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.evolution import require_readable
from holdfast.backends.rocksdb.errors import damaged
from holdfast.backends.schema import TableSchema, require_declared
from holdfast.backends.stored_schema import decode_schema, encode_schema
from holdfast.errors import CorruptionError, InvalidArgumentError, SchemaMismatchError

MARKER_KEY = b"\x00m"
UNDO_PREFIX, UNDO_END = b"\x00u", b"\x00v"
#: Version of the layout of rows and markers.
ROWS_FORMAT = 1
_KIND = "rocksdb"
_TABLE_IDS_MAX = 254  # the first byte of a key; 0 and 255 bound the tables
#: Value schemas of a table: their number is the first byte of a row.
SCHEMAS_MAX = 255


class VersionLabel(NamedTuple):
    """A version's name and what is kept with it."""

    pointer: Pointer
    properties: Mapping[str, Any]


@dataclass(frozen=True)
class StoredTable:
    """A table that was written.

    Attributes
    ----------
    id : int
        The first byte of its keys.
    key : pyarrow.Schema
    values : tuple of pyarrow.Schema
        The value columns of its rows: a row that begins with the number n has the n-th ones. Numbers begin at 1.
    """

    id: int
    key: pa.Schema
    values: tuple[pa.Schema, ...]

    @cached_property
    def header(self) -> Mapping[str, Any]:
        """What a marker says of the table; made once, as each batch has a marker."""
        values = [encode_schema(values) for values in self.values]
        return {"id": self.id, "key": encode_schema(self.key), "values": values}

    def with_values(self, values: pa.Schema) -> StoredTable:
        """Return the table with a number for rows of these value columns."""
        if values in self.values:
            return self
        if len(self.values) == SCHEMAS_MAX:
            raise InvalidArgumentError(
                "the columns of a state table have changed too often: rescale the query, which rewrites its rows",
                most=SCHEMAS_MAX,
            )
        return replace(self, values=(*self.values, values))

    def number_of(self, values: pa.Schema) -> int:
        """Return the number of value columns that the table has."""
        return 1 + self.values.index(values)

    @classmethod
    def decode(cls, table: Mapping[str, Any]) -> StoredTable:
        """Return the table that a marker describes.

        Raises
        ------
        KeyError, TypeError, ValueError, OSError, pyarrow.ArrowException
            It describes none.
        """
        values = tuple(decode_schema(text) for text in table["values"])
        if not 0 < len(values) <= SCHEMAS_MAX:
            raise ValueError("not the value schemas of a table")
        return cls(_table_id(table["id"]), decode_schema(table["key"]), values)


@dataclass(frozen=True)
class Marker:
    """See the module.

    Attributes
    ----------
    version : VersionLabel or None
        None while a version of several batches is being written.
    tables : mapping of str to StoredTable
        Those that were ever written.
    undo : VersionLabel or None
    """

    version: VersionLabel | None = None
    tables: Mapping[str, StoredTable] = field(default_factory=dict)
    undo: VersionLabel | None = None

    def labelled(self, version: VersionLabel | None, undo: VersionLabel | None = None) -> Self:
        """Return a marker of the same tables for another version."""
        return replace(self, version=version, undo=undo)

    def with_tables(self, schemas: Iterable[TableSchema]) -> Self:
        """Return the marker with each of `schemas`, so that rows of it can be written."""
        tables = dict(self.tables)
        for schema in schemas:
            table = tables.get(schema.name)
            if table is None:
                table = StoredTable(max((t.id for t in tables.values()), default=0) + 1, schema.key, ())
            tables[schema.name] = table.with_values(schema.value)
        if len(tables) > _TABLE_IDS_MAX:
            raise InvalidArgumentError("too many tables for one operator", tables=len(tables), most=_TABLE_IDS_MAX)
        return self if tables == self.tables else replace(self, tables=tables)

    def require(self, held: Mapping[str, TableSchema], source: Path) -> None:
        """Check that the stored tables can be read as those of the shard.

        Raises
        ------
        SchemaMismatchError
            A stored table is not among them, or has columns that they do not hold.
        """
        require_declared(self.tables, held)
        for name, stored in self.tables.items():
            for values in stored.values:
                require_readable(TableSchema(name, stored.key, values), held[name], source=str(source))

    def frozen_as(self, pointer: Pointer, source: Path) -> VersionLabel:
        """Return the version of a frozen database, which holds that one and no other.

        Raises
        ------
        CorruptionError
            It holds another one, or none.
        """
        if self.version is None or self.version.pointer != pointer or self.undo is not None:
            raise damaged(source, "its marker names another version")
        return self.version

    def encode(self) -> bytes:
        """Return the marker's value."""
        tables = {name: table.header for name, table in self.tables.items()}
        version = _encode_label(self.version) or {"pointer": None, "properties": None}
        header = {"rows": ROWS_FORMAT, **version, "tables": tables, "undo": _encode_label(self.undo)}
        data, _ = stored_file.encode(_KIND, header)
        return data.to_pybytes()

    @classmethod
    def decode(cls, value: bytes, source: Path) -> Self:
        """Read a marker.

        Raises
        ------
        CorruptionError
            It is not one.
        SchemaMismatchError
            Another release wrote it, in a format that this one does not read.
        """
        header = stored_file.decode(value, source=f"the marker of {source}", kind=_KIND).header
        if header.get("rows") != ROWS_FORMAT:
            raise SchemaMismatchError(
                f"{source} has a format that this release of holdfast does not read: keep using the release that wrote "
                "it, or remove the directory so that its versions are restored from the state directory",
                format=header.get("rows"),
                readable=ROWS_FORMAT,
            )
        try:
            tables = {name: StoredTable.decode(table) for name, table in header["tables"].items()}
            if len({table.id for table in tables.values()}) != len(tables):
                raise ValueError("two tables have one id")
            version = _read_label(header) if header["pointer"] is not None else None
            return cls(version, tables, _read_label(header["undo"]) if header["undo"] else None)
        except (KeyError, TypeError, ValueError, AttributeError, OSError, pa.ArrowException) as exc:
            raise CorruptionError(f"the marker of {source} cannot be read: {exc!r}") from exc


def _encode_label(label: VersionLabel | None) -> dict[str, Any] | None:
    return label and {"pointer": str(label.pointer), "properties": dict(label.properties)}


def _read_label(header: Mapping[str, Any]) -> VersionLabel:
    if not isinstance(header["properties"], dict):
        raise TypeError("properties are not an object")
    return VersionLabel(Pointer.parse(header["pointer"]), header["properties"])


def _table_id(value: object) -> int:
    if type(value) is not int or not 0 < value <= _TABLE_IDS_MAX:
        raise ValueError("not the id of a table")
    return value


@contextmanager
def reading_frozen() -> Iterator[None]:
    """Call rows in the format of another release damaged, as older objects can stand in for what is frozen."""
    try:
        yield
    except SchemaMismatchError as exc:
        raise CorruptionError("another release of holdfast froze it, with rows in another format", **exc.facts) from exc
