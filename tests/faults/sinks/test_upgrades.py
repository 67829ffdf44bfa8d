"""Queries that are upgraded again and again under kills: readers of their sinks' targets find exactly the truth.

benches/SINKS.md shows 50 upgrades in a row, by HOLDFAST_TEST_UPGRADES=50.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.sinks.targets import TARGETS
from tests.faults.sinks.upgraded_queries import SOURCES, Job
from tests.faults.sinks.upgrading import Upgrades
from tests.tiers import LONG

UPGRADES = int(os.environ.get("HOLDFAST_TEST_UPGRADES") or (12 if LONG else 6))

pytestmark = [pytest.mark.all, pytest.mark.slow(200), pytest.mark.spark, pytest.mark.timeout(7200)]


@pytest.fixture
def job(java_home: Path, tmp_path: Path) -> Iterator[Job]:
    """Return what drivers are to do, while all targets serve."""
    with ExitStack() as servers:
        places = {}
        for name in SOURCES:
            (tmp_path / name).mkdir()
            places[name] = servers.enter_context(TARGETS[name].served(tmp_path / name))
        (tmp_path / "input").mkdir()
        topic = TARGETS["kafka"].anew(places["kafka"], tmp_path)
        numbers = {"folder": str(tmp_path / "input"), **topic}
        yield Job(str(tmp_path), compiles=False, places=places, numbers=numbers)


def test_an_upgrade_shows_each_result_once(job: Job) -> None:
    """After a stop, a SIGKILL at any moment, after a decision, and before Spark's commit."""
    run, began_s = Upgrades(job, random.Random("upgrades")), time.monotonic()
    found = run.run(UPGRADES)
    print(f"\n{run.done} in {time.monotonic() - began_s:.0f} s; {found}")
    assert all(each.is_right for each in found.values()), f"{found}; {run.describe()}"


def test_what_others_do(job: Job) -> None:
    """The same upgrades with Spark's own Kafka sink, and with plain appends: results are doubled."""
    run, began_s = Upgrades(Job(**{**job.__dict__, "is_plain": True}), random.Random("upgrades")), time.monotonic()
    found = run.run(UPGRADES)
    print(f"\nthe plain way: {run.done} in {time.monotonic() - began_s:.0f} s; {found}")
    assert any(each.doubled for each in found.values())
