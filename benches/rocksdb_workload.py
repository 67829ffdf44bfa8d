"""A RocksDB database with rows like ours, and options that can be varied: what `rocksdb_options` measures.

Keys have 26 bytes (table, uniform hash, user key); half of each value compresses; commits overwrite random keys in
hash order, without a write-ahead log.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rocksdict import (
    BlockBasedOptions,
    Cache,
    ChecksumType,
    DataBlockIndexType,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteBufferManager,
    WriteOptions,
)

MIB = 1 << 20
KEY_BYTES, CHUNK_KEYS, FILL_KEYS = 26, 8192, 50_000


@dataclass(frozen=True)
class Tuning:
    """One choice of RocksDB's options; the defaults are what we chose, with a cache that holds half of the rows."""

    cache_mib: int = 128
    write_buffer_ratio: float = 0.4
    write_buffer_mib: int = 16
    write_buffer_number: int = 2
    hyper_clock: bool = False
    bloom_bits: int = 10
    filters_for_hits: bool = False
    block_kib: int = 4
    compression: str = "lz4"
    bottom: str = "lz4"
    format_version: int = 6
    restart_interval: int = 16
    hash_index: bool = False
    index_in_cache: bool = True
    checksum: str = "xxh3"
    style: str = "level"
    dynamic_levels: bool = True
    level_base_mib: int = 256
    level0_trigger: int = 8
    level0_slowdown: int = 20
    background_jobs: int = 2
    rate_mib: int = 0
    open_files: int = 512

    def memory(self) -> tuple[Cache, WriteBufferManager]:
        """Return what all databases of a process share."""
        size = self.cache_mib * MIB
        cache = Cache.new_hyper_clock_cache(size, 0) if self.hyper_clock else Cache(size)
        limit = int(size * self.write_buffer_ratio)
        return cache, WriteBufferManager.new_write_buffer_manager_with_cache(limit, False, cache)

    def options(self, cache: Cache, write_buffers: WriteBufferManager) -> Options:
        """Return them as RocksDB takes them."""
        options = Options(raw_mode=True)
        options.set_block_based_table_factory(self._blocks(cache))
        options.set_write_buffer_manager(write_buffers)
        options.set_write_buffer_size(self.write_buffer_mib * MIB)
        options.set_max_write_buffer_number(self.write_buffer_number)
        options.set_optimize_filters_for_hits(self.filters_for_hits)
        options.set_compression_type(getattr(DBCompressionType, self.compression)())
        options.set_bottommost_compression_type(getattr(DBCompressionType, self.bottom)())
        options.set_compaction_style(getattr(DBCompactionStyle, self.style)())
        options.set_level_compaction_dynamic_level_bytes(self.dynamic_levels)
        options.set_max_bytes_for_level_base(self.level_base_mib * MIB)
        options.set_level_zero_file_num_compaction_trigger(self.level0_trigger)
        options.set_level_zero_slowdown_writes_trigger(self.level0_slowdown)
        options.set_level_zero_stop_writes_trigger(self.level0_slowdown + 16)
        options.set_max_background_jobs(self.background_jobs)
        if self.rate_mib:
            options.set_ratelimiter(self.rate_mib * MIB, 100_000, 10)
        options.set_max_open_files(self.open_files)
        options.set_stats_dump_period_sec(0)
        return options

    def _blocks(self, cache: Cache) -> BlockBasedOptions:
        blocks = BlockBasedOptions()
        blocks.set_block_cache(cache)
        blocks.set_block_size(self.block_kib << 10)
        blocks.set_format_version(self.format_version)
        blocks.set_block_restart_interval(self.restart_interval)
        blocks.set_checksum_type(getattr(ChecksumType, self.checksum)())
        blocks.set_cache_index_and_filter_blocks(self.index_in_cache)
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(self.index_in_cache)
        if self.bloom_bits:
            blocks.set_bloom_filter(self.bloom_bits, False)
        if self.hash_index:
            blocks.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
            blocks.set_data_block_hash_ratio(0.75)
        return blocks


@dataclass
class Meter:
    """What a stretch of work took: wall and CPU seconds, bytes handed to the file system."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    cpu_all_s: float = 0.0
    written_bytes: int = 0

    @contextmanager
    def running(self) -> Iterator[Meter]:
        """Add what happens inside."""
        begin = time.perf_counter(), time.thread_time(), time.process_time(), _written_bytes()
        yield self
        self.wall_s += time.perf_counter() - begin[0]
        self.cpu_s += time.thread_time() - begin[1]
        self.cpu_all_s += time.process_time() - begin[2]
        self.written_bytes += _written_bytes() - begin[3]


def _written_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def resident_mib(name: str) -> float:
    """Return the resident memory now (VmRSS) or at its peak (VmHWM)."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024


@dataclass
class Bench:
    """One database in a fresh directory, and rows like ours."""

    tuning: Tuning
    keys: int
    batch: int
    value_bytes: int
    commits: int
    directory: Path
    chance: np.random.Generator
    database: Rdict = field(init=False)
    cache: Cache = field(init=False)

    def __post_init__(self) -> None:
        self.rows(np.arange(FILL_KEYS))  # what Python takes for a batch is not the database's
        self.resident_mib = resident_mib("VmRSS")
        self.cache, self.write_buffers = self.tuning.memory()
        self.open()

    def open(self) -> None:
        """Open the database, or make it."""
        self.database = Rdict(str(self.directory), self.options())

    def options(self) -> Options:
        """Return the options of this database, and of any other that shares its memory."""
        return self.tuning.options(self.cache, self.write_buffers)

    def sorted_keys(self, numbers: np.ndarray) -> list[bytes]:
        """Return the keys with these numbers."""
        return _keys(numbers)

    def random_keys(self, count: int, space: int | None = None) -> list[bytes]:
        """Return distinct keys among the first `space`, sorted."""
        return _keys(np.unique(self.chance.integers(0, space or self.keys, count)))

    def rows(self, numbers: np.ndarray) -> tuple[list[bytes], list[bytes]]:
        """Return keys and values for these numbers, in the order of the keys."""
        values = np.full((len(numbers), self.value_bytes), ord("a"), np.uint8)
        values[:, : self.value_bytes // 2] = self.chance.integers(
            0, 256, (len(numbers), self.value_bytes // 2), dtype=np.uint8
        )
        return _keys(numbers), values.view(f"S{self.value_bytes}").ravel().tolist()

    def write(self, keys: list[bytes], values: list[bytes]) -> None:
        """Write one atomic batch."""
        batch = WriteBatch(raw_mode=True)
        deque(map(batch.put, keys, values), maxlen=0)
        options = WriteOptions()
        options.disable_wal = True  # type: ignore[method-assign, assignment]  # a property, whatever its stub says
        self.database.write(batch, options)

    def commit(self) -> float:
        """Overwrite random keys; return the milliseconds that it took."""
        keys, values = self.rows(np.unique(self.chance.integers(0, self.keys, self.batch)))
        begin = time.perf_counter()
        self.write(keys, values)
        return (time.perf_counter() - begin) * 1e3

    def fill(self) -> None:
        """Write every key once, in random order."""
        order = self.chance.permutation(self.keys)
        for start in range(0, self.keys, FILL_KEYS):
            self.write(*self.rows(order[start : start + FILL_KEYS]))
        self.settle()

    def settle(self) -> None:
        """Wait until nothing runs in the background."""
        names = ("num-running-compactions", "num-running-flushes", "compaction-pending", "mem-table-flush-pending")
        quiet = 0
        while quiet < 3:
            quiet = 0 if any(self.database.property_int_value(f"rocksdb.{name}") for name in names) else quiet + 1
            time.sleep(0.02)

    def reader(self, chunk: int) -> Callable[[list[Any]], None]:
        """Return a function that reads keys, so many in a call."""

        def read(keys: list[Any]) -> None:
            for start in range(0, len(keys), chunk):
                self.database.get(keys[start : start + chunk])

        return read

    def get(self, keys: list[bytes]) -> None:
        """Read keys in chunks, as the backend does."""
        self.reader(CHUNK_KEYS)(keys)

    def scan(self, keys: list[bytes]) -> None:
        """Read them by one scan from the first to the last, which are sorted."""
        to = ReadOptions()
        to.set_iterate_upper_bound(keys[-1] + b"\0")
        found = dict(self.database.items(from_key=keys[0], read_opt=to))
        deque(map(found.get, keys), maxlen=0)

    def us_per_key(self, work: Callable[[list[bytes]], Any], keys: list[bytes]) -> float:
        """Return microseconds of CPU that `work` takes for each of `keys`."""
        with Meter().running() as meter:
            work(keys)
        return meter.cpu_s / len(keys) * 1e6

    def us_per_row(self, rows: Iterator[Any], count: int = 200_000) -> float:
        """Return microseconds of CPU that a row takes."""
        with Meter().running() as meter:
            count = sum(1 for _ in islice(rows, count))
        return meter.cpu_s / count * 1e6

    def size_mib(self) -> float:
        """Return the size of the sorted files that live."""
        return (self.database.property_int_value("rocksdb.total-sst-files-size") or 0) / MIB


def _keys(numbers: np.ndarray) -> list[bytes]:
    """Return table byte, hash (the finaliser of splitmix64) and "user-000000000042", sorted."""
    hashes = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
    order = np.argsort(hashes)
    rows = np.empty((len(numbers), KEY_BYTES), np.uint8)
    rows[:, 0] = 1
    rows[:, 1:9] = hashes[order].astype(">u8").view(np.uint8).reshape(-1, 8)
    rows[:, 9:14] = np.frombuffer(b"user-", np.uint8)
    rows[:, 14:] = numbers[order, None] // 10 ** np.arange(11, -1, -1) % 10 + ord("0")
    return rows.view(f"S{KEY_BYTES}").ravel().tolist()
