"""Chance writes scripts, Spark's operator and ours play them, and must say the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.spark.parity.engines import trial
from tests.spark.processors.engines import BY_PANDAS, BY_ROW, SPARK, WITHOUT_TEMPLATES
from tests.spark.processors.scripts.clocked import play_script
from tests.spark.processors.scripts.script import Case, Script
from tests.tiers import LONG

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.all, pytest.mark.slow(40), pytest.mark.timeout(3000)]

_STATE = [
    "?value.get()",
    "?value.exists()",
    "value.update(({n},))",
    "value.clear()",
    "?list(items.get())",
    "?items.exists()",
    "items.appendValue(({n},))",
    "items.appendList([({n},), (None,)])",
    "items.put([({n},), (-{n},)])",
    "items.clear()",
    "?entries.getValue(({n},))",
    "?entries.containsKey(({n},))",
    "?sorted(entries.iterator())",
    "?sorted(entries.keys())",
    "?entries.exists()",
    "entries.updateValue(({n},), ({n},))",
    "[entries.updateValue((n,), ({n},)) for n in range(4)]",
]
# Q2: with a TTL Spark evicts too early what was removed and put again.
_REMOVALS = ["entries.removeKey(({n},))", "entries.clear()"]
_TIMERS = [
    "handle.registerTimer({clock} + {ms})",
    "handle.registerTimer({clock} + {ms})",
    "handle.deleteTimer({clock} + {ms})",
    "?sorted(handle.listTimers())",
]
_MS = st.sampled_from([-70_000, -1, 0, 1, 500, 1000, 2000, 3500])


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Draw a script of a few keys, each of which has rows in about every second micro-batch."""
    time_mode = draw(st.sampled_from(["None", "ProcessingTime", "EventTime"]))
    ttl_ms = draw(st.sampled_from([None, 1000, 2500])) if time_mode == "ProcessingTime" else None
    templates = _STATE + (_REMOVALS if ttl_ms is None else []) + (_TIMERS * 2 if time_mode != "None" else [])
    clock = {"ProcessingTime": "now()", "EventTime": "watermark()", "None": ""}[time_mode]

    def commands(max_size: int) -> str:
        drawn = draw(st.lists(st.sampled_from(templates), min_size=1, max_size=max_size))
        return ";".join(one.format(n=draw(st.integers(0, 3)), ms=draw(_MS), clock=clock) for one in drawn)

    micro_batches = 6
    cases = []
    for number in range(draw(st.integers(6, 14))):
        batches = draw(st.sets(st.integers(0, micro_batches - 2), min_size=1, max_size=4))
        cases.append(Case(f"key {number}", {batch: commands(5) for batch in sorted(batches)}, [], commands(2)))
    return Script("drawn", time_mode, tuple(cases), micro_batches, ttl_ms, watermark=time_mode == "EventTime")


@hypothesis.settings(
    max_examples=20 if LONG else 2,
    derandomize=not LONG,
    deadline=None,
    # An example takes seconds, and says by itself which key differs: no time for shrinking.
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(script=scripts())
def test_scripts_come_to_the_same(script: Script, spark: SparkSession, local_state: Path) -> None:
    """V, S, M, TM, TL and E1, in whatever order: each key sees the same on Spark and on ours."""
    found = {}
    for engine in (SPARK[0], BY_ROW[0], BY_PANDAS[0], WITHOUT_TEMPLATES):
        with tempfile.TemporaryDirectory() as folder, trial(spark, engine, Path(folder), local_state) as on:
            found[engine.name] = play_script(script, engine, on).notes
    expected = found.pop(SPARK[0].name)
    for engine_name, notes in found.items():
        assert notes == expected, engine_name
