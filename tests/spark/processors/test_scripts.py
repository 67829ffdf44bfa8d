"""Timers, time to live and state over micro-batches and a restart: the scripts, on Spark's operator and on ours.

What a script must come to stands in its cases, and holds for each engine alone. In ``make test`` each script is played
by one engine of ours, each another one; what Spark's operator came to, as recorded, shows that its cases are right.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.answers import Book, Questions
from tests.spark.once import Once
from tests.spark.parity.engines import trial
from tests.spark.processors.engines import SPARK, ProcessorEngine, ours
from tests.spark.processors.scripts.clocked import play_script
from tests.spark.processors.scripts.script import Case, Play, Played, Script
from tests.spark.processors.scripts.timers import EVENT_TIME, NO_TIME, PROCESSING_TIME
from tests.spark.processors.scripts.ttl import TTL
from tests.spark.questions import digest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow(0.5)]

SCRIPTS = (PROCESSING_TIME, EVENT_TIME, NO_TIME, TTL)
PLAYS = [
    *((engine, script) for number, script in enumerate(SCRIPTS) for engine in ours(number)),
    *product(SPARK, SCRIPTS),
]
CASES = [
    pytest.param(script, case, engine, id=f"{script.name}-{case.name.replace(' ', '_')}-{engine.name}")
    for engine, script in PLAYS
    for case in script.cases
]


@pytest.fixture(scope="module")
def play(spark: SparkSession, local_state: Path, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Return a function that plays a script on an engine, once."""
    played = Once[Played]()

    def play_it(engine: ProcessorEngine, script: Script) -> Played:
        questions = Questions(Book.of(Path(__file__)), script.name, digest(play_script, script))
        with trial(spark, engine, tmp_path_factory.mktemp("play"), local_state, questions=questions) as on:
            return play_script(script, engine, on)

    return lambda engine, script: played.get((engine.name, script.name), lambda: play_it(engine, script))


@pytest.mark.parametrize(("script", "case", "engine"), CASES)
def test_case(engine: ProcessorEngine, script: Script, case: Case, play: Play) -> None:
    notes = case.on_spark if engine.is_spark and case.on_spark is not None else case.notes
    assert play(engine, script).notes.get(case.name, []) == notes


@pytest.mark.parametrize(("engine", "script"), [pytest.param(e, s, id=f"{s.name}-{e.name}") for e, s in PLAYS])
def test_nothing_else_happens(engine: ProcessorEngine, script: Script, play: Play) -> None:
    """No key but those of the script is called, and the clock's key once in each micro-batch with data."""
    found = play(engine, script).notes
    assert set(found) == {"clock", *(case.name for case in script.cases)}
    last = script.micro_batches - (script.time_mode != "None")
    assert found["clock"] == [f"{number} rows" for number in range(last)]
