"""Frames and states against Spark itself: every type with every kind of value, and whatever chance makes of it."""

from __future__ import annotations

import collections
import datetime as dt
import inspect
import io
import json
import random
import uuid
import warnings
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas import serializers
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.streaming.state import GroupState
from pyspark.util import PythonEvalType

from holdfast.spark_integration.keyed.frames import FrameFormat, OutputFrames
from holdfast.spark_integration.transport.output import RowsOutput
from tests.tiers import LONG, repetitions

_STATE_SCHEMA = T.StructType().add("n", "long")

_STATE = pa.struct(
    {"properties": pa.string(), "keyRowAsUnsafe": pa.binary(), "object": pa.binary()}
    | {"startOffset": pa.int32(), "numRows": pa.int32(), "isLastChunk": pa.bool_()}
)
_PROPERTIES = {
    "batchProcessingTimeMs": 0,
    "eventTimeWatermarkMs": -1,
    "timeoutConf": "NoTimeout",
    "hasTimedOut": False,
    "watermarkPresent": False,
    "defined": False,
    "updated": False,
    "removed": False,
    "timeoutTimestamp": -1,
}


def returned_by_spark(
    returned: Sequence[Iterable[pd.DataFrame]], schema: T.StructType, frame_format: FrameFormat
) -> pa.Table:
    """Return what Spark's worker sends to the JVM for keys whose functions return these frames."""
    serializer = getattr(serializers, "ApplyInPandasWithStateSerializer", None)
    run = _worker if serializer is None else _serializer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # pandas' of Spark's use of it
        pieces = [_without_padding(batch) for batch in run(returned, schema, frame_format)]
    return pa.concat_tables(pieces)


def _worker(
    returned: Sequence[Iterable[pd.DataFrame]], schema: T.StructType, frame_format: FrameFormat
) -> Iterable[pa.RecordBatch]:
    from pyspark.worker import EvalConf, RunnerConf, read_udfs
    from pyspark.worker_message import UDFInfo

    commands = [((lambda key, frames, state: returned[int(key[0])]), schema)]
    run, _, _, _ = read_udfs(
        _Unpickled(commands),
        [UDFInfo(udfs=[memoryview(b"0")], args=[3, 1, 0, 0], kwargs={}, result_id=0)],
        PythonEvalType.SQL_GROUPED_MAP_PANDAS_UDF_WITH_STATE,
        RunnerConf(_settings(frame_format)),
        EvalConf({"state_value_schema": _STATE_SCHEMA.json()}),
    )
    return run(0, iter([_sent(len(returned))]))


def _serializer(
    returned: Sequence[Iterable[pd.DataFrame]], schema: T.StructType, frame_format: FrameFormat
) -> Iterable[pa.RecordBatch]:
    made = serializers.ApplyInPandasWithStateSerializer
    known = inspect.signature(made).parameters
    settings = {
        "timezone": frame_format.timezone,
        "safecheck": frame_format.safecheck,
        "assign_cols_by_name": frame_format.assign_cols_by_name,
        "prefer_int_ext_dtype": frame_format.prefer_int_ext_dtype,
        "state_object_schema": _STATE_SCHEMA,
        "arrow_max_records_per_batch": 10_000,
        "prefers_large_var_types": False,
        "int_to_decimal_coercion_enabled": frame_format.int_to_decimal_coercion_enabled,
    }
    serializer = made(**{name: value for name, value in settings.items() if name in known})
    # The worker hands on Arrow's type where the serializer converts by itself.
    declared = to_arrow_type(schema) if hasattr(serializer, "_create_array") else schema
    stream = io.BytesIO()

    def state() -> GroupState:
        return GroupState(optionalValue=None, keyAsUnsafe=b"", valueSchema=_STATE_SCHEMA, **_PROPERTIES)

    serializer.dump_stream(([((iter(frames), state()), declared)] for frames in returned), stream)
    start_of_arrow_stream = 4
    return ipc.open_stream(stream.getvalue()[start_of_arrow_stream:])


def _settings(given: FrameFormat) -> dict[str, str]:
    """Return all settings on which the conversion depends, as the JVM sends them."""
    return {
        "spark.sql.session.timeZone": given.timezone,
        "spark.sql.execution.pandas.convertToArrowArraySafely": str(given.safecheck).lower(),
        "spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName": str(given.assign_cols_by_name).lower(),
        "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled": str(
            given.int_to_decimal_coercion_enabled
        ).lower(),
    }


def _sent(keys: int) -> pa.RecordBatch:
    """Return what the JVM sends: one row of data for each key, and where in them the rows of each key stand."""
    same = {"properties": json.dumps(_PROPERTIES), "keyRowAsUnsafe": b"", "object": None}
    states = [{**same, "startOffset": key, "numRows": 1, "isLastChunk": True} for key in range(keys)]
    return pa.RecordBatch.from_arrays([pa.array(range(keys), pa.int64()), pa.array(states, _STATE)], ["key", "state"])


def _without_padding(batch: pa.RecordBatch) -> pa.Table:
    counts, output, _ = batch.columns
    rows = counts[0]["dataCount"].as_py()
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(output)]).slice(0, rows)


class _Unpickled:
    """Gives a worker its commands as they are; nothing needs to be pickled in one process."""

    def __init__(self, commands: list[Any]) -> None:
        self._commands = commands

    def loads(self, which: memoryview) -> Any:
        return self._commands[int(bytes(which))]


_POINT = T.StructType().add("a", T.LongType()).add("b", T.StringType())

TYPES: dict[str, T.DataType] = {
    data_type.simpleString(): data_type
    for data_type in (
        *(T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType(), T.FloatType(), T.DoubleType()),
        *(T.DecimalType(5, 0), T.DecimalType(10, 2), T.DecimalType(38, 18), T.StringType(), T.BinaryType()),
        *(T.BooleanType(), T.DateType(), T.TimestampType(), T.TimestampNTZType(), T.DayTimeIntervalType()),
        T.NullType(),
        *(T.ArrayType(T.LongType()), T.ArrayType(T.DoubleType()), T.ArrayType(T.DecimalType(10, 2))),
        *(T.ArrayType(T.StringType()), T.ArrayType(T.BinaryType()), T.ArrayType(T.DateType())),
        T.ArrayType(T.TimestampType()),
        T.ArrayType(T.ArrayType(T.LongType())),
        T.ArrayType(_POINT),
        T.MapType(T.StringType(), T.LongType()),
        T.MapType(T.LongType(), T.TimestampType()),
        T.MapType(T.StringType(), T.ArrayType(T.DoubleType())),
        T.MapType(T.DateType(), T.DoubleType()),
        _POINT,
        T.StructType().add("t", T.TimestampType()).add("n", T.TimestampNTZType()).add("d", T.DateType()),
        T.StructType().add("a", T.ArrayType(T.StructType().add("x", T.DoubleType()))),
    )
}

_NOON = dt.datetime(2024, 1, 1, 12)  # noqa: DTZ001
_AWARE = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
_TOKYO = dt.datetime(2024, 7, 1, 12, 0, 0, 123456, tzinfo=ZoneInfo("Asia/Tokyo"))
_DATE = dt.date(2024, 1, 1)

_OBJECTS: list[Any] = [
    *(None, float("nan"), pd.NaT, pd.NA),
    *(True, 0, 1, -1, 300, 2**40, 2**53 + 1, 2**62, 2**70, 1.0, 1.5, 1e300, float("inf")),
    *map(Decimal, ("1", "1.25", "1.255", "1E20", "NaN", "12345678901234567890.5")),
    *("text", "5", "1.5", "2024-01-01", "true", "", b"ab", b"\xff", bytearray(b"ab"), memoryview(b"ab")),
    *(_DATE, dt.date.min, dt.date.max, dt.time(12), dt.timedelta(days=1, microseconds=1), dt.timedelta(days=200_000)),
    *(_NOON, _AWARE, _TOKYO, dt.datetime(1500, 1, 1), dt.datetime.max),  # noqa: DTZ001, DTZ901
    *(pd.Timestamp(_NOON), pd.Timestamp("2024-01-01 00:00:00.123456789"), pd.Timestamp(_AWARE), pd.Timestamp(_TOKYO)),
    *(pd.Timedelta("1 days 00:00:00.000000001"), pd.Timedelta("1 days 00:00:00.000001")),
    *([1, 2], [], [1, None], ["a", "b"], [1.5, float("nan")], [1, "a"], [[1], [2, 3]], [None, [1]], [_NOON, _AWARE]),
    *([_DATE], [Decimal("1.5"), None], [b"a", bytearray(b"b")], [{"a": 1, "b": "x"}, None], [T.Row(a=1, b="x")]),
    *((1, "a"), (1, 2), (1, 2, 3), {1}, range(3), collections.deque([1, 2]), [("a", 1)]),
    *({"a": 1, "b": "x"}, {"a": 1}, {"c": 1}, {_DATE: 1.5}, {1: _NOON}, {"a": [1.0, None]}, {}),
    *({"a": [{"x": 1.5}, {"x": None}, None]}, {"t": _AWARE, "n": _NOON, "d": _DATE}, T.Row(a=1, b="x"), T.Row(1, "x")),
    *(np.array([1, 2]), np.array([1.5, np.nan]), np.array(5), np.array(["a", "b"])),
    *(np.int8(5), np.int64(5), np.uint64(2**63), np.float32(1.5), np.float64(1.5), np.bool_(True)),
    *(np.str_("a"), np.bytes_(b"a"), np.timedelta64(5, "s")),
    *(np.datetime64("2024-01-01T12"), np.datetime64("2024-01-01")),
    *(object(), uuid.UUID(int=5), pd.Interval(0, 1), pd.Period("2024-01")),
]

_TYPED: list[tuple[str, list[Any]]] = [
    *(("int8", [5]), ("int16", [300]), ("int32", [5]), ("int64", [5]), ("int64", [2**53 + 1]), ("int64", [2 * 10**9])),
    *(("uint8", [200]), ("uint64", [2**63]), ("uint64", [5]), ("bool", [True]), ("boolean", [True, None])),
    *(("float16", [1.5]), ("float32", [1.5]), ("float64", [1.0]), ("float64", [1.5]), ("float64", [np.nan])),
    *(("float64", [1.0, np.nan]), ("float64", [1.5, np.nan]), ("float64", [np.inf]), ("float64", [1e300])),
    *(("Int8", [5]), ("Int64", [5, None]), ("Int64", [2**53 + 1, None]), ("Float64", [1.5, None])),
    *(("string", ["a", None]), ("string", ["5"]), ("category", ["a", None]), ("category", [1, 2, 1])),
    *(("category", [pd.Timestamp(_NOON)]), ("Sparse[float]", [1.0, np.nan]), ("period[M]", ["2024-01"])),
    ("S1", [b"a"]),
    *(("M8[ns]", ["2024-01-01 12:00:00.123456789"]), ("M8[us]", ["2024-01-01 12:00"]), ("M8[s]", ["1500-01-01 12:00"])),
    *(("M8[ns]", ["2024-01-01"]), ("M8[ns]", [None]), ("M8[ns]", ["2024-01-01", None])),
    # In a gap and in a fold of the session's zone.
    *(("M8[ns]", ["2024-03-10 02:30"]), ("M8[ns]", ["2024-11-03 01:30"])),
    *(("datetime64[ns, UTC]", ["2024-01-01 12:00"]), ("datetime64[us, Asia/Tokyo]", ["2024-01-01 12:00", None])),
    *(("m8[ns]", [1500]), ("m8[us]", [1500]), ("m8[s]", [1]), ("m8[ns]", [None])),
    *(("object", [None, 1]), ("object", [float("nan"), 1]), ("object", [pd.NA, 1]), ("object", [True, 1])),
    *(("object", [1, 1.5]), ("object", [1.5, 1]), ("object", [1, "a"]), ("object", [pd.Timestamp(_NOON), None])),
    *(("object", [_NOON, _AWARE]), ("object", [{"a": 1, "b": "x"}, None]), ("object", [{"a": 1}, float("nan")])),
    *(("object", [[1], float("nan")]), ("object", [_DATE, pd.Timestamp(_NOON)])),
    ("object", [pd.Timestamp(_NOON), _DATE]),
]

# Spark fails with these for every type: its worker makes them of several pieces, which Arrow does not take.
_OF_ARROW: list[tuple[Any, list[Any]]] = [
    *((pa.int64(), [5, None]), (pa.float64(), [1.5, None]), (pa.string(), ["a", None]), (pa.bool_(), [True, None])),
    *((pa.timestamp("us"), [_NOON, None]), (pa.timestamp("us", "UTC"), [_AWARE, None]), (pa.date32(), [_DATE, None])),
    *((pa.decimal128(10, 2), [Decimal("1.50"), None]), (pa.binary(), [b"a", None])),
    (pa.duration("us"), [dt.timedelta(1), None]),
]


def _object(value: Any) -> pd.Series[Any]:
    values = np.empty(1, object)
    values[0] = value
    return pd.Series(values, dtype=object)


COLUMNS: dict[str, pd.Series[Any]] = {
    **{f"{type(value).__name__} {value!r}": _object(value) for value in _OBJECTS},
    **{f"{dtype} {values}": pd.Series(values, dtype=dtype) for dtype, values in _TYPED},
    "list of pyarrow": pd.Series([[1, 2]], dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
}
OF_ARROW: dict[str, pd.Series[Any]] = {
    **{f"{dtype} {values}": pd.Series(values, dtype=pd.ArrowDtype(dtype)) for dtype, values in _OF_ARROW},
    "string[pyarrow]": pd.Series(["a", None], dtype="string[pyarrow]"),
}


_SAFE, _UNSAFE = FrameFormat("America/New_York"), FrameFormat("America/New_York", safecheck=False)
_PAIRS = sorted((data_type, name) for data_type in TYPES for name in COLUMNS)
# All but the long tier take one of so many; a prime, so that all types and all columns have their turn.
_ONE_OF = 1 if LONG else 17


def of_spark(returned: list[Any], schema: T.StructType, frame_format: FrameFormat) -> pa.Array | None:
    """Return the only column of what Spark makes of what functions return for keys; None where it fails."""
    try:
        return returned_by_spark(returned, schema, frame_format).column(0).combine_chunks()
    except Exception:  # noqa: BLE001 - anything that a conversion raises
        return None


def of_ours(returned: list[Iterable[pd.DataFrame]], schema: T.StructType, frame_format: FrameFormat) -> pa.Array | None:
    """Return the same of what ours makes, once Spark's worker has converted it for the JVM."""
    output = OutputFrames(schema, frame_format, 10_000)
    try:
        batches = [batch for key, frames in enumerate(returned) for batch in output.add_all(frames, (key,))]
        batches += output.finish()
    except Exception:  # noqa: BLE001 - as above
        return None
    return returned_by_spark([list(RowsOutput(schema).send(batches))], schema, frame_format).column(0).combine_chunks()


def is_same(left: pa.Array | None, right: pa.Array | None) -> bool:
    """Tell whether two columns hold the same, NaN being itself."""
    if left is None or right is None:
        return left is right
    return left.type == right.type and (left.equals(right) or str(left) == str(right))


def schema_of(data_type: T.DataType) -> T.StructType:
    return T.StructType().add("x", data_type)


@pytest.mark.smoke
@pytest.mark.parametrize("frame_format", [_SAFE, _UNSAFE], ids=["safe", "unsafe"])
def test_a_frame_becomes_what_spark_makes_of_it(frame_format: FrameFormat) -> None:
    """Each pair of a declared type and a column: the same rows, or an error on both."""
    wrong = []
    for data_type, name in _PAIRS[:: _ONE_OF if frame_format is _SAFE else 3 * _ONE_OF]:
        schema, returned = schema_of(TYPES[data_type]), [[pd.DataFrame({"x": COLUMNS[name]})]]
        sparks, ours = of_spark(returned, schema, frame_format), of_ours(returned, schema, frame_format)
        if not is_same(sparks, ours):
            wrong.append((data_type, name, sparks, ours))
    assert not wrong


@pytest.mark.parametrize("seed", repetitions(10, 600))
def test_keys_returned_together_become_what_spark_makes_of_each(seed: int) -> None:
    """No key's frame changes what becomes of another's: as on Spark where it calls each key in a micro-batch alone."""
    chance = random.Random(seed)
    data_type = chance.choice(list(TYPES))
    schema = schema_of(TYPES[data_type])
    rows: list[pa.Array] = []
    returned: list[list[pd.DataFrame]] = []
    for name in chance.sample(list(COLUMNS), len(COLUMNS)):
        frame = pd.DataFrame({"x": COLUMNS[name]})
        alone = of_spark([[frame]], schema, _SAFE)
        if alone is not None:
            returned.append([frame])
            rows.append(alone)
        if len(rows) == 5:
            break
    ours = of_ours([*returned, []], schema, _SAFE)
    assert is_same(ours, pa.concat_arrays(rows)), (data_type, [frame["x"] for [frame] in returned])


@pytest.mark.parametrize("seed", repetitions(10, 300))
def test_frames_of_one_dtype_become_what_spark_makes_of_them_together(seed: int) -> None:
    """Where Spark's worker gathers the frames of several keys, and need not change their dtypes."""
    chance = random.Random(seed)
    data_type, name = chance.choice(list(TYPES)), chance.choice(list(COLUMNS))
    values = COLUMNS[name]
    schema = schema_of(TYPES[data_type])
    returned = [[pd.DataFrame({"x": values})] for _ in range(chance.randint(2, 5))]
    if isinstance(values.dtype, np.dtype):  # else Spark's empty frame for this key would change it
        returned.insert(chance.randint(0, len(returned)), [])
    assert is_same(of_spark(returned, schema, _SAFE), of_ours(returned, schema, _SAFE)), (data_type, name)


@pytest.mark.parametrize("name", OF_ARROW)
def test_columns_of_arrow_that_spark_refuses_are_kept(name: str) -> None:
    """Spark's worker fails with all of them, ours with none: also where several keys return them."""
    types = [
        (data_type, frame)
        for data_type, frame in ((t, pd.DataFrame({"x": OF_ARROW[name]})) for t in TYPES.values())
        if of_ours([[frame]], schema_of(data_type), _SAFE) is not None
    ]
    assert types
    for data_type, frame in types:
        assert of_spark([[frame]], schema_of(data_type), _SAFE) is None
        one = of_ours([[frame]], schema_of(data_type), _SAFE)
        assert is_same(of_ours([[frame], [frame]], schema_of(data_type), _SAFE), pa.concat_arrays([one, one]))
