"""The compressed streams of Spark's state store files, read and written.

``lz4``, the default, is the format of lz4-java, not that of LZ4 frames; integers are little endian::

    "LZ4Block"   method + level   compressed   plain    checksum         data
     8 bytes      1                4 bytes      4        4                …
                  0x1. plain, 0x2. LZ4                   XXH32 of the plain bytes, seed 0x9747b28c, 28 bits

A block with no plain bytes ends the stream.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import lz4.block
import pyarrow as pa
import xxhash

from holdfast.errors import CorruptionError

LZ4, ZSTD = "lz4", "zstd"
#: Those that are known here.
CODECS = frozenset({LZ4, ZSTD})
_MAGIC = b"LZ4Block"
_HEADER = struct.Struct("<8sBiii")
_PLAIN_METHOD, _LZ4_METHOD = 0x10, 0x20
_SEED, _CHECKSUM_BITS = 0x9747B28C, 0x0FFFFFFF
#: lz4-java makes no larger ones.
_BLOCK_BYTES_MAX = 32 << 20
# Those of Spark, unless spark.io.compression.lz4.blockSize says otherwise; the level tells a reader how large they are.
_BLOCK_BYTES, _LEVEL = 32 << 10, 5
_PIECE_BYTES = 1 << 20


def decompressed(data: memoryview, codec: str, limit_bytes: int, source: str) -> bytes:
    """Return the plain bytes of a stream.

    Parameters
    ----------
    codec : str
        One of `CODECS`.
    limit_bytes : int
        How many it may have.
    source : str
        What to call the file in an error.

    Raises
    ------
    CorruptionError
        It is no such stream, is cut off, or holds more.
    """
    found = bytearray()
    pieces = _lz4_blocks(data, source) if codec == LZ4 else _pieces(data, codec, source)
    for piece in pieces:
        found += piece
        if len(found) > limit_bytes:
            raise CorruptionError(f"{source} holds more than Spark stores there", limit_bytes=limit_bytes)
    return bytes(found)


def compressed(data: bytes, codec: str) -> bytes:
    """Return a stream of some plain bytes; the codec is one of `CODECS`."""
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


def _pieces(data: memoryview, codec: str, source: str) -> Iterator[bytes]:
    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), codec) as stream:
            while piece := stream.read(_PIECE_BYTES):
                yield piece
    except (OSError, pa.ArrowException) as exc:
        raise CorruptionError(f"{source} is not a {codec} stream, or is cut off: {exc}") from exc
