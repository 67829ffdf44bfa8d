"""Chance writes a program, Spark's operator and ours run it, and must say the same: calls, outputs and states.

A program is a list of micro-batches of rows whose commands `program.interpret` carries out, on time or late, for keys
that say what to do when they time out; between some micro-batches the query is stopped and started again.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.spark.parity import program
from tests.spark.parity.engines import SPARK, STRICT, Row, State, Trial, trial
from tests.tiers import LONG

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.state import GroupState

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.all, pytest.mark.slow, pytest.mark.timeout(3000)]

_NOW_MS = 5_000
_UPDATES = st.sampled_from(["", "update 1", "increase", "increase;increase", "remove", "remove;increase", "get;str"])
_TIMEOUTS = st.sampled_from(
    ["", "", "after 0", "after 1", "after 500", "after 1500", "after 4000", "after 500;after 900"]
)
_COMMANDS = st.tuples(_UPDATES, _TIMEOUTS).map(lambda both: ";".join(text for text in both if text))
_LATENESS_MS = st.sampled_from([0, 0, 0, 0, 1, 999, 1000, 1001, 2500])


@dataclass(frozen=True)
class Program:
    """What rows come in each micro-batch, and before which ones the query begins again."""

    batches: list[list[Row]]
    restarts: frozenset[int]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program of a few keys, each of which has rows in about every second micro-batch."""
    keys = [f"{i}@{do}" for i, do in enumerate(draw(st.lists(_COMMANDS, min_size=6, max_size=14)))]
    batches, now_ms = [], _NOW_MS
    for _ in range(draw(st.integers(3, 5))):
        now_ms += draw(st.sampled_from([1, 500, 1000, 2000]))
        called = draw(st.lists(st.sampled_from([*keys, None]), min_size=3, max_size=12))
        rows = [(key, now_ms - draw(_LATENESS_MS), draw(_COMMANDS)) for key in called]
        batches.append([("clock", now_ms, "watermark"), *rows])
    return Program(batches, draw(st.frozensets(st.integers(1, len(batches) - 1), max_size=2)))


def play(program_: Program, run: Trial) -> tuple[list[list[str]], State]:
    """Run a program; return the notes of each micro-batch, sorted, and the state at the end."""
    ends = [*sorted(program_.restarts), len(program_.batches)]
    for start, end in itertools.pairwise([0, *ends]):
        for rows in program_.batches[start:end]:
            run.feed(rows)
        arguments = (named_interpreter, program.OUTPUT, program.STATE, "update", "EventTimeTimeout")
        run.run(run.apply(run.source(), ["key"], *arguments))
    return [sorted(f"{key} {note}" for key, note in rows) for rows in run.batches], run.state()


def named_interpreter(
    key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """Interpret, with the null key as one that only looks at what it is given."""
    yield from program.interpret((key[0] or "null",), chunks, state)


OURS = STRICT


@hypothesis.settings(
    max_examples=25 if LONG else 2,
    derandomize=not LONG,
    deadline=None,
    # An example takes seconds, and says by itself which key differs: no time for shrinking.
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(drawn=programs())
def test_programs_come_to_the_same(drawn: Program, spark: SparkSession, local_state: Path) -> None:
    found = {}
    for engine in (SPARK, *OURS):
        with tempfile.TemporaryDirectory() as folder, trial(spark, engine, Path(folder), local_state) as run:
            found[engine.name] = play(drawn, run)
    notes_of_spark, states_of_spark = found[SPARK.name]
    for engine in OURS:
        notes, states = found[engine.name]
        assert notes == notes_of_spark, engine.name
        assert states == states_of_spark, engine.name
