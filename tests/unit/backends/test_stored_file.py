"""The framing of stored files: whatever happens to a byte, the answer is right or an error that names the file."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.run import Run
from holdfast.errors import CorruptionError, InvalidArgumentError
from holdfast.testing.state_rows import COUNTS, counts
from tests.fuzz.forge import put_together, take_apart

RUN = counts(*((f"user {i}", i) for i in range(50)))["counts"]
P1 = Pointer(1, "aa")


def sections(compression: str | None) -> dict[str, stored_file.SectionWriter]:
    return {"counts": lambda file: RUN.write(file, compression=compression), "note": lambda file: file.write(b"x" * 20)}


KINDS: dict[str, tuple[dict[str, Any], dict[str, stored_file.SectionWriter]]] = {
    "run": ({"rows": 50}, sections(None)),
    "commit": ({"pointer": "1-aa", "chain": []}, sections("lz4")),
    "version": ({"stacks": {"counts": []}, "properties": {"ü": None}}, {}),
    "empty": ({}, {}),
}


def encoded(kind: str) -> bytes:
    header, parts = KINDS[kind]
    return stored_file.encode(kind, header, parts)[0].to_pybytes()


def reseal(data: bytes, footer: object, **of_frame: int) -> bytes:
    """Return the file with another footer and a right digest, as somebody who knows the format could make it."""
    return put_together(take_apart(data).body, footer, **of_frame)


@pytest.mark.slow(1)
def test_a_footer_has_a_limit() -> None:
    """JSON takes many times its size in memory, so a large one is neither written nor parsed."""
    room = stored_file.FOOTER_BYTES_MAX - len(json.dumps(_footer_of(""), separators=(",", ":")))
    largest, _ = stored_file.encode("empty", {"text": "x" * room})
    assert largest.size == stored_file.NOTICE_BYTES_MAX
    assert len(stored_file.decode(largest, source="x", kind="empty").header["text"]) == room
    with pytest.raises(InvalidArgumentError, match="too large"):
        stored_file.encode("empty", {"text": "x" * (room + 1)})
    text = json.dumps(_footer_of("x" * (room + 1)), separators=(",", ":")).encode()
    with pytest.raises(CorruptionError, match="x has a footer of an impossible size"):
        stored_file.decode(reseal(encoded("empty"), text), source="x", kind="empty")


def _footer_of(text: str) -> dict[str, Any]:
    return {"kind": "empty", "encoding": "plain", "header": {"text": text}, "sections": []}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(kind: str) -> None:
    """Header, sections, size and digest come back; the two ways to write agree."""
    data = encoded(kind)
    read = stored_file.decode(data, source="x", kind=kind)
    assert read.header == KINDS[kind][0]
    assert read.size_bytes == len(data)
    assert read.digest == stored_file.encode(kind, *KINDS[kind])[1]
    assert set(read.sections) == set(KINDS[kind][1])
    if "counts" in read.sections:
        assert Run.read(read.section("counts", "x"), COUNTS, source="x").batch.equals(RUN.batch)
        assert read.section("note", "x").to_pybytes() == b"x" * 20
    with pytest.raises(CorruptionError, match=r"x lacks a section.*no such"):
        read.section("no such", "x")


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_found_wherever_it_is(kind: str) -> None:
    data = encoded(kind)
    for offset in range(len(data)):
        damaged = bytearray(data)
        damaged[offset] ^= 0x41
        with pytest.raises(CorruptionError, match=r"s3://b/the-file"):
            stored_file.decode(bytes(damaged), source="s3://b/the-file", kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_or_extended_file_is_found(kind: str) -> None:
    data = encoded(kind)
    for cut in [*(data[:n] for n in range(len(data))), data[1:], data + b"\0", data + data[-32:]]:
        with pytest.raises(CorruptionError, match="the-file"):
            stored_file.decode(cut, source="the-file", kind=kind)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_an_unverified_flip_is_never_an_untyped_error(offset: int, change: int) -> None:
    """Local files are read without their digest: damage to the frame is still a typed error."""
    data = bytearray(encoded("version"))
    data[offset % len(data)] ^= change
    with contextlib.suppress(CorruptionError):  # any other error fails the test
        stored_file.decode(bytes(data), source="x", kind="version", verify=False)


def test_another_format_version_says_what_to_do() -> None:
    """A newer release's file is not called damaged."""
    data = encoded("version")
    footer = {"kind": "version", "encoding": "plain", "header": {}, "sections": []}
    for changed in (reseal(data, footer, version=2), reseal(data, footer, flags=1)):
        with pytest.raises(CorruptionError, match=r"a different format than this release.*release that wrote it"):
            stored_file.decode(changed, source="x", kind="version")
    assert stored_file.decode(reseal(data, footer), source="x", kind="version").header == {}


@pytest.mark.parametrize(
    "footer",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        [],
        {"kind": "run"},
        {"kind": "run", "encoding": "plain", "header": [], "sections": []},
        {"kind": "version", "encoding": "plain", "header": {}, "sections": []},
        {"kind": "run", "encoding": "aes", "header": {}, "sections": []},
        *(
            {"kind": "run", "encoding": "plain", "header": {}, "sections": [entry]}
            for entry in (
                7,
                {},
                {"name": "a", "offset": -1, "size_bytes": 1, "plain_bytes": 1},
                {"name": "a", "offset": 0, "size_bytes": 2**62, "plain_bytes": 2**62},
                {"name": "a", "offset": 2**70, "size_bytes": 0, "plain_bytes": 0},
                {"name": "a", "offset": True, "size_bytes": 1, "plain_bytes": 1},
                {"name": ["a"], "offset": 0, "size_bytes": 1, "plain_bytes": 1},
            )
        ),
        b"[" * 100_000,
        {"kind": "run", "encoding": ["plain"], "header": {}, "sections": []},
        {"kind": ["run"], "encoding": "plain", "header": {}, "sections": []},
        {"kind": "run", "encoding": "plain", "header": {"a": "\ud800"}, "sections": []},
        b'{"kind": "run", "encoding": "plain", "header": {"a": Infinity}, "sections": []}',
        *(
            {"kind": "run", "encoding": encoding, "header": {}, "sections": sections}
            for encoding, sections in (
                ("plain", [{"name": "a", "offset": 0, "size_bytes": 1, "plain_bytes": 2}]),
                ("plain", [{"name": "a", "offset": 0, "size_bytes": 1}]),
                ("lz4", [{"name": "a", "offset": 0, "size_bytes": 1, "plain_bytes": 2**46}]),
                ("lz4", [{"name": "a", "offset": 0, "size_bytes": 1, "plain_bytes": -1}]),
                ("plain", [{"name": n, "offset": 0, "size_bytes": 9, "plain_bytes": 9} for n in "ab"]),
                ("plain", [{"name": "a", "offset": o, "size_bytes": 9, "plain_bytes": 9} for o in (0, 9)]),
            )
        ),
    ],
    ids=lambda footer: str(footer)[:80],
)
def test_a_forged_footer_is_refused(footer: Any) -> None:
    """A right digest proves nothing about who wrote the file."""
    with pytest.raises(CorruptionError, match="the-file"):
        stored_file.decode(reseal(encoded("run"), footer), source="the-file", kind="run")


def test_a_file_made_in_place_is_the_same_file() -> None:
    room = bytearray(b"some bytes" + b"\xff" * stored_file.END_BYTES_MAX)
    wanted, digest = stored_file.encode("part", {"offset": 0}, {"data": lambda out: out.write(b"some bytes")})
    made, its_digest = stored_file.encode_in_place(room, 10, "part", {"offset": 0}, "data")
    assert (bytes(made), its_digest) == (wanted.to_pybytes(), digest)


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("tables", [1, 300])
def test_a_large_file_made_in_one_piece_of_memory_is_the_same_file(compression: str | None, tables: int) -> None:
    """Of bytes that LZ4 makes larger, and of many small columns, which it makes larger still."""
    noise = np.random.default_rng(tables).bytes((4 << 20) // tables)
    width = 1 << 20 if tables == 1 else 16
    values = pa.array([noise[start : start + width] for start in range(0, len(noise), width)], pa.large_binary())
    batch = pa.record_batch([pa.array(range(len(values))), values], ["n", "noise"])

    def write(file: pa.NativeFile) -> None:
        options = ipc.IpcWriteOptions(compression=compression)
        with ipc.new_stream(file, batch.schema, options=options) as writer:
            writer.write_batch(batch)

    parts = {f"table-{number}": write for number in range(tables)}
    plain_bytes = tables * ipc.get_record_batch_size(batch)
    assert plain_bytes > 1 << 20
    wanted, digest = stored_file.encode("commit", {"chain": []}, parts)
    made, its_digest = stored_file.encode("commit", {"chain": []}, parts, plain_bytes=plain_bytes)
    assert made.equals(wanted)
    assert its_digest == digest == stored_file.decode(made, source="x", kind="commit").digest


def test_a_file_that_has_no_room_is_not_made_in_place() -> None:
    with pytest.raises(InvalidArgumentError, match="no room"):
        stored_file.encode_in_place(bytearray(20), 10, "part", {}, "data")


def test_sections_are_views() -> None:
    """Reading copies nothing: a mapped file stays a mapping."""
    data = pa.py_buffer(encoded("run"))
    read = stored_file.decode(data, source="x", kind="run")
    assert data.address <= read.sections["counts"].address < data.address + data.size


# Local files, which are read by size and not by digest.


@pytest.mark.parametrize(
    "footer",
    [
        b'{"kind":"version","kind":"version","encoding":"plain","header":{},"sections":[]}',
        b'{"kind":"version","encoding":"plain","header":{"a":1,"a":1},"sections":[]}',
        b'{"kind":"version","encoding":"plain","header":{"a":[{"b":{"c":1,"c":2}}]},"sections":[]}',
    ],
)
def test_a_field_that_stands_twice_is_refused(footer: bytes) -> None:
    """Two readers of the format would not agree which one counts."""
    with pytest.raises(CorruptionError, match="x has an unreadable footer"):
        stored_file.decode(reseal(encoded("version"), footer), source="x", kind="version")


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "k" * 100_000},
        {"encoding": "e" * 100_000},
        {"sections": [{"name": "n" * 100_000, "offset": 9, "size_bytes": 1, "plain_bytes": 1}]},
        {"sections": [{"name": "n" * 100_000, "offset": 0, "size_bytes": 0, "plain_bytes": 1}]},
        {"sections": [{"name": "n", "offset": 0, "size_bytes": 10**4000, "plain_bytes": 10**4000}]},
        {"sections": [{"name": "n", "offset": 0, "size_bytes": 0, "plain_bytes": -(10**4000)}]},
    ],
)
def test_no_error_repeats_much_of_a_file(changed: dict[str, Any]) -> None:
    """What stands in a log or in a terminal is about the file, and not the file."""
    footer = {"kind": "version", "encoding": "plain", "header": {}, "sections": []} | changed
    with pytest.raises(CorruptionError) as told:
        stored_file.decode(reseal(encoded("version"), footer), source="x", kind="version")
    assert len(str(told.value)) < 400


@pytest.mark.parametrize("tells_its_size", [True, False])
@pytest.mark.parametrize(
    ("more_bytes", "cut", "behind"), [(0, 0, b""), (1, 0, b""), (-1, 0, b""), (0, 3, b""), (0, 0, b"x")]
)
def test_a_frame_holds_exactly_what_the_footer_says(
    tells_its_size: bool, more_bytes: int, cut: int, behind: bytes
) -> None:
    """Nobody sees memory that no frame has filled, nor half of a section, whoever wrote the file."""
    plain = b"state" * 1000
    frame = lz4.frame.compress(plain, store_size=tells_its_size)
    frame = frame[: len(frame) - cut] + behind
    buffer = bytearray(frame) + bytearray(stored_file.END_BYTES_MAX)
    data, _ = stored_file.encode_in_place(buffer, len(frame), "part", {}, "data", "lz4", len(plain) + more_bytes)
    if not (more_bytes or cut or behind):
        found = stored_file.decode(data, source="it", kind="part")
        assert found.section("data", "it").to_pybytes() == plain
        return
    with pytest.raises(CorruptionError, match="not an LZ4 frame"):
        stored_file.decode(data, source="it", kind="part")


def ranges_of(data: bytes) -> stored_file.Read:
    return lambda start, end: memoryview(data)[start:end]


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_says_what_the_whole_file_says(kind: str) -> None:
    """Without a look at the rest, whose digest can be checked in blocks."""
    data = encoded(kind)
    whole = stored_file.decode(data, source="x", kind=kind)
    end = stored_file.decode_end(ranges_of(data), len(data), source="x", kind=kind)
    assert (end.header, end.size_bytes, end.digest) == (whole.header, whole.size_bytes, whole.digest)
    assert end.sections == {name: section.size for name, section in whole.sections.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_was_cut_is_an_error(kind: str) -> None:
    whole = encoded(kind)
    for size in range(len(whole)):
        with pytest.raises(CorruptionError, match=r"^x "):
            stored_file.decode_end(ranges_of(whole[:size]), size, source="x", kind=kind)
