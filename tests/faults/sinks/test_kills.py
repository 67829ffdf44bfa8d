"""Sinks under kills: processes die at random moments and at each step, and a reader finds each result once.

benches/SINKS.md shows 100 kills of each, by HOLDFAST_TEST_KILLS=100.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.faults.sinks.judging import Onlooker, census
from tests.faults.sinks.killed_query import Job
from tests.faults.sinks.killing import SinkKillings
from tests.faults.sinks.targets import TARGETS, SparksFiles, target_of
from tests.tiers import ALL, cases, kills

KILLS = kills(quick=4 if ALL else 2)
#: Those that append.
SOURCES = ["parquet", "delta", "postgres", "postgres staged", "kafka"]
#: Files and rows appended in foreachBatch, and Spark's own sink of Kafka.
APPENDERS = ["parquet", "delta", "postgres", "kafka"]
SPARKS_FILES = SparksFiles()

pytestmark = [pytest.mark.slow(60), pytest.mark.spark, pytest.mark.timeout(3000)]


def run_of(tmp_path: Path, target: str, place: dict[str, str], way: str, seed: object) -> SinkKillings:
    job = Job(str(tmp_path), target=target, place=place, way=way, compiles=ALL)
    return SinkKillings(job, random.Random(f"{seed} {target} {way}"))


def kill_until(shows: Callable[[], bool], run: SinkKillings) -> None:
    """Kill until it shows what others do wrong: few kills hit the moment at which they do."""
    for number in range(KILLS, 10 * KILLS + 1, KILLS):
        run.run(number)
        if shows():
            return


def assert_once(tmp_path: Path, target: str, way: str, go: Callable[[SinkKillings], None]) -> None:
    with TARGETS[target].served(tmp_path) as place:
        run, began_s = run_of(tmp_path, target, place, way, 0), time.monotonic()
        go(run)
        found = run.judged()
    print(f"\n{target}, {way}: killed {run.done} in {time.monotonic() - began_s:.0f} s; {found}")
    assert found.is_right, f"{found}; {run.describe()}"
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("target", cases(sorted(TARGETS, reverse=True)))
def test_kills_show_each_result_once(target: str, java_home: Path, tmp_path: Path) -> None:
    assert_once(tmp_path, target, "exactly_once", lambda run: run.run(KILLS))


@pytest.mark.all
@pytest.mark.parametrize("target", cases([*TARGETS][1:] + [*TARGETS][:1]))
def test_a_death_at_each_step_shows_each_result_once(target: str, java_home: Path, tmp_path: Path) -> None:
    assert_once(tmp_path, target, "steps", SinkKillings.run_steps)


@pytest.mark.all
@pytest.mark.since("4.1")
@pytest.mark.parametrize("target", cases(SOURCES))
def test_kills_of_a_data_source_show_each_result_once(target: str, java_home: Path, tmp_path: Path) -> None:
    assert_once(tmp_path, target, "source", lambda run: run.run(KILLS))


@pytest.mark.all
@pytest.mark.parametrize("target", APPENDERS)
def test_what_others_do(target: str, java_home: Path, tmp_path: Path) -> None:
    """The same kills without these sinks: results are doubled, and attempts mixed.

    That nothing of ours is, `test_kills_show_each_result_once` shows .
    """
    with target_of(target).served(tmp_path) as place:
        run = run_of(tmp_path, target, place, "plain", 0)
        kill_until(lambda: run.judged().doubled > 0, run)
        found = run.judged()
    print(f"\n{target}, the plain way: killed {run.done}; {found}")
    assert found.doubled
    shutil.rmtree(tmp_path)


@pytest.mark.all
def test_what_spark_shows_of_its_own_files(spark: SparkSession, tmp_path: Path) -> None:
    """Its own reader knows which files count; all others find those of dead attempts, too."""
    with SPARKS_FILES.served(tmp_path) as place:
        run = run_of(tmp_path, "Spark's files", place, "plain", 0)
        kill_until(lambda: run.judged().doubled > 0, run)
        by_others = run.judged()
        by_spark = census(SPARKS_FILES.read_by_spark(spark, place), by_others.batches, upserts=False)
    print(f"\nSpark's files: killed {run.done}; all files: {by_others}; by Spark: {by_spark}")
    assert by_others.doubled
    assert by_spark.is_right
    shutil.rmtree(tmp_path)


@pytest.mark.all
@pytest.mark.parametrize("way", ["plain", "exactly_once"])
def test_what_an_onlooker_sees_of_upserts(way: str, java_home: Path, tmp_path: Path) -> None:
    """In the end both have the newest results; on the way others show parts of micro-batches."""
    target = target_of("postgres upsert")
    with target.served(tmp_path) as place, Onlooker(lambda: target.read(place)) as onlooker:
        run = run_of(tmp_path, "postgres upsert", place, way, 0)
        kill_until(lambda: way != "plain" or onlooker.torn > 0, run)
        found = run.judged()
    print(f"\nupserts, {way}: killed {run.done}; {found}; of {onlooker.reads} looks {onlooker.torn} at parts, "
          f"{onlooker.changed} results changed")  # fmt: skip
    assert onlooker.reads
    if way == "plain":
        assert onlooker.torn
    else:
        assert found.is_right
        assert (onlooker.torn, onlooker.changed) == (0, 0)
    shutil.rmtree(tmp_path)
