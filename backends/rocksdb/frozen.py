"""A frozen database that is read where it lies: each block is brought when RocksDB asks for it.

The files are as large as they should be, and hold zeros wherever nothing was brought. RocksDB verifies each block that
it reads, and says of one that is wrong in which file and where it stands. So a read that meets such a place brings it
and begins again; what is wrong although it was brought, and verified as stored, is damage::

    read ──▶ "block checksum mismatch … 000012.sst offset 8126464 size 4011" ──▶ bring ──▶ read again

Blocks that belong together lie together, so more is brought than is asked for: a few requests for each file that may
hold the key. Which those are, the manifest tells, which is small.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from rocksdict import BlockBasedOptions, Cache, Options, Rdict

from holdfast.backends.base import MAX_HASH, Found, Pointer, View
from holdfast.backends.frozen_files import FrozenFiles, Place
from holdfast.backends.rocksdb.codec.keys import encode_keys
from holdfast.backends.rocksdb.errors import damaged, rocksdb_errors
from holdfast.backends.rocksdb.marker import MARKER_KEY, Marker, StoredTable, reading_frozen
from holdfast.backends.rocksdb.options import open_rocksdb
from holdfast.backends.rocksdb.reads import Rows, TableReader, key_range, run_of, scanned, sought, to_list
from holdfast.backends.run import Run
from holdfast.backends.run_stack import look_up
from holdfast.backends.schema import Keys, TableSchema, find_table
from holdfast.errors import ClosedError, CorruptionError

_T = TypeVar("_T")
_CACHE_BYTES = 8 << 20
_OPEN_FILES = 64
#: What is brought around a block that is asked for, and of a file's end, which has its index.
_AROUND_BYTES, _END_BYTES = 64 << 10, 256 << 10
_DOUBLED_MAX = 8
_WRONG_BLOCK = re.compile(r"(\d+\.sst) offset (\d+) size (\d+)")
_WRONG_FILE = re.compile(r"(\d+\.sst)\b")
_TABLE_FILE = ".sst"


class FrozenDatabase(View):
    """See the module; for one thread.

    Parameters
    ----------
    pointer : Pointer
    tables : mapping of str to TableSchema
    files : FrozenFiles

    Raises
    ------
    CorruptionError, SchemaMismatchError, UnavailableError
        It is no database of this version, or cannot be had.
    """

    def __init__(self, pointer: Pointer, tables: Mapping[str, TableSchema], files: FrozenFiles) -> None:
        self._files, self._tables = files, tables
        # How often something was brought of a file, and how often RocksDB has asked for a place.
        self._times: dict[str, int] = {}
        self._asked: dict[tuple[str, tuple[int, int]], int] = {}
        for name in files.sizes:
            if not name.endswith(_TABLE_FILE):
                files.require(name)
        with rocksdb_errors(files.folder):
            self._rdict: Rdict | None = open_rocksdb(files.folder, _options(), read_only=True)
        try:
            self._bring_ends(MARKER_KEY, MARKER_KEY)
            value = self._read(lambda database: database.get(MARKER_KEY))
            if value is None:
                raise damaged(files.folder, "it has no marker")
            with reading_frozen():
                self._marker = Marker.decode(value, files.folder)
            self._properties = self._marker.frozen_as(pointer, files.folder).properties
            self._marker.require(tables, files.folder)
        except BaseException:
            self.close()
            raise

    @property
    def properties(self) -> Mapping[str, Any]:
        return self._properties

    def get(self, table: str, keys: Keys) -> Found:
        return look_up(list(self.scan_prefix(table, keys)), keys, find_table(self._tables, table))

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        schema, stored = self._table(table)
        if stored is None:
            return

        def read(start: bytes, end: bytes, most: int) -> Rows:
            return self._read(lambda database: _reader(database, stored).rows(start, end, most))

        for rows in scanned(read, *key_range(stored.id, first_hash, last_hash)):
            yield run_of(schema, rows, stored.values)

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        schema, stored = self._table(table)
        if stored is None or not len(prefixes):
            return
        encoded = sorted(set(to_list(encode_keys(stored.id, prefixes.hashes, prefixes.columns))))
        self._bring_ends(encoded[0], encoded[-1] + b"\xff")

        def read(wanted: list[bytes], start: bytes | None) -> tuple[Rows, int]:
            return self._read(lambda database: _reader(database, stored).prefixed(wanted, start))

        for rows in sought(read, encoded):
            yield run_of(schema, rows, stored.values)

    def close(self) -> None:
        if self._rdict is not None:
            self._rdict.close()
            self._rdict = None

    def _table(self, table: str) -> tuple[TableSchema, StoredTable | None]:
        return find_table(self._tables, table), self._marker.tables.get(table)

    def _bring_ends(self, first: bytes, last: bytes) -> None:
        """Bring the ends of all tables that may have keys in a range, at once."""
        places = []
        for table in self._require_open().live_files():
            name = table["name"].lstrip("/")
            if (
                name in self._files.sizes
                and name not in self._times
                and table["start_key"] <= last
                and first <= table["end_key"]
            ):
                size = self._files.sizes[name]
                places.append(Place(name, max(0, size - _END_BYTES), size))
                self._times[name] = 0
        if places:
            self._files.bring(places)

    def _require_open(self) -> Rdict:
        if self._rdict is None:
            raise ClosedError("the view was closed: open a new one")
        return self._rdict

    def _read(self, read: Callable[[Rdict], _T]) -> _T:
        """Return what a read returns, once all that it needs is here."""
        while True:
            database = self._require_open()
            try:
                with rocksdb_errors(self._files.folder):
                    return read(database)
            except CorruptionError as exc:
                if not self._bring(str(exc.__cause__)):
                    raise

    def _bring(self, said: str) -> bool:
        """Bring what RocksDB says is wrong; tell whether there was anything left to bring."""
        block, file = _WRONG_BLOCK.search(said), _WRONG_FILE.search(said)
        name = block[1] if block else file[1] if file else ""
        if name not in self._files.sizes:
            return False
        size = self._files.sizes[name]
        end = (max(0, size - _END_BYTES), size)
        wrong = (int(block[2]), int(block[2]) + int(block[3])) if block else end
        times = self._times[name] = self._times.get(name, -1) + 1
        wanted = self._asked.get((name, wrong), 0)
        self._asked[name, wrong] = wanted + 1
        if times == 0:
            self._files.bring([Place(name, *end)])  # first of all: the index stands there
        elif wanted <= 1:
            # Twice as much each time: who reads many rows of a file soon has all of it.
            length = _AROUND_BYTES << min(times, _DOUBLED_MAX)
            start = wrong[0] - wrong[0] % _AROUND_BYTES
            self._files.bring([Place(name, start, min(size, max(wrong[1], start + length)))])
        elif wanted == 2:
            self._files.require(name, *wrong)
        return wanted <= 2


def _reader(database: Rdict, stored: StoredTable) -> TableReader:
    return TableReader(database, database.snapshot(), stored.id, lambda _first, _last: [])


def _options() -> Options:
    blocks = BlockBasedOptions()
    blocks.set_block_cache(Cache(_CACHE_BYTES))
    blocks.set_cache_index_and_filter_blocks(True)
    found = Options(raw_mode=True)
    found.set_block_based_table_factory(blocks)
    found.set_max_open_files(_OPEN_FILES)
    # Tables are opened before they are brought.
    found.set_paranoid_checks(False)
    found.set_skip_stats_update_on_db_open(True)
    found.set_stats_dump_period_sec(0)
    found.set_keep_log_file_num(1)
    return found
