"""The options of the `rocksdb` backend, and the memory that all databases of a process share.

Set as ``spark.holdfast.rocksdb.<option>``:

=================  =========  ==========================================================================
option             default    meaning
=================  =========  ==========================================================================
memory             512m       budget of the whole process that holds the databases (the state server)
compression        lz4        none, lz4, snappy; zstd: lz4, and zstd at the bottom level, smaller by 7 %, slower
blockSize          4k         of a data block before compression
bloomBitsPerKey    10         bits of bloom filter for each key; 0: none
maxOpenFiles       512        files that each database keeps open at most
writeBufferRatio   0.4        share of the cache that unflushed writes may take
backgroundJobs     2          threads for flushes and compactions, in the process
compactionStyle    level      level or universal
=================  =========  ==========================================================================

The budget is divided so::

    process without databases   150m
    batch in flight             128m     Python and Arrow objects: 100 MiB were seen with commits of 100,000 rows
    each open shard             0.5m     RocksDB's own objects
    block cache                 the rest, a fifth of it for what the allocator cannot give back; it also holds
                                indexes, filters and write buffers

RocksDB's own limit of write buffers only flushes the database that is being written. So each database has a share of
the limit, and begins a flush as soon as a commit has filled it; what commits write at one moment comes on top. The
defaults are measured: docs/decisions/0009-rocksdb.md.

More shards make the shares smaller, and the budget says how many may be open before they are too small
(`most_open_shards`). Beyond that, whoever opens shards closes some that rest; the budget itself never makes a call
fail (docs/decisions/0009-rocksdb.md). The process's limit of open files is divided in the same way: each shard
may count on `_FILES_MIN`, and has more while there are few.
"""

from __future__ import annotations

import math
import resource
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocksdict import (
    AccessType,
    BlockBasedIndexType,
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
#: RocksDB's own objects for each open shard: 0.4 MiB were seen, with 180 of them.
_SHARD_BYTES = 512 << 10
#: What a shard needs of the cache at least: part of a write buffer, indexes and filters.
_SHARD_CACHE_BYTES_MIN = 512 << 10
_CACHE_BYTES_MIN = 16 << 20
#: RocksDB takes no less.
_WRITE_BUFFER_BYTES_MIN = 64 << 10
_WRITE_BUFFER_BYTES_MAX = 16 << 20
#: Files of level 0 that are merged at once. Each snapshot flushes one more, and each merge is stored again.
_LEVEL_ZERO_FILES = 8
#: Of an index or a filter that is held by itself.
_INDEX_PART_BYTES = 16 << 10
#: RocksDB begins a new list of its files, and a new log of its own, when the old one has so many bytes; it keeps two
#: logs. A shard may be open for months, and each flush is an entry in both.
MANIFEST_BYTES_MAX, INFO_LOG_BYTES_MAX = 1 << 20, 256 << 10
#: A state server that has loaded all its libraries.
_BASE_BYTES = 150 << 20
#: What the allocator takes for blocks of all sizes that come and go.
_BYTES_PER_CACHED_BYTE = 1.25
#: Files that any open shard may have: RocksDB keeps ten for itself. As many again are for those that have more.
_FILES_MIN = 32
#: Part of the process's open files that databases may have; the others are connections, uploads, and files being made.
_SHARE_OF_FILES = 0.75


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
        _require_enough(found.memory_bytes)
        return found

    @property
    def most_open_shards(self) -> int:
        """How many shards may be open at once, such that each has a useful share of memory and open files."""
        each = _SHARD_BYTES + _SHARD_CACHE_BYTES_MIN * _BYTES_PER_CACHED_BYTE
        by_memory = int((self.memory_bytes - _BASE_BYTES - _BATCH_ROOM_BYTES) / each)
        return max(1, min(by_memory, _files_of_process() // (2 * _FILES_MIN)))


class ProcessMemory:
    """One block cache, one limit of write buffers and one of open files for all databases of this process.

    Parameters
    ----------
    options : RocksDBOptions
    """

    def __init__(self, options: RocksDBOptions) -> None:
        # Each open shard and the files that it may keep open.
        self._files: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._options = options
        size = _cache_bytes(options.memory_bytes, shards=0)
        self.cache = Cache(size)
        self.write_buffers = WriteBufferManager.new_write_buffer_manager_with_cache(
            int(size * options.write_buffer_ratio), False, self.cache
        )
        self._size = size, options.write_buffer_ratio

    @property
    def write_buffer_bytes(self) -> int:
        """What one database may gather before it flushes: it has two write buffers."""
        with self._lock:
            share = self.write_buffers.get_buffer_size() // (2 * max(1, len(self._files)))
        return max(_WRITE_BUFFER_BYTES_MIN, min(_WRITE_BUFFER_BYTES_MAX, share))

    def resize(self, options: RocksDBOptions) -> None:
        """Take the budget of the newest query; it is one for the process."""
        with self._lock:
            self._options = options
            self._share_out()

    def admit(self, shard: object) -> None:
        """Count one more open shard, as long as it lives; the shares of all become smaller."""
        with self._lock:
            most = self._options.most_open_shards
            spare = _files_of_process() - sum(self._files.values()) - _FILES_MIN * max(1, most - len(self._files))
            self._files[shard] = _FILES_MIN + max(0, min(self._options.max_open_files - _FILES_MIN, spare // 2))
            self._share_out()

    def release(self, shard: object) -> None:
        """Count it no longer."""
        with self._lock:
            self._files.pop(shard, None)
            self._share_out()

    def open_files(self, shard: object) -> int:
        """Return how many files each database of an open shard may keep open."""
        with self._lock:
            return self._files.get(shard, _FILES_MIN)

    def _share_out(self) -> None:
        ratio = self._options.write_buffer_ratio
        size = _cache_bytes(self._options.memory_bytes, len(self._files))
        if (size, ratio) != self._size:
            self._size = size, ratio
            self.cache.set_capacity(size)
            self.write_buffers.set_buffer_size(int(size * ratio))


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


def _require_enough(budget: int) -> None:
    """Raise `InvalidArgumentError` where a budget is too small for one shard."""
    least = _BASE_BYTES + _BATCH_ROOM_BYTES + _CACHE_BYTES_MIN * _BYTES_PER_CACHED_BYTE
    if budget < least:
        raise InvalidArgumentError(
            "spark.holdfast.rocksdb.memory is too small: it is the budget of the whole process that has the databases "
            f"open; set it to {math.ceil(least / (1 << 20))}m or more",
            memory=f"{budget >> 20}m",
        )


def _cache_bytes(budget: int, shards: int) -> int:
    """Return what the budget leaves for the cache; it also holds write buffers, indexes and filters."""
    left = budget - _BASE_BYTES - _BATCH_ROOM_BYTES - shards * _SHARD_BYTES
    return max(int(left / _BYTES_PER_CACHED_BYTE), _SHARD_CACHE_BYTES_MIN * max(1, shards))


def _files_of_process() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(_SHARE_OF_FILES * (limit if limit != resource.RLIM_INFINITY else 1 << 20))


def database_options(options: RocksDBOptions, memory: ProcessMemory, shard: object, *, create: bool) -> Options:
    """Return the options with which a database of a shard is opened.

    Raw mode always: the other one unpickles what it reads.
    """
    blocks = BlockBasedOptions()
    blocks.set_block_cache(memory.cache)
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    # In parts: the cache is many small ones, and of the whole filters of large files, a megabyte each, two in one of
    # them throw each other out.
    blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
    blocks.set_partition_filters(True)
    blocks.set_metadata_block_size(_INDEX_PART_BYTES)
    blocks.set_pin_top_level_index_and_filter(True)
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
    found.set_max_open_files(min(options.max_open_files, memory.open_files(shard)))
    found.set_max_background_jobs(options.background_jobs)
    found.set_stats_dump_period_sec(0)
    found.set_keep_log_file_num(2)
    found.set_max_log_file_size(INFO_LOG_BYTES_MAX)
    found.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
    return found


def open_rocksdb(path: Path, options: Options, *, read_only: bool = False) -> Rdict:
    """Open a database with exactly these options.

    Without those of the column family rocksdict takes what the last process has written beside the data, and a block
    cache of 8 MiB for each database.
    """
    access = AccessType.read_only() if read_only else AccessType.read_write()
    return Rdict(str(path), options, {"default": options}, access)
