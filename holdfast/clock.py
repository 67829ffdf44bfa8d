"""Time and chance: the one place that asks the machine for either.

Components do not call these functions on their own account. They take them as arguments whose defaults
these are (``new_id: Callable[[], str] = clock.new_id``), so that a test hands in its own and every fault can
be reproduced.
"""

from __future__ import annotations

import secrets
import time


def now_ms() -> int:
    """Return the wall-clock time in milliseconds since 1970; it may jump, so it only labels things."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Return milliseconds since some moment in the past; never goes back, so it measures durations."""
    return time.monotonic_ns() // 1_000_000


def sleep_ms(milliseconds: int) -> None:
    """Let the calling thread rest."""
    time.sleep(milliseconds / 1000)


def new_id() -> str:
    """Return 16 random hexadecimal characters (64 bits), different in every process, forks included."""
    return secrets.token_hex(8)
