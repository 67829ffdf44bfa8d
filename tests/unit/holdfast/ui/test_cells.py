"""Values of every type as text, and those that are none."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from holdfast.ui.views.rows import TEXT_MAX, shown_table, texts

ZONED = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, pa.int64(), None),
        (1, pa.int64(), "1"),
        (True, pa.bool_(), "true"),
        (float("nan"), pa.float64(), "nan"),
        (-0.0, pa.float64(), "-0.0"),
        (Decimal("1.50"), pa.decimal128(10, 2), "1.50"),
        ("a\nb\x00\u202e", pa.large_string(), "a\\nb\\x00\\u202e"),
        (b"\x00\xff", pa.large_binary(), "0x00ff"),
        (dt.date(2026, 1, 2), pa.date32(), "2026-01-02"),
        (ZONED, pa.timestamp("us", "UTC"), "2026-01-02 03:04:05+00:00"),
        (dt.timedelta(seconds=90), pa.duration("us"), "0:01:30"),
        ([1, None], pa.large_list(pa.int64()), "[1, null]"),
        ({"a": "<b>", "b": b"\x01"}, pa.struct([("a", pa.string()), ("b", pa.binary())]), '{"a": "<b>", "b": "0x01"}'),
        ([("k", ZONED)], pa.map_(pa.string(), pa.timestamp("us", "UTC")), '[["k", "2026-01-02 03:04:05+00:00"]]'),
    ],
)
def test_each_type_has_a_text(value: Any, kind: pa.DataType, text: str | None) -> None:
    """As people read it; control characters as escapes, a null as none."""
    assert texts(pa.chunked_array([pa.array([value], kind)])) == [text]


def test_bytes_that_are_no_text_are_shown() -> None:
    """Spark's strings hold any bytes: in a column, and inside of a list."""
    bad = pa.array([b"\xff\xfea"], pa.large_binary()).view(pa.large_string())
    assert texts(bad) == ["\\\\xff\\\\xfea".replace("\\\\", "\\")]
    nested = pa.LargeListArray.from_arrays(pa.array([0, 1]), bad)
    assert texts(nested) == ['["\\\\xff\\\\xfea"]']


def test_times_beyond_the_calendar_are_numbers() -> None:
    """A date that Python does not have is no reason to show nothing."""
    found = texts(pa.array([2**62, 0], pa.int64()).cast(pa.timestamp("us", "UTC")))
    assert found == [f"{2**62} timestamp[us, tz=UTC]", "1970-01-01 00:00:00+00:00"]


def test_long_values_are_cut() -> None:
    """A megabyte in one cell does not become a megabyte of the page."""
    (cell,) = texts(pa.array(["x" * 1_000_000]))
    assert cell is not None
    assert len(cell) < TEXT_MAX + 40
    assert cell.endswith("(1,000,000 characters)")
    (binary,) = texts(pa.array([b"x" * 1_000_000]))
    assert binary is not None
    assert len(binary) < TEXT_MAX + 40


def test_a_table_without_rows_has_its_columns() -> None:
    """An empty state is shown as such."""
    shown = shown_table("t", pa.table({"a": pa.array([], pa.int64()), "b": pa.array([], pa.string())}))
    assert (shown.columns, shown.rows) == ([("a", True), ("b", False)], [])
