"""The session window of docs/operators.md, as it stands there: by key and for a shard it is the same window."""

from __future__ import annotations

import datetime as dt
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.vectorised.arrow_with_state import ArrowWithState, StateColumns
from holdfast.testing import PandasWithStateTester
from holdfast.testing.ddl import parse_schema
from tests.pages import block_with
from tests.unit.spark_integration.embedded_shard import EmbeddedShard

GAP_MS, STATE = 90_000, "n long, first_ms long, last_ms long"
OUTPUT = f"key long, {STATE}"
GUIDE: dict[str, Any] = {
    "np": np,
    "pa": pa,
    "pc": pc,
    "pd": pd,
    "GAP_MS": GAP_MS,
    "SESSION": ["n", "first_ms", "last_ms"],
}
for function in ("session_of_key", "sessions_of_shard"):
    exec(block_with("docs/operators.md", f"def {function}("), GUIDE)
INPUT = "key long, at_ms long, at timestamp"
KEYS = pa.schema([("key", pa.int64())])
micro_batches = st.lists(
    st.tuples(
        st.integers(0, 3 * GAP_MS), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2 * GAP_MS)), max_size=6)
    ),
    max_size=8,
)


class Vectorised(EmbeddedShard):
    """The vectorised operator, with its watermark set by hand."""

    def __init__(self, folder: Path) -> None:
        states = {"state": StateColumns(arrow_schema(parse_schema(STATE), "state"), None)}
        output = arrow_schema(parse_schema(OUTPUT), "output")
        super().__init__(
            folder, ArrowWithState(GUIDE["sessions_of_shard"], KEYS, output, states, "EventTime"), KEYS.names
        )

    def run(self, events: list[tuple[int, int]], watermark_ms: int) -> list[dict[str, Any]]:
        """Run a micro-batch and return its output."""
        rows = pa.table({"key": [key for key, _ in events], "at_ms": [at_ms for _, at_ms in events]})
        return self.micro_batch(rows.cast(pa.schema([("key", pa.int64()), ("at_ms", pa.int64())])), watermark_ms)


@pytest.mark.slow(1)
@given(micro_batches)
def test_both_functions_find_the_same_sessions(script: list[tuple[int, list[tuple[int, int]]]]) -> None:
    """In each micro-batch, whichever keys have events, time out, or both."""
    tester = PandasWithStateTester(
        GUIDE["session_of_key"], "key", INPUT, OUTPUT, STATE, "EventTimeTimeout", eventTime="at"
    )
    watermark_ms = newest_ms = 10 * GAP_MS
    with tempfile.TemporaryDirectory() as folder:
        vectorised = Vectorised(Path(folder))
        for passes, offsets in script:
            watermark_ms += passes
            newest_ms = max(newest_ms, watermark_ms)
            # Times ascend from micro-batch to micro-batch, as a watermark without delay wants them.
            events = [(key, newest_ms + ms) for key, ms in offsets]
            newest_ms = max([newest_ms, *(at_ms for _, at_ms in events)])
            by_key = [row.asDict() for row in tester.setWatermark(watermark_ms)] if passes else []
            rows = [(key, at_ms, dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC)) for key, at_ms in events]
            by_key += [row.asDict() for row in tester.test(rows)]
            found = vectorised.run(events, watermark_ms)
            columns = ["key", "n", "first_ms", "last_ms"]
            assert sorted([row[c] for c in columns] for row in found) == sorted(
                [row[c] for c in columns] for row in by_key
            )
