"""What a function can do to its state, on Spark's operator and on ours: the scripts, case by case.

Each script is one query an engine; its cases are told apart by their keys. With ``spark.holdfast.timeouts=spark``
nothing may differ; as documented, only what `Case.documented` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.answers import Book, Questions
from tests.spark.once import Once
from tests.spark.parity import program
from tests.spark.parity.engines import (
    DOCUMENTED,
    FILESYSTEM,
    MEMORY,
    ROCKSDB,
    SPARK,
    STRICT,
    Engine,
    State,
    Trial,
    trial,
)
from tests.spark.parity.scripts import EVENT_TIME, NO_TIMEOUT, PROCESSING_TIME, SCRIPTS, Case, Script
from tests.spark.questions import digest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow(0.3)]

ENGINES = [SPARK, *STRICT, DOCUMENTED]
# What ``make test`` plays beside Spark, as recorded.
QUICK = {
    NO_TIMEOUT.name: [SPARK, FILESYSTEM],
    EVENT_TIME.name: [SPARK, ROCKSDB, DOCUMENTED],
    PROCESSING_TIME.name: [SPARK, MEMORY],
}
PLAYS = [
    (engine, script, () if engine in QUICK[script.name] else (pytest.mark.all,))
    for script in SCRIPTS
    for engine in ENGINES
]
CASES = [
    pytest.param(script, case, engine, id=f"{script.name}-{case.item}-{case.what}-{engine.name}", marks=marks)
    for engine, script, marks in PLAYS
    for case in script.cases
]


@dataclass(frozen=True)
class Played:
    """What a script came to on an engine: by key the notes of each micro-batch, and the states at the end."""

    notes: dict[str, list[tuple[int, str]]]
    order: list[list[str]]
    states: State
    micro_batches: int

    def calls(self, key: str) -> str:
        """Return in which micro-batches a key was called, with a ``t`` for a timeout."""
        return " ".join(f"{n}{'t' * note.startswith('timeout')}" for n, note in self.notes.get(key, []))


Play = Callable[[Engine, Script], Played]


@pytest.fixture(scope="module")
def play(spark: SparkSession, local_state: Path, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Return a function that plays a script on an engine, once."""
    played = Once[Played]()

    def play_it(engine: Engine, script: Script) -> Played:
        # With processing time, micro-batches without data would never end.
        endless = script.timeout == "ProcessingTimeTimeout"
        conf = {"spark.sql.streaming.noDataMicroBatches.enabled": str(not endless).lower()}
        questions = Questions(Book.of(Path(__file__)), script.name, digest(play_on, script))
        with trial(spark, engine, tmp_path_factory.mktemp("play"), local_state, conf, questions) as run:
            return play_on(run, script)

    return lambda engine, script: played.get((engine.name, script.name), lambda: play_it(engine, script))


def play_on(run: Trial, script: Script) -> Played:
    """Play a script."""
    for number in range(script.micro_batches):
        run.feed(script.rows(number))
    arguments = (program.interpret, program.OUTPUT, program.STATE, "update", script.timeout)
    run.run(run.apply(run.source(), ["key"], *arguments))
    return _played(run.batches, run.state(exact=script.timeout != "ProcessingTimeTimeout"))


def _played(batches: list[list[tuple[str, str]]], states: State) -> Played:
    notes: dict[str, list[tuple[int, str]]] = {}
    for number, rows in enumerate(batches):
        for key, note in rows:
            notes.setdefault(key, []).append((number, note))
    return Played(notes, [[key for key, _ in rows] for rows in batches], states, len(batches))


@pytest.mark.parametrize(("script", "case", "engine"), CASES)
def test_case(engine: Engine, script: Script, case: Case, play: Play) -> None:
    found, on_spark = play(engine, script), play(SPARK, script)
    calls, state = case.calls, case.state
    if engine is DOCUMENTED and case.documented is not None:
        calls, state = case.documented
    else:
        assert found.notes.get(case.key) == on_spark.notes.get(case.key)
    assert found.calls(case.key) == calls
    assert found.states.get(case.key) == state


@pytest.mark.parametrize(
    ("script", "engine"),
    [pytest.param(script, engine, id=f"{script.name}-{engine.name}", marks=marks) for engine, script, marks in PLAYS],
)
def test_nothing_else_happens(engine: Engine, script: Script, play: Play) -> None:
    """P1, P4: no key but those of the script is called or stored, and there are as many micro-batches as in Spark."""
    found = play(engine, script)
    keys = {case.key for case in script.cases}
    assert set(found.notes) == keys | {"clock"}
    assert set(found.states) <= keys
    assert found.micro_batches == play(SPARK, script).micro_batches
    assert found.notes["clock"] == play(SPARK, script).notes["clock"]
