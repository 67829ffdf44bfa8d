"""The marker of a database: which version its files hold, and how the tables are laid out.

::

    key      0x00 'm'            table id 0, which no state table has
    value    a stored file (`holdfast.backends.stored_file`) of kind "rocksdb", its header:
             rows       format of keys and values (`holdfast.backends.rocksdb.codec.keys`, `rows`)
             pointer    version that the rows make up; null while a version of several batches is written
             properties what was kept with the version
             tables     by name: id (the first byte of each key), key and value schema (Arrow IPC, base64)
             undo       null, or pointer and properties of another version, whose rows that differ stand below 0x00 'u'

    key      0x00 'u' <key>      undo row, only in a database that was closed cleanly
    value    0x01 <value>        the row's value in the other version
             0x00                the row is absent there

The marker is part of every batch, so it is true after any crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from holdfast.backends import stored_file
from holdfast.backends.arrow.streams import require_columns
from holdfast.backends.base import Pointer
from holdfast.backends.schema import TableSchema, require_declared
from holdfast.backends.stored_schema import decode_schemas, encode_schemas
from holdfast.errors import CorruptionError, InvalidArgumentError, SchemaMismatchError

MARKER_KEY = b"\x00m"
UNDO_PREFIX, UNDO_END = b"\x00u", b"\x00v"
#: Version of the layout of rows and markers.
ROWS_FORMAT = 1
_KIND = "rocksdb"
_TABLE_IDS_MAX = 254  # the first byte of a key; 0 and 255 bound the tables


class VersionLabel(NamedTuple):
    """A version's name and what is kept with it."""

    pointer: Pointer
    properties: Mapping[str, Any]


@dataclass(frozen=True)
class Marker:
    """See the module.

    Attributes
    ----------
    version : VersionLabel or None
        None while a version of several batches is being written.
    tables : mapping of str to int
        Ids of the tables that were ever written.
    schemas : mapping of str to TableSchema
        Of the same tables.
    undo : VersionLabel or None
    """

    version: VersionLabel | None = None
    tables: Mapping[str, int] = field(default_factory=dict)
    schemas: Mapping[str, TableSchema] = field(default_factory=dict)
    undo: VersionLabel | None = None

    def labelled(self, version: VersionLabel | None, undo: VersionLabel | None = None) -> Self:
        """Return a marker of the same tables for another version."""
        return replace(self, version=version, undo=undo)

    def with_tables(self, schemas: Iterable[TableSchema]) -> Self:
        """Return the marker with an id for each of `schemas`."""
        tables, known = dict(self.tables), dict(self.schemas)
        for schema in schemas:
            if schema.name not in tables:
                tables[schema.name] = max(tables.values(), default=0) + 1
                known[schema.name] = schema
        if max(tables.values(), default=0) > _TABLE_IDS_MAX:
            raise InvalidArgumentError("too many tables for one operator", tables=len(tables), most=_TABLE_IDS_MAX)
        return replace(self, tables=tables, schemas=known)

    def require(self, declared: Mapping[str, TableSchema], source: Path) -> None:
        """Check the stored tables against those that the operator declares.

        Raises
        ------
        SchemaMismatchError
            A stored table is not declared, or with other columns.
        """
        require_declared(self.schemas, declared)
        for name, stored in self.schemas.items():
            require_columns(stored.columns, declared[name].columns, source=str(source), table=name)

    def encode(self) -> bytes:
        """Return the marker's value."""
        tables = {
            name: {"id": self.tables[name], "key": key, "value": value}
            for name, (key, value) in encode_schemas(self.schemas).items()
        }
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
                "it, or remove the directory so that its versions are restored from the checkpoint directory",
                format=header.get("rows"),
                readable=ROWS_FORMAT,
            )
        try:
            tables = header["tables"]
            schemas = decode_schemas({name: (table["key"], table["value"]) for name, table in tables.items()})
            ids = {name: _table_id(table["id"]) for name, table in tables.items()}
            if len(set(ids.values())) != len(ids):
                raise ValueError("two tables have one id")
            version = _read_label(header) if header["pointer"] is not None else None
            return cls(version, ids, schemas, _read_label(header["undo"]) if header["undo"] else None)
        except (KeyError, TypeError, ValueError, AttributeError, CorruptionError) as exc:
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
