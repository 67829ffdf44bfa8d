"""Files of Spark's state stores, made here as Spark makes them, and hostile ones: read, or refused by name."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import struct
import threading
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lz4.block
import pyarrow as pa
import pytest
import xxhash
from rocksdict import Options, Rdict

from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.local import LocalStorage
from holdfast.spark_integration.shard.pointer_row import POINTER_VARIABLE, STATE_VARIABLES
from holdfast.spark_integration.spark_state import rocksdb_files, row_streams
from holdfast.spark_integration.spark_state.pointers import (
    FILE_BYTES_MAX,
    PART_BYTES_MAX,
    StateOperator,
    StateOperators,
    StateStores,
    read_pointers,
)
from holdfast.spark_integration.spark_state.query_location import LoggedBatch
from holdfast.spark_integration.spark_state.row_streams import (
    Named,
    RowStream,
    avro_binary,
    crc_32c,
    decompressed,
    first_binary,
)

LIMIT = 1 << 20
KEY, VALUE = b"\0" * 16, bytes(range(200))


def lz4_blocks(plain: bytes, size: int = 64) -> bytes:
    """Return a stream as lz4-java makes it; the first block is stored as it is."""
    found = b""
    for start in range(0, len(plain), size):
        block = plain[start : start + size]
        token, data = (0x15, block) if not start else (0x25, lz4.block.compress(block, store_size=False))
        checksum = xxhash.xxh32_intdigest(block, 0x9747B28C) & 0x0FFFFFFF
        found += struct.pack("<8sBiii", b"LZ4Block", token, len(data), len(block), checksum) + data
    return found + struct.pack("<8sBiii", b"LZ4Block", 0x15, 0, 0, 0)


def rows(*pairs: tuple[bytes, bytes | None], end: bytes = struct.pack(">i", -1), before: bytes = b"") -> bytes:
    found = b""
    for key, value in pairs:
        kind = b"" if not before else b"\x10" if value is None else b"\x01"
        found += kind + struct.pack(">i", len(key)) + key
        found += struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
    return found + end


def put(folder: Path, name: str, plain: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lz4_blocks(plain))


def test_a_version_is_its_snapshot_and_the_changes_since(tmp_path: Path) -> None:
    put(tmp_path, "1.delta", rows((b"a", b"1"), (b"b", b"1")))
    put(tmp_path, "2.delta", rows((b"a", None), (b"c", b"2")))
    put(tmp_path, "2.snapshot", rows((b"b", b"1"), (b"c", b"2"), (b"", VALUE)))
    put(tmp_path, "3.delta", rows((b"c", b"3")))
    with LocalStorage(str(tmp_path)) as partition:
        assert row_streams.read_rows(partition, Named(0), "lz4", LIMIT) == {}
        assert row_streams.read_rows(partition, Named(1), "lz4", LIMIT) == {b"a": b"1", b"b": b"1"}
        wanted = {b"b": b"1", b"c": b"3", b"": VALUE}
        assert row_streams.read_rows(partition, Named(3), "lz4", LIMIT) == wanted
        (tmp_path / "1.delta").unlink()
        assert row_streams.read_rows(partition, Named(3), "lz4", LIMIT) == wanted
        for version in (1, 4):
            with pytest.raises(NotFoundError, match="purged"):
                row_streams.read_rows(partition, Named(version), "lz4", LIMIT)


def database(folder: Path, name: str, content: Mapping[bytes, bytes], families: Mapping[str, int]) -> None:
    """Store a database as Spark's RocksDB provider does."""
    made, options = folder / "made", Options(raw_mode=True)
    opened = Rdict(str(made), options)
    for key, value in content.items():
        opened[key] = value  # type: ignore[index]
    opened.flush()
    opened.close()
    tables = [path for path in made.iterdir() if path.suffix == ".sst"]
    files = [
        {"localFileName": path.name, "dfsSstFileName": f"{path.stem}-{len(name)}.sst", "sizeBytes": 1}
        for path in tables
    ]
    (folder / "SSTs").mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}.zip", "w") as archive:
        for path in made.iterdir():
            if path.name.startswith(("MANIFEST", "CURRENT", "OPTIONS")) or path.suffix == ".log":
                archive.write(path, path.name)
            elif path.suffix == ".sst":
                (folder / "SSTs" / f"{path.stem}-{len(name)}.sst").write_bytes(path.read_bytes())
        archive.writestr("metadata", "v1\n" + json.dumps({"sstFiles": files, "columnFamilyMapping": families}))
    for path in made.iterdir():
        path.unlink()
    made.rmdir()


V2, END = b"\0\2v2", b"\0"


def lineage(*versions: tuple[int, str]) -> bytes:
    text = json.dumps(
        [{"version": version, "checkpointUniqueId": unique_id} for version, unique_id in versions]
    ).encode()
    return b"\0\2v4" + struct.pack(">H", len(text)) + text


def test_a_version_of_rocksdb_is_its_database_and_the_changes_since(tmp_path: Path) -> None:
    """Changelogs of all formats, families of columns, and the lineage that ids follow."""
    database(tmp_path, "2", {b"\2\0a": b"1", b"\2\0b": b"1", b"\3\0z": b"?"}, {"default": 0, "ours": 2, "others": 3})
    put(tmp_path, "3.changelog", rows((b"\2\0a", None), (b"\3\0y", b"?")))
    put(tmp_path, "4.changelog", V2 + rows((b"\2\0c", b"4"), (b"\2\0b", None), end=END, before=b"x"))
    with LocalStorage(str(tmp_path)) as partition:
        assert rocksdb_files.read_rows(partition, Named(2), "lz4", "ours", LIMIT) == {b"a": b"1", b"b": b"1"}
        assert rocksdb_files.read_rows(partition, Named(3), "lz4", "ours", LIMIT) == {b"b": b"1"}
        assert rocksdb_files.read_rows(partition, Named(4), "lz4", "ours", LIMIT) == {b"c": b"4"}
        assert len(rocksdb_files.read_rows(partition, Named(4), "lz4", None, LIMIT)) == 3
        for version in (1, 5):
            with pytest.raises(NotFoundError, match="purged"):
                rocksdb_files.read_rows(partition, Named(version), "lz4", "ours", LIMIT)
    database(tmp_path, "7_aa", {b"\2\0a": b"7"}, {"ours": 2})
    put(tmp_path, "8_bb.changelog", lineage((7, "aa")) + rows((b"\2\0b", b"8"), end=END, before=b"x"))
    put(tmp_path, "8_zz.changelog", lineage((7, "aa")) + rows((b"\2\0b", b"dropped"), end=END, before=b"x"))
    put(tmp_path, "9_cc.changelog", lineage((7, "aa"), (8, "bb")) + rows((b"\2\0a", None), end=END, before=b"x"))
    with LocalStorage(str(tmp_path)) as partition:
        assert rocksdb_files.read_rows(partition, Named(9, "cc"), "lz4", "ours", LIMIT) == {b"b": b"8"}


def test_changes_without_the_database_that_numbers_families_are_no_empty_store(tmp_path: Path) -> None:
    """Spark purges databases before changelogs: of families nothing was found, as if the query had no state."""
    database(tmp_path, "1", {b"\2\0a": b"1"}, {"ours": 2})
    put(tmp_path, "1.changelog", V2 + rows((b"\2\0a", b"1"), end=END, before=b"x"))
    put(tmp_path, "2.changelog", V2 + rows((b"\2\0b", b"2"), end=END, before=b"x"))
    with LocalStorage(str(tmp_path)) as partition:
        assert rocksdb_files.read_rows(partition, Named(2), "lz4", "ours", LIMIT) == {b"a": b"1", b"b": b"2"}
        (tmp_path / "1.zip").unlink()
        with pytest.raises(NotFoundError, match="purged"):
            rocksdb_files.read_rows(partition, Named(2), "lz4", "ours", LIMIT)
        assert len(rocksdb_files.read_rows(partition, Named(2), "lz4", None, LIMIT)) == 2


def test_what_is_cut_or_altered_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    """Any byte of a file may be anything: the answer is right, or a CorruptionError, in bounded memory."""
    plain = rows((KEY, VALUE), (b"b", None), (b"c", VALUE * 3))
    whole, chance = lz4_blocks(plain), random.Random(5)
    right: dict[bytes, bytes] = {}
    RowStream(decompressed(memoryview(whole), "lz4", 1 << 20, "f"), "f", LIMIT).apply_to(right)
    assert right == {KEY: VALUE, b"c": VALUE * 3}
    for turn in range(1500):
        data = bytearray(whole)
        if turn % 2:
            data = data[: chance.randrange(len(data))]
        else:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        found: dict[bytes, bytes] = {}
        try:
            RowStream(decompressed(memoryview(data), "lz4", 1 << 20, "f"), "f", LIMIT).apply_to(found)
        except CorruptionError:
            continue
        assert found == right, turn
    for turn in range(1500):
        data = bytearray(plain if turn % 3 else V2 + plain)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        for read in (RowStream.apply_to, RowStream.apply_changelog_to):
            try:
                read(RowStream(bytes(data), "f", LIMIT), {})
            except CorruptionError:
                continue


def test_a_stream_that_claims_too_much_is_not_unpacked() -> None:
    """A block says how large it is when unpacked; so does a file that is one block after the other."""
    bomb = struct.pack("<8sBiii", b"LZ4Block", 0x25, 4, (32 << 20) + 1, 0) + bytes(4)
    with pytest.raises(CorruptionError, match="LZ4 blocks"):
        decompressed(memoryview(bomb), "lz4", 1 << 30, "f")
    with pytest.raises(CorruptionError, match="more than"):
        decompressed(memoryview(lz4_blocks(bytes(4096))), "lz4", 4095, "f")


def test_many_files_or_rows_are_too_much_together(tmp_path: Path) -> None:
    """Each file is small enough; their rows together, or the Python objects of many tiny ones, are not."""
    for number in range(1, 5):
        put(tmp_path, f"{number}.delta", rows((b"%d" % number, bytes(400))))
    with LocalStorage(str(tmp_path)) as partition:
        assert len(row_streams.read_rows(partition, Named(2), "lz4", 1000)) == 2
        with pytest.raises(CorruptionError, match="more than"):
            row_streams.read_rows(partition, Named(4), "lz4", 1000)
    tiny = rows(*((b"%d" % number, b"") for number in range(100)))
    assert len(tiny) < 4000
    with pytest.raises(CorruptionError, match="more than"):
        RowStream(tiny, "f", 4000).apply_to({})


def test_partitions_side_by_side_are_small(tmp_path: Path) -> None:
    """A large partition is read again, with no other large one: hostile state takes the memory of one, not of all."""
    large, limits, at_once = {3, 4, 5, 9}, [], []

    def read(_location: object, _operator: int, partition: int, *, family: str, limit_bytes: int) -> dict[bytes, bytes]:
        limits.append(limit_bytes)
        if limit_bytes == PART_BYTES_MAX and partition in large:
            raise CorruptionError("more than Spark would have stored")
        if limit_bytes > PART_BYTES_MAX:
            at_once.append(partition)
            time.sleep(0.01)
            assert at_once.pop() == partition
            assert not at_once
        return {}

    operator = StateOperator(0, STATE_VARIABLES, 16, (POINTER_VARIABLE,))
    stores: Any = SimpleNamespace(read=read)
    with LocalStorage(str(tmp_path)) as location, ThreadPoolExecutor(16) as threads, ThreadPoolExecutor(2) as callers:
        args = location, stores, operator, StateOperators(location), threads
        found = list(callers.map(lambda _: read_pointers(*args), range(2)))
        assert found == [[], []]
        assert limits.count(FILE_BYTES_MAX) == 2 * len(large)
        assert limits.count(PART_BYTES_MAX) == 2 * operator.partitions
        limits.clear()
        read_pointers(*args, partitions=[3])  # as a look-up does
        assert limits == [PART_BYTES_MAX, FILE_BYTES_MAX]


def test_a_look_up_waits_for_nobody(tmp_path: Path) -> None:
    """While a large partition is read, slowly, look-ups in small ones go on, and few others are kept in memory."""
    begun, released, small = threading.Event(), threading.Event(), []

    def read(_location: object, _operator: int, partition: int, *, family: str, limit_bytes: int) -> dict[bytes, bytes]:
        if partition:
            small.append(partition)
        elif limit_bytes == PART_BYTES_MAX:
            raise CorruptionError("more than Spark would have stored")
        else:
            begun.set()
            assert released.wait(10)
        return {}

    operator = StateOperator(0, STATE_VARIABLES, 200, (POINTER_VARIABLE,))
    stores: Any = SimpleNamespace(read=read)
    with LocalStorage(str(tmp_path)) as location, ThreadPoolExecutor(16) as threads, ThreadPoolExecutor(2) as callers:
        args = location, stores, operator, StateOperators(location), threads
        slow = callers.submit(read_pointers, *args)
        assert begun.wait(10)
        try:
            assert callers.submit(read_pointers, *args, partitions=[7]).result(timeout=5) == []
            time.sleep(0.05)
            assert len(small) <= 20
        finally:
            released.set()
        assert slow.result() == []
        assert len(small) == 200


def test_a_database_that_grows_when_read_is_refused(tmp_path: Path) -> None:
    """Tables are compressed, and metadata may name one a thousand times: neither fills memory or the disk."""
    database(tmp_path, "1", {b"%d" % n: bytes(1000) for n in range(100)}, {})
    with LocalStorage(str(tmp_path)) as partition:
        assert len(rocksdb_files.read_rows(partition, Named(1), "lz4", None, LIMIT)) == 100
        stored_bytes = max(path.stat().st_size for path in tmp_path.rglob("*.*"))
        assert stored_bytes < 50_000
        with pytest.raises(CorruptionError, match="more than"):
            rocksdb_files.read_rows(partition, Named(1), "lz4", None, 50_000)
    with zipfile.ZipFile(tmp_path / "1.zip") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    metadata = json.loads(content["metadata"].removeprefix(b"v1\n"))
    metadata["sstFiles"] += [{**metadata["sstFiles"][0], "localFileName": "900000.sst"}]
    content["metadata"] = b"v1\n" + json.dumps(metadata).encode()
    with zipfile.ZipFile(tmp_path / "1.zip", "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with LocalStorage(str(tmp_path)) as partition, pytest.raises(CorruptionError, match="twice"):
        rocksdb_files.read_rows(partition, Named(1), "lz4", None, LIMIT)


@pytest.mark.parametrize("kind", ["CURRENT", ".sst", "settings"])
def test_a_full_disk_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What an archive has, the tables beside it, and the settings that rocksdict writes even to read.

    `holdfast get` ended with a traceback.
    """
    database(tmp_path, "1", {b"\2\0a": b"1"}, {"ours": 2})
    opened = os.open

    def open_while_there_is_room(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_CREAT and str(path).endswith(kind):
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, flags, *arguments, **options)

    def opened_without_room(*arguments: Any) -> Rdict:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            return Rdict(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    if kind == "settings":
        monkeypatch.setattr(rocksdb_files, "Rdict", opened_without_room)
    else:
        monkeypatch.setattr(os, "open", open_while_there_is_room)
    with (
        LocalStorage(str(tmp_path)) as partition,
        pytest.raises(UnavailableError, match=r"no space left.*SPARK_LOCAL_DIRS"),
    ):
        rocksdb_files.read_rows(partition, Named(1), "lz4", "ours", LIMIT)


@pytest.mark.parametrize(
    "metadata",
    [
        "v2\n{}",
        "v1\n[]",
        'v1\n{"sstFiles": 5}',
        'v1\n{"sstFiles": [{"localFileName": "../x.sst", "dfsSstFileName": "a.sst"}]}',
        'v1\n{"sstFiles": [{"localFileName": "000001.sst", "dfsSstFileName": "../../a.sst"}]}',
        'v1\n{"sstFiles": [], "columnFamilyMapping": {"a": -1}}',
        'v1\n{"sstFiles": [], "columnFamilyMapping": []}',
        'v1\n{"sstFiles": []}',
    ],
)
def test_a_hostile_archive_writes_nowhere_and_is_refused(tmp_path: Path, metadata: str) -> None:
    """No name in an archive leads out of the temporary folder, and one that is no database is none."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("../../../outside", "x")
        archive.writestr("MANIFEST-../../outside", "x")
        archive.writestr("CURRENT", "MANIFEST-000001\n")
        archive.writestr("metadata", metadata)
    (tmp_path / "partition").mkdir()
    (tmp_path / "partition/1.zip").write_bytes(data.getvalue())
    with LocalStorage(str(tmp_path / "partition")) as partition, pytest.raises(CorruptionError):
        rocksdb_files.read_rows(partition, Named(1), "lz4", "ours", LIMIT)
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_cannot_be_unpacked_is_refused(tmp_path: Path, method: int) -> None:
    """Spark deflates; what somebody else has put there may be packed in any way, and each has its own error."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        archive.writestr("CURRENT", bytes(range(256)) * 4)
    packed = bytearray(data.getvalue())
    packed[50:58] = b"\xff" * 8  # behind the entry's header, and that of LZMA
    (tmp_path / "1.zip").write_bytes(packed)
    with LocalStorage(str(tmp_path)) as partition, pytest.raises(CorruptionError, match="not a database that Spark"):
        rocksdb_files.read_rows(partition, Named(1), "lz4", "ours", LIMIT)


def test_rows_that_point_outside_of_themselves_are_refused() -> None:
    for offset, size in ((8, 1), (15, 1), (100, 1), (16, 5), (16, 2**31), (2**31, 4), (0, 0)):
        with pytest.raises(CorruptionError, match="outside"):
            first_binary(bytes(8) + struct.pack("<II", size, offset) + b"abcd", "f")
    with pytest.raises(CorruptionError, match="too short"):
        first_binary(bytes(15), "f")


def test_ids_of_state_that_name_other_files_are_refused() -> None:
    with pytest.raises(CorruptionError):
        StateStores.of(LoggedBatch("v1", '{"conf":{}}', (), 3, 0, {"0": [["../../x"]]}), "file:///query")


STORE = "spark.sql.streaming.stateStore."
ROCKSDB = {"providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"}
PLAIN = bytes(range(256)) * 3 + bytes(1000) + b"the same again, the same again"


def snappy(plain: bytes, size: int = 700) -> bytes:
    found = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    for start in range(0, len(plain), size):
        block = pa.compress(plain[start : start + size], "snappy", asbytes=True)
        found += struct.pack(">i", len(block)) + block
    return found


def lzf(plain: bytes) -> bytes:
    """Return a chunk as it is; one of literals, and of copies near, long, and of themselves."""
    assert plain[-1030:-30] == bytes(1000)
    begin, text = plain[:-1030], plain[-30:]
    found = b"ZV\0" + struct.pack(">H", len(begin)) + begin
    copies = b"\0\0" + b"".join(b"\xe0" + bytes([size - 9, 0]) for size in (264, 264, 264)) + b"\xe0\xc6\0"
    literals = bytes([len(text[:16]) - 1]) + text[:16]
    again = bytes([0xE0, 14 - 9, 15])
    chunk = copies + literals + again
    return found + b"ZV\1" + struct.pack(">HH", len(chunk), 1030) + chunk


@pytest.mark.parametrize(("codec", "stream"), [("snappy", snappy(PLAIN)), ("lzf", lzf(PLAIN))])
def test_a_stream_of_each_codec_is_what_it_holds_or_an_error(codec: str, stream: bytes) -> None:
    """Any byte may be anything; neither codec has checksums, so a byte of what is stored may differ."""
    assert decompressed(memoryview(stream), codec, LIMIT, "f") == PLAIN
    assert decompressed(memoryview(stream[:0] if codec == "lzf" else stream[:16]), codec, LIMIT, "f") == b""
    with pytest.raises(CorruptionError, match="more than"):
        decompressed(memoryview(stream), codec, len(PLAIN) - 1, "f")
    with pytest.raises(CorruptionError):
        decompressed(memoryview(stream[:-1]), codec, LIMIT, "f")
    chance = random.Random(3)
    for _ in range(1000):
        damaged = bytearray(stream)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        try:
            decompressed(memoryview(damaged), codec, LIMIT, "f")
        except CorruptionError:
            continue


def test_a_block_of_snappy_that_claims_too_much_is_not_unpacked() -> None:
    stream = b"\x82SNAPPY\0" + struct.pack(">iii", 1, 1, 5) + b"\xff\xff\xff\xff\x0f"
    with pytest.raises(CorruptionError, match="too large"):
        decompressed(memoryview(stream), "snappy", 1 << 40, "f")


def summed(key: bytes, value: bytes, *, is_sized: bool = False) -> bytes:
    size = struct.pack("<i", len(value)) if is_sized else b""
    return struct.pack("<I", crc_32c(key + value)) + size + value


def read_summed(partition: LocalStorage, version: int) -> Mapping[bytes, bytes]:
    return row_streams.read_rows(partition, Named(version), "lz4", LIMIT, has_checksums=True)


def test_checksums_of_rows_are_verified(tmp_path: Path) -> None:
    """Of values, with their keys, and of deleted keys; damage is an error, and no row of another value."""
    assert crc_32c(b"123456789") == 0xE3069283
    kept, gone = summed(b"a", b"1"), summed(b"b", b"2")
    put(tmp_path, "1.delta", rows((b"a", kept), (b"b", gone)))
    put(tmp_path, "2.delta", rows((summed(b"", b"b"), None)))
    put(tmp_path, "3.delta", rows((b"c", kept)))
    put(tmp_path, "4.delta", rows((summed(b"", b"b")[::-1], None)))
    put(tmp_path, "5.delta", rows((b"d", b"123")))
    with LocalStorage(str(tmp_path)) as partition:
        read = partial(read_summed, partition)
        assert read(1) == {b"a": b"1", b"b": b"2"}
        assert read(2) == {b"a": b"1"}
        for version in (3, 4, 5):
            with pytest.raises(CorruptionError, match="checksum does not match"):
                read(version)


def test_checksums_of_rows_on_rocksdb_are_of_whole_keys(tmp_path: Path) -> None:
    """With the number of the family; rows of other families, which may hold several values, are left alone."""
    key, other = b"\2\0a", b"\2\0b"
    families = {"ours": 2, "lists": 3}
    database(tmp_path, "1", {key: summed(key, b"1", is_sized=True), b"\3\0z": b"several,several"}, families)
    changes = rows((other, summed(other, b"2", is_sized=True)), (summed(b"", key), None), end=END, before=b"x")
    put(tmp_path, "2.changelog", V2 + changes)
    put(tmp_path, "3.changelog", V2 + rows((other, summed(other, b"3")), end=END, before=b"x"))
    with LocalStorage(str(tmp_path)) as partition:
        arguments = "lz4", "ours", LIMIT
        assert rocksdb_files.read_rows(partition, Named(1), *arguments, has_checksums=True) == {b"a": b"1"}
        assert rocksdb_files.read_rows(partition, Named(2), *arguments, has_checksums=True) == {b"b": b"2"}
        with pytest.raises(CorruptionError, match="checksum does not match"):
            rocksdb_files.read_rows(partition, Named(3), *arguments, has_checksums=True)


@pytest.mark.parametrize(
    ("row", "found"),
    [(b"\0\0\2\6abc", b"abc"), (b"\1\0\2\xc8\1" + bytes(100), bytes(100)), (b"\0\0\2\0", b""), (b"\0\0\0", None)],
)
def test_the_binary_of_a_row_of_avro(row: bytes, found: bytes | None) -> None:
    assert avro_binary(row, "f") == found


@pytest.mark.parametrize("rest", [b"", b"\2", b"\4\6abc", b"\2\6ab", b"\2\5ab", b"\2" + b"\xff" * 9])
def test_rows_that_are_not_avros_are_refused(rest: bytes) -> None:
    with pytest.raises(CorruptionError):
        avro_binary(b"\0\0" + rest, "f")


def stores(**pinned: str) -> StateStores:
    conf = {f"{STORE}{name.replace('_', '.')}": value for name, value in pinned.items()}
    return StateStores.of(LoggedBatch("v1", json.dumps({"conf": conf}), (), 3, 0), "file:///query")


@pytest.mark.parametrize("codec", ["zstd", "LZF", "org.apache.spark.io.SnappyCompressionCodec"])
def test_codecs_have_the_names_that_spark_takes(codec: str) -> None:
    assert stores(compression_codec=codec).codec in codec.lower()


def test_the_store_of_files_has_no_avro() -> None:
    assert not stores(encodingFormat="avro").is_avro
    assert stores(encodingFormat="avro", **ROCKSDB).is_avro


@pytest.mark.parametrize(
    ("pinned", "says"),
    [
        ({"providerClass": "com.example.Provider"}, "com.example"),
        ({"compression_codec": "com.example.Codec"}, "com.example"),
        (ROCKSDB | {"encodingFormat": "protobuf"}, "encodingFormat=protobuf"),
    ],
)
def test_what_is_not_known_is_said_before_anything_is_read(pinned: Mapping[str, str], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"Spark's own state stores.*{says}.*location=file:///query"):
        stores(**pinned)
