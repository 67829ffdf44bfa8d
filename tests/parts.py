"""What takes long begins first, and parts of a run, for who has no time for the whole: ``make test-all PART=7/20``.

A part is always of whole files, and at one commit always of the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

#: For example ``7/20``; empty for the whole.
PART = os.environ.get("HOLDFAST_TEST_PART", "")

# Seconds that a test takes at a guess, by its marker: enough to say which files take longest. A test says it better by
# `slow(60)`.
_WEIGHTS = {"slow": 20, "cluster": 20, "kafka": 10, "postgres": 5, "spark": 4, "hdfs": 2, "s3": 1}


def longest_files_first(items: list[pytest.Item]) -> None:
    """Sort the files, so that side by side no process is left alone with a long one at the end."""
    weights = _weights(items)
    items.sort(key=lambda item: -weights[item.path])


def of_other_parts(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that are not in this part, of files with the longest first: each goes to the lightest part."""
    if not PART:
        return set()
    number, of = (int(each) for each in PART.split("/"))
    if not 1 <= number <= of:
        raise pytest.UsageError(f"HOLDFAST_TEST_PART={PART}: the first part is 1/{of}, the last one {of}/{of}")
    loads, chosen = [0.0] * of, set()
    for path, weight in _weights(items).items():
        lightest = loads.index(min(loads))
        loads[lightest] += weight
        if lightest == number - 1:
            chosen.add(path)
    return {item for item in items if item.path not in chosen}


def _weights(items: Sequence[pytest.Item]) -> dict[Path, float]:
    weights: dict[Path, float] = {}
    for item in items:
        # Also a test of nothing dear takes a little: many files of them make a part.
        weights[item.path] = weights.get(item.path, 0.0) + (_guessed_s(item) or 0.01)
    return weights


def _guessed_s(item: pytest.Item) -> float:
    if item.get_closest_marker("skip"):
        return 0.0
    slow = item.get_closest_marker("slow")
    if slow is not None and slow.args:
        return float(slow.args[0])
    return max((_WEIGHTS[mark.name] for mark in item.iter_markers() if mark.name in _WEIGHTS), default=0)
