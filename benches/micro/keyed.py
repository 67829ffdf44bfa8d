"""Single steps of the loop over keys: 20,000 keys with two rows each, and what a function's frames cost beside.

A step's time by 20,000 is what it adds to each key. Run with ``make bench-micro``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructField, StructType

from holdfast.spark_integration.keyed.frames import FrameFormat, KeyFrames, key_tuples
from holdfast.spark_integration.keyed.group_state import KeyStates
from holdfast.spark_integration.keyed.output_frames import OutputFrames
from holdfast.spark_integration.keyed.python_values import RowValues

KEYS, ROWS_EACH = 20_000, 2
Benchmark = Callable[..., Any]
_FORMAT = FrameFormat("UTC")
_STATE = StructType([StructField("n", LongType()), StructField("s", LongType()), StructField("name", StringType())])
_ROWS = pa.table({"key": np.repeat(np.arange(KEYS), ROWS_EACH), "v": np.arange(KEYS * ROWS_EACH)})
_STATES = [(i, i, "name") for i in range(KEYS)]


def _all_frames(rows: pa.Table) -> None:
    frames = KeyFrames(rows, np.arange(len(rows)), np.arange(KEYS) * ROWS_EACH, _FORMAT, len(rows))
    for slab in frames.slabs():
        for chunks in slab:
            for _ in chunks:
                pass


def _new_frame() -> pd.DataFrame:
    return pd.DataFrame({"n": [1], "s": [2], "name": ["name"]})


def test_frames(benchmark: Benchmark) -> None:
    """Cut one frame for each key."""
    benchmark(_all_frames, _ROWS)


def test_frames_with_nulls(benchmark: Benchmark) -> None:
    """The same, with a null in every third key: two kinds of frames."""
    values = pa.array(np.arange(len(_ROWS)), mask=np.arange(len(_ROWS)) % (3 * ROWS_EACH) == 0)
    benchmark(_all_frames, _ROWS.set_column(1, "v", values))


def test_keys(benchmark: Benchmark) -> None:
    """Make the tuple of each key."""
    benchmark(key_tuples, pa.table({"key": np.arange(KEYS), "name": ["name"] * KEYS}), _FORMAT)


def test_states_open_and_update(benchmark: Benchmark) -> None:
    """Open the state of each key, and update it."""
    states = KeyStates(_STATE, "NoTimeout", 0, None)

    def each() -> None:
        for row in _STATES:
            state = states.open(row)
            state.update(row)
            assert state.value == row

    benchmark(each)


def test_states_to_python(benchmark: Benchmark) -> None:
    """Turn columns into the tuples that functions get."""
    values = RowValues(_STATE)
    benchmark(values.to_tuples, values.to_arrow(_STATES))


def test_states_to_arrow(benchmark: Benchmark) -> None:
    """Turn the tuples that functions gave into columns."""
    benchmark(RowValues(_STATE).to_arrow, _STATES)


def test_function_makes_frames(benchmark: Benchmark) -> None:
    """What a function itself pays for one row of output a key."""
    benchmark(lambda: [None for _ in range(KEYS) if _new_frame() is None])


def test_function_makes_frames_and_output_takes_them(benchmark: Benchmark) -> None:
    """The same, and the output gathered: the difference is ours."""

    def each() -> None:
        output = OutputFrames(_STATE, _FORMAT, 2 * KEYS)
        for _ in range(KEYS):
            for _ in output.add_all([_new_frame()], (1,)):
                pass
        assert sum(batch.num_rows for batch in output.finish()) == KEYS

    benchmark(each)
