"""A limit of the bytes that uploads send per second, shared by all threads that upload.

A bucket of tokens, kept as the moment when it is full again: who takes bytes is given the next free moment, sleeps
until then, and sends. So callers go in the order in which they came, nobody polls, and a large part is paid for by
whoever comes after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast import clock

_LOOK_EVERY_MS = 100


def _go_on() -> None:
    """Never cancel."""


class Bandwidth:
    """The limit; see the module.

    Parameters
    ----------
    bytes_per_second : int
        At least 1.
    monotonic_ms, sleep_ms : callable, optional
        As in `holdfast.clock`.

    Notes
    -----
    Threads: any. Over any stretch of time at most ``bytes_per_second`` times its length is let through, and one part; a
    part more for each wait that was cancelled meanwhile.
    """

    def __init__(
        self,
        bytes_per_second: int,
        *,
        monotonic_ms: Callable[[], int] = clock.monotonic_ms,
        sleep_ms: Callable[[int], None] = clock.sleep_ms,
    ) -> None:
        self._bytes_per_ms = bytes_per_second / 1000
        self._monotonic_ms, self._sleep_ms = monotonic_ms, sleep_ms
        self._lock = threading.Lock()
        self._free_ms = float(monotonic_ms())

    def take(self, size_bytes: int, check: Callable[[], None] = _go_on) -> None:
        """Wait until so many bytes may be sent.

        Parameters
        ----------
        size_bytes : int
            What is sent next.
        check : callable, optional
            Called before the wait and every 0.1 s of it; what it raises ends the wait, for example because the upload
            was cancelled. The bytes are then given back.
        """
        check()
        turn_ms = self._free_ms_after(size_bytes)
        try:
            while (left_ms := turn_ms - self._monotonic_ms()) > 0:
                self._sleep_ms(max(1, min(_LOOK_EVERY_MS, round(left_ms))))
                check()
        except BaseException:
            self._free_ms_after(-size_bytes)
            raise

    def _free_ms_after(self, size_bytes: int) -> float:
        """Reserve bytes, or give them back; returns the moment at which they may go."""
        with self._lock:
            turn_ms = max(self._free_ms, self._monotonic_ms()) if size_bytes > 0 else self._free_ms
            self._free_ms = turn_ms + size_bytes / self._bytes_per_ms
            return turn_ms
