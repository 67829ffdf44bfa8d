"""Options of the rocksdb backend, the memory that databases share, and errors of RocksDB."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.rocksdb import options as rocksdb_options
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.rocksdb.errors import rocksdb_errors
from holdfast.backends.rocksdb.options import RocksDBOptions, process_memory
from holdfast.errors import ClosedError, CorruptionError, HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.testing.state_rows import P1, P2, TABLES, contents, counts


@pytest.fixture(autouse=True)
def _no_other_shards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a memory that no other shard uses; where it opens some, none of them stays."""
    monkeypatch.setattr(rocksdb_options, "_shared", None)
    opens_shards = "tmp_path" in request.fixturenames
    if opens_shards:
        gc.collect()
    yield
    if opens_shards:
        gc.collect()


def test_every_option_is_read() -> None:
    """The names that users know, below one prefix; driver and worker read them with the same function."""
    text = {
        "memory": "1g",
        "compression": "ZSTD",
        "blockSize": "16k",
        "bloomBitsPerKey": "0",
        "maxOpenFiles": "100",
        "writeBufferRatio": "0.5",
        "backgroundJobs": "4",
        "compactionStyle": "universal",
    }
    expected = RocksDBOptions(1 << 30, "zstd", 16 << 10, 0, 100, 0.5, 4, "universal")
    assert RocksDBOptions.of("rocksdb", text) == expected
    assert find_backend("rocksdb").parse_options("rocksdb", text)["memory_bytes"] == 1 << 30
    assert all(value != getattr(RocksDBOptions(), name) for name, value in vars(expected).items())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("memroy", "1g", r"'spark.holdfast.rocksdb.memroy': did you mean spark.holdfast.rocksdb.memory\?"),
        ("memory", "much", "rocksdb.memory cannot be 'much': it must be a size such as 512m"),
        ("memory", "200m", r"rocksdb.memory is too small.*set it to 298m or more"),
        ("compression", "rar", "rocksdb.compression cannot be 'rar': it must be one of none, lz4, zstd, snappy"),
        ("blockSize", "2m", "rocksdb.blockSize cannot be '2m': it must be from 1k to 1m"),
        ("bloomBitsPerKey", "-1", "rocksdb.bloomBitsPerKey cannot be '-1': it must be a whole number from 0 to 64"),
        ("maxOpenFiles", "1e3", "rocksdb.maxOpenFiles cannot be '1e3'"),
        ("writeBufferRatio", "nan", "rocksdb.writeBufferRatio cannot be 'nan': it must be a number from 0.05 to 0.8"),
        ("backgroundJobs", "0", "rocksdb.backgroundJobs cannot be '0'"),
        ("compactionStyle", "fifo", "rocksdb.compactionStyle cannot be 'fifo': it must be one of level, universal"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_right(option: str, value: str, message: str) -> None:
    """On the driver, before the query starts."""
    with pytest.raises(InvalidArgumentError, match=message):
        find_backend("rocksdb").parse_options("rocksdb", {option: value})


@pytest.mark.parametrize(
    "options",
    [
        {"compression": name, "blockSize": "32k", "bloomBitsPerKey": "0", "compactionStyle": style}
        for name, style in (("none", "level"), ("zstd", "universal"), ("snappy", "level"), ("lz4", "universal"))
    ],
    ids=str,
)
def test_a_database_may_be_opened_with_other_options(tmp_path: Path, options: dict[str, str]) -> None:
    """Options change how new files are written; files written with others stay readable."""
    with RocksDBBackend(tmp_path, TABLES, clock.new_id, options) as backend:
        backend.apply(None, P1, counts(*((f"u{i}", i) for i in range(500))), {})
    with RocksDBBackend(tmp_path, TABLES, clock.new_id) as backend:
        backend.apply(P1, P2, counts(("u1", -1)), {})
        with backend.view(P2) as view:
            assert len(contents(view, "counts")) == 500


def test_every_database_uses_the_one_cache(tmp_path: Path) -> None:
    """A new one, one that is opened again, and a copy: none has a cache of its own, which nobody counts."""
    options = {"memory": "350m", "blockSize": "2k"}
    with RocksDBBackend(tmp_path, TABLES, clock.new_id, options) as backend:
        backend.apply(None, P1, counts(("ann", 1)), {})
    with RocksDBBackend(tmp_path, TABLES, clock.new_id, {**options, "blockSize": "8k"}) as backend:
        backend.apply(P1, P2, counts(*((f"u{i}", i) for i in range(500))), {})
        (database,) = backend._shard.opened
        assert database._rdict is not None
        capacity = database._rdict.property_int_value("rocksdb.block-cache-capacity")
        assert capacity == rocksdb_options._cache_bytes(350 << 20, shards=1)
        written = max(database.path.glob("OPTIONS-*")).read_text()
        assert " block_size=8192\n" in written
        assert " filter_policy=bloomfilter" in written


@pytest.mark.all
@pytest.mark.slow
def test_the_least_memory_that_is_named_is_enough(tmp_path: Path) -> None:
    """The error's remedy works; more shards are slower, and none is refused."""

    def shard(number: int, memory: str) -> RocksDBBackend:
        return RocksDBBackend(tmp_path / str(number), TABLES, clock.new_id, {"memory": memory})

    with pytest.raises(InvalidArgumentError) as failure:
        shard(0, "1m")
    least = str(failure.value).split("set it to ")[1].split(" ")[0]
    backends = [shard(i, least) for i in range(30)]
    for backend in backends:
        backend.apply(None, P1, counts(("ann", 1)), {})
        with backend.view(P1) as view:
            assert contents(view, "counts") == {("ann",): (1,)}
    for backend in backends:
        backend.close()


def test_more_open_shards_leave_a_smaller_cache(tmp_path: Path) -> None:
    """What RocksDB needs for each of them comes out of the one budget, and goes back when they are closed."""
    backends = [RocksDBBackend(tmp_path / str(i), TABLES, clock.new_id, {"memory": "512m"}) for i in range(12)]
    memory = backends[0]._shard.memory

    def limit() -> int:
        return memory.write_buffers.get_buffer_size()

    before = limit()
    for backend in backends:
        backend.versions()
    assert before - limit() == pytest.approx(0.4 * 12 * (512 << 10) / 1.25, rel=0.01)
    for backend in backends:
        backend.close()
    assert limit() == before


@pytest.mark.parametrize(("memory", "most"), [("298m", 17), ("512m", 208), ("2g", 1573)])
def test_a_budget_says_how_many_shards_it_keeps_open(memory: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/backends.md has it; few open files allow fewer."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert RocksDBBackend.most_open({"memory": memory}) == most
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 20))
    assert RocksDBBackend.most_open({"memory": memory}) == min(most, 12)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert RocksDBBackend.most_open({"memory": memory}) == most


@pytest.mark.parametrize(("limit", "first"), [(1024, 224), (4096, 512), (20_000, 512), (1 << 20, 512)])
def test_all_databases_together_keep_to_the_limit_of_open_files(
    limit: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few shards have what they may; as many as the budget keeps open never have more than the process."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, 1 << 20))
    options = RocksDBOptions()
    memory = process_memory(options)

    class Shard:
        """Whatever is counted."""

    shards = [Shard() for _ in range(options.most_open_shards)]
    for shard in shards:
        memory.admit(shard)
    files = [memory.open_files(shard) for shard in shards]
    assert sum(files) <= 0.75 * limit
    assert min(files) >= 32
    assert files == sorted(files, reverse=True)
    assert files[0] == first
    for shard in shards:
        memory.release(shard)
    memory.admit(shards[-1])
    assert memory.open_files(shards[-1]) == files[0]


@pytest.mark.slow(0.5)
def test_write_buffers_shrink_as_shards_are_opened(tmp_path: Path) -> None:
    """RocksDB only flushes the database that is written, so each one's buffer is a share of the whole."""
    options = {"memory": "350m", "writeBufferRatio": "0.3"}
    backends = [RocksDBBackend(tmp_path / str(i), TABLES, clock.new_id, options) for i in range(8)]
    memory = process_memory(RocksDBOptions.of("rocksdb", options))
    assert all(backend._shard.memory is memory for backend in backends)
    sizes = []
    for backend in backends:
        backend.apply(None, P1, counts(("ann", 1)), {})
        sizes.append(memory.write_buffer_bytes)
        assert 2 * len(sizes) * sizes[-1] <= memory.write_buffers.get_buffer_size()
    assert sizes[0] == 16 << 20 or sizes[0] > 4 * sizes[-1]
    backends[0].apply(P1, P2, counts(("ann", 2)), {})
    (database,) = backends[0]._shard.opened
    assert database._buffer_bytes == sizes[-1]
    for backend in backends:
        backend.close()
    assert memory.write_buffer_bytes >= sizes[0]


@pytest.mark.all
@pytest.mark.slow
def test_memory_stays_near_its_limit(tmp_path: Path) -> None:
    """Many shards written in turns: cache, with all write buffers in it, does not outgrow what it was given."""
    options = {"memory": "320m", "writeBufferRatio": "0.4"}
    backends = [RocksDBBackend(tmp_path / str(i), TABLES, clock.new_id, options) for i in range(4)]
    memory, peak = backends[0]._shard.memory, 0
    for version in range(1, 8):
        for backend in backends:
            base = Pointer(version - 1, "a") if version > 1 else None
            rows = counts(*((f"user {version} {i} {'x' * 50}", i) for i in range(10_000)))
            backend.apply(base, Pointer(version, "a"), rows, {})
            backend.drop([base] if base else [])
            peak = max(peak, memory.cache.get_usage())
    assert peak <= rocksdb_options._cache_bytes(320 << 20, shards=4)
    for backend in backends:
        backend.close()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "Corruption: block checksum mismatch in /a/b/000012.sst offset 1",
            CorruptionError,
            "file=/shard/000012.sst ",
        ),
        (
            "Corruption: Bad table magic number in /a/b/000012.sst  The file /a/b/MANIFEST-000005 may be corrupted.",
            CorruptionError,
            "file=/shard/000012.sst ",
        ),
        (
            "Corruption: properties unsorted The file /shard/MANIFEST-000005 may be corrupted.",  # a table's properties
            CorruptionError,
            "file=/shard ",
        ),
        ("Corruption: CURRENT file corrupted", CorruptionError, "file=/shard "),
        (
            "IO error: No such file or directory: While open a file for random read: /a/000012.sst: No such file",
            CorruptionError,
            "file=/shard/000012.sst ",
        ),
        (
            "IO error: No such file or directory: While open a file for appending: /a/000012.sst: No such file",
            UnavailableError,
            "check that the directory exists",
        ),
        ("IO error: No space left on device: While appending to file: /a/b", UnavailableError, "no space left"),
        ("IO error: Disk quota exceeded: While", UnavailableError, "no space left"),
        ("IO error: Read-only file system: While open", UnavailableError, "cannot be used.*Read-only"),
        ("IO error: lock hold by current process, acquire time 1", UnavailableError, "another process holds"),
        ("IO error: While lock file: /a/LOCK: Resource temporarily", UnavailableError, "another process holds"),
        ("Shutdown in progress", UnavailableError, "Shutdown in progress"),
    ],
)
def test_rocksdb_s_errors_become_ours(text: str, kind: type[HoldfastError], message: str) -> None:
    """rocksdict raises plain exceptions; what the catcher should do is in their text only."""
    with pytest.raises(kind, match=message), rocksdb_errors(Path("/shard")):
        raise Exception(text)  # noqa: TRY002  as rocksdict does


@pytest.mark.parametrize("error", [MemoryError(), ClosedError("closed"), KeyError(1), KeyboardInterrupt()])
def test_other_errors_pass(error: Any) -> None:
    """Nothing but RocksDB's own errors is mapped."""
    with pytest.raises(type(error)) as failure, rocksdb_errors(Path("/shard")):
        raise error
    assert failure.value is error
