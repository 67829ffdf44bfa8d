"""Makes stored files: into a file, in memory of its own, or around bytes that are there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import lz4.frame
import pyarrow as pa
import xxhash

from holdfast.backends.block_io import in_blocks
from holdfast.backends.stored_file.layout import (
    DIGEST_BYTES,
    FOOTER_BYTES_MAX,
    FOOTER_SIZE,
    FORMAT_VERSION,
    MAGIC,
    NOTICE_BYTES_MAX,
)
from holdfast.errors import InvalidArgumentError

# From so many bytes on, a file is made in one piece of memory.
_LARGE_BYTES = 1 << 20


class _Sink(Protocol):
    def write(self, data: Any, /) -> Any: ...


SectionWriter = Callable[[pa.NativeFile], None]


class _DigestingSink:
    """Passes bytes on and keeps their digest and number; a file object in pyarrow's eyes."""

    closed = False

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self.digest = xxhash.xxh3_128()
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        before = self.size_bytes
        for block in in_blocks(data):
            self.digest.update(block)
            self._sink.write(block)
            self.size_bytes += len(block)
        return self.size_bytes - before

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        """Do nothing: writes are unbuffered."""

    def close(self) -> None:
        """The sink behind belongs to the caller."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def write_to(
    sink: _Sink,
    kind: str,
    header: Mapping[str, Any],
    sections: Mapping[str, SectionWriter] | None = None,
    encoding: str = "plain",
) -> tuple[int, str]:
    """Write one stored file to `sink`.

    `sink` receives the bytes in order; the caller makes them durable. Each of `sections` is called with a file to write
    its section to; with "lz4" a section is held in memory once.
    """
    out = _DigestingSink(sink)
    with pa.PythonFile(out, mode="w") as file:
        _write_undigested(file, kind, header, sections, encoding)
    digest = out.digest.digest()
    sink.write(digest + MAGIC)
    return out.size_bytes + len(digest) + len(MAGIC), digest.hex()


def _write_undigested(
    out: pa.NativeFile,
    kind: str,
    header: Mapping[str, Any],
    sections: Mapping[str, SectionWriter] | None,
    encoding: str,
) -> None:
    """Write all that stands before the digest."""
    table = []
    for name, write_section in (sections or {}).items():
        start = out.tell()
        plain_bytes = _write_section(out, write_section, encoding)
        size_bytes = out.tell() - start
        plain_bytes = size_bytes if plain_bytes is None else plain_bytes
        table.append({"name": name, "offset": start, "size_bytes": size_bytes, "plain_bytes": plain_bytes})
    out.write(_footer(kind, header, table, encoding))


def _write_section(out: pa.NativeFile, write_section: SectionWriter, encoding: str) -> int | None:
    """Write one section, and return how many bytes it has when it is decoded; None if as many as were written."""
    if encoding != "lz4":
        write_section(out)
        return None
    raw = pa.BufferOutputStream()
    write_section(raw)
    plain = raw.getvalue()
    out.write(lz4.frame.compress(plain))
    return plain.size


def _footer(kind: str, header: Mapping[str, Any], table: list[dict[str, Any]], encoding: str) -> bytes:
    """Return all that stands between the sections and the digest."""
    values = {"kind": kind, "encoding": encoding, "header": header, "sections": table}
    footer = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
    if b"\\ud" in footer:
        _require_text(kind, values)
    if len(footer) > FOOTER_BYTES_MAX:
        raise InvalidArgumentError(
            "the header of a stored file is too large: use more shards, or fewer tables and columns",
            kind=kind,
            footer_bytes=len(footer),
            limit_bytes=FOOTER_BYTES_MAX,
        )
    return footer + FOOTER_SIZE.pack(len(footer), 0, FORMAT_VERSION)


def _require_text(kind: str, values: Mapping[str, Any]) -> None:
    """Raise where a text has half of a surrogate pair: readers refuse it."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgumentError(
            "a text in the header of a stored file has a lone surrogate: remove it", kind=kind
        ) from exc


def encode(
    kind: str,
    header: Mapping[str, Any],
    sections: Mapping[str, SectionWriter] | None = None,
    encoding: str = "plain",
    plain_bytes: int = 0,
) -> tuple[pa.Buffer, str]:
    """Return one stored file as a buffer, and its digest.

    If `plain_bytes`, before compression, are many, memory is asked for once: a buffer that grows is copied again and
    again, which takes longer than LZ4.
    """
    if plain_bytes < _LARGE_BYTES:
        sink = pa.BufferOutputStream()
        _, digest = write_to(sink, kind, header, sections, encoding)
        return sink.getvalue(), digest
    # What LZ4 cannot make smaller it makes larger, by less than that. Pages that are never written take no memory.
    room = pa.allocate_buffer(plain_bytes + (plain_bytes >> 8) + _LARGE_BYTES + NOTICE_BYTES_MAX)
    with pa.FixedSizeBufferWriter(room) as file:
        _write_undigested(file, kind, header, sections, encoding)
        end = file.tell()
    whole, digest = _sealed(memoryview(room).cast("B"), end)
    return room.slice(0, whole), digest


def encode_in_place(
    data: bytearray,
    size_bytes: int,
    kind: str,
    header: Mapping[str, Any],
    section: str,
    encoding: str = "plain",
    plain_bytes: int | None = None,
) -> tuple[memoryview, str]:
    """Make a stored file of the first bytes of `data`, which are its only section; nothing is copied.

    At least `END_BYTES_MAX` must follow the section's `size_bytes`; it had `plain_bytes` before it was encoded. Returns
    the file, a view of `data`, and its digest.
    """
    plain_bytes = size_bytes if plain_bytes is None else plain_bytes
    table = [{"name": section, "offset": 0, "size_bytes": size_bytes, "plain_bytes": plain_bytes}]
    footer = _footer(kind, header, table, encoding)
    end = size_bytes + len(footer)
    if end + DIGEST_BYTES + len(MAGIC) > len(data):
        raise InvalidArgumentError("no room for the end of a stored file", size_bytes=end, room_bytes=len(data))
    view = memoryview(data)
    view[size_bytes:end] = footer
    whole, digest = _sealed(view, end)
    return view[:whole], digest


def _sealed(view: memoryview, end: int) -> tuple[int, str]:
    """Put the digest of the first `end` bytes behind them, and the magic; return the file's size and its digest."""
    digest = xxhash.xxh3_128(view[:end]).digest()
    whole = end + DIGEST_BYTES + len(MAGIC)
    view[end:whole] = digest + MAGIC
    return whole, digest.hex()
