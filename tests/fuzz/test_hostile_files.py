"""Stored files that somebody has made to do harm: an answer that can be read, or an error of ours, in little memory.

A digest proves that a file is whole, not who wrote it. The fuzzer is a program of its own (`hostile_files`): a crash
of the interpreter shows, and so does memory that is asked for because a file claims to be large.
"""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lz4.frame
import pyarrow as pa
import pytest

from holdfast.backends import stored_file
from holdfast.backends.run import Run
from holdfast.errors import CorruptionError
from holdfast.testing.state_rows import COUNTS, counts
from tests.fuzz.forge import frame_that_claims, put_together, take_apart
from tests.tiers import LONG, repetitions

FILES = 2000 if LONG else 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", repetitions(1, 20))
@pytest.mark.timeout(1800)
def test_a_hostile_file_is_an_error_of_ours_or_harmless(seed: int) -> None:
    """Commits, manifests, parts, records, local notes and markers, spoiled in JSON and in bytes."""
    command = [sys.executable, "-m", "tests.fuzz.hostile_files", str(seed), str(FILES)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    tail = "\n".join([*done.stdout.splitlines()[-3:], done.stderr[-4000:]])
    assert done.returncode == 0, f"{' '.join(command)}\n{tail}"
    outcomes = json.loads(done.stdout.splitlines()[-1].replace("'", '"'))
    assert outcomes["read"] > 0
    assert outcomes["CorruptionError"] > 0


# Claims, one by one, in a process that has no room for them.


def part(section: bytes, plain_bytes: int, encoding: str = "lz4") -> bytes:
    entry = {"name": "data", "offset": 0, "size_bytes": len(section), "plain_bytes": plain_bytes}
    return put_together(section, {"kind": "part", "encoding": encoding, "header": {}, "sections": [entry]})


def decode_part(data: bytes, plain_bytes: int | None = None) -> None:
    stored_file.decode(data, source="the-part", kind="part", plain_bytes=plain_bytes)


def claims() -> dict[str, Callable[[], None]]:
    """By name what must be a `CorruptionError`, in a process with 256 MB to spare."""
    zeros = frame_of_zeros(128)
    small = lz4.frame.compress(b"x")
    twice = {"name": "data", "offset": 0, "size_bytes": len(zeros), "plain_bytes": 512 << 20}
    overlapping = put_together(
        zeros, {"kind": "part", "encoding": "lz4", "header": {}, "sections": [twice, {**twice, "name": "more"}]}
    )
    return {
        "a frame of 64 TiB": lambda: decode_part(part(frame_that_claims(b"x" * 100, 64 << 40), 100)),
        "a footer of 64 TiB": lambda: decode_part(part(small, 64 << 40)),
        "2 MB of 512 MB, where 8 MB were declared": lambda: decode_part(part(zeros, 512 << 20), 8 << 20),
        "2 MB of 512 MB that say they are 8": lambda: decode_part(part(zeros, 8 << 20), 8 << 20),
        "a negative size": lambda: decode_part(part(small, -1)),
        "two sections in the same bytes": lambda: decode_part(overlapping),
        "buffers of 64 TiB": lambda: read_run(64 << 40, None),
        "buffers of 200 times the file": lambda: read_run(None, 1000),
        "a negative buffer": lambda: read_run(-7, None),
    }


def read_run(claimed: int | None, declared: int | None) -> None:
    """Read a compressed run whose first buffer claims to have so many bytes, or where so many are declared."""
    sink = pa.BufferOutputStream()
    counts(*((f"user {i}", 0) for i in range(5000)))["counts"].write(sink, compression="lz4")
    data = bytearray(sink.getvalue().to_pybytes())
    if claimed is not None:
        at = data.index(lz4.frame.compress(b"")[:4]) - 8
        data[at : at + 8] = struct.pack("<q", claimed)
    Run.read(pa.py_buffer(bytes(data)), COUNTS, source="the-run", plain_bytes=declared)


def frame_of_zeros(blocks: int) -> bytes:
    """Return an LZ4 frame of so many times 4 MiB of zeros, 16 KiB each."""
    one = lz4.frame.compress(bytes(4 << 20), block_size=7, block_linked=False, store_size=False)
    return one[:7] + one[7:-4] * blocks + one[-4:]


@pytest.mark.slow
def test_a_claim_is_checked_before_memory_is_asked_for() -> None:
    """Two megabytes never become more than somebody has declared outside of them."""
    command = [sys.executable, "-c", "import tests.fuzz.test_hostile_files as t; t.make_claims()"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{name}: refused" for name in claims()]


def make_claims() -> None:
    """Make all claims in this process, which has little memory from now on."""
    made = claims()
    within(256 << 20)
    for name, claim in made.items():
        with pytest.raises(CorruptionError, match="the-"):
            claim()
        print(f"{name}: refused")


def within(more_bytes: int) -> None:
    """Give this process so much more memory and no more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, used + more_bytes))


def test_what_is_true_is_read() -> None:
    """The forger's files are right where nothing is wrong with them, so what it spoils is what is refused."""
    content = bytes(range(256)) * 100
    assert decode_section(part(lz4.frame.compress(content), len(content))) == content
    assert decode_section(part(content, len(content), "plain")) == content
    data = stored_file.encode("part", {"a": 1}, {"data": lambda f: f.write(content)})[0].to_pybytes()
    assert put_together(*take_apart(data)) != b""
    assert decode_section(put_together(*take_apart(data))) == content


def decode_section(data: bytes) -> bytes:
    return stored_file.decode(data, source="it", kind="part").section("data", "it").to_pybytes()
