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

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.mvcc import VersionedStore
from holdfast.spark_integration.shard.operator import BatchTimes, ShardInput
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.vectorised.arrow_with_state import ArrowWithState, StateColumns
from holdfast.testing import PandasWithStateTester
from holdfast.testing.ddl import parse_schema
from tests.pages import block_with

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


class Vectorised:
    """One shard of the vectorised operator, with its watermark set by hand."""

    def __init__(self, folder: Path) -> None:
        states = {"state": StateColumns(arrow_schema(parse_schema(STATE), "state"), None)}
        output = arrow_schema(parse_schema(OUTPUT), "output")
        self._step = ArrowWithState(GUIDE["sessions_of_shard"], KEYS, output, states, "EventTime")
        self._store = VersionedStore(MemoryBackend(folder, self._step.tables(), clock.new_id))
        self._pointer: Pointer | None = None
        self._earliest_ms: int | None = None

    def run(self, events: list[tuple[int, int]], watermark_ms: int) -> list[dict[str, Any]]:
        """Run a micro-batch and return its output."""
        rows = pa.table({"key": [key for key, _ in events], "at_ms": [at_ms for _, at_ms in events]})
        rows = rows.cast(pa.schema([("key", pa.int64()), ("at_ms", pa.int64())]))
        hashes = pa.array([key % 2 for key, _ in events], pa.int64())
        times = BatchTimes(0, watermark_ms, self._earliest_ms, None)
        batch = ShardInput("op", 0, 0, rows, rows.select(["key"]), hashes, times)
        out = []
        with self._store.begin(self._pointer) as transaction:
            running = self._step.run(batch, transaction)
            while True:
                try:
                    out += next(running).to_pylist()
                except StopIteration as end:
                    self._earliest_ms = end.value
                    break
            self._pointer = transaction.commit()
        return out


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
