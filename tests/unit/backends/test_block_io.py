"""`holdfast.backends.block_io`: all bytes arrive, whatever the kernel takes at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.backends import block_io


def test_pieces_are_all_bytes_in_order() -> None:
    data = os.urandom(2 * block_io.BLOCK_BYTES + 3)
    found = list(block_io.in_blocks(memoryview(data)))
    assert [len(block) for block in found] == [block_io.BLOCK_BYTES, block_io.BLOCK_BYTES, 3]
    assert b"".join(found) == data
    assert list(block_io.in_blocks(b"")) == []


def test_a_write_of_which_the_kernel_takes_a_part_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:1000], offset))
    data = os.urandom(block_io.BLOCK_BYTES + 7)
    with (tmp_path / "file").open("w+b") as file:
        block_io.write_at(file.fileno(), data, 5)
    assert (tmp_path / "file").read_bytes() == bytes(5) + data


def test_a_read_of_which_the_kernel_gives_a_part_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:1000]], offset))
    data = os.urandom(10_000)
    (tmp_path / "file").write_bytes(data)
    room = bytearray(6_000)
    with (tmp_path / "file").open("rb") as file:
        assert block_io.read_at(file.fileno(), memoryview(room), 1) == 6_000
        assert bytes(room) == data[1:6_001]
        assert block_io.read_at(file.fileno(), memoryview(room), 7_000) == 3_000
        assert bytes(room[:3_000]) == data[7_000:]
