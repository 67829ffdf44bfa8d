"""Tells which pages of a mapped file are in memory, and prefetches others at once, in parallel."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

IntArray = npt.NDArray[np.int64]

PAGE_BYTES = 4096
#: Gaps between pages up to this size are prefetched, too.
_GAP_PAGES = 2
#: A sample of this size stands for all.
_SAMPLE = 16
#: Linux maps the pages around one that is touched, as far as they are in memory.
_FAULT_BYTES = 64 << 10


class MappedFile:
    """A mapped, non-empty file, which stays readable when it is unlinked. Raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        # Not through Arrow, which would ask the system to read everything.
        self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        self._advice = mmap.MADV_NORMAL
        self.data = pa.py_buffer(self._map)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    @property
    def descriptor(self) -> int:
        """Its file descriptor, open as long as the object lives."""
        assert self._descriptor is not None
        return self._descriptor

    def expect_scans(self) -> None:
        """Expect reads in order: pages are read ahead."""
        self._advise(mmap.MADV_NORMAL)

    def expect_look_ups(self) -> None:
        """Expect look-ups: no page is read ahead."""
        self._advise(mmap.MADV_RANDOM)

    def _advise(self, advice: int) -> None:
        if self._advice != advice:
            self._advice = advice
            self._map.madvise(advice)

    def is_cached(self) -> bool:
        """Tell from a sample whether the whole file is in memory."""
        return self.are_cached(np.linspace(0, self.data.size - 1, _SAMPLE).astype(np.int64))

    def touch(self) -> None:
        """Map all pages that are in memory in one go: single faults during look-ups cost ten times as much."""
        if self.is_cached():
            np.frombuffer(self.data, np.uint8)[::_FAULT_BYTES].max()

    def are_cached(self, places: IntArray) -> bool:
        """Tell, from a sample, whether the bytes at some places can be read without waiting."""
        if not hasattr(os, "RWF_NOWAIT"):
            return True
        byte = bytearray(1)
        try:
            for place in places[:: max(1, len(places) // _SAMPLE)].tolist():
                os.preadv(self.descriptor, [byte], place, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True  # a file system that cannot tell
        return True

    def prefetch(self, begins: IntArray, ends: IntArray) -> None:
        """Prefetch byte ranges, given by `begins` and `ends`, without waiting for them."""
        if not len(begins) or not hasattr(os, "posix_fadvise"):
            return
        firsts, lasts = begins // PAGE_BYTES, np.maximum(ends - 1, begins) // PAGE_BYTES
        order = np.argsort(firsts)
        firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
        is_new = np.ones(len(firsts), np.bool_)
        is_new[1:] = firsts[1:] > lasts[:-1] + _GAP_PAGES
        starts = np.flatnonzero(is_new)
        spans = zip(firsts[starts].tolist(), lasts[np.append(starts[1:], len(lasts)) - 1].tolist(), strict=True)
        with suppress(OSError):
            for first, last in spans:
                length = (last + 1 - first) * PAGE_BYTES
                os.posix_fadvise(self.descriptor, first * PAGE_BYTES, length, os.POSIX_FADV_WILLNEED)
