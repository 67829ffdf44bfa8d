"""State as a function is shown it, where Spark's own conversion fails."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from pyspark.sql.types import ArrayType, BinaryType, DataType, LongType, MapType, Row, StructType, TimestampType

from holdfast.spark_integration.keyed.python_values import RowValues
from tests.time_zone import process_in


def kept(value: Any, data_type: DataType) -> Any:
    """Return a value as it is read after it was put."""
    values = RowValues(StructType().add("v", data_type))
    [(shown,)] = values.to_tuples(values.to_arrow([(value,)]))
    return shown


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_the_first_day_of_the_calendar_is_read(zone: str) -> None:
    """As `datetime.min`, which says "never yet" in many a state; Spark's conversion looks at the day before."""
    first = dt.datetime.min  # noqa: DTZ901  a state's times have no zone
    with process_in(zone):
        for moment in (first, first + dt.timedelta(hours=23, microseconds=7), first + dt.timedelta(days=3)):
            assert kept(moment, TimestampType()) == moment


POINT = StructType().add("x", LongType()).add("tags", ArrayType(BinaryType()))


@pytest.mark.parametrize(
    ("key", "data_type"),
    [
        ((1, 2), ArrayType(LongType())),
        (((1, None), None, ()), ArrayType(ArrayType(LongType()))),
        (Row(x=1, tags=(b"a", b"b")), POINT),
        (b"a", BinaryType()),
    ],
)
def test_maps_by_arrays_are_read(key: Any, data_type: DataType) -> None:
    """Lists cannot be keys of a dict: they are tuples there, at any depth."""
    shown = kept({key: 3}, MapType(data_type, LongType()))
    assert shown == {key: 3}
    assert repr(shown) == repr({key: 3})
