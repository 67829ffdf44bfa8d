"""Which tests run, and how often: four tiers, each the same set every time.

===============  ====================================================================================
make test-fast   of the next tier what needs neither Spark nor a server nor seconds
make test        every promise once
make test-all    each case once: also the tests marked ``all``, and all of `cases`
make test-long   each case, repeated: also the tests marked ``long``, and the long `repetitions`
===============  ====================================================================================

``HOLDFAST_TEST_TIER=all pytest tests/…`` runs a tier by hand. Chance never decides what runs: what a test draws, it
draws from a fixed seed; only in ``make test-long`` hypothesis draws anew, and prints how to draw the same again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

TIERS = ("test", "all", "long")
TIER = os.environ.get("HOLDFAST_TEST_TIER", "test")
if TIER not in TIERS:
    raise ValueError(f"HOLDFAST_TEST_TIER={TIER}: one of {', '.join(TIERS)}")
#: Whether each case runs, and whether it is also repeated.
ALL, LONG = TIER != "test", TIER == "long"
Case = TypeVar("Case")


def cases(every: Sequence[Case], quick: int = 1) -> list[Case]:
    """Return the cases of a test: in ``make test`` `quick` of them, always the same, evenly spread from the first."""
    if ALL or quick >= len(every):
        return list(every)
    return [every[i * len(every) // quick] for i in range(quick)]


def repetitions(quick: int, long: int) -> range:
    """Return the numbers of the repetitions to run, for ``parametrize`` or a loop; they serve as seeds."""
    return range(long if LONG else quick)


def kills(quick: int, long: int = 10) -> int:
    """Return how many processes a test of kills is to kill; ``HOLDFAST_TEST_KILLS=100`` kills more.

    Nearly all of its time is starting what was killed: 14 CPU seconds for a driver.
    """
    return int(os.environ.get("HOLDFAST_TEST_KILLS") or (long if LONG else quick))


def examples(quick: int = 10, every: int = 20, long: int = 200) -> int:
    """Return how many examples hypothesis tries in ``make test``, in ``make test-all`` and in the long tier.

    ``HOLDFAST_TEST_EXAMPLES=1000`` tries more. Some tests try as many for each of 8 cases, at a quarter of a second
    each.
    """
    return int(os.environ.get("HOLDFAST_TEST_EXAMPLES") or (long if LONG else every if ALL else quick))
