"""What a function returns: Spark's checks, its conversions, and nothing lost between frames of different dtypes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkRuntimeError, PySparkTypeError, PySparkValueError
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.keyed.frames import GATHERED_FRAMES, FrameFormat, OutputFrames

ZONE = FrameFormat("America/New_York")


def gathered(
    columns: dict[str, DataType], *returned: Any, rows_each: int = 100, fmt: FrameFormat = ZONE, nullable: bool = True
) -> list[list[dict[str, Any]]]:
    """Return the rows of each batch."""
    schema = StructType()
    for name, data_type in columns.items():
        schema.add(name, data_type, nullable)
    output = OutputFrames(schema, fmt, rows_each)
    batches = [batch for i, one in enumerate(returned) for batch in output.add_all(one, (i,))]
    return [batch.to_pylist() for batch in [*batches, *output.finish()]]


XY: dict[str, DataType] = {"x": LongType(), "y": LongType()}


@pytest.mark.parametrize(
    ("returned", "expected", "actual"),
    [
        (pd.DataFrame({"x": [1], "y": [1]}), "iterable of pandas.DataFrame", "DataFrame"),
        (None, "iterable", "NoneType"),
        (7, "iterable", "int"),
        ([(1, 2)], "iterator of pandas.DataFrame", "iterator of tuple"),
        ([pd.Series([1])], "iterator of pandas.DataFrame", "iterator of Series"),
    ],
    ids=["R1", "R2 none", "R2 int", "R3 tuple", "R3 series"],
)
def test_what_is_no_iterable_of_frames_is_refused(returned: Any, expected: str, actual: str) -> None:
    with pytest.raises(PySparkTypeError) as caught:
        gathered(XY, returned)
    assert caught.value.getCondition() == "UDF_RETURN_TYPE"
    assert caught.value.getMessageParameters() == {"expected": expected, "actual": actual}


def test_r4_another_number_of_columns_is_refused() -> None:
    with pytest.raises(PySparkRuntimeError) as caught:
        gathered(XY, [pd.DataFrame({"x": [1]})])
    assert caught.value.getCondition() == "RESULT_COLUMN_SCHEMA_MISMATCH"
    assert caught.value.getMessageParameters() == {"expected": "2", "actual": "1"}
    with pytest.raises(PySparkRuntimeError):
        gathered(XY, [pd.DataFrame({"x": []})])  # Also without rows.


def test_r4_frames_without_rows_are_passed_over() -> None:
    assert gathered(XY, [pd.DataFrame(), pd.DataFrame({"a": [], "b": []})], []) == []


def test_a_frame_of_rows_without_columns_is_rows_of_nulls() -> None:
    """As on Spark."""
    assert gathered(XY, [pd.DataFrame(index=[1, 2])]) == [[{"x": None, "y": None}] * 2]


def test_r5_columns_are_found_by_name() -> None:
    assert gathered(XY, [pd.DataFrame({"y": [1], "x": [2]}, index=[9])]) == [[{"x": 2, "y": 1}]]


def test_r5_columns_without_names_are_taken_by_position() -> None:
    by_position = FrameFormat("UTC", assign_cols_by_name=False)
    assert gathered(XY, [pd.DataFrame([[1, 2]])]) == [[{"x": 1, "y": 2}]]
    assert gathered(XY, [pd.DataFrame({"y": [1], "x": [2]})], fmt=by_position) == [[{"x": 1, "y": 2}]]


@pytest.mark.parametrize("labels", [["a", "b"], ["x", "z"], ["x", "x"], ["x", 1]])
def test_r5_other_names_are_an_error(labels: list[Any]) -> None:
    """Spark makes nulls of them without a word."""
    with pytest.raises(PySparkRuntimeError) as caught:
        gathered(XY, [pd.DataFrame([[1, 2]], columns=labels)])
    assert caught.value.getCondition() == "RESULT_COLUMN_NAMES_MISMATCH"


def test_batches_come_when_there_are_more_rows_than_asked() -> None:
    frames = [pd.DataFrame({"x": [i] * 2, "y": [0] * 2}) for i in range(5)]
    assert [len(batch) for batch in gathered(XY, frames[:1], frames[1:], rows_each=3)] == [4, 4, 2]


def test_output_is_streamed_while_the_function_runs() -> None:
    """The function's generator is not run ahead of the batches that it fills."""
    made = []

    def function() -> Iterator[pd.DataFrame]:
        for i in range(100):
            made.append(i)
            yield pd.DataFrame({"x": [i], "y": [0]})

    schema = StructType().add("x", LongType()).add("y", LongType())
    next(OutputFrames(schema, ZONE, 4).add_all(function(), ()))
    assert len(made) == 5


@pytest.mark.slow(0.5)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["x", "y"]),
            st.lists(st.one_of(st.none(), st.integers(2**53, 2**60)), min_size=1, max_size=2),
            st.sampled_from([None, "object", "Int64"]),
        ),
        max_size=8,
    ),
    st.integers(1, 9),
)
def test_frames_of_all_dtypes_keep_their_values_and_order(
    made: list[tuple[str, list[int | None], str | None]], rows_each: int
) -> None:
    """Integers beyond 2**53 are exact next to frames whose columns are objects, and rows stay in order."""
    frames, rows = [], []
    for first, values, dtype in made:
        exact = dtype if None not in values else dtype or "object"
        second = "y" if first == "x" else "x"
        frames.append(pd.DataFrame({first: pd.Series(values, dtype=exact), second: [1] * len(values)}))
        rows += [{first: v, second: 1} for v in values]
    batches = gathered(XY, *([frame] for frame in frames), rows_each=rows_each)
    assert [row for batch in batches for row in batch] == rows


def test_types_are_converted_as_spark_does() -> None:
    """Instants are of the session's zone, where pandas has no zone."""
    columns: dict[str, DataType] = {
        "t": TimestampType(),
        "d": DateType(),
        "n": DecimalType(5, 2),
        "b": BinaryType(),
        "s": StringType(),
        "f": DoubleType(),
        "l": StructType().add("i", IntegerType()),
    }
    noon = dt.datetime(2024, 1, 1, 17, tzinfo=dt.UTC)
    naive = pd.DataFrame(
        {
            "t": [pd.Timestamp("2024-01-01 12:00")],
            "d": [dt.date(2024, 1, 1)],
            "n": [Decimal("1.5")],
            "b": [b""],
            "s": ["5"],
            "f": [1],
            "l": [{"i": 1}],
        }
    )
    aware = naive.assign(t=[pd.Timestamp(noon)])
    expected = {"t": noon, "d": dt.date(2024, 1, 1), "n": Decimal("1.50"), "b": b"", "s": "5", "f": 1.0, "l": {"i": 1}}
    assert gathered(columns, [naive, aware, aware]) == [[expected] * 3]


def test_values_that_do_not_fit_are_refused() -> None:
    """With Spark's classes; overflow only where the session asks for it."""
    with pytest.raises((PySparkTypeError, PySparkValueError), match="'x'"):
        gathered(XY, [pd.DataFrame({"x": ["text"], "y": [1]})])
    fraction = [pd.DataFrame({"x": [1.5], "y": [1]})]
    assert gathered(XY, fraction, fmt=FrameFormat("UTC", safecheck=False)) == [[{"x": 1, "y": 1}]]
    with pytest.raises(PySparkValueError, match="convertToArrowArraySafely"):
        gathered(XY, fraction)
    with pytest.raises(SchemaMismatchError, match="NOT NULL"):
        gathered(XY, [pd.DataFrame({"x": [None], "y": [1]})], nullable=False)
    pair = StructType().add("a", LongType(), False)
    with pytest.raises(SchemaMismatchError, match=r"nulls inside column 'x', in 'a', .* NOT NULL"):
        gathered({"x": pair}, [pd.DataFrame({"x": [{"a": None}]})])


@pytest.mark.parametrize("bad", [{"x": ["text"], "y": [1]}, {"x": [1.5], "y": [1]}])
def test_the_key_of_a_frame_that_does_not_fit_is_told(bad: dict[str, Any]) -> None:
    """Not that of the key whose frame filled the batch, nor of one that is converted together with it."""
    good = {"x": ["5"] if bad["x"] == ["text"] else [2.0], "y": [1]}
    output = OutputFrames(StructType().add("x", LongType()).add("y", LongType()), ZONE, 3)
    for key, frame in enumerate([good, bad, good]):
        assert not list(output.add_all([pd.DataFrame(frame)], (key,)))
    with pytest.raises((PySparkTypeError, PySparkValueError)):
        list(output.add_all([pd.DataFrame(good)], (3,)))
    assert output.failed_key == (1,)


@pytest.mark.slow(1)
def test_many_frames_of_several_dtypes_stay_in_order() -> None:
    """Frames are joined piece by piece, strings and nullable integers too."""
    columns: dict[str, DataType] = {"x": LongType(), "s": StringType()}
    frames, expected = [], []
    for i in range(3 * GATHERED_FRAMES + 1):
        rows = [{"x": i if i % 7 else None, "s": f"{i} {row}"} for row in range(i % 3)]
        frame = pd.DataFrame(rows, columns=list(columns))
        frames.append(frame.astype({"x": "Int64"}) if i % 2 else frame)
        expected += rows
    assert gathered(columns, frames, rows_each=10**6) == [expected]


@pytest.mark.parametrize("at", [GATHERED_FRAMES - 1, GATHERED_FRAMES, 2 * GATHERED_FRAMES + 5])
def test_the_key_of_one_frame_of_many_is_told(at: int) -> None:
    """Also where its frame was joined with others long before."""
    output = OutputFrames(StructType().add("x", LongType()), ZONE, 10**6)
    for key in range(3 * GATHERED_FRAMES):
        frame = pd.DataFrame({"x": [0.5 if key == at else 1.0] * (1 + key % 2)})
        assert not list(output.add_all([frame], (key,)))
    with pytest.raises(PySparkValueError, match="convertToArrowArraySafely"):
        list(output.finish())
    assert output.failed_key == (at,)


@pytest.mark.parametrize(
    ("data_type", "good", "bad"),
    [
        (TimestampType(), pd.Timestamp("2024-03-10 01:30"), pd.Timestamp("2024-03-10 02:30")),
        (MapType(StringType(), LongType()), {"a": 1}, 7),
        (LongType(), 5, 2**70),
    ],
    ids=["in a gap of summer time", "no map", "too large"],
)
@pytest.mark.parametrize("at", range(3))
def test_the_key_is_told_whatever_the_conversion_raises(data_type: DataType, good: Any, bad: Any, at: int) -> None:
    """Also errors that are neither Spark's, nor Arrow's, nor a TypeError or a ValueError."""
    output = OutputFrames(StructType().add("x", data_type), ZONE, 10)
    for key in range(3):
        assert not list(output.add_all([pd.DataFrame({"x": [bad if key == at else good]})], (key,)))
    with pytest.raises(Exception, match=r"\w"):
        list(output.finish())
    assert output.failed_key == (at,)


def test_frames_that_fit_alone_fit_together() -> None:
    """Text that holds a number is one for Spark, where there is no number beside it."""
    frames = [pd.DataFrame({"x": pd.Series([value], dtype=object)}) for value in ("5", 6, "7", 8, 9)]
    assert gathered({"x": LongType()}, *([frame] for frame in frames)) == [[{"x": x} for x in range(5, 10)]]


def test_an_error_of_the_function_is_its_own() -> None:
    def function() -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"x": [1], "y": [1]})
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        gathered(XY, function())


def test_numpy_and_extension_columns_with_zones_and_categories() -> None:
    zoned = pd.DataFrame({"t": pd.Series([pd.Timestamp("2024-01-01", tz="Asia/Tokyo")]), "s": pd.Categorical(["a"])})
    columns: dict[str, DataType] = {"t": TimestampType(), "s": StringType()}
    expected = {"t": dt.datetime(2023, 12, 31, 15, tzinfo=dt.UTC), "s": "a"}
    assert gathered(columns, [zoned, zoned]) == [[expected] * 2]
    assert gathered({"x": LongType()}, [pd.DataFrame({"x": np.array([], np.int64)})]) == []


def test_text_of_arrow_that_is_not_utf8_is_refused_by_column() -> None:
    """Spark's worker fails too, and names nothing; Arrow's conversion would let it pass, for pandas to fail later."""
    text = pa.array([b"fine", b"\xff\xfe"]).view(pa.string())
    frame = pd.DataFrame({"s": pd.Series(text, dtype=pd.ArrowDtype(pa.string()))})
    with pytest.raises(InvalidArgumentError, match=r"column 's' of the output has text that is not UTF-8"):
        gathered({"s": StringType()}, [frame])
