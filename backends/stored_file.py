"""The file format: the framing of every file that holdfast stores, locally and durably.

::

    offset 0     section 1          bytes; for a run, an Arrow IPC stream that any Arrow reader opens
                 section 2 …
                 footer             JSON, UTF-8: kind, encoding, header, and name, offset and sizes of each section
    end - 32     footer size        uint32, little endian
    end - 28     flags              uint16, 0
    end - 26     format version     uint16
    end - 24     digest             XXH3-128 of all bytes before it
    end - 8      magic              "HOLDFAST"

Invariants
----------
* **whole**: a file is accepted only if its magic, format version and digest match; a truncated or altered file raises
  a `CorruptionError` that names it.
* **self-describing**: `kind` is the type of file, `encoding` that of its sections (``"plain"``, or ``"lz4"`` with one
  LZ4 frame per section; other values are reserved, for example for encryption), and `header` holds values of the kind.
* **sizes first**: every size is checked before memory is allocated: a section's against the footer, the footer's
  against the file and `FOOTER_BYTES_MAX`, and both against a size declared elsewhere if the caller knows one. A digest
  proves integrity, not origin.
* **fixed tail**: the format version and the magic stay at these offsets in every later version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import lz4.frame
import pyarrow as pa
import xxhash

from holdfast.backends.block_io import in_blocks
from holdfast.errors import CorruptionError, InvalidArgumentError

FORMAT_VERSION = 1
MAGIC = b"HOLDFAST"
FOOTER_SIZE = struct.Struct("<IHH")
DIGEST_BYTES = 16
TAIL_BYTES = FOOTER_SIZE.size + DIGEST_BYTES + len(MAGIC)
#: The largest footer written or read: parsed JSON takes 25 times its size in memory. The footer of a snapshot, which
#: lists a part per 8 MiB, reaches this limit at 1 TB of state in one shard.
FOOTER_BYTES_MAX = 16 << 20
#: The largest size of a file without sections; such files describe state but hold none.
NOTICE_BYTES_MAX = FOOTER_BYTES_MAX + TAIL_BYTES
#: Enough bytes for the end of any stored file with one section.
END_BYTES_MAX = 64 << 10

_FOOTER_FIELDS = {"kind": str, "encoding": str, "header": dict, "sections": list}
_SECTION_SIZES = ("offset", "size_bytes", "plain_bytes")
_SIZE_LIMIT = 1 << 62

# The last bytes of a file, which the digest does not cover.
_SEAL_BYTES = DIGEST_BYTES + len(MAGIC)
#: Read size for files too large to hold in memory.
BLOCK_BYTES = 16 << 20

_LZ4 = pa.Codec("lz4")
#: LZ4 expands one byte to at most 255.
EXPANSION_MAX = 256
#: Returns a file's bytes between two offsets.
Read = Callable[[int, int], memoryview]
# A file of at least this size is encoded into one preallocated buffer.
_LARGE_BYTES = 1 << 20
SectionWriter = Callable[[pa.NativeFile], None]


def _decompress(section: pa.Buffer, plain_bytes: int) -> pa.Buffer:
    if lz4.frame.get_frame_info(section)["content_size"] == plain_bytes:
        # Arrow's decoder refuses a frame of any other size, and copies nothing.
        return _LZ4.decompress(section, decompressed_size=plain_bytes)
    frame = lz4.frame.LZ4FrameDecompressor()
    # Limited: otherwise the frame decides how much memory is allocated.
    plain = frame.decompress(section, max_length=plain_bytes + 1)
    if len(plain) != plain_bytes or not frame.eof or frame.unused_data:
        raise ValueError("its length does not match the footer")
    return pa.py_buffer(plain)


_DECODERS: dict[str, Callable[[pa.Buffer, int], pa.Buffer]] = {"plain": lambda section, _: section, "lz4": _decompress}


@dataclass(frozen=True)
class StoredFile:
    """A verified file; its sections are views into the bytes it was read from."""

    kind: str  #: ``run``, ``version``, ``merge``, ``commit``, ``snapshot``, ``operator`` …
    header: Mapping[str, Any]  #: JSON values specific to the kind
    sections: Mapping[str, pa.Buffer]  #: Decoded
    size_bytes: int
    digest: str  #: 32 hexadecimal digits; identifies exactly these bytes

    def section(self, name: str, source: str) -> pa.Buffer:
        """Return one section. Raises a `CorruptionError` that names the file if it is missing."""
        if name not in self.sections:
            raise CorruptionError(f"{source} lacks a section", section=name, kind=self.kind)
        return self.sections[name]


@dataclass(frozen=True)
class StoredEnd:
    """The description at a file's end, unverified because the rest was not read."""

    header: Mapping[str, Any]  #: JSON values specific to the kind
    sections: Mapping[str, int]  #: The decoded size of each section
    size_bytes: int
    digest: str  #: The expected digest of the whole file; see `require_digest`


def decode(
    data: pa.Buffer | bytes | memoryview,
    *,
    source: str,
    kind: str,
    verify: bool = True,
    plain_bytes: int | None = None,
    plain_bytes_max: int | None = None,
) -> StoredFile:
    """Decode a whole stored file into views of `data`; errors name it `source`.

    Sections must decode to `plain_bytes`, or to at most `plain_bytes_max`; by default LZ4's expansion is the limit.
    """
    buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
    view = memoryview(buffer)
    footer_size, digest = _read_tail(view, source, kind)
    if verify and xxhash.xxh3_128(view[:-_SEAL_BYTES]).digest() != digest:
        raise _altered(source, kind)
    end = len(view) - TAIL_BYTES
    _require_footer_size(footer_size, end, source)
    footer = _read_footer(bytes(view[end - footer_size : end]), end - footer_size, source, kind)
    _require_declared(footer["sections"], plain_bytes, plain_bytes_max, source)
    sections = {}
    for entry in footer["sections"]:
        try:
            section = buffer.slice(entry["offset"], entry["size_bytes"])
            sections[entry["name"]] = _DECODERS[footer["encoding"]](section, entry["plain_bytes"])
        except (OSError, RuntimeError, ValueError) as exc:
            raise CorruptionError(
                f"{source} has a section that is not an LZ4 frame: {exc}", section=_short(entry["name"])
            ) from exc
    return StoredFile(kind, footer["header"], sections, len(view), digest.hex())


def decode_end(read: Read, size_bytes: int, *, source: str, kind: str, plain_bytes_max: int | None = None) -> StoredEnd:
    """Decode only the end of a stored file, which `read` returns; the other parameters are those of `decode`."""
    start = max(0, size_bytes - END_BYTES_MAX)
    data = read(start, size_bytes) if size_bytes else memoryview(b"")
    footer_size, digest = _read_tail(data, source, kind)
    end = size_bytes - TAIL_BYTES
    _require_footer_size(footer_size, end, source)
    if end - footer_size < start:
        start = end - footer_size
        data = read(start, size_bytes)
    footer = _read_footer(bytes(data[end - footer_size - start : end - start]), end - footer_size, source, kind)
    _require_declared(footer["sections"], None, plain_bytes_max, source)
    plain_bytes = {entry["name"]: entry["plain_bytes"] for entry in footer["sections"]}
    return StoredEnd(footer["header"], plain_bytes, size_bytes, digest.hex())


def require_digest(read: Read, size_bytes: int, digest: str, *, source: str, kind: str) -> None:
    """Check a file against its digest, reading block by block. Raises `CorruptionError`."""
    found, end = xxhash.xxh3_128(), size_bytes - _SEAL_BYTES
    for start in range(0, end, BLOCK_BYTES):
        found.update(read(start, min(start + BLOCK_BYTES, end)))
    if found.hexdigest() != digest:
        raise _altered(source, kind)


def _read_tail(view: memoryview, source: str, kind: str) -> tuple[int, bytes]:
    """Return the footer's size and the digest from the last bytes of a file."""
    if len(view) < TAIL_BYTES or bytes(view[-8:]) != MAGIC:
        raise CorruptionError(
            f"{source} is not a whole holdfast file: its end is missing", size_bytes=len(view), kind=kind
        )
    footer_size, flags, version = FOOTER_SIZE.unpack(view[-TAIL_BYTES : -TAIL_BYTES + FOOTER_SIZE.size])
    if version != FORMAT_VERSION or flags != 0:
        raise CorruptionError(
            f"{source} has a different format than this release of holdfast reads: open it with the release that "
            "wrote it, or restore the file if it was altered",
            format_version=version,
            flags=flags,
            readable=FORMAT_VERSION,
        )
    return footer_size, bytes(view[-_SEAL_BYTES:-8])


def _altered(source: str, kind: str) -> CorruptionError:
    return CorruptionError(f"{source} was altered or damaged: its checksum does not match", kind=kind)


def _require_footer_size(footer_size: int, end: int, source: str) -> None:
    if footer_size > min(end, FOOTER_BYTES_MAX):
        raise CorruptionError(f"{source} has a footer of an impossible size", footer_size_bytes=footer_size)


def _read_footer(text: bytes, at: int, source: str, kind: str) -> dict[str, Any]:
    """Parse the footer at offset `at` of a file; check its kind, encoding and section sizes."""
    footer = _parse_footer(text, source)
    encoding = footer["encoding"]
    if footer["kind"] != kind or encoding not in _DECODERS:
        raise CorruptionError(
            f"{source} is not the requested object", kind=_short(footer["kind"]), encoding=_short(encoding), wanted=kind
        )
    _check_table(footer["sections"], at, 1 if encoding == "plain" else EXPANSION_MAX, source)
    return footer


def digest_of(data: memoryview) -> str | None:
    """Return the digest of these bytes; None unless they are exactly one whole stored file."""
    named = digest_at_end(data)
    return named if named is not None and xxhash.xxh3_128(data[:-_SEAL_BYTES]).hexdigest() == named else None


def digest_at_end(data: memoryview) -> str | None:
    """Return the unchecked digest at a file's end; None if it is not the end of a stored file."""
    if len(data) < TAIL_BYTES or bytes(data[-8:]) != MAGIC:
        return None
    return bytes(data[-_SEAL_BYTES:-8]).hex()


def _require_declared(
    table: list[dict[str, Any]], plain_bytes: int | None, plain_bytes_max: int | None, source: str
) -> None:
    """Check the sections' decoded size against the declared size."""
    decoded = sum(entry["plain_bytes"] for entry in table)
    if (plain_bytes is not None and decoded != plain_bytes) or (
        plain_bytes_max is not None and decoded > plain_bytes_max
    ):
        raise CorruptionError(
            f"{source} does not have its declared size", decoded_bytes=decoded, declared=plain_bytes or plain_bytes_max
        )


def _check_table(table: list[dict[str, Any]], end: int, expansion_max: int, source: str) -> None:
    """Check that the sections do not overlap, end before `end`, and have possible sizes."""
    at = 0
    for entry in table:
        start, size = entry["offset"], entry["size_bytes"]
        if not at <= start <= start + size <= end:
            raise CorruptionError(f"{source} has a section outside its bytes", section=_short(entry["name"]))
        plain = entry["plain_bytes"]
        if not 0 <= plain <= size * expansion_max or (expansion_max == 1 and plain != size):
            raise CorruptionError(
                f"{source} has a section of an impossible size",
                section=_short(entry["name"]),
                size_bytes=size,
                plain_bytes=plain,
            )
        at = start + size
    if len({entry["name"] for entry in table}) != len(table):
        raise CorruptionError(f"{source} has two sections with the same name")


def _parse_footer(text: bytes, source: str) -> dict[str, Any]:
    try:
        footer = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
        if b"\\u" in text:  # a lone surrogate cannot be encoded or printed
            json.dumps(footer, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as exc:
        raise CorruptionError(f"{source} has an unreadable footer") from exc
    if not (
        isinstance(footer, dict)
        and all(isinstance(footer.get(name), kind) for name, kind in _FOOTER_FIELDS.items())
        and all(_is_section(entry) for entry in footer["sections"])
    ):
        raise CorruptionError(f"{source} has an incomplete footer")
    return footer


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse duplicate fields, which JSON readers resolve differently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field occurs twice")
    return found


def _is_section(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("name")) is str
        and all(type(n := entry.get(name)) is int and abs(n) < _SIZE_LIMIT for name in _SECTION_SIZES)
    )


def _short(text: str) -> str:
    """Shorten text from a file for an error."""
    return text[:80]


class _Sink(Protocol):
    def write(self, data: Any, /) -> Any: ...


class _DigestingSink:
    """A file object for pyarrow that forwards writes and tracks their digest and size."""

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
        """Do nothing: the caller owns the sink."""

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
    """Write one stored file to `sink` sequentially, calling a writer for each section; the caller makes it durable."""
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
    """Write everything before the digest."""
    table = []
    for name, write_section in (sections or {}).items():
        start = out.tell()
        plain_bytes = _write_section(out, write_section, encoding)
        size_bytes = out.tell() - start
        plain_bytes = size_bytes if plain_bytes is None else plain_bytes
        table.append({"name": name, "offset": start, "size_bytes": size_bytes, "plain_bytes": plain_bytes})
    out.write(_footer(kind, header, table, encoding))


def _write_section(out: pa.NativeFile, write_section: SectionWriter, encoding: str) -> int | None:
    """Write one section; return its decoded size, None if it equals the written size."""
    if encoding != "lz4":
        write_section(out)
        return None
    raw = pa.BufferOutputStream()
    write_section(raw)
    plain = raw.getvalue()
    out.write(lz4.frame.compress(plain))
    return plain.size


def _footer(kind: str, header: Mapping[str, Any], table: list[dict[str, Any]], encoding: str) -> bytes:
    """Return the bytes between the sections and the digest."""
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
    """Raise if a text has a lone surrogate, which readers refuse."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgumentError(
            "a string in the header of a stored file has a lone surrogate: remove it", kind=kind
        ) from exc


def encode(
    kind: str,
    header: Mapping[str, Any],
    sections: Mapping[str, SectionWriter] | None = None,
    encoding: str = "plain",
    plain_bytes: int = 0,
) -> tuple[pa.Buffer, str]:
    """Return one stored file as a buffer, and its digest; a large `plain_bytes` preallocates the buffer."""
    if plain_bytes < _LARGE_BYTES:
        sink = pa.BufferOutputStream()
        _, digest = write_to(sink, kind, header, sections, encoding)
        return sink.getvalue(), digest
    # LZ4 enlarges incompressible data by less than this. Pages that are never written take no memory.
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
    """Turn `data` in place into a stored file, whose only section is its first `size_bytes`; return it and its digest.

    At least `END_BYTES_MAX` spare bytes must follow the section.
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
    """Append the digest of the first `end` bytes and the magic; return the file's size and digest."""
    digest = xxhash.xxh3_128(view[:end]).digest()
    whole = end + DIGEST_BYTES + len(MAGIC)
    view[end:whole] = digest + MAGIC
    return whole, digest.hex()
