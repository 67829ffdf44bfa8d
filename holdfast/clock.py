"""Time and randomness: the only module that reads the clocks and the random source.

Components take these functions as arguments with defaults (``new_id: Callable[[], str] = clock.new_id``), so that a
test can pass its own and reproduce any fault.
"""

from __future__ import annotations

import random
import secrets
import time
import uuid


def now_ms() -> int:
    """Return the wall-clock time in ms since 1970, for labels: it may jump."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Return ms since an arbitrary moment, for durations: it never goes back."""
    return time.monotonic_ns() // 1_000_000


def monotonic_ns() -> int:
    """Return nanoseconds since an arbitrary moment, for durations below a millisecond."""
    return time.monotonic_ns()


def sleep_ms(milliseconds: int) -> None:
    """Suspend the calling thread."""
    time.sleep(milliseconds / 1000)


def chance() -> float:
    """Return a random number in [0, 1)."""
    return random.random()  # noqa: S311  not a secret


def new_id() -> str:
    """Return 16 random hexadecimal characters (64 bits), which differ between processes, even after a fork."""
    return secrets.token_hex(8)


def new_uuid() -> str:
    """Return a random UUID, such as Spark's query ids."""
    return str(uuid.UUID(bytes=secrets.token_bytes(16), version=4))
