"""A place for files in RAM: tests sync them thousands of times, which on a disk is most of what they wait for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_RAM = Path("/dev/shm")
_ROOM_BYTES = 4 << 30


def place_in_ram() -> Path | None:
    """Return the file system in RAM, if there is one with room; containers often give it 64 MB."""
    has_room = _RAM.is_dir() and os.access(_RAM, os.W_OK) and shutil.disk_usage(_RAM).free > _ROOM_BYTES
    return _RAM if has_room else None
