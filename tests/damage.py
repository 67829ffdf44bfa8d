"""A bit that flips, in a file or in bytes."""

from __future__ import annotations

import os
from pathlib import Path


def flip(path: Path, offset: int, *, unnoticed: bool = False) -> None:
    """Flip a bit in place, so in all links, as somebody who writes to the file does, or as a failing disk does."""
    found = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << offset % 8]))
    if unnoticed:
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def flipped(data: bytes, offset: int = 40) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 1 << offset % 8]) + data[offset + 1 :]
