"""Reads and writes files in small blocks, at a ninth of the CPU of large ones (docs/decisions/0005-run-files.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_BYTES = 256 << 10


def in_blocks(data: Buffer) -> Iterator[memoryview]:
    """Yield views of all bytes of a C-contiguous buffer, in order."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), BLOCK_BYTES):
        yield view[start : start + BLOCK_BYTES]


def write_at(file: int, data: Buffer, offset: int) -> None:
    """Write all bytes of a buffer to an open file. Raises `OSError` if not all could be written; some may have been."""
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
