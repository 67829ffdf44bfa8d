"""Sinks under kills: processes die at random moments and at each step, and a reader finds each result once."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from tests.faults.sinks.killed_at import STEPS
from tests.faults.sinks.killed_query import Job
from tests.faults.sinks.killing import SinkKillings
from tests.faults.sinks.targets import TARGETS
from tests.repetitions import LONG, sample

KILLS = 100 if LONG else 4
#: Those that append.
SOURCES = ["parquet", "delta", "postgres", "postgres staged", "kafka"]
#: Files and rows appended in foreachBatch, and Spark's own sink of Kafka.
OTHERS = ["parquet", "delta", "postgres", "kafka"]
#: The steps at which one query dies: all, or in a quick run those up to a decision, or those around and after it.
STEPS_OF_A_QUERY = (
    [STEPS]
    if LONG
    else [("begin", "confirmed", "found", "aborted"), ("write", "prepared", "decided", "commit", "committed")]
)

pytestmark = [pytest.mark.slow(60), pytest.mark.spark, pytest.mark.timeout(3000)]


def run_of(tmp_path: Path, target: str, place: dict[str, str], way: str, seed: object) -> SinkKillings:
    job = Job(str(tmp_path), "packed", target=target, place=place, way=way, compiles=LONG)
    return SinkKillings(job, random.Random(f"{seed} {target} {way}"))


@pytest.mark.turn(0, 2)
@pytest.mark.parametrize("target", sample(list(TARGETS)))
def test_kills_show_each_result_once(target: str, java_home: Path, tmp_path: Path) -> None:
    with TARGETS[target].served(tmp_path) as place:
        run, began_s = run_of(tmp_path, target, place, "exactly_once", 0), time.monotonic()
        run.run(KILLS)
        found = run.judged()
    print(f"\n{target}: killed {run.done} in {time.monotonic() - began_s:.0f} s; {found}")
    assert found.is_right, f"{found}; {run.describe()}"
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(("target", "steps"), sample(list(product(TARGETS, STEPS_OF_A_QUERY))))
def test_a_death_at_each_step_shows_each_result_once(
    target: str, steps: Sequence[str], java_home: Path, tmp_path: Path
) -> None:
    with TARGETS[target].served(tmp_path) as place:
        run = run_of(tmp_path, target, place, "steps", 0)
        run.run_steps(steps)
        found = run.judged()
    print(f"\n{target}: died at {', '.join(run.done)}; {found}")
    assert found.is_right, f"{found}; {run.describe()}"
    shutil.rmtree(tmp_path)


@pytest.mark.turn(1, 2)
@pytest.mark.parametrize("target", sample(SOURCES))
def test_kills_of_a_data_source_show_each_result_once(target: str, java_home: Path, tmp_path: Path) -> None:
    with TARGETS[target].served(tmp_path) as place:
        run = run_of(tmp_path, target, place, "source", 0)
        run.run(KILLS)
        found = run.judged()
    print(f"\n{target}, as a data source: killed {run.done}; {found}")
    assert found.is_right, f"{found}; {run.describe()}"
    shutil.rmtree(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("target", OTHERS)
def test_what_others_do(target: str, java_home: Path, tmp_path: Path) -> None:
    """The same kills without these sinks: results are doubled, and attempts mixed.

    That nothing of ours is, `test_kills_show_each_result_once` shows in every run.
    """
    with TARGETS[target].served(tmp_path) as place:
        run = run_of(tmp_path, target, place, "plain", 0)
        run.run(KILLS)
        found = run.judged()
    print(f"\n{target}, the plain way: killed {run.done}; {found}")
    assert found.doubled
    shutil.rmtree(tmp_path)
