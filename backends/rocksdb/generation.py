"""A generation: an immutable RocksDB database below the runs of some versions, and how it is read.

::

    generations/<id>/
        generation                its tables, files and origin: `holdfast.backends.rocksdb.generation_file`
        000012.sst, …             sorted rows; files that did not change are shared with the previous generation
        MANIFEST-000005, CURRENT  RocksDB's list of these files
        rocksdict-config.json     a link to /dev/null: rocksdict writes this file whenever it opens a database

A published generation is never written to, so any process can open it read-only.

A worker serves many shards, with one call per shard and micro-batch, and opening a database takes milliseconds. So
databases stay open between calls (`OpenGenerations`).

Invariants
----------
* **the same folder**: a generation is found by the inode of its folder, which readers lock.
* **bounded**: a process keeps the `MOST_OPEN` most recently used databases, whose tables use at most a quarter of its
  descriptors, and one block cache. An executor's cache budget is divided evenly among its processes: each has a folder
  below ``rocksdb-readers``, locked while the process lives, whose name gives its share. A process takes only what the
  others leave.
* **released**: the next call closes a removed generation; a forked process begins with no open generations.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import xxhash
from rocksdict import Cache, Rdict

from holdfast.backends.arrow.rows import HashArray, from_columns, inverse, null_rows, take
from holdfast.backends.base import MAX_HASH, Found, View
from holdfast.backends.local.folder_locks import try_lock_alone
from holdfast.backends.local.page_cache import MappedFile
from holdfast.backends.local_files import list_folder, lock_folder, reading, writing
from holdfast.backends.rocksdb import reads
from holdfast.backends.rocksdb.codec.keys import encode_keys
from holdfast.backends.rocksdb.codec.rows import decode_numbered
from holdfast.backends.rocksdb.errors import damaged, rocksdb_errors
from holdfast.backends.rocksdb.generation_file import DatabaseFile, GenerationFile, StoredTable
from holdfast.backends.rocksdb.options import OPEN_FILES, open_rocksdb, reader_options
from holdfast.backends.rocksdb.reads import EncodedRows, Span, key_range, run_of, to_list
from holdfast.backends.run import Run
from holdfast.backends.schema import KeyRanges, Keys, TableSchema, find_table
from holdfast.errors import ClosedError, NotFoundError

#: A scan beats seeking each prefix if it reads at most this many rows per prefix.
SCAN_ROWS_PER_PREFIX = 10
# Up to this many keys are read by point reads.
_SPARSE_KEYS = 64
#: A file that rocksdict writes next to the data; never read, because options are passed on opening.
SETTINGS = "rocksdict-config.json"
NOT_WHOLE = "the file is missing, or its bytes have changed since it was written"
_T = TypeVar("_T")
READERS = "rocksdb-readers"
#: RocksDB's own objects take half a MiB per open database.
MOST_OPEN = 64
# Tables use at most 1/4 of the process's limit on descriptors.
_SHARE = 4
# RocksDB splits a cache into shards when it creates it, by its initial size.
_NEW_CACHE_BYTES = 4 << 20


class GenerationView(View):
    """A view of a generation. Raises `SchemaMismatchError` if its tables do not match the shard's."""

    def __init__(
        self,
        folder: Path,
        database: Rdict,
        file: GenerationFile,
        tables: Mapping[str, TableSchema],
        crowds: dict[str, HashArray] | None = None,
    ) -> None:
        file.require(tables, folder)
        self._crowds = {} if crowds is None else crowds
        self._folder, self._file, self._tables = folder, file, tables
        self._database: Rdict | None = database
        self._process = os.getpid()

    @property
    def properties(self) -> Mapping[str, Any]:
        """Always empty: properties are kept in the version file."""
        return {}

    def get(self, table: str, keys: Keys) -> Found:
        schema, stored = self._table(table)
        if stored is None or not len(keys):
            return Found(np.zeros(len(keys), np.bool_), null_rows(schema.value, len(keys)))
        order = None if keys.is_sorted else np.argsort(keys.hashes, kind="stable")
        keys = keys if order is None else keys.take(order)
        found = self._get_sorted(schema, stored, encode_keys(stored.id, keys.hashes, keys.columns), keys.hashes)
        if order is None:
            return found
        place = inverse(order)
        return Found(found.exists[place], take(found.values, place))

    def _get_sorted(self, schema: TableSchema, stored: StoredTable, keys: pa.Array, hashes: HashArray) -> Found:
        """Look up encoded keys with ascending hashes."""
        first, last = int(hashes[0]), int(hashes[-1])

        def read(database: Rdict) -> Found:
            rows_per_hash = np.inf
            if len(hashes) > _SPARSE_KEYS:
                rows_per_hash = reads.density(database, stored.id, first, last)
            parts = []
            for start in range(0, len(hashes), reads.CHUNK_KEYS):
                chunk = slice(start, start + reads.CHUNK_KEYS)
                wanted = to_list(keys.slice(start, reads.CHUNK_KEYS))
                found = reads.get_rows(database, stored.id, wanted, hashes[chunk], rows_per_hash)
                parts.append(pa.array(found, pa.large_binary()))
            rows = pa.concat_arrays(parts)
            values = decode_numbered(rows, stored.values, schema.value)
            return Found(rows.is_valid().to_numpy(zero_copy_only=False), values)

        return self._read(read)

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        schema, stored = self._table(table)
        if stored is None:
            return iter(())

        def read(start: bytes, end: bytes, most: int) -> tuple[Run, bytes | None]:
            def rows_of(database: Rdict) -> tuple[Run, bytes | None]:
                rows = reads.read_rows(database, start, end, most, fill_cache=False)
                return run_of(schema, rows, stored.values), rows.rest

            return self._read(rows_of)

        return reads.scanned(read, *key_range(stored.id, first_hash, last_hash))

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        schema, stored = self._table(table)
        if stored is None or not len(prefixes):
            return iter(())
        spans = _spans(schema, stored, prefixes)
        if self._is_dense(stored, prefixes):
            return self._scan_or_seek(schema, stored, prefixes, spans)
        return self._seek(schema, stored, spans)

    def crowded(self, table: str) -> HashArray:
        return self._crowds.get(table, super().crowded(table))

    def _note_crowds(self, run: Run) -> None:
        if len(run.crowded):
            self._crowds[run.schema.name] = np.union1d(self.crowded(run.schema.name), run.crowded)

    def _is_dense(self, stored: StoredTable, prefixes: Keys) -> bool:
        """Return whether one scan from the first to the last prefix costs less than seeking each prefix."""
        first, last = int(prefixes.hashes.min()), int(prefixes.hashes.max())
        rows_per_hash = self._read(lambda database: reads.density(database, stored.id, first, last))
        return rows_per_hash * (last - first + 1) <= SCAN_ROWS_PER_PREFIX * len(prefixes)

    def _scan_or_seek(
        self, schema: TableSchema, stored: StoredTable, prefixes: Keys, spans: list[Span]
    ) -> Iterator[Run]:
        """Scan from the first to the last prefix; seek the rest if one key turns out to have very many rows."""
        read = 0
        for run in self.scan(schema.name, int(prefixes.hashes.min()), int(prefixes.hashes.max())):
            self._note_crowds(run)
            found = run.with_prefixes(prefixes)
            if len(found):
                yield found
            read += len(run)
            if read > 2 * SCAN_ROWS_PER_PREFIX * len(prefixes):
                end = Keys(run.hashes, run.keys).slice(len(run) - 1, len(run))
                (key,) = to_list(encode_keys(stored.id, end.hashes, end.columns))
                yield from self._seek(schema, stored, [span for span in spans if span.reaches(key)], key + b"\0")
                return

    def _seek(
        self, schema: TableSchema, stored: StoredTable, spans: list[Span], start: bytes | None = None
    ) -> Iterator[Run]:
        while spans:

            def read(
                database: Rdict, spans: list[Span] = spans, start: bytes | None = start
            ) -> tuple[Run, EncodedRows, int]:
                rows, done = reads.read_spans(database, stored.id, spans, start)
                return run_of(schema, rows, stored.values), rows, done

            run, rows, done = self._read(read)
            spans, start = spans[done:], rows.rest
            if len(run):
                self._note_crowds(run)
                yield run

    def close(self) -> None:
        self._database = None

    def _read(self, read: Callable[[Rdict], _T]) -> _T:
        with rocksdb_errors(self._folder):
            return read(self._open())

    def _open(self) -> Rdict:
        if self._database is None:
            raise ClosedError("the view was closed: open a new one")
        if os.getpid() != self._process:
            raise ClosedError("a view cannot be used after a fork: open one in the new process")
        return self._database

    def _table(self, table: str) -> tuple[TableSchema, StoredTable | None]:
        """Return a table's schema, and its stored form if the table was ever written."""
        self._open()
        return find_table(self._tables, table), self._file.tables.get(table)


def _spans(schema: TableSchema, stored: StoredTable, prefixes: Keys) -> list[Span]:
    """Return the spans of keys that begin with a prefix, within its range if it has one."""
    ends = [prefixes.columns] * 2
    if isinstance(prefixes, KeyRanges):
        own = schema.prefix(prefixes.columns.num_columns + 1).key
        numbers = (pa.array(bound).view(own.field(len(own) - 1).type) for bound in (prefixes.first, prefixes.last))
        ends = [from_columns([*prefixes.columns.columns, bound], own, len(prefixes)) for bound in numbers]
    first, last = (to_list(encode_keys(stored.id, prefixes.hashes, columns)) for columns in ends)
    return sorted(map(Span, first, last))


def keep_unwritten(folder: Path) -> None:
    """Redirect the file that rocksdict writes on opening a database to /dev/null."""
    with writing(folder):
        (folder / SETTINGS).symlink_to(os.devnull)


def note_file(path: Path) -> DatabaseFile:
    """Read a database file; return its size and digest. Raises `NotFoundError`."""
    with reading(path):
        if not path.stat().st_size:
            raise NotFoundError(f"{path} is empty")
        data = memoryview(MappedFile(path).data)
    return DatabaseFile(len(data), xxhash.xxh3_128_hexdigest(data))


def broken_file(folder: Path, files: Mapping[str, DatabaseFile]) -> Path | None:
    """Read a database's files; return the first file that has changed, or None."""
    for name, noted in sorted(files.items()):
        try:
            if note_file(folder / name) == noted:
                continue
        except NotFoundError:
            pass
        return folder / name
    return None


def require_whole(folder: Path, files: Mapping[str, DatabaseFile]) -> None:
    """Read `files` of a database; raise `CorruptionError` if one has changed."""
    broken = broken_file(folder, files)
    if broken is not None:
        raise damaged(broken, NOT_WHOLE)


class OpenGeneration(NamedTuple):
    folder: Path
    database: Rdict
    file: GenerationFile
    crowds: dict[str, HashArray]  #: By table, hashes with very many rows, as found by reads here or of the base


class CacheShare:
    """One process's share of an executor's cache budget; `home` has a folder ``<name>.<share>`` per process."""

    def __init__(self, home: Path, name: str) -> None:
        self._home, self._name = home, name
        self.folder, self.size_bytes = home / f"{name}.0", 0
        self._lock = lock_folder(self.folder)
        self._seen: tuple[int, list[str]] | None = None
        self.cache = Cache(_NEW_CACHE_BYTES)
        self.cache.set_capacity(0)

    def share_out(self, budget_bytes: int) -> None:
        """Take an equal share of a budget, or what others leave of it. Cost: one listing if no process came or went.

        If another process is doing the same, keep the share until the next call.
        """
        if self._seen == (budget_bytes, list_folder(self._home)):
            return
        with try_lock_alone(self._home) as is_mine:
            if not is_mine:
                return
            others = [name for name in list_folder(self._home) if name != self.folder.name and self._is_alive(name)]
            fair_bytes = budget_bytes // (1 + len(others))
            left_bytes = budget_bytes - sum(int(name.rpartition(".")[2]) for name in others)
            self._take(max(0, min(fair_bytes, left_bytes)))
            self._seen = (budget_bytes, list_folder(self._home)) if self.size_bytes == fair_bytes else None

    def _take(self, size_bytes: int) -> None:
        if size_bytes != self.size_bytes:
            path = self._home / f"{self._name}.{size_bytes}"
            with writing(path), suppress(FileNotFoundError):  # removed by a cleaner: see `is_counted`
                os.rename(self.folder, path)
                self.folder, self.size_bytes = path, size_bytes
                self.cache.set_capacity(size_bytes)

    def _is_alive(self, name: str) -> bool:
        path = self._home / name
        with try_lock_alone(path) as is_left:
            if is_left:
                with suppress(OSError):
                    path.rmdir()
        return not is_left

    def is_counted(self) -> bool:
        """Return whether other processes count this process; a cleaner may have removed its folder."""
        return self.folder.is_dir()

    def close(self) -> None:
        self.cache.set_capacity(0)  # a database may still use it
        self._lock.close()


class OpenGenerations:
    """The generations that this process keeps open; safe for many threads."""

    def __init__(self) -> None:
        # A forked process must not close inherited databases: their threads exist only in the parent.
        self._inherited: list[object] = []
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, int], OpenGeneration] = OrderedDict()
        self._shares: dict[Path, CacheShare] = {}

    def forget(self) -> None:
        """Start empty in a forked process."""
        self._inherited += [self._open, self._shares]
        self._begin()

    def open(
        self, folder: Path, executor_directory: Path, cache_bytes: int, new_id: Callable[[], str]
    ) -> OpenGeneration:
        """Return the generation in a folder, opening it if necessary; the caller must have locked the folder."""
        with reading(folder):
            found = os.stat(folder)
        place = found.st_dev, found.st_ino
        with self._lock:
            share = self._shared(executor_directory / READERS, cache_bytes, new_id)
            known = self._open.get(place)
            if known is not None and known.folder == folder:
                self._open.move_to_end(place)
                return known
        file = GenerationFile.read(folder)
        require_whole(folder, file.lists)  # RocksDB takes a truncated manifest for an older one
        with rocksdb_errors(folder):
            database = open_rocksdb(folder, reader_options(share.cache), read_only=True)
        with self._lock:
            before = [one for one in self._open.values() if one.folder == folder.with_name(str(file.base))]
            crowds = before[0].crowds if before else {}
            opened = self._open[place] = OpenGeneration(folder, database, file, crowds)
            while len(self._open) > 1 and _are_too_many(self._open.values()):
                self._open.popitem(last=False)
        return opened

    def _shared(self, readers: Path, cache_bytes: int, new_id: Callable[[], str]) -> CacheShare:
        """Return this process's share of an executor's cache budget."""
        share = self._shares.get(readers)
        if share is None or not share.is_counted():
            for gone in [path for path, other in self._shares.items() if not other.is_counted()]:
                self._shares.pop(gone).close()
            share = self._shares[readers] = CacheShare(readers, new_id())
        share.share_out(cache_bytes)
        return share

    def close_removed(self) -> None:
        """Close removed generations; open views keep theirs."""
        with self._lock:
            gone = [place for place, opened in self._open.items() if not _is_at(place, opened.folder)]
            unused = [self._open.pop(place) for place in gone]
        del unused  # outside the lock, since closing a database takes a while

    def close(self, folder: Path) -> None:
        with self._lock:
            unused = [self._open.pop(p) for p, opened in list(self._open.items()) if opened.folder == folder]
        del unused


def _are_too_many(opened: Collection[OpenGeneration]) -> bool:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    tables = sum(min(OPEN_FILES, len(one.file.files)) for one in opened)
    return len(opened) > MOST_OPEN or (descriptors != resource.RLIM_INFINITY and tables > descriptors // _SHARE)


def _is_at(place: tuple[int, int], folder: Path) -> bool:
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return place == (found.st_dev, found.st_ino)


#: The open generations of this process.
OPEN = OpenGenerations()
os.register_at_fork(after_in_child=OPEN.forget)
