"""Reads and writes files in small blocks: a ninth of the CPU cost of large ones (docs/decisions/0005-run-files.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_BYTES = 256 << 10


def in_blocks(data: Buffer) -> Iterator[memoryview]:
    """Yield consecutive views of a C-contiguous buffer, each of at most `BLOCK_BYTES`."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), BLOCK_BYTES):
        yield view[start : start + BLOCK_BYTES]


def write_at(file: int, data: Buffer, offset: int) -> None:
    """Write a whole buffer to an open file at an offset. Raises `OSError`, possibly after a partial write."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done : done + BLOCK_BYTES], offset + done)


def read_at(file: int, data: memoryview, offset: int) -> int:
    """Fill a buffer from an open file, up to the file's end; return the number of bytes read."""
    size_bytes = 0
    while size_bytes < len(data) and (read := os.preadv(file, [data[size_bytes:]], offset + size_bytes)):
        size_bytes += read
    return size_bytes
