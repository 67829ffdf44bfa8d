"""How often a test repeats what chance decides, and which cases of a wide product have their turn.

The long profile runs everything. A quick run repeats little and samples a product. The sample moves with the seed of
the run, so each case has its turn in some run. The header of a run shows the seed, and ``HOLDFAST_TEST_SEED=41 make
test`` runs the same cases again.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

LONG = os.environ.get("HOLDFAST_TEST_PROFILE", "quick") == "long"
Case = TypeVar("Case")


def repetitions(quick: int, long: int) -> range:
    """Return the numbers of the repetitions to run, for ``parametrize`` or a loop; they serve as seeds."""
    return range(long if LONG else quick)


def kills(quick: int) -> int:
    """Return how many processes a test of kills is to kill, 10 in the long profile; ``HOLDFAST_TEST_KILLS=100`` more.

    Nearly all of its time is starting what was killed: 14 CPU seconds for a driver.
    """
    return int(os.environ.get("HOLDFAST_TEST_KILLS") or (10 if LONG else quick))


def examples() -> int:
    """Return how many examples hypothesis tries, 200 in the long profile; ``HOLDFAST_TEST_EXAMPLES=1000`` more.

    Some tests try as many for each of 8 cases, at a quarter of a second each.
    """
    return int(os.environ.get("HOLDFAST_TEST_EXAMPLES") or (200 if LONG else 20))


def sample(cases: Sequence[Case], quick: int = 1) -> list[Case]:
    """Return all cases in the long profile, else `quick` of them, evenly spread from the one whose turn it is."""
    if LONG or quick >= len(cases):
        return list(cases)
    return [cases[(seed() + i * len(cases) // quick) % len(cases)] for i in range(quick)]


def has_turn(which: int, of: int) -> bool:
    """Tell whether this run has a test marked ``turn(which, of)``: of so many successive seeds, one has.

    The order differs each time, so that such a test meets all cases of a `sample`.
    """
    return LONG or (seed() + zlib.crc32(b"%d" % (seed() // of))) % of == which


def turn_of(name: str) -> int:
    """Return a number whose remainder says whose turn it is: it goes up by one with each seed, and names differ."""
    return zlib.crc32(name.encode()) + seed()


def seed() -> int:
    """Return the seed of the run: the same in all its processes, and by default another for each commit."""
    if "HOLDFAST_TEST_SEED" not in os.environ:
        os.environ["HOLDFAST_TEST_SEED"] = str(_number_of_commits())
    return int(os.environ["HOLDFAST_TEST_SEED"])


def _number_of_commits() -> int:
    command = ["git", "rev-list", "--count", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return 0 if done.returncode else int(done.stdout)
