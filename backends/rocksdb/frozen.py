"""A frozen generation read in place: each block is fetched when RocksDB reads it.

The local files have their full size, with zeros in place of blocks not yet fetched. RocksDB verifies each block that it
reads, and its error names the file and offset of a bad block. So a read that hits a missing block fetches the block and
starts again; a bad block that was already fetched and verified is damage::

    read ──▶ "block checksum mismatch … 000012.sst offset 8126464 size 4011" ──▶ bring ──▶ read again

Related blocks are adjacent, so each fetch brings neighbours, too. A look-up thus takes a few requests per file that may
hold the key; the small manifest lists the key range of each file.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from rocksdict import Rdict

from holdfast.backends.base import Found
from holdfast.backends.frozen_files import ByteRange, FrozenFiles
from holdfast.backends.rocksdb.codec.keys import encode_keys
from holdfast.backends.rocksdb.errors import rocksdb_errors
from holdfast.backends.rocksdb.generation import GenerationView, require_whole
from holdfast.backends.rocksdb.generation_file import GENERATION, GenerationFile, StoredTable
from holdfast.backends.rocksdb.options import frozen_options, open_rocksdb
from holdfast.backends.rocksdb.reads import to_list
from holdfast.backends.run import Run
from holdfast.backends.run_stack import look_up
from holdfast.backends.schema import Keys, TableSchema, find_table
from holdfast.errors import CorruptionError

_T = TypeVar("_T")
#: Bytes fetched around a requested block, and at a file's end, which holds its index.
_AROUND_BYTES, _END_BYTES = 64 << 10, 256 << 10
_DOUBLED_MAX = 8
#: With more keys than this, most of a table is needed, so it is fetched whole.
_MANY_KEYS = 32
_WRONG_BLOCK = re.compile(r"(\d+\.sst) offset (\d+) size (\d+)")
_WRONG_FILE = re.compile(r"(\d+\.sst)\b")


class FrozenGeneration(GenerationView):
    """A frozen generation, fetched block by block as it is read; for one thread."""

    def __init__(self, files: FrozenFiles, tables: Mapping[str, TableSchema]) -> None:
        self._files = files
        # Number of fetches per file, and of requests per block.
        self._times: dict[str, int] = {}
        self._asked: dict[tuple[str, tuple[int, int]], int] = {}
        if GENERATION not in files.sizes:
            raise CorruptionError(f"{files.folder / GENERATION} is missing")
        files.require(GENERATION)
        file = GenerationFile.read(files.folder)
        for name, noted in file.files.items():
            if files.sizes.get(name) != noted.size_bytes:
                raise CorruptionError(f"{files.folder / name} is missing or has the wrong size")
        for name in file.lists:
            files.require(name)
        require_whole(files.folder, file.lists)
        with rocksdb_errors(files.folder):
            database = open_rocksdb(files.folder, frozen_options(), read_only=True)
        super().__init__(files.folder, database, file, tables)

    def get(self, table: str, keys: Keys) -> Found:
        return look_up(list(self.scan_prefix(table, keys)), keys, find_table(self._tables, table))

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        _, stored = self._table(table)
        if stored is not None and len(prefixes):
            encoded = encode_keys(stored.id, prefixes.hashes, prefixes.columns)
            self._bring_first(sorted(to_list(encoded)))
        return super().scan_prefix(table, prefixes)

    def _is_dense(self, stored: StoredTable, prefixes: Keys) -> bool:
        return False  # a scan would fetch everything between the prefixes

    def _bring_first(self, prefixes: list[bytes]) -> None:
        """Fetch what every read needs: the end of each table, or the whole table if it has many wanted prefixes."""
        ends = []
        for table in self._open().live_files():
            name = table["name"].lstrip("/")
            first = bisect_left(prefixes, table["start_key"])
            first -= first > 0 and table["start_key"].startswith(prefixes[first - 1])
            wanted = bisect_right(prefixes, table["end_key"]) - first
            if wanted > _MANY_KEYS:
                self._files.require(name)
            elif wanted > 0 and name not in self._times:
                self._times[name] = 0
                size = self._files.sizes[name]
                ends.append(ByteRange(name, max(0, size - _END_BYTES), size))
        self._files.bring(ends)

    def _read(self, read: Callable[[Rdict], _T]) -> _T:
        """Repeat a read until every block it needs is local."""
        while True:
            try:
                return super()._read(read)
            except CorruptionError as exc:
                if not self._bring(str(exc.__cause__)):
                    raise

    def _bring(self, said: str) -> bool:
        """Fetch the block that RocksDB's error names as damaged; return False if nothing is left to fetch."""
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
            self._files.bring([ByteRange(name, *end)])  # the end first, because it holds the index
        elif wanted <= 1:
            # Doubles each time, so that a read of many rows soon has the whole file.
            length = _AROUND_BYTES << min(times, _DOUBLED_MAX)
            start = wrong[0] - wrong[0] % _AROUND_BYTES
            self._files.bring([ByteRange(name, start, min(size, max(wrong[1], start + length)))])
        elif wanted == 2:
            self._files.require(name, *wrong)
        return wanted <= 2
