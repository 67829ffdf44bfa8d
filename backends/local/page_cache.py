"""Checks which pages of a mapped file are in memory, and prefetches other pages in parallel."""

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
_SAMPLE = 16
#: On a page fault, Linux also maps the surrounding pages that are in memory.
_FAULT_BYTES = 64 << 10


class MappedFile:
    """A memory-mapped, non-empty file; it stays readable when it is unlinked. Raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        # Not mapped by Arrow, which would advise the system to read the whole file.
        self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        self._advice = mmap.MADV_NORMAL
        self.data = pa.py_buffer(self._map)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    @property
    def descriptor(self) -> int:
        """The file descriptor, open as long as the object lives."""
        assert self._descriptor is not None
        return self._descriptor

    def expect_scans(self) -> None:
        """Expect sequential reads: enable read-ahead."""
        self._advise(mmap.MADV_NORMAL)

    def expect_look_ups(self) -> None:
        """Expect random reads: disable read-ahead."""
        self._advise(mmap.MADV_RANDOM)

    def _advise(self, advice: int) -> None:
        if self._advice != advice:
            self._advice = advice
            self._map.madvise(advice)

    def is_cached(self) -> bool:
        """Return, from a sample, whether the whole file is in memory."""
        return self.are_cached(np.linspace(0, self.data.size - 1, _SAMPLE).astype(np.int64))

    def touch(self) -> None:
        """Map all pages at once if they are in memory: single faults during look-ups cost ten times as much."""
        if self.is_cached():
            np.frombuffer(self.data, np.uint8)[::_FAULT_BYTES].max()

    def are_cached(self, places: IntArray) -> bool:
        """Return, from a sample, whether the bytes at `places` can be read without waiting."""
        if not hasattr(os, "RWF_NOWAIT"):
            return True
        byte = bytearray(1)
        try:
            for place in places[:: max(1, len(places) // _SAMPLE)].tolist():
                os.preadv(self.descriptor, [byte], place, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the file system does not support RWF_NOWAIT
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
