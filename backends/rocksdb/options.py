"""Options of the `rocksdb` backend and of its databases.

Set as ``spark.holdfast.rocksdb.<option>``:

=================  =========  ==========================================================================
option             default    meaning
=================  =========  ==========================================================================
memory             512m       an executor's memory for state, divided evenly among its shards. A shard uses it for
                              runs not yet moved into its database, besides those of the last micro-batches; once
                              it has a database, half goes to the block caches of all processes. At least 16m
compression        lz4        none; lz4; or zstd, which uses zstd at the bottom level: 7 % smaller, slower
=================  =========  ==========================================================================

Everything else is fixed: docs/decisions/0009-rocksdb.md gives the figures.
"""

from __future__ import annotations

import os
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
    DBCompressionType,
    Options,
    Rdict,
)

from holdfast.backends.options import parse_options, parse_size
from holdfast.errors import InvalidArgumentError

_COMPRESSIONS = ("none", "lz4", "zstd")
MEMORY_BYTES_MIN = 16 << 20
_BLOCK_BYTES, _BLOOM_BITS = 4 << 10, 10
#: Size of one partition of an index or a filter.
_INDEX_PART_BYTES = 16 << 10
TABLE_BYTES = 64 << 20
#: Files that a reader keeps open per database.
OPEN_FILES = 64
_BACKGROUND_JOBS = 2
_FROZEN_CACHE_BYTES = 8 << 20


def _compression(text: str) -> str:
    if text.lower() not in _COMPRESSIONS:
        raise ValueError(f"it must be one of {', '.join(_COMPRESSIONS)}")
    return text.lower()


_KNOWN: Mapping[str, Callable[[str], Any]] = {"memory": parse_size, "compression": _compression}


@dataclass(frozen=True)
class RocksDBOptions:
    memory_bytes: int = 512 << 20
    compression: str = "lz4"

    @classmethod
    def of(cls, name: str, options: Mapping[str, str]) -> RocksDBOptions:
        """Parse the options of a backend registered as `name`. Raises `InvalidArgumentError`."""
        values = parse_options(name, _KNOWN, options)
        found = cls(values.get("memory", cls.memory_bytes), values.get("compression", cls.compression))
        if found.memory_bytes < MEMORY_BYTES_MIN:
            raise InvalidArgumentError(
                f"spark.holdfast.{name}.memory is too small: all shards and processes of an executor share it; set it "
                f"to {MEMORY_BYTES_MIN >> 20}m or more",
                memory=values["memory"],
            )
        return found


def reader_options(cache: Cache) -> Options:
    """Return the options for reading a database."""
    blocks = _blocks()
    blocks.set_block_cache(cache)
    blocks.set_cache_index_and_filter_blocks(True)
    found = _options(blocks)
    found.set_max_open_files(OPEN_FILES)
    found.set_db_log_dir(os.devnull)  # no log: a reader must not write into a database's folder
    return found


def frozen_options() -> Options:
    """Return the options for reading a frozen database, whose tables are opened before they are fetched."""
    found = reader_options(Cache(_FROZEN_CACHE_BYTES))
    found.set_paranoid_checks(False)
    found.set_skip_stats_update_on_db_open(True)
    return found


def writer_options(compression: str) -> Options:
    """Return the options for writing and merging tables."""
    blocks = _blocks()
    blocks.disable_cache()  # each block is read once
    # Partitioned: RocksDB's cache consists of many small shards, in which two whole filters of large files, a megabyte
    # each, would evict each other.
    blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
    blocks.set_partition_filters(True)
    blocks.set_metadata_block_size(_INDEX_PART_BYTES)
    blocks.set_block_size(_BLOCK_BYTES)
    blocks.set_bloom_filter(_BLOOM_BITS, False)
    blocks.set_checksum_type(ChecksumType.xxh3())
    found = _options(blocks)
    found.create_if_missing(True)
    if compression == "zstd":
        found.set_compression_type(DBCompressionType.lz4())
        found.set_bottommost_compression_type(DBCompressionType.zstd())
    else:
        found.set_compression_type(getattr(DBCompressionType, compression)())
    found.set_target_file_size_base(TABLE_BYTES)
    found.set_max_background_jobs(_BACKGROUND_JOBS)
    return found


def _blocks() -> BlockBasedOptions:
    blocks = BlockBasedOptions()
    blocks.set_pin_top_level_index_and_filter(True)
    return blocks


def _options(blocks: BlockBasedOptions) -> Options:
    """Return the common options, in raw mode: rocksdict's other mode unpickles what it reads."""
    found = Options(raw_mode=True)
    found.set_block_based_table_factory(blocks)
    found.set_stats_dump_period_sec(0)
    return found


def open_rocksdb(path: Path, options: Options, *, read_only: bool = False) -> Rdict:
    """Open a database with exactly these options; by default rocksdict prefers a column family's stored options."""
    access = AccessType.read_only() if read_only else AccessType.read_write()
    return Rdict(str(path), options, {"default": options}, access)
