"""The options of the `rocksdb` backend, and the memory that all databases of a process share.

Set as ``spark.holdfast.rocksdb.<option>``:

=================  =========  ==========================================================================
option             default    meaning
=================  =========  ==========================================================================
memory             512m       budget of the whole process that holds the databases (the state server)
compression        lz4        none, lz4, snappy; zstd: lz4, and zstd at the bottom level, smaller by 7 %, slower
blockSize          4k         of a data block before compression
bloomBitsPerKey    10         bits of bloom filter for each key; 0: none
maxOpenFiles       512        files that each database keeps open
writeBufferRatio   0.4        share of the cache that unflushed writes may take
backgroundJobs     2          threads for flushes and compactions, in the process
compactionStyle    level      level or universal
=================  =========  ==========================================================================

The budget is divided so::

    process without databases   150m
    batch in flight             128m     Python and Arrow objects: 100 MiB were seen with commits of 100,000 rows
    block cache                 the rest, a fifth of it for what the allocator cannot give back; it also holds
                                indexes, filters and write buffers

RocksDB's own limit of write buffers only flushes the database that is being written. So each database has a share of
the limit, and begins a flush as soon as a commit has filled it; what commits write at one moment comes on top. The
defaults are measured: docs/decisions/0009-rocksdb.md.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    ChecksumType,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    Rdict,
    WriteBufferManager,
)

from holdfast.backends.options import parse_options, parse_size
from holdfast.errors import InvalidArgumentError

_COMPRESSIONS = ("none", "lz4", "zstd", "snappy")
_STYLES = ("level", "universal")
#: Room for what a batch in flight takes in Python and Arrow objects.
_BATCH_ROOM_BYTES = 128 << 20
#: What a shard needs at least: part of a write buffer, indexes and filters.
_SHARD_BYTES = 4 << 20
_CACHE_BYTES_MIN = 16 << 20
_WRITE_BUFFER_BYTES_MAX = 16 << 20
#: Files of level 0 that are merged at once. Each snapshot flushes one more, and each merge is stored again.
_LEVEL_ZERO_FILES = 8
#: A state server that has loaded all its libraries.
_BASE_BYTES = 150 << 20
#: What the allocator takes for blocks of all sizes that come and go.
_BYTES_PER_CACHED_BYTE = 1.25


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"it must be one of {', '.join(names)}")
        return text.lower()

    return parse


def _number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isascii() or not text.strip().isdigit() or not least <= int(text) <= most:
            raise ValueError(f"it must be a whole number from {least} to {most}")
        return int(text)

    return parse


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 0.8:
        raise ValueError("it must be a number from 0.05 to 0.8")
    return value


def _block_size(text: str) -> int:
    size = parse_size(text)
    if not 1 << 10 <= size <= 1 << 20:
        raise ValueError("it must be from 1k to 1m")
    return size


_KNOWN: Mapping[str, Callable[[str], Any]] = {
    "memory": parse_size,
    "compression": _one_of(_COMPRESSIONS),
    "blockSize": _block_size,
    "bloomBitsPerKey": _number(0, 64),
    "maxOpenFiles": _number(16, 1_000_000),
    "writeBufferRatio": _ratio,
    "backgroundJobs": _number(1, 64),
    "compactionStyle": _one_of(_STYLES),
}
_FIELDS = {
    "blockSize": "block_size_bytes",
    "bloomBitsPerKey": "bloom_bits_per_key",
    "maxOpenFiles": "max_open_files",
    "writeBufferRatio": "write_buffer_ratio",
    "backgroundJobs": "background_jobs",
    "compactionStyle": "compaction_style",
    "memory": "memory_bytes",
}


@dataclass(frozen=True)
class RocksDBOptions:
    """See the module."""

    memory_bytes: int = 512 << 20
    compression: str = "lz4"
    block_size_bytes: int = 4 << 10
    bloom_bits_per_key: int = 10
    max_open_files: int = 512
    write_buffer_ratio: float = 0.4
    background_jobs: int = 2
    compaction_style: str = "level"

    @classmethod
    def of(cls, name: str, options: Mapping[str, str]) -> RocksDBOptions:
        """Read the options of a backend that is registered as `name`.

        Raises
        ------
        InvalidArgumentError
            An option is not known, or its value does not fit; names the full key.
        """
        values = parse_options(name, _KNOWN, options)
        found = cls(**{_FIELDS.get(option, option): value for option, value in values.items()})
        _cache_bytes(found.memory_bytes, shards=1)
        return found


class ProcessMemory:
    """One block cache and one limit of write buffers for all databases of this process.

    Parameters
    ----------
    options : RocksDBOptions
    """

    def __init__(self, options: RocksDBOptions) -> None:
        self._shards: weakref.WeakSet[object] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._budget = options.memory_bytes
        self._ratio = options.write_buffer_ratio
        size = _cache_bytes(self._budget, shards=1)
        self.cache = Cache(size)
        self.write_buffers = WriteBufferManager.new_write_buffer_manager_with_cache(
            int(size * self._ratio), False, self.cache
        )

    @property
    def write_buffer_bytes(self) -> int:
        """What one database may gather before it flushes: it has two write buffers."""
        with self._lock:
            return min(_WRITE_BUFFER_BYTES_MAX, self.write_buffers.get_buffer_size() // (2 * max(1, len(self._shards))))

    def resize(self, options: RocksDBOptions) -> None:
        """Take the budget of the newest query; it is one for the process."""
        with self._lock:
            if (options.memory_bytes, options.write_buffer_ratio) != (self._budget, self._ratio):
                size = _cache_bytes(options.memory_bytes, shards=len(self._shards))
                self._budget, self._ratio = options.memory_bytes, options.write_buffer_ratio
                self.cache.set_capacity(size)
                self.write_buffers.set_buffer_size(int(size * self._ratio))

    def admit(self, shard: object) -> None:
        """Count one more open shard, as long as it lives.

        Raises
        ------
        InvalidArgumentError
            The budget is too small for so many.
        """
        with self._lock:
            _cache_bytes(self._budget, shards=len(self._shards) + 1)
            self._shards.add(shard)

    def release(self, shard: object) -> None:
        """Count it no longer."""
        with self._lock:
            self._shards.discard(shard)


_shared: weakref.ref[ProcessMemory] | None = None
_shared_lock = threading.Lock()


def process_memory(options: RocksDBOptions) -> ProcessMemory:
    """Return the memory of this process, made by the first who asks and kept as long as somebody holds it."""
    global _shared  # noqa: PLW0603  there is one process
    with _shared_lock:
        memory = _shared() if _shared is not None else None
        if memory is None:
            memory = ProcessMemory(options)
            _shared = weakref.ref(memory)
    memory.resize(options)
    return memory


def _cache_bytes(budget: int, shards: int) -> int:
    """Return what the budget leaves for the cache; it also holds write buffers, indexes and filters.

    Raises
    ------
    InvalidArgumentError
        It leaves too little for so many databases.
    """
    least_cache = max(_CACHE_BYTES_MIN, shards * _SHARD_BYTES)
    size = int((budget - _BASE_BYTES - _BATCH_ROOM_BYTES) / _BYTES_PER_CACHED_BYTE)
    if size < least_cache:
        least = math.ceil((_BASE_BYTES + _BATCH_ROOM_BYTES + least_cache * _BYTES_PER_CACHED_BYTE) / (1 << 20))
        raise InvalidArgumentError(
            f"spark.holdfast.rocksdb.memory is too small for {shards} open shards: it is the budget of the whole "
            f"process; set it to {least}m or more, or use fewer shards",
            memory=f"{budget >> 20}m",
        )
    return size


def database_options(options: RocksDBOptions, memory: ProcessMemory, *, create: bool) -> Options:
    """Return the options with which a database is opened. Raw mode always: the other one unpickles what it reads."""
    blocks = BlockBasedOptions()
    blocks.set_block_cache(memory.cache)
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    blocks.set_block_size(options.block_size_bytes)
    if options.bloom_bits_per_key:
        blocks.set_bloom_filter(options.bloom_bits_per_key, False)
    blocks.set_checksum_type(ChecksumType.xxh3())
    found = Options(raw_mode=True)
    found.create_if_missing(create)
    found.set_error_if_exists(create)
    found.set_block_based_table_factory(blocks)
    found.set_write_buffer_manager(memory.write_buffers)
    found.set_write_buffer_size(memory.write_buffer_bytes)
    found.set_max_write_buffer_number(2)
    if options.compression == "zstd":
        found.set_compression_type(DBCompressionType.lz4())
        found.set_bottommost_compression_type(DBCompressionType.zstd())
    else:
        found.set_compression_type(getattr(DBCompressionType, options.compression)())
    found.set_level_zero_file_num_compaction_trigger(_LEVEL_ZERO_FILES)
    found.set_compaction_style(getattr(DBCompactionStyle, options.compaction_style)())
    found.set_max_open_files(options.max_open_files)
    found.set_max_background_jobs(options.background_jobs)
    found.set_stats_dump_period_sec(0)
    found.set_keep_log_file_num(2)
    found.set_max_log_file_size(1 << 20)
    return found


def open_rocksdb(path: Path, options: Options, *, read_only: bool = False) -> Rdict:
    """Open a database with exactly these options.

    Without those of the column family rocksdict takes what the last process has written beside the data, and a block
    cache of 8 MiB for each database.
    """
    access = AccessType.read_only() if read_only else AccessType.read_write()
    return Rdict(str(path), options, {"default": options}, access)
