"""The one framing of every file that holdfast stores, locally and durably.

::

    offset 0     section 1          bytes; of a run: an Arrow IPC stream, which any Arrow reader opens as it is
                 section 2 …
                 footer             JSON, UTF-8: kind, encoding, header, and name, offset and sizes of each section
    end - 32     footer size        uint32, little endian
    end - 28     flags              uint16, 0
    end - 26     format version     uint16
    end - 24     digest             XXH3-128 of all bytes before it
    end - 8      magic              "HOLDFAST"

Invariants
----------
* **whole**: a file is accepted only if its magic, its format version and its digest are right; a cut or
  altered file is a `CorruptionError` that names it.
* **self-describing**: `kind` says what it is, `encoding` how its sections are encoded (``"plain"``, or ``"lz4"``:
  each is one LZ4 frame; other values are reserved, for example for encryption), `header` holds the facts of that kind.
* **sizes first**: no memory is allocated before its size is checked: a section's against the footer, the footer's
  against the file and `FOOTER_BYTES_MAX`, and both, if the caller knows it, against what was declared elsewhere. A
  digest proves that a file is whole, not who wrote it.
* **fixed tail**: the format version and the magic stay at these places in every later version.
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
#: The largest footer written or read: JSON takes 25 times its size in memory. A snapshot's, which names a part every 8
#: MiB, reaches it at 1 TB of state in one shard.
FOOTER_BYTES_MAX = 16 << 20
#: The size of the largest file without sections, which describes state and holds none.
NOTICE_BYTES_MAX = FOOTER_BYTES_MAX + TAIL_BYTES
#: Room for the end of any stored file with one section.
END_BYTES_MAX = 64 << 10


_FOOTER_FIELDS = {"kind": str, "encoding": str, "header": dict, "sections": list}
_SECTION_SIZES = ("offset", "size_bytes", "plain_bytes")
_SIZE_LIMIT = 1 << 62

# The bytes after everything that the digest covers.
_SEAL_BYTES = DIGEST_BYTES + len(MAGIC)
#: For a file that is too large to be held in memory.
BLOCK_BYTES = 16 << 20

_LZ4 = pa.Codec("lz4")
#: LZ4 expands one byte to at most 255.
EXPANSION_MAX = 256
#: Returns the bytes of a file from one place to another.
Read = Callable[[int, int], memoryview]
# From this size on, a file is made in one piece of memory.
_LARGE_BYTES = 1 << 20
SectionWriter = Callable[[pa.NativeFile], None]


def _out_of_a_frame(section: pa.Buffer, plain_bytes: int) -> pa.Buffer:
    if lz4.frame.get_frame_info(section)["content_size"] == plain_bytes:
        # Arrow's decoder refuses a frame of any other size, and needs no copy.
        return _LZ4.decompress(section, decompressed_size=plain_bytes)
    frame = lz4.frame.LZ4FrameDecompressor()
    # With a limit, or the frame would decide how much memory is allocated.
    plain = frame.decompress(section, max_length=plain_bytes + 1)
    if len(plain) != plain_bytes or not frame.eof or frame.unused_data:
        raise ValueError("it is not as long as the footer says")
    return pa.py_buffer(plain)


def _as_it_is(section: pa.Buffer, _plain_bytes: int) -> pa.Buffer:
    return section


_DECODERS: dict[str, Callable[[pa.Buffer, int], pa.Buffer]] = {"plain": _as_it_is, "lz4": _out_of_a_frame}


@dataclass(frozen=True)
class StoredFile:
    """A verified file, its sections as views into the bytes it was read from."""

    kind: str  #: ``run``, ``version``, ``merge``, ``commit``, ``snapshot``, ``operator`` …
    header: Mapping[str, Any]  #: The facts of this kind, JSON values
    sections: Mapping[str, pa.Buffer]  #: Decoded
    size_bytes: int
    digest: str  #: 32 hexadecimal digits; names exactly these bytes

    def section(self, name: str, source: str) -> pa.Buffer:
        """Return one section; its absence is a `CorruptionError` that names the file."""
        if name not in self.sections:
            raise CorruptionError(f"{source} lacks a section", section=name, kind=self.kind)
        return self.sections[name]


@dataclass(frozen=True)
class StoredEnd:
    """A file's own description at its end, unverified, as the rest was not read."""

    header: Mapping[str, Any]  #: The facts of its kind, JSON values
    sections: Mapping[str, int]  #: How many bytes each has when it is decoded
    size_bytes: int
    digest: str  #: That the whole file should have; see `require_digest`


def decode(
    data: pa.Buffer | bytes | memoryview,
    *,
    source: str,
    kind: str,
    verify: bool = True,
    plain_bytes: int | None = None,
    plain_bytes_max: int | None = None,
) -> StoredFile:
    """Read a whole stored file, called `source` in errors, into views of `data`.

    Sections unpack to `plain_bytes`, or at most `plain_bytes_max`, by default LZ4's maximum.
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
    """Read only the end of a stored file; `read` returns bytes between two places. The rest is as for `decode`."""
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
    """Raise `CorruptionError` if a file, read a block at a time, does not match the digest at its end."""
    found, end = xxhash.xxh3_128(), size_bytes - _SEAL_BYTES
    for start in range(0, end, BLOCK_BYTES):
        found.update(read(start, min(start + BLOCK_BYTES, end)))
    if found.hexdigest() != digest:
        raise _altered(source, kind)


def _read_tail(view: memoryview, source: str, kind: str) -> tuple[int, bytes]:
    """Return the size of the footer and the digest that the last bytes of a file name."""
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
    """Return the footer at an offset of a file, checked against the expected kind and encoding."""
    footer = _parse_footer(text, source)
    encoding = footer["encoding"]
    if footer["kind"] != kind or encoding not in _DECODERS:
        raise CorruptionError(
            f"{source} is not the requested object", kind=_short(footer["kind"]), encoding=_short(encoding), wanted=kind
        )
    _check_table(footer["sections"], at, 1 if encoding == "plain" else EXPANSION_MAX, source)
    return footer


def digest_of(data: memoryview) -> str | None:
    """Return the digest of exactly these bytes; None unless they are a whole stored file."""
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
    """Check the sections' claimed decoded size against the declared one."""
    decoded = sum(entry["plain_bytes"] for entry in table)
    if (plain_bytes is not None and decoded != plain_bytes) or (
        plain_bytes_max is not None and decoded > plain_bytes_max
    ):
        raise CorruptionError(
            f"{source} does not have its declared size", decoded_bytes=decoded, declared=plain_bytes or plain_bytes_max
        )


def _check_table(table: list[dict[str, Any]], end: int, expansion_max: int, source: str) -> None:
    """Check that the sections are contiguous before `end`, and their sizes possible."""
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
        raise CorruptionError(f"{source} has two sections of one name")


def _parse_footer(text: bytes, source: str) -> dict[str, Any]:
    try:
        footer = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
        if b"\\u" in text:  # half a surrogate pair cannot be encoded or shown
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
    """Return a JSON object; refuse duplicate fields, as readers may differ in which one they take."""
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
    """Return a file's text, shortened for an error."""
    return text[:80]


class _Sink(Protocol):
    def write(self, data: Any, /) -> Any: ...


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
    """Write one stored file to `sink`, in order, and each of `sections` by a call; the caller makes it durable."""
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
    """Write all that comes before the digest."""
    table = []
    for name, write_section in (sections or {}).items():
        start = out.tell()
        plain_bytes = _write_section(out, write_section, encoding)
        size_bytes = out.tell() - start
        plain_bytes = size_bytes if plain_bytes is None else plain_bytes
        table.append({"name": name, "offset": start, "size_bytes": size_bytes, "plain_bytes": plain_bytes})
    out.write(_footer(kind, header, table, encoding))


def _write_section(out: pa.NativeFile, write_section: SectionWriter, encoding: str) -> int | None:
    """Write one section; return its decoded size, None if equal to the written one."""
    if encoding != "lz4":
        write_section(out)
        return None
    raw = pa.BufferOutputStream()
    write_section(raw)
    plain = raw.getvalue()
    out.write(lz4.frame.compress(plain))
    return plain.size


def _footer(kind: str, header: Mapping[str, Any], table: list[dict[str, Any]], encoding: str) -> bytes:
    """Return all that comes between the sections and the digest."""
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
    """Raise if a text has half a surrogate pair, which readers refuse."""
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
    """Return one stored file as a buffer, and its digest; a large `plain_bytes` allocates memory once."""
    if plain_bytes < _LARGE_BYTES:
        sink = pa.BufferOutputStream()
        _, digest = write_to(sink, kind, header, sections, encoding)
        return sink.getvalue(), digest
    # LZ4 enlarges what it cannot compress, by less than that. Pages that are never written take no memory.
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
    """Make a stored file of the first `size_bytes` of `data`, its only section, in place; return it and its digest.

    `END_BYTES_MAX` must follow the section.
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
