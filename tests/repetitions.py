"""How often a test repeats what chance decides: few times by default, many in the long profile."""

from __future__ import annotations

import os

LONG = os.environ.get("HOLDFAST_TEST_PROFILE", "quick") == "long"


def repetitions(quick: int, long: int) -> range:
    """Return the numbers of the repetitions to run, for ``parametrize`` or a loop; they serve as seeds."""
    return range(long if LONG else quick)
