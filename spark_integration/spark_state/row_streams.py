"""Row streams of Spark's state stores: all rows of a version, or its changes.

::

    row         key size, key, value size, value       sizes: 4 bytes, big endian; -1 for a deleted row, without value
    end         a key size of -1

    changelog of RocksDB, by format
        v1      rows
        v2      "v2" ‖ rows, each after a byte with its kind; 0 is the end
        v3      "v3" ‖ lineage ‖ rows as in v1             if state stores have ids: the preceding versions
        v4      "v4" ‖ lineage ‖ rows as in v2

Texts are Java's: 2 bytes for their size, then UTF-8.

If a query sets ``stateStore.rowChecksum.enabled``, the CRC-32C of key and value, 4 bytes, precedes the value, on
RocksDB followed by the value's size. A deleted row's key is preceded by the key's CRC-32C. Both are little endian.

Source: Spark 4.3's ``HDFSBackedStateStoreProvider``, ``StateStoreChangelog`` and ``KeyValueChecksumEncoder``.

The streams are compressed. ``lz4``, the default, is the format of lz4-java, not of LZ4 frames; integers are little
endian::

    "LZ4Block"   method + level   compressed   plain    checksum         data
     8 bytes      1                4 bytes      4        4                …
                  0x1. plain, 0x2. LZ4                   XXH32 of the plain bytes, seed 0x9747b28c, 28 bits

A block with no plain bytes ends the stream. ``snappy`` is the format of snappy-java, ``lzf`` of compress-lzf; both are
big endian::

    0x82 "SNAPPY" 0   versions      compressed   data   compressed   data …
     8 bytes           8             4            …

    "ZV" 0   plain   data …         "ZV" 1   compressed   plain   data …
     3        2       …              3        2            2       …

Spark's default state store, ``HDFSBackedStateStoreProvider``, stores changes, and all rows of a version, in files::

    state/0/3/                operator 0, partition 3
        7.delta               the changes of micro-batch 6
        8.delta
        6.snapshot            all rows of version 6

Version 8 is the newest snapshot up to 8 with all later changes applied; each file is a stream of the codec that Spark
pinned.

A key or value is Spark's ``UnsafeRow``::

    null bits           8 bytes per 64 columns; column i is bit i
    columns             8 bytes each: a number, or the place of bytes: offset << 32 | size, from the row's start
    bytes               strings, binaries, and structs, which are rows

All integers are little endian.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import lz4.block
import pyarrow as pa
import xxhash

from holdfast.errors import CorruptionError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage

_WORD = 8
LZ4, ZSTD, SNAPPY, LZF = "lz4", "zstd", "snappy", "lzf"
#: Codecs that can be read, and codecs that can also be written.
CODECS, WRITTEN_CODECS = frozenset({LZ4, ZSTD, SNAPPY, LZF}), frozenset({LZ4, ZSTD})
_MAGIC = b"LZ4Block"
_HEADER = struct.Struct("<8sBiii")
_PLAIN_METHOD, _LZ4_METHOD = 0x10, 0x20
_SEED, _CHECKSUM_BITS = 0x9747B28C, 0x0FFFFFFF
#: The largest block of lz4-java.
_BLOCK_BYTES_MAX = 32 << 20
# Spark's default of spark.io.compression.lz4.blockSize; the level encodes the block size for readers.
_BLOCK_BYTES, _LEVEL = 32 << 10, 5
_PIECE_BYTES = 1 << 20
_SNAPPY_BEGIN, _SNAPPY_VERSIONS_BYTES = b"\x82SNAPPY\0", 8
_LZF_BEGIN, _LZF_PLAIN, _LZF_LITERALS, _LZF_LONG = b"ZV", 0, 32, 7
_VARINT_BYTES_MAX, _VARINT_GOES_ON = 5, 0x80
_SCHEMA_ID_BYTES = 2
_AVRO_PRESENT = 2  # 1, as Avro encodes numbers
#: The header of a value with a checksum: in files, and on RocksDB, which adds the value's size.
CHECKSUM, SIZED_CHECKSUM = struct.Struct("<I"), struct.Struct("<Ii")
_CRC_32C = 0x82F63B78
#: Keys and values as a store holds them.
Rows = dict[bytes, bytes]
_SIZE, _TEXT_SIZE = struct.Struct(">i"), struct.Struct(">H")
#: Bytes of a pointer and its key; also the least memory of a Python row.
ROW_BYTES = 200
_NONE = -1
_END, _PUT, _DELETE = 0x00, 0x01, 0x10
_UNIQUE_ID = re.compile(r"[0-9A-Za-z-]{1,64}")


def first_binary(row: bytes, source: str) -> bytes | None:
    """Return a row's first column, binary or null. Raises `CorruptionError` that names `source`."""
    fixed_bytes = 2 * _WORD
    if len(row) < fixed_bytes:
        raise CorruptionError(f"{source} holds a row that is too short", size_bytes=len(row), columns=1)
    if row[0] & 1:
        return None
    size, offset = struct.unpack_from("<II", row, _WORD)
    if offset < fixed_bytes or offset + size > len(row):
        raise CorruptionError(f"{source} holds a row whose bytes are outside it", column=0)
    return row[offset : offset + size]


def unsafe_row(*columns: int | bytes) -> bytes:
    """Return a row without nulls, given bytes and signed 64-bit or unsigned 32-bit ints."""
    fixed, following = bytearray(-(-len(columns) // 64) * _WORD), bytearray()
    begin = len(fixed) + len(columns) * _WORD
    for column in columns:
        if isinstance(column, int):
            fixed += struct.pack("<q", column)
        else:
            fixed += struct.pack("<II", len(column), begin + len(following))
            following += column + bytes(-len(column) % _WORD)
    return bytes(fixed + following)


def read_rows(
    partition: ObjectStorage, at: Named, codec: str, limit_bytes: int, *, has_checksums: bool = False
) -> Rows:
    """Return the rows of a version, with its checksums verified; `limit_bytes` bounds each file and all rows."""
    found = {info.key for info in partition.list("")}
    first = at.version
    while first > 0 and f"{first}.snapshot" not in found and f"{first}.delta" in found:
        first -= 1
    rows: Rows = {}
    names = [f"{number}.delta" for number in range(first + 1, at.version + 1)]
    for name in [f"{first}.snapshot", *names] if first > 0 else names:
        stream_of(partition, name, codec, limit_bytes, has_checksums=has_checksums).apply_to(rows)
        require_few(rows, limit_bytes, partition.url)
    return verified(rows, CHECKSUM, partition.url) if has_checksums else rows


def stream_of(
    partition: ObjectStorage, name: str, codec: str, limit_bytes: int, *, has_checksums: bool = False
) -> RowStream:
    """Return a file's content. Raises `NotFoundError` if Spark has purged the file."""
    source = f"{partition.url}/{name}"
    try:
        data = partition.get(name, limit_bytes)
    except NotFoundError as exc:
        raise NotFoundError("Spark has purged this version of its state, or has not made it", file=source) from exc
    plain = decompressed(data, codec, limit_bytes, source)
    return RowStream(plain, source, limit_bytes, has_checksums=has_checksums)


def decompressed(data: memoryview, codec: str, limit_bytes: int, source: str) -> bytes:
    """Decompress a stream. Raises `CorruptionError` that names `source`."""
    found = bytearray()
    for piece in _PIECES[codec](data, source):
        found += piece
        if len(found) > limit_bytes:
            raise too_much(source, limit_bytes=limit_bytes)
    return bytes(found)


def compressed(data: bytes, codec: str) -> bytes:
    """Compress bytes to a stream; the codec is one of `WRITTEN_CODECS`."""
    if codec == ZSTD:
        stream: bytes = pa.compress(data, codec, asbytes=True)
        return stream
    found = bytearray()
    for start in range(0, len(data), _BLOCK_BYTES):
        plain = data[start : start + _BLOCK_BYTES]
        method, block = _LZ4_METHOD, lz4.block.compress(plain, store_size=False)
        if len(block) >= len(plain):
            method, block = _PLAIN_METHOD, plain
        checksum = xxhash.xxh32_intdigest(plain, _SEED) & _CHECKSUM_BITS
        found += _HEADER.pack(_MAGIC, method | _LEVEL, len(block), len(plain), checksum) + block
    return bytes(found + _HEADER.pack(_MAGIC, _PLAIN_METHOD | _LEVEL, 0, 0, 0))


def _lz4_blocks(data: memoryview, source: str) -> Iterator[bytes]:
    at = 0
    while True:
        if len(data) - at < _HEADER.size:
            raise CorruptionError(f"{source} is cut off", size_bytes=len(data))
        magic, token, size, plain_size, checksum = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        method = token & 0xF0
        if magic != _MAGIC or not (0 <= size <= len(data) - at and 0 <= plain_size <= _BLOCK_BYTES_MAX):
            raise CorruptionError(f"{source} is not a stream of LZ4 blocks, or is cut off", offset=at)
        if plain_size == 0:
            return
        block = data[at : at + size]
        at += size
        try:
            plain = bytes(block) if method == _PLAIN_METHOD else lz4.block.decompress(block, plain_size)
        except lz4.block.LZ4BlockError as exc:
            raise CorruptionError(f"{source} has a damaged block: {exc}", offset=at) from exc
        if len(plain) != plain_size or xxhash.xxh32_intdigest(plain, _SEED) & _CHECKSUM_BITS != checksum:
            raise CorruptionError(f"{source} has a damaged block: its checksum does not match", offset=at)
        yield plain


def _zstd_pieces(data: memoryview, source: str) -> Iterator[bytes]:
    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), ZSTD) as stream:
            while piece := stream.read(_PIECE_BYTES):
                yield piece
    except (OSError, pa.ArrowException) as exc:
        raise CorruptionError(f"{source} is not a zstd stream, or is cut off: {exc}") from exc


def _snappy_blocks(data: memoryview, source: str) -> Iterator[bytes]:
    if bytes(data[: len(_SNAPPY_BEGIN)]) != _SNAPPY_BEGIN:
        raise CorruptionError(f"{source} is not a snappy-java stream", size_bytes=len(data))
    stream = RowStream(bytes(data[len(_SNAPPY_BEGIN) + _SNAPPY_VERSIONS_BYTES :]), source, 0)
    while not stream.is_at_end():
        block = stream.sized()
        plain_size, _ = _varint(block, 0, source)
        if plain_size > _BLOCK_BYTES_MAX:
            raise CorruptionError(f"{source} has a block that is too large", size_bytes=plain_size)
        try:
            yield pa.decompress(block, plain_size, SNAPPY, asbytes=True)
        except (OSError, pa.ArrowException) as exc:
            raise CorruptionError(f"{source} has a damaged block: {exc}") from exc


def _lzf_chunks(data: memoryview, source: str) -> Iterator[bytes]:
    at, data = 0, memoryview(bytes(data))
    try:
        while at < len(data):
            if data[at : at + 2] != _LZF_BEGIN:
                raise CorruptionError(f"{source} is not a stream of LZF chunks, or is cut off", offset=at)
            kind, (size,) = data[at + 2], _TEXT_SIZE.unpack_from(data, at + 3)
            begin = at + 5 if kind == _LZF_PLAIN else at + 7
            plain_size = size if kind == _LZF_PLAIN else _TEXT_SIZE.unpack_from(data, at + 5)[0]
            chunk = bytes(data[begin : begin + size])
            plain = chunk if kind == _LZF_PLAIN else _lzf_plain(chunk)
            if len(chunk) != size or len(plain) != plain_size:
                raise CorruptionError(f"{source} has a damaged chunk, or is cut off", offset=at)
            yield plain
            at = begin + size
    except (IndexError, struct.error) as exc:
        raise CorruptionError(f"{source} has a damaged chunk, or is cut off", offset=at) from exc


def _lzf_plain(chunk: bytes) -> bytes:
    """Expand literals and back references. Raises `IndexError` if the chunk is damaged."""
    found, at = bytearray(), 0
    while at < len(chunk):
        token = chunk[at]
        at += 1
        if token < _LZF_LITERALS:
            found += chunk[at : at + token + 1]
            at += token + 1
            continue
        size = token >> 5
        if size == _LZF_LONG:
            size += chunk[at]
            at += 1
        begin = len(found) - ((token & 0x1F) << 8 | chunk[at]) - 1
        at += 1
        if begin < 0:
            raise IndexError("it copies bytes before its start")
        for place in range(begin, begin + size + 2):  # a copy may overlap its source
            found.append(found[place])
    return bytes(found)


_PIECES: Mapping[str, Callable[[memoryview, str], Iterator[bytes]]] = {
    LZ4: _lz4_blocks,
    ZSTD: _zstd_pieces,
    SNAPPY: _snappy_blocks,
    LZF: _lzf_chunks,
}


def _varint(data: bytes, at: int, source: str) -> tuple[int, int]:
    """Return a number encoded in 7 bits per byte, lowest first, and its end."""
    number = 0
    for place, byte in enumerate(data[at : at + _VARINT_BYTES_MAX]):
        number |= (byte & 0x7F) << 7 * place
        if byte < _VARINT_GOES_ON:
            return number, at + place + 1
    raise CorruptionError(f"{source} is cut off, or damaged", offset=at)


def avro_binary(row: bytes, source: str) -> bytes | None:
    """Return the first column of an Avro row, whose schema never changes. Raises `CorruptionError`."""
    branch, at = _varint(row, _SCHEMA_ID_BYTES, source)
    if branch == 0:
        return None
    twice_size, at = _varint(row, at, source)
    size = twice_size >> 1
    if branch != _AVRO_PRESENT or twice_size & 1 or size > len(row) - at:
        raise CorruptionError(f"{source} holds a row that is not encoded in Avro", size_bytes=len(row))
    return row[at : at + size]


@cache
def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [number >> 1 ^ (_CRC_32C if number & 1 else 0) for number in table]
    return table


def crc_32c(data: bytes) -> int:
    """Return the CRC-32C of bytes, at 60 ns per byte; rows with checksums are rare."""
    table, found = _crc_table(), 0xFFFFFFFF
    for byte in data:
        found = found >> 8 ^ table[(found ^ byte) & 0xFF]
    return found ^ 0xFFFFFFFF


def verified(rows: Rows, before: struct.Struct, source: str) -> Rows:
    """Verify and strip the checksums of rows. Raises `CorruptionError` that names `source`."""
    return {key: _verified(value, before, key, source) for key, value in rows.items()}


def _verified(data: bytes, before: struct.Struct, key: bytes, source: str) -> bytes:
    plain = data[before.size :]
    if len(data) >= before.size:
        checksum, *size = before.unpack_from(data)
        if size in ([], [len(plain)]) and crc_32c(key + plain) == checksum:
            return plain
    raise CorruptionError(f"{source} has a damaged row: its checksum does not match", size_bytes=len(data))


class Named(NamedTuple):
    """A version of a store, with the id of the attempt that wrote it, if any."""

    version: int
    unique_id: str | None = None

    def __str__(self) -> str:
        return f"{self.version}" if self.unique_id is None else f"{self.version}_{self.unique_id}"


def stream_of_rows(rows: Rows) -> bytes:
    """Return the uncompressed file that puts these rows: a snapshot, or changes to an empty store."""
    found = bytearray()
    for row in rows.items():
        for part in row:
            found += _SIZE.pack(len(part)) + part
    return bytes(found + _SIZE.pack(_NONE))


class RowStream:
    """Reads an uncompressed file, named `source` in errors; verifies the checksums of deleted rows."""

    def __init__(self, data: bytes, source: str, limit_bytes: int, *, has_checksums: bool = False) -> None:
        self._data, self._at, self._source = memoryview(data), 0, source
        self._rows_max = limit_bytes // ROW_BYTES
        self._has_checksums = has_checksums

    def apply_to(self, rows: Rows) -> None:
        """Apply all rows of the file to `rows`. Raises `CorruptionError`."""
        while (size := self._size()) != _NONE:
            self._apply_row(rows, self._bytes(size))

    def apply_changelog_to(self, rows: Rows) -> None:
        """Apply a changelog of any format to `rows`. Raises `CorruptionError`."""
        number, _ = self._head()
        if number in (1, 3):
            self.apply_to(rows)
            return
        while (kind := self._bytes(1)[0]) != _END:
            if kind not in (_PUT, _DELETE):  # pointers are put, never appended to
                raise CorruptionError(
                    f"{self._source} holds a record that is neither a put nor a delete", kind=kind, offset=self._at
                )
            self._apply_row(rows, self.sized())

    def is_at_end(self) -> bool:
        """Return whether all bytes are read."""
        return self._at == len(self._data)

    def sized(self) -> bytes:
        """Read length-prefixed bytes. Raises `CorruptionError`."""
        return self._bytes(self._size())

    def lineage(self) -> list[Named]:
        """Return the versions listed in a changelog's header. Raises `CorruptionError`."""
        return self._head()[1]

    def _apply_row(self, rows: Rows, key: bytes) -> None:
        size = self._size()
        if size == _NONE:
            rows.pop(_verified(key, CHECKSUM, b"", self._source) if self._has_checksums else key, None)
        else:
            rows[key] = self._bytes(size)
            if len(rows) > self._rows_max:
                raise too_much(self._source, rows=len(rows))

    def _head(self) -> tuple[int, list[Named]]:
        """Return a changelog's format number, and its lineage or an empty list."""
        begin = bytes(self._data[:4])
        if begin not in (b"\0\2v2", b"\0\2v3", b"\0\2v4"):
            return 1, []
        self._at = len(begin)
        number = int(begin[3:])
        return number, [] if number == 2 else self._read_lineage()

    def _read_lineage(self) -> list[Named]:
        text = self._bytes(_TEXT_SIZE.unpack(self._bytes(_TEXT_SIZE.size))[0])
        try:
            found = [Named(one["version"], checked_unique_id(one["checkpointUniqueId"])) for one in json.loads(text)]
            if any(type(one.version) is not int or one.version < 0 for one in found):
                raise ValueError("not the number of a version")
            return found
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise CorruptionError(f"{self._source} names no versions before its own") from exc

    def _size(self) -> int:
        return int(_SIZE.unpack(self._bytes(_SIZE.size))[0])

    def _bytes(self, size: int) -> bytes:
        if not 0 <= size <= len(self._data) - self._at:
            raise CorruptionError(f"{self._source} is cut off, or damaged", offset=self._at, size_bytes=size)
        self._at += size
        return bytes(self._data[self._at - size : self._at])


def require_few(rows: Rows, limit_bytes: int, source: str) -> None:
    """Raise `CorruptionError` if a version's rows exceed `limit_bytes`."""
    size_bytes = sum(len(key) + len(value) for key, value in rows.items())
    if size_bytes > limit_bytes:
        raise too_much(source, limit_bytes=limit_bytes)


def too_much(source: str, **facts: int) -> CorruptionError:
    return CorruptionError(f"{source} holds more than Spark stores there", **facts)


def checked_unique_id(unique_id: object) -> str:
    """Return an id that is safe in a file name. Raises `ValueError` for anything else."""
    if not isinstance(unique_id, str) or not _UNIQUE_ID.fullmatch(unique_id):
        raise ValueError("not the id of a version")
    return unique_id
