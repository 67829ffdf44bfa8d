"""The file that describes a generation's database: its tables, its files, and the runs that were moved into it.

::

    generation   a stored file (`holdfast.backends.stored_file`) of kind "generation", with the header:
                 rows       format of keys and values (`holdfast.backends.rocksdb.codec.keys`, `rows`)
                 tables     by name: id (the first byte of each key), key schema, and the value schemas that its rows
                            were written with (Arrow IPC, base64); each row begins with the number of its schema
                 counts     estimated number of rows, by table
                 files      by name: size and digest of each file of the database
                 base       the generation that this generation was made from, or null
                 moved      by table: the runs, oldest first, directly above `base`, that were moved into it
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa

from holdfast.backends import local_files
from holdfast.backends.evolution import require_readable
from holdfast.backends.local_files import StagedFolder
from holdfast.backends.run_files.version_file import VersionFile
from holdfast.backends.schema import TableSchema, decode_schema, encode_schema, require_declared
from holdfast.errors import CorruptionError, InvalidArgumentError

GENERATION, TABLE_FILE = "generation", ".sst"
#: Version of the layout of rows.
ROWS_FORMAT = 1
_TABLE_IDS_MAX = 254  # the first byte of a key; 255 bounds the tables
#: Value schemas per table; a row begins with its schema's number, one byte.
SCHEMAS_MAX = 255
#: Generation files that a process caches.
MOST_KNOWN = 256
_FILE_NAME = re.compile(r"[0-9]{1,20}\.sst|MANIFEST-[0-9]{1,20}|CURRENT")


@dataclass(frozen=True)
class StoredTable:
    """A table that the database stores."""

    id: int  #: The first byte of its keys
    key: pa.Schema
    #: The value schemas of its rows: a row that begins with n has the n-th schema. Numbers begin at 1.
    values: tuple[pa.Schema, ...]

    @cached_property
    def header(self) -> Mapping[str, Any]:
        values = [encode_schema(values) for values in self.values]
        return {"id": self.id, "key": encode_schema(self.key), "values": values}

    def with_values(self, values: pa.Schema) -> StoredTable:
        """Return the table with a number for these value columns."""
        if values in self.values:
            return self
        if len(self.values) == SCHEMAS_MAX:
            raise InvalidArgumentError(
                "the columns of a state table have changed too often: rescale the query, which rewrites its rows",
                most=SCHEMAS_MAX,
            )
        return replace(self, values=(*self.values, values))

    def number_of(self, values: pa.Schema) -> int:
        """Return the number of these value columns, which the table must have."""
        return 1 + self.values.index(values)

    @classmethod
    def decode(cls, table: Mapping[str, Any]) -> StoredTable:
        values = tuple(decode_schema(text) for text in table["values"])
        if not 0 < len(values) <= SCHEMAS_MAX:
            raise ValueError("not the value schemas of a table")
        if type(table["id"]) is not int or not 0 < table["id"] <= _TABLE_IDS_MAX:
            raise ValueError("not the id of a table")
        return cls(table["id"], decode_schema(table["key"]), values)


class DatabaseFile(NamedTuple):
    """A file of the database; it never changes."""

    size_bytes: int
    digest: str  #: XXH3-128 of its bytes


@dataclass(frozen=True)
class GenerationFile:
    """The content of a generation file."""

    tables: Mapping[str, StoredTable] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, DatabaseFile] = field(default_factory=dict)
    base: str | None = None
    moved: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def lists(self) -> Mapping[str, DatabaseFile]:
        """The small files that list the database's tables."""
        return {name: file for name, file in self.files.items() if not name.endswith(TABLE_FILE)}

    def with_tables(self, schemas: Iterable[TableSchema]) -> Self:
        """Return the content with `schemas` added, so that their rows can be written."""
        tables = dict(self.tables)
        for schema in schemas:
            table = tables.get(schema.name)
            if table is None:
                table = StoredTable(max((t.id for t in tables.values()), default=0) + 1, schema.key, ())
            tables[schema.name] = table.with_values(schema.value)
        if len(tables) > _TABLE_IDS_MAX:
            raise InvalidArgumentError("too many tables for one operator", tables=len(tables), most=_TABLE_IDS_MAX)
        return replace(self, tables=tables)

    def require(self, held: Mapping[str, TableSchema], source: Path) -> None:
        """Check that the stored tables can be read as the shard's tables. Raises `SchemaMismatchError`."""
        require_declared(self.tables, held)
        for name, stored in self.tables.items():
            for values in stored.values:
                require_readable(TableSchema(name, stored.key, values), held[name], source=str(source))

    def replaces(self, version: VersionFile) -> bool:
        """Return whether this generation can replace the bottom of a version."""
        return version.generation == self.base and all(
            [file.id for file in version.stacks.get(table, [])[: len(ids)]] == ids for table, ids in self.moved.items()
        )

    def below(self, version: VersionFile, name: str) -> VersionFile:
        """Return the version with this generation, called `name`, in place of the runs it replaces."""
        stacks = {table: files[len(self.moved.get(table, [])) :] for table, files in version.stacks.items()}
        return replace(version, stacks={table: files for table, files in stacks.items() if files}, generation=name)

    def write(self, staged: StagedFolder) -> None:
        header = {
            "rows": ROWS_FORMAT,
            "tables": {name: table.header for name, table in self.tables.items()},
            "counts": dict(self.counts),
            "files": {name: list(file) for name, file in self.files.items()},
            "base": self.base,
            "moved": dict(self.moved),
        }
        staged.write(GENERATION, GENERATION, header)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file of a generation's folder. Raises `NotFoundError`, `CorruptionError`."""
        path = folder / GENERATION
        header = local_files.read_header(path, GENERATION)
        try:
            if header["rows"] != ROWS_FORMAT:
                raise ValueError("the rows have a different format")
            tables = {name: StoredTable.decode(table) for name, table in header["tables"].items()}
            if len({table.id for table in tables.values()}) != len(tables):
                raise ValueError("two tables share an id")
            files = {name: DatabaseFile(*file) for name, file in header["files"].items()}
            if not all(_FILE_NAME.fullmatch(name) for name in files):
                raise ValueError("a file name that RocksDB does not use")
            moved = {table: [str(run_id) for run_id in ids] for table, ids in header["moved"].items()}
            return cls(tables, dict(header["counts"]), files, header["base"], moved)
        except (KeyError, TypeError, ValueError, AttributeError, OSError, pa.ArrowException) as exc:
            raise CorruptionError(f"{path} is not a file that this release of holdfast reads: {exc!r}") from exc


def known_generation(folder: Path) -> GenerationFile:
    """Return a generation's file; it is read once per process, and again when it changes."""
    path = folder / GENERATION
    with local_files.reading(path):
        found = os.stat(path)
    return _read_once(folder, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(MOST_KNOWN)
def _read_once(folder: Path, *_: int) -> GenerationFile:
    return GenerationFile.read(folder)
