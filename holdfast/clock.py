"""Time and randomness: the one place that asks the machine for either.

Components never call these functions directly. They take them as arguments with these defaults
(``new_id: Callable[[], str] = clock.new_id``), so that a test can pass its own and reproduce any fault.
"""

from __future__ import annotations

import random
import secrets
import time
import uuid


def now_ms() -> int:
    """Return the wall-clock time in milliseconds since 1970; it may jump, so it only labels things."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Return milliseconds since some moment in the past; never goes back, so it measures durations."""
    return time.monotonic_ns() // 1_000_000


def monotonic_ns() -> int:
    """Return nanoseconds since some moment in the past, to measure less than a millisecond."""
    return time.monotonic_ns()


def sleep_ms(milliseconds: int) -> None:
    """Put the calling thread to sleep."""
    time.sleep(milliseconds / 1000)


def chance() -> float:
    """Return a random number, from 0 to below 1."""
    return random.random()  # noqa: S311  nothing secret


def new_id() -> str:
    """Return 16 random hexadecimal characters (64 bits), different in every process, forks included."""
    return secrets.token_hex(8)


def new_uuid() -> str:
    """Return a random UUID, as Spark gives one to a query."""
    return str(uuid.UUID(bytes=secrets.token_bytes(16), version=4))
