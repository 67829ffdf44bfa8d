"""The ways of output out of a shard: nothing is altered by pandas, and much output is neither kept nor gathered."""

from __future__ import annotations

import datetime as dt
import warnings
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import types as T  # noqa: N812

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.shard_call import call as shard_call
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.transport.output import (
    OneByOneOutput,
    PackedOutput,
    RowsOutput,
    unpack_output,
)
from holdfast.spark_integration.transport.packed import BLOB

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


def as_spark_converts(frames: list[pd.DataFrame], schema: T.StructType) -> pa.Array:
    """What Spark's worker makes of frames: it puts them together, and an empty one of its own behind them."""
    padding = pd.DataFrame(dict.fromkeys(schema.names), index=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of pandas, for each padding
        together = pd.concat([*frames, padding], ignore_index=True)
    batch = spark_versions.pandas_to_arrow(
        [together[name] for name in schema.names],
        schema,
        "America/New_York",
        safecheck=True,
        int_to_decimal_coercion_enabled=False,
    )
    return batch.column(0)


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
    converted = spark_versions.pandas_to_arrow(
        [frame["c"]], schema, "America/New_York", safecheck=True, int_to_decimal_coercion_enabled=False
    )
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


def test_what_is_sent_at_once_has_more_rows_than_sparks_worker_gathers() -> None:
    output = PackedOutput(T.StructType([T.StructField("n", T.LongType())]), 100)
    frames = list(output.send_at_once([rows(0, 5), rows(5, 5)]))
    assert [len(frame) for frame in frames] == [101]
    assert unpacked(frames) == list(range(10))


def test_without_a_limit_of_rows_nothing_is_padded() -> None:
    """Where `spark.sql.execution.arrow.maxRecordsPerBatch` is 0, a blob would be padded with two billion nulls."""
    output = PackedOutput(T.StructType([T.StructField("n", T.LongType())]), 2**31 - 1)
    frames = list(output.send_at_once([rows(0, 5), rows(5, 5)]))
    assert [len(frame) for frame in frames] == [1]
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


def test_no_output_sends_nothing() -> None:
    assert list(shard_call._held_back(iter([]), RowsOutput(T.StructType([])))) == [[]]
