"""What a query may set for Spark's state: codecs, checksums of rows, and Avro."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.errors import CorruptionError
from holdfast.snapshotter.storage.local import LocalStorage
from holdfast.spark_integration.spark_state import rocksdb_files, row_streams
from holdfast.spark_integration.spark_state.operators import NotKnownError
from holdfast.spark_integration.spark_state.pointers import StateStores
from holdfast.spark_integration.spark_state.query_location import LoggedBatch
from holdfast.spark_integration.spark_state.row_streams import Named, avro_binary, crc_32c, decompressed
from tests.unit.spark_integration.spark_state.test_state_files import END, V2, database, put, rows

STORE = "spark.sql.streaming.stateStore."
ROCKSDB = {"providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"}
LIMIT = 1 << 20
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
    [
        (b"\0\0\2\6abc", b"abc"),
        (b"\1\0\2\xc8\1" + bytes(100), bytes(100)),
        (b"\0\0\2\0", b""),
        (b"\0\0\0", None),
    ],
)
def test_the_binary_of_a_row_of_avro(row: bytes, found: bytes | None) -> None:
    assert avro_binary(row, "f") == found


@pytest.mark.parametrize("rest", [b"", b"\2", b"\4\6abc", b"\2\6ab", b"\2\5ab", b"\2" + b"\xff" * 9])
def test_rows_that_are_not_avros_are_refused(rest: bytes) -> None:
    with pytest.raises(CorruptionError):
        avro_binary(b"\0\0" + rest, "f")


def stores(**pinned: str) -> StateStores:
    conf = {f"{STORE}{name.replace('_', '.')}": value for name, value in pinned.items()}
    return StateStores.of(LoggedBatch(3, "v1", json.dumps({"conf": conf}), (), 0))


@pytest.mark.parametrize("codec", ["zstd", "LZF", "org.apache.spark.io.SnappyCompressionCodec"])
def test_codecs_have_the_names_that_spark_takes(codec: str) -> None:
    assert stores(compression_codec=codec).codec in codec.lower()


def test_the_store_of_files_has_no_avro() -> None:
    """It takes no notice of the setting."""
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
    """So that Spark's own reader is used, instead of a guess."""
    with pytest.raises(NotKnownError, match=says):
        stores(**pinned)
