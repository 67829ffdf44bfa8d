"""Rows that hold what Python does not have: bytes that are no text, and times beyond its calendar."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends.arrow.values import python_rows

TEXT = pa.array([b"\xffa", b"b", None], pa.large_binary()).view(pa.large_string())
FAR = pa.array([2**62, 0, None], pa.int64()).cast(pa.timestamp("us", "UTC"))
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
FAR_TEXT = f"{2**62} timestamp[us, tz=UTC]"


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array([1, 2, None]), [1, 2, None]),
        (TEXT, ["\\xffa", "b", None]),
        (FAR, [FAR_TEXT, EPOCH, None]),
        (pa.array([2**30, 0, None], pa.int32()).view(pa.date32()), [f"{2**30} date32[day]", dt.date(1970, 1, 1), None]),
        (
            pa.StructArray.from_arrays([TEXT, FAR], ["s", "t"]),
            [{"s": "\\xffa", "t": FAR_TEXT}, {"s": "b", "t": EPOCH}, {"s": None, "t": None}],
        ),
        (pa.LargeListArray.from_arrays(pa.array([0, 2, 3, 3]), TEXT), [["\\xffa", "b"], [None], []]),
        (
            pa.MapArray.from_arrays(pa.array([0, 2, 2, 2], pa.int32()), TEXT.slice(0, 2), FAR.slice(0, 2)),
            [[("\\xffa", FAR_TEXT), ("b", EPOCH)], [], []],
        ),
    ],
    ids=["number", "text", "time", "date", "struct", "list", "map"],
)
def test_each_row_can_be_shown(column: pa.Array, values: list[Any]) -> None:
    """Spark stores all of these; what stands beside them is as it would be without them."""
    rows = pa.table({"c": column, "n": [1, 2, 3]})
    assert python_rows(rows) == [{"c": value, "n": n} for value, n in zip(values, (1, 2, 3), strict=True)]
    assert python_rows(rows.combine_chunks().to_batches()[0]) == python_rows(rows)


def test_no_rows_and_no_columns() -> None:
    """As Arrow has them."""
    assert python_rows(pa.table({"a": pa.array([], pa.string())})) == []
    assert python_rows(pa.table({})) == []
