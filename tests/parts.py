"""Which process of a run has which tests, what begins first, and parts of a run: ``make test-all PART=7/20``.

The tests of a file stay together and share its servers. In ``make test`` so do those that use a session of Spark: a
JVM costs 10 CPU seconds to start, and as much until it is warm. Two processes have them, one for each core: one alone
would still be at it when all other tests have ended; in longer tiers two would be left alone with them. What takes
longest begins first. A part is always of whole files, and at one commit always of the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.tiers import ALL

#: For example ``7/20``; empty for the whole.
PART = os.environ.get("HOLDFAST_TEST_PART", "")

# Seconds that a test takes at a guess, by its marker: enough to say which files take longest. A test says it better by
# `slow(60)`.
_WEIGHTS = {"slow": 20, "cluster": 20, "kafka": 10, "postgres": 5, "spark": 4, "hdfs": 2, "s3": 1}

# What uses a session, what starts applications of its own, and what has a session beside the rest: also what kills
# drivers and executors, and reads what came of it.
_SESSION, _APPLICATIONS = ("tests/spark/", "tests/formats/"), ("tests/spark/programs/",)
_KILLS = ("tests/cluster/", "tests/faults/test_exactly_once", "tests/faults/sinks/")
_BESIDE = ("tests/spark/parity/", "tests/spark/processors/", *_KILLS)
# Servers that take seconds to start: by their name in the path of a file.
_SERVERS = ("hdfs", "kafka", "postgres", "s3")
# Each takes as long as the rest takes the third process: begun late, it would be left alone at the end.
_LONGEST = ("session", "beside")


class Scheduling(LoadScopeScheduling):
    """Gives out tests by file, but those of a session all to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid)


def together(nodeid: str) -> str:
    """Return the file of a test, or what all that share the session or a server with it are called."""
    file = nodeid.partition("::")[0]
    if ALL:
        return file
    if file.startswith(_BESIDE):
        return "beside"
    if file.startswith(_SESSION) and not file.startswith(_APPLICATIONS):
        return "session"
    return next((server for server in _SERVERS if server in file), file)


def longest_first(items: list[pytest.Item]) -> None:
    weights = _weights(items, lambda item: together(item.nodeid))

    def rank(item: pytest.Item) -> tuple[bool, float]:
        group = together(item.nodeid)
        return group not in _LONGEST, _LONGEST.index(group) if group in _LONGEST else -weights[group]

    items.sort(key=rank)


def of_other_parts(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that are not in this part: of files with the longest first, each goes to the lightest part."""
    if not PART:
        return set()
    number, of = (int(each) for each in PART.split("/"))
    if not 1 <= number <= of:
        raise pytest.UsageError(f"HOLDFAST_TEST_PART={PART}: the first part is 1/{of}, the last one {of}/{of}")
    loads, part_of = [0.0] * of, {}
    weights = _weights(items, _file)
    for file in sorted(weights, key=lambda file: -weights[file]):
        part_of[file] = loads.index(min(loads))
        loads[part_of[file]] += weights[file]
    return {item for item in items if part_of[_file(item)] != number - 1}


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _weights(items: Iterable[pytest.Item], group: Callable[[pytest.Item], str]) -> dict[str, float]:
    """Return how many seconds each group of tests takes, at a guess."""
    weights: dict[str, float] = {}
    for item in items:
        # A test of nothing dear takes a little, too: many of them make a part.
        weights[group(item)] = weights.get(group(item), 0.0) + (_guessed_s(item) or 0.01)
    return weights


def _guessed_s(item: pytest.Item) -> float:
    if item.get_closest_marker("skip"):
        return 0.0
    slow = item.get_closest_marker("slow")
    if slow is not None and slow.args:
        return float(slow.args[0])
    return max((_WEIGHTS[mark.name] for mark in item.iter_markers() if mark.name in _WEIGHTS), default=0)
