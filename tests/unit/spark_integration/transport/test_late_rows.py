"""Late rows in blobs are dropped one by one, as Spark drops its own: up to the watermark, and never without a time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark_integration.shard_call import call
from holdfast.spark_integration.shard_call.call import gather_rows
from holdfast.spark_integration.spark_types import Watermark
from holdfast.spark_integration.transport import packed as packed_module
from holdfast.spark_integration.transport.packed import BLOB, NEVER_LATE, PackedTransport, marks_of, pack_rows
from holdfast.spark_integration.transport.routes import ROUTE, routes_of
from holdfast.spark_integration.transport.transport import EVENT_TIME, HASH, EventTime, Received

AT = pa.timestamp("us", "America/New_York")
COLUMNS = pa.schema([(HASH, pa.int64()), ("row", pa.int64()), ("at", AT)])
BY_AT = EventTime("at", Watermark(0), filters_rows=True)
HELD_BACK = EventTime("at", Watermark(0, held_back_ms=2), filters_rows=True)
# The earliest and the last time of Spark's, and such as are late together with others, or just not.
TIMES = st.none() | st.sampled_from([-(2**63), -1001, -1000, -1, 0, 1, 999, 1000, 1001, 2000, 2**63 - 1])


def batch_of(first: int, times: list[int | None]) -> pa.RecordBatch:
    """Return numbered rows of two shards, with these event times in µs."""
    numbers = np.arange(first, first + len(times))
    hashes = np.where(numbers % 2, -1, 0)
    columns = [pa.array(hashes), pa.array(numbers), pa.array(times, pa.int64()).view(AT)]
    return pa.RecordBatch.from_arrays(columns, schema=COLUMNS)


def received(
    packed: Iterable[pa.RecordBatch], event_time: EventTime, route: int, watermark_ms: int, each: int, root: Path
) -> Received:
    """Return what a shard receives if Spark drops what is late by a watermark, and hands over so many rows at once."""
    table = pa.Table.from_batches(packed).to_pandas()
    left = table[(table[ROUTE] == route) & ~(table[EVENT_TIME] <= watermark_ms * 1000)]
    chunks = [left.iloc[start : start + each] for start in range(0, len(left), each)]
    transport = PackedTransport(2, COLUMNS, event_time)
    return transport.receive(reversed(chunks), partial(gather_rows, schema=COLUMNS, root=root))


@pytest.mark.slow(0.5)
@given(
    st.lists(st.lists(TIMES, max_size=12), min_size=1, max_size=3),
    st.sampled_from([BY_AT, HELD_BACK]),
    st.sampled_from([-2, -1, 0, 1, 2, 5]),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from([1, 32 << 20]),
)
def test_rows_are_late_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[int | None]],
    event_time: EventTime,
    watermark_ms: int,
    each: int,
    bytes_max: int,
) -> None:
    """Whatever shares a blob, in whatever order its rows arrive, in memory or in a file."""
    starts = np.cumsum([0, *map(len, batches)]).tolist()
    sent = [batch_of(start, times) for start, times in zip(starts, batches, strict=False)]
    every_time = [time for times in batches for time in times]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_module, "BLOB_BYTES", bytes_max)
        patch.setattr(call, "MEMORY_BYTES", bytes_max)
        packed = list(pack_rows(sent, routes_of(2), event_time))
        for shard, route in enumerate(routes_of(2)):
            of_shard = {row: time for row, time in enumerate(every_time) if row % 2 == shard}
            passed_us = (watermark_ms - event_time.watermark.held_back_ms) * 1000
            kept = {row for row, time in of_shard.items() if time is None or time > passed_us}
            if not of_shard:
                continue
            rows, late = received(packed, event_time, route, watermark_ms, each, tmp_path_factory.getbasetemp())
            assert sorted(rows["row"].to_pylist()) == sorted(kept)
            assert late == len(of_shard) - len(kept)


def test_a_window_is_late_when_its_end_is() -> None:
    ends = pa.array([30, 10, None, 2010], pa.int64()).view(AT)
    windows = pa.StructArray.from_arrays([ends, ends], ["start", "end"], mask=pa.array([False, False, True, False]))
    batch = pa.record_batch({"at": windows})
    assert marks_of([batch], BY_AT).tolist() == [1000, 3000]
    assert marks_of([batch], HELD_BACK).tolist() == [3000, 5000]


def test_a_shard_has_one_mark_a_millisecond() -> None:
    """A mark for each row would cost as much as the row."""
    (packed,) = pack_rows([batch_of(0, list(range(1, 4001)))], routes_of(2), BY_AT)
    assert packed.num_rows == 2 + 2 * 4
    assert sorted(packed.column(EVENT_TIME).to_pylist())[-2:] == [NEVER_LATE] * 2


def test_a_shard_that_is_called_without_rows_has_none_late(tmp_path: Path) -> None:
    frame = pd.DataFrame({name: [] for name in (ROUTE, BLOB, EVENT_TIME)})
    transport = PackedTransport(2, COLUMNS, BY_AT)
    rows, late = transport.receive([frame], partial(gather_rows, schema=COLUMNS, root=tmp_path))
    assert (rows.num_rows, late) == (0, 0)
