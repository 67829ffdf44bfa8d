"""A view of a version in RocksDB: look-ups and scans as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import HashArray, from_columns
from holdfast.backends.base import MAX_HASH, Found, View
from holdfast.backends.evolution import project
from holdfast.backends.rocksdb.codec.keys import encode_keys
from holdfast.backends.rocksdb.codec.schemas import decode_numbered
from holdfast.backends.rocksdb.database import Database, OpenVersion
from holdfast.backends.rocksdb.marker import StoredTable
from holdfast.backends.rocksdb.reads import (
    CHUNK_KEYS,
    Rows,
    TableReader,
    key_range,
    run_of,
    scanned,
    sought,
    to_list,
)
from holdfast.backends.run import Run
from holdfast.backends.schema import Keys, TableSchema, find_table
from holdfast.errors import ClosedError

#: A scan is cheaper than seeking prefixes while it meets at most so many rows for each.
SCAN_ROWS_PER_PREFIX = 10
# So few keys are read one by one, whatever lies between them.
_SPARSE_KEYS = 64


class DatabaseOwner(Protocol):
    """What a view asks of the databases among which its own is."""

    @property
    def tables(self) -> Mapping[str, TableSchema]:
        """The shard's tables."""

    def closing_if_failed(self, database: Database) -> AbstractContextManager[None]:
        """Close a database that turns out to be damaged while the context lasts."""

    def discard_unused(self, database: Database) -> None:
        """Remove a database that nothing needs."""


class RocksDBView(View):
    """See `View`. It holds a RocksDB snapshot, so it is not changed by what is written, undone or dropped.

    Parameters
    ----------
    owner : DatabaseOwner
    database : Database
    version : OpenVersion
    """

    def __init__(self, owner: DatabaseOwner, database: Database, version: OpenVersion) -> None:
        self._owner = owner
        self._database = database
        self._version: OpenVersion | None = version
        self._properties = version.properties

    @property
    def properties(self) -> Mapping[str, Any]:
        return self._properties

    def get(self, table: str, keys: Keys) -> Found:
        schema, stored = self._table(table)
        if stored is None or not len(keys):
            return Found(
                np.zeros(len(keys), np.bool_), project(from_columns([], pa.schema([]), len(keys)), schema.value)
            )
        encoded, hashes, order = encode_keys(stored.id, keys.hashes, keys.columns), keys.hashes, None
        if not keys.is_sorted:
            order = np.argsort(hashes, kind="stable")
            encoded, hashes = encoded.take(pa.array(order)), hashes[order]
        rows = self._values(stored.id, encoded, hashes)
        if order is not None:
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            rows = rows.take(pa.array(place))
        with self._closing_if_failed():
            values = decode_numbered(rows, stored.values, schema.value)
        return Found(rows.is_valid().to_numpy(zero_copy_only=False), values)

    def _values(self, table_id: int, keys: pa.Array, hashes: HashArray) -> pa.Array:
        """Return the encoded values of encoded keys whose hashes ascend, null where a key is absent."""
        with self._reading(table_id) as reader:
            rows_per_hash = reader.density(int(hashes[0]), int(hashes[-1])) if len(hashes) > _SPARSE_KEYS else np.inf
        parts = []
        for start in range(0, len(hashes), CHUNK_KEYS):
            wanted = to_list(keys.slice(start, CHUNK_KEYS))
            with self._reading(table_id) as reader:
                found = reader.get(wanted, hashes[start : start + CHUNK_KEYS], rows_per_hash)
            parts.append(pa.array(found, pa.large_binary()))
        return pa.concat_arrays(parts)

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        schema, stored = self._table(table)
        return self._scan(schema, stored, first_hash, last_hash) if stored is not None else iter(())

    def _scan(self, schema: TableSchema, stored: StoredTable, first_hash: int, last_hash: int) -> Iterator[Run]:
        def read(start: bytes, end: bytes, most: int) -> Rows:
            with self._reading(stored.id) as reader:
                return reader.rows(start, end, most)

        return self._runs(schema, stored, scanned(read, *key_range(stored.id, first_hash, last_hash)))

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        schema, stored = self._table(table)
        if stored is None or not len(prefixes):
            return iter(())
        first, last = int(prefixes.hashes.min()), int(prefixes.hashes.max())
        with self._reading(stored.id) as reader:
            rows = reader.density(first, last) * (last - first + 1)
        if rows <= SCAN_ROWS_PER_PREFIX * len(prefixes):
            return super().scan_prefix(table, prefixes)
        encoded = to_list(encode_keys(stored.id, prefixes.hashes, prefixes.columns))
        return self._scan_each(schema, stored, sorted(set(encoded)))

    def _scan_each(self, schema: TableSchema, stored: StoredTable, prefixes: list[bytes]) -> Iterator[Run]:
        def read(prefixes: list[bytes], start: bytes | None) -> tuple[Rows, int]:
            with self._reading(stored.id) as reader:
                return reader.prefixed(prefixes, start)

        return self._runs(schema, stored, sought(read, prefixes))

    def _runs(self, schema: TableSchema, stored: StoredTable, found: Iterator[Rows]) -> Iterator[Run]:
        for rows in found:
            with self._closing_if_failed():
                run = run_of(schema, rows, stored.values)
            yield run

    def estimate_rows(self, table: str) -> int:
        """Return about how many rows a table has; exact for small ones."""
        _, stored = self._table(table)
        if stored is None:
            return 0
        with self._reading(stored.id) as reader:
            return reader.estimate_rows()

    def close(self) -> None:
        if self._version is not None:
            self._version = None
            self._owner.discard_unused(self._database)

    def _table(self, table: str) -> tuple[TableSchema, StoredTable | None]:
        """Return a table's schema, and how it is stored where it was ever written."""
        self._require_open()
        return find_table(self._owner.tables, table), self._database.marker.tables.get(table)

    def _require_open(self) -> OpenVersion:
        if self._version is None:
            raise ClosedError("the view was closed: open a new one")
        return self._version

    @contextmanager
    def _reading(self, table_id: int) -> Iterator[TableReader]:
        with self._closing_if_failed(), self._database.reading(self._require_open(), table_id) as reader:
            yield reader

    def _closing_if_failed(self) -> AbstractContextManager[None]:
        return self._owner.closing_if_failed(self._database)
