"""Frames that a processor returns: Spark's worker converts each by itself, as it is at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql.types import ArrayType, DataType, LongType, StringType, StructType

from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration.keyed.frames import FrameFormat
from holdfast.spark_integration.processor.exchange import FrameExchange

UTC = FrameFormat("UTC")


def returned(columns: dict[str, DataType], *calls: Any, fmt: FrameFormat = UTC) -> list[dict[str, Any]]:
    """Return the rows of what a processor returned in some calls."""
    schema = StructType()
    for name, data_type in columns.items():
        schema.add(name, data_type)
    output = FrameExchange(schema, fmt, 100).output()
    batches = [batch for i, frames in enumerate(calls) for batch in output.add_all(frames, (i,))]
    return [row for batch in [*batches, *output.finish()] for row in batch.to_pylist()]


def test_a_frame_is_taken_as_it_is_when_it_is_yielded() -> None:
    """It may be changed in place, and yielded again: in the same call, and in the next one."""
    frame = pd.DataFrame({"t": ["a"], "n": [0], "at": pd.Series([None], dtype="Int64")})

    def call(first: int) -> Iterator[pd.DataFrame]:
        for n in (first, first + 1):
            frame.iat[0, 0] = "abcd"[n]
            frame.iat[0, 1] = n
            frame.iat[0, 2] = n
            yield frame

    found = returned({"t": StringType(), "n": LongType(), "at": LongType()}, call(0), call(2))
    assert [tuple(row.values()) for row in found] == [("a", 0, 0), ("b", 1, 1), ("c", 2, 2), ("d", 3, 3)]


def test_what_is_in_a_frame_is_taken_as_it_is_when_it_is_yielded() -> None:
    """A list that grows from frame to frame, and an array that is filled anew."""
    seen: list[int] = []
    buffer = np.zeros(1, np.int64)

    def call() -> Iterator[pd.DataFrame]:
        for n in range(3):
            seen.append(n)
            buffer.fill(n)
            yield pd.DataFrame({"seen": [seen], "last": [buffer]})

    numbers = ArrayType(LongType())
    assert returned({"seen": numbers, "last": numbers}, call()) == [
        {"seen": [0], "last": [0]},
        {"seen": [0, 1], "last": [1]},
        {"seen": [0, 1, 2], "last": [2]},
    ]


def test_booleans_are_numbers_where_numbers_are_declared() -> None:
    """As Spark casts them; those of ``applyInPandasWithState`` its worker makes objects of, and refuses."""
    frames = [pd.DataFrame({"n": [True, False]}), pd.DataFrame({"n": [7]})]
    assert returned({"n": LongType()}, frames) == [{"n": 1}, {"n": 0}, {"n": 7}]


def test_columns_go_by_position_if_the_session_says_so() -> None:
    """Whatever their names; ``spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName`` is off."""
    frames = [pd.DataFrame({"b": [1], "c": [2]})]
    by_position = FrameFormat("UTC", assign_cols_by_name=False)
    assert returned({"a": LongType(), "b": LongType()}, frames, fmt=by_position) == [{"a": 1, "b": 2}]


def test_columns_without_names_may_be_more_than_are_declared() -> None:
    """As those with names; fewer are an error."""
    more, fewer = pd.DataFrame([(1, 2, 3)]), pd.DataFrame([(1,)])
    assert returned({"a": LongType(), "b": LongType()}, [more]) == [{"a": 1, "b": 2}]
    with pytest.raises(SchemaMismatchError, match=r"fewer columns.*columns=1 declared=2"):
        returned({"a": LongType(), "b": LongType()}, [fewer])
