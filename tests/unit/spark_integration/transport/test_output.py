"""The way into a shard and out: routes, late rows, output that nothing alters, and measures beside it."""

from __future__ import annotations

import datetime as dt
import struct
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import mmh3
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T  # noqa: N812

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.client.measures import MEASURES, METRICS, CallMeasures
from holdfast.spark_integration.shard_call import call
from holdfast.spark_integration.shard_call import call as shard_call
from holdfast.spark_integration.shard_call.call import gather_rows
from holdfast.spark_integration.spark_types import Watermark, arrow_schema
from holdfast.spark_integration.transport import output as output_module
from holdfast.spark_integration.transport import packed as packed_module
from holdfast.spark_integration.transport.output import (
    MANY_SHARDS,
    MEASURED,
    ListedOutput,
    ObservedOutput,
    OneByOneOutput,
    Output,
    PackedOutput,
    RowsOutput,
    of_each_shard_once,
    unpack_output,
)
from holdfast.spark_integration.transport.packed import (
    BLOB,
    EVENT_TIME,
    HASH,
    NEVER_LATE,
    EventTime,
    PackedTransport,
    Received,
    marks_of,
    pack_rows,
)
from holdfast.spark_integration.transport.routes import (
    ROUTE,
    hash_of_route,
    route_of_hash,
    routes_of,
    shard_of_route,
    shards_of,
)

FOLD = dt.datetime(2024, 11, 3, 5, 30, tzinfo=dt.UTC)  # 01:30 in New York, and an hour later again
#: By type: values that a pandas frame would alter.
AWKWARD: dict[T.DataType, list[Any]] = {
    T.BooleanType(): [True, False],
    T.ByteType(): [1, -128],
    T.ShortType(): [1, 2**15 - 1],
    T.IntegerType(): [1, -(2**31)],
    T.LongType(): [2**53 + 1, -(2**63)],
    T.FloatType(): [1.5, float("inf")],
    T.DoubleType(): [5e-324, -0.0],
    T.DecimalType(38, 18): [Decimal("12345678901234567890.123456789012345678"), Decimal(0)],
    T.StringType(): ["", "None"],
    T.BinaryType(): [b"", b"\xff\x00"],
    T.DateType(): [dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    T.TimestampType(): [FOLD, FOLD + dt.timedelta(hours=1)],
    T.TimestampNTZType(): [dt.datetime(2024, 11, 3, 1, 30), dt.datetime(9999, 1, 1)],  # noqa: DTZ001
    T.DayTimeIntervalType(): [dt.timedelta(days=1), dt.timedelta(microseconds=-1)],
    T.ArrayType(T.TimestampType()): [[FOLD, None], []],
    T.MapType(T.StringType(), T.LongType()): [[("a", 2**53 + 1), ("b", None)], []],
    T.StructType([T.StructField("x", T.LongType()), T.StructField("t", T.TimestampType())]): [
        {"x": 2**53 + 1, "t": FOLD},
        {"x": None, "t": None},
    ],
}
ROWS = pa.schema([("n", pa.int64())])


def as_spark_converts(frames: list[pd.DataFrame], schema: T.StructType, padded: int = 0) -> pa.Array:
    """What Spark's worker makes of frames: it puts them together, and one of its own behind them that pads them."""
    padding = pd.DataFrame(dict.fromkeys(schema.names), index=[*range(padded)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of pandas, for each padding
        together = pd.concat([*frames, padding], ignore_index=True)
    columns = [together[name] for name in schema.names]
    return spark_versions.pandas_to_arrow(columns, schema, "America/New_York").column(0)


@pytest.mark.parametrize("first_has_null", [True, False])
@pytest.mark.parametrize("data_type", AWKWARD, ids=lambda t: t.simpleString())
def test_rows_are_converted_without_loss(data_type: T.DataType, first_has_null: bool) -> None:
    """Also where one batch has nulls and the next has none: Spark's worker puts them into one frame."""
    schema = T.StructType([T.StructField("c", data_type)])
    types = arrow_schema(schema, "the output")
    values = AWKWARD[data_type]
    parts = [[*values, None], values] if first_has_null else [values, values]
    batches = [pa.RecordBatch.from_arrays([pa.array(part, types.types[0])], schema=types) for part in parts]
    converted = as_spark_converts(list(RowsOutput(schema).send(batches)), schema)
    expected = pa.concat_arrays([batch.column(0) for batch in batches])
    assert converted.cast(types.types[0]).equals(expected)


NAN = float("nan")
XY = T.StructType([T.StructField("x", T.DoubleType()), T.StructField("y", T.ArrayType(T.FloatType()))])
#: Values that Spark's worker makes null or fails on, unless they come in another form.
ODD: dict[T.DataType, list[Any]] = {
    T.DoubleType(): [NAN, None, -0.0],
    T.FloatType(): [NAN, None, 1.5],
    T.ArrayType(T.DoubleType()): [[NAN, None, 1.5], None, []],
    T.ArrayType(T.FloatType()): [[None, 1.5], [2.5], None, [NAN], []],
    XY: [{"x": NAN, "y": [NAN, None]}, {"x": None, "y": None}, None],
    T.MapType(T.DoubleType(), XY): [[(NAN, {"x": NAN, "y": []}), (1.5, None)], None],
    T.MapType(XY, T.LongType()): [[({"x": 1.5, "y": [0.5]}, 2**53 + 1), ({"x": NAN, "y": None}, None)], None, []],
    T.ArrayType(T.MapType(T.ArrayType(T.LongType()), T.TimestampType())): [[[([1, None], FOLD)], None], None],
}


@pytest.mark.parametrize("data_type", ODD, ids=lambda t: t.simpleString())
def test_rows_of_processors_keep_nan_and_keys_of_any_type(data_type: T.DataType) -> None:
    """Spark's worker converts their frames one by one; its own Row API keeps all of this, too."""
    schema = T.StructType([T.StructField("c", data_type)])
    types = arrow_schema(schema, "the output")
    sent = pa.RecordBatch.from_arrays([pa.array(ODD[data_type], types.types[0])], schema=types)
    [frame] = list(OneByOneOutput(schema).send([sent]))
    converted = spark_versions.pandas_to_arrow([frame["c"]], schema, "America/New_York")
    # NaN equals nothing, but prints as it is.
    assert repr(converted.column(0).cast(types.types[0]).to_pylist()) == repr(sent.column(0).to_pylist())


@pytest.mark.parametrize("data_type", [T.FloatType(), T.DoubleType()], ids=["float", "double"])
def test_nan_of_functions_by_key_fails_nothing(data_type: T.DataType) -> None:
    """Spark's worker concatenates their frames with an empty one: two chunks of Arrow's are an error there."""
    schema = T.StructType([T.StructField("c", data_type)])
    types = arrow_schema(schema, "the output")
    batch = pa.RecordBatch.from_arrays([pa.array([1.5, NAN, None], types.types[0])], schema=types)
    converted = as_spark_converts(list(RowsOutput(schema).send([batch, batch])), schema)
    assert converted.to_pylist() == [1.5, None, None] * 2


@pytest.mark.parametrize("padded", [0, 2])
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("data_type", [*AWKWARD, *ODD], ids=lambda t: t.simpleString())
def test_lists_of_rows_arrive_as_they_are(data_type: T.DataType, observed: bool, padded: int) -> None:
    """NaN beside null, put together with other lists and with rows that pad."""
    schema = T.StructType([T.StructField("c", data_type)])
    types = arrow_schema(schema, "the output")
    parts = [[None, None], [*AWKWARD.get(data_type, []), None, *ODD.get(data_type, [])]]
    batches = [pa.RecordBatch.from_arrays([pa.array(part, types.types[0])], schema=types) for part in parts]
    output: Output = ListedOutput(schema, 10)
    if observed:
        output = ObservedOutput.of(output, "holdfast.op")
    frames = [*output.send(batches), *output.send_measures(CALL)]
    converted = as_spark_converts(frames, output.sent_schema, padded)
    assert converted.slice(2).to_pylist() == [[]] * observed + [None] * padded
    for listed, batch in zip(converted, batches, strict=False):
        (column,) = listed.values.flatten()
        # NaN equals nothing, but prints as it is.
        assert repr(column.cast(types.types[0]).to_pylist()) == repr(batch.column(0).to_pylist())


def test_lists_keep_text_that_is_not_utf8_and_columns_that_have_no_null() -> None:
    raw = pa.array([b"\xff", b"a"])
    schema = T.StructType([T.StructField("x", T.StringType(), False)])
    text = pa.RecordBatch.from_arrays(
        [pa.Array.from_buffers(pa.string(), 2, raw.buffers())], schema=arrow_schema(schema, "it", keep_not_null=True)
    )
    output = ListedOutput(schema, 10)
    converted = as_spark_converts(list(output.send([text, text])), output.sent_schema, 1)
    assert converted.values.field("x").view(pa.binary()).to_pylist() == [b"\xff", b"a"] * 2
    assert not converted.type.value_type.field("x").nullable


def test_large_lists_leave_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JVM reads one at a time."""
    monkeypatch.setattr(output_module, "BLOB_BYTES", 80)
    output = ListedOutput(T.StructType([T.StructField("n", T.LongType())]), 3)
    pieces = [frame.iloc[:, 0].array.arrow for frame in output.send([rows(0, 25), rows(25, 5)])]
    assert [len(piece[0]) for piece in pieces] == [10, 10, 5, 5]
    assert [len(frame) for frame in output.send_at_once([rows(0, 25)])] == [4, 4, 4]


def test_lists_of_small_rows_leave_in_pieces_too() -> None:
    """A row that is a bit in Arrow takes 24 bytes in the JVM, which holds a whole list, and at most 2 GiB of it."""
    output = ListedOutput(T.StructType([T.StructField("flag", T.BooleanType())]), 3)
    flags = pa.RecordBatch.from_pydict({"flag": pa.array(np.ones(300_000, np.bool_))})
    pieces = [len(frame.iloc[:, 0].array.arrow[0]) for frame in output.send([flags])]
    assert sum(pieces) == 300_000
    assert max(pieces) <= 1 << 17


@pytest.mark.parametrize(
    ("metadata", "shards", "kind"),
    [
        ({}, MANY_SHARDS, ListedOutput),
        ({}, MANY_SHARDS - 1, PackedOutput),
        ({"comment": "kept"}, MANY_SHARDS, PackedOutput),
    ],
)
def test_output_of_many_shards_needs_no_stage_that_unpacks(metadata: Any, shards: int, kind: type[Output]) -> None:
    """Lists would lose what a column says of itself."""
    schema = T.StructType([T.StructField("n", T.LongType(), metadata=metadata)])
    assert type(PackedOutput(schema, 10).for_shards(shards)) is kind


def rows(first: int, n: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(range(first, first + n), pa.int64())], schema=ROWS)


def test_text_that_is_not_utf8_travels_as_bytes_or_is_refused_by_name() -> None:
    """A column of text that Spark itself holds; within an array or a struct no bytes become text again."""
    raw = pa.array([b"\xff", b"a", None])
    schema = T.StructType([T.StructField("x", T.StringType())])
    text = pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.string(), 3, raw.buffers())], names=["x"])
    [frame] = RowsOutput(schema).send([text])
    assert frame["x"].tolist() == [b"\xff", b"a", None]
    lists = pa.ListArray.from_arrays([0, 3], text.column(0))
    with pytest.raises(InvalidArgumentError, match="column 'x' of the output has text that is not UTF-8"):
        list(RowsOutput(schema).send([pa.RecordBatch.from_arrays([lists], names=["x"])]))


def unpacked(frames: list[pd.DataFrame]) -> list[int]:
    batches = [
        pa.RecordBatch.from_pydict({BLOB: pa.Array.from_pandas(frame[BLOB], type=pa.binary())}) for frame in frames
    ]
    return [n for batch in unpack_output(batches, 1000) for n in batch.column(0).to_pylist()]


@pytest.mark.parametrize(("limit", "sent"), [(100, 101), (2**31 - 1, 1)])
def test_what_is_sent_at_once_has_more_rows_than_sparks_worker_gathers(limit: int, sent: int) -> None:
    """Without a limit, `spark.sql.execution.arrow.maxRecordsPerBatch` 0, it is not padded with two billion nulls."""
    output = PackedOutput(T.StructType([T.StructField("n", T.LongType())]), limit)
    frames = list(output.send_at_once([rows(0, 5), rows(5, 5)]))
    assert [len(frame) for frame in frames] == [sent]
    assert unpacked(frames) == list(range(10))


def test_output_is_held_back_until_the_commit_as_long_as_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the call can begin again; and more of it than that is never kept."""
    events: list[str] = []

    def attempt(batches: int) -> Iterator[pa.RecordBatch]:
        for i in range(batches):
            events.append(f"batch {i}")
            yield rows(i * 10, 10)
        events.append("commit")

    output = PackedOutput(T.StructType([T.StructField("n", T.LongType())]), 100)
    monkeypatch.setattr(shard_call, "HELD_BACK_BYTES", 200)
    sent = []
    for frames in shard_call._held_back(attempt(2), output):
        events.append("sent")
        sent += frames
    assert events == ["batch 0", "batch 1", "commit", "sent"]
    assert unpacked(sent) == list(range(20))

    events, sent = [], []
    for frames in shard_call._held_back(attempt(7), output):
        events.append("sent")
        sent += frames
    assert [i for i, event in enumerate(events) if event == "sent"] == [3, 7, 10]
    assert events[-2] == "commit"
    assert unpacked(sent) == list(range(70))
    assert list(shard_call._held_back(iter([]), RowsOutput(T.StructType([])))) == [[]]


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


CALL = CallMeasures(3, *range(1, 13))


@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize("data_type", AWKWARD, ids=lambda t: t.simpleString())
def test_rows_arrive_as_without_measures(data_type: T.DataType, nullable: bool) -> None:
    schema = T.StructType([T.StructField("c", data_type, nullable)])
    types = arrow_schema(schema, "the output")
    values = [*AWKWARD[data_type], *([None] if nullable else [])]
    batch = pa.RecordBatch.from_arrays([pa.array(values, types.types[0])], schema=types)
    output = ObservedOutput.of(RowsOutput(schema), "holdfast.op")
    frames = [*output.send([batch]), *output.send_measures(CALL)]
    assert [list(frame.columns) for frame in frames] == [["c", MEASURED]] * 2
    assert frames[0][MEASURED].isna().all()
    assert frames[1][MEASURED].tolist() == [CALL.row()]
    converted = as_spark_converts(frames, output.sent_schema)
    assert converted.slice(0, len(values)).cast(types.types[0]).equals(batch.column(0))
    assert converted.null_count == batch.column(0).null_count or data_type == T.NullType()


@pytest.mark.parametrize(
    "inner",
    [PackedOutput(T.StructType().add("n", "long"), 10), RowsOutput(T.StructType().add("n", "long", False))],
    ids=["packed", "rows"],
)
def test_large_output_goes_on_at_once(inner: Output) -> None:
    batches = [pa.record_batch({"n": pa.array([1, 2, 3])})]
    sent = [len(frame) for frame in inner.send_at_once(batches)]
    output = ObservedOutput.of(inner, "holdfast.op")
    assert [len(frame) for frame in output.send_at_once(batches)] == sent
    assert list(inner.send_measures(CALL)) == []


def test_measures_have_places() -> None:
    row = dict(zip(MEASURES, CALL.row(), strict=True))
    assert row == asdict(CALL)
    assert row["shard"] == 3
    told = CALL.with_news(1, 2, 3)
    assert (told.snapshot_lag_ms, told.snapshot_bytes, told.snapshot_failures) == (1, 2, 3)


ONCE = {metric.name: 12 if metric.is_sum else 7 for metric in METRICS} | {"shards": 4, "calls": 4}


def test_a_micro_batch_that_was_evaluated_once_is_as_observed() -> None:
    assert of_each_shard_once(ONCE) == ONCE
    nothing = dict.fromkeys(ONCE) | {"shards": 0, "calls": 0}
    assert of_each_shard_once(nothing) == nothing


@pytest.mark.parametrize("times", [2, 3])
def test_totals_of_shards_that_were_called_again_count_once(times: int) -> None:
    seen = {name: value * times if isinstance(value, int) and value == 12 else value for name, value in ONCE.items()}
    seen |= {"calls": 4 * times, "snapshot_bytes": None}
    assert of_each_shard_once(seen) == ONCE | {"calls": 4 * times, "snapshot_bytes": None}


EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2**32 - 1, 2**64 - 2**32, 2**64 - 1]


FIRST_ROUTES = [-1693959553, -1910889132, -1382833682, -876271479]
INTS = st.integers(-(2**31), 2**31 - 1)


@given(INTS)
def test_the_hash_is_murmur3_with_the_seed_of_spark_and_each_int_has_its_own(route: int) -> None:
    assert hash_of_route(route) == mmh3.hash(struct.pack("<i", route), 42, signed=False)
    assert route_of_hash(hash_of_route(route)) == route


@given(st.integers(1, 2000), st.integers(1, 500))
def test_shard_i_runs_in_partition_i_modulo_the_partitions_whatever_they_are(shards: int, partitions: int) -> None:
    """So each partition has the same number of shards, or one more; and the session may change their number."""
    routes = routes_of(shards)
    hashes = [mmh3.hash(struct.pack("<i", route), 42) for route in routes]
    assert [value % partitions for value in hashes] == [shard % partitions for shard in range(shards)]
    assert [shard_of_route(route, shards) for route in routes] == list(range(shards))


def test_routes_are_the_same_for_ever() -> None:
    """They are keys of Spark's state: other ones would lose every pointer."""
    assert routes_of(4) == FIRST_ROUTES
    assert routes_of(2) == FIRST_ROUTES[:2]


def test_a_route_of_no_shard_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(SchemaMismatchError, match=r"set spark\.holdfast\.shards.*shards=3"):
        shard_of_route(routes_of(4)[3], 3)


@given(st.lists(st.one_of(st.sampled_from(EXTREMES), st.integers(0, 2**64 - 1)), max_size=50), st.integers(1, 5000))
def test_shards_are_contiguous_ranges_of_hashes(hashes: list[int], shards: int) -> None:
    """Rescaling intersects ranges, so a larger hash is never in a smaller shard."""
    found = shards_of(np.array(sorted(hashes), np.uint64), shards)
    assert ((found >= 0) & (found < shards)).all()
    assert (np.diff(found) >= 0).all()
    assert found.tolist() == [((h >> 32) * shards) >> 32 for h in sorted(hashes)]
