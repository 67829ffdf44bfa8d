"""Keys of maps, as a processor gives them: two are one key where the store has one."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import ArrayType, DoubleType, LongType, StringType, StructField, StructType, TimestampType

from holdfast.errors import SchemaMismatchError
from tests.time_zone import process_in
from tests.unit.spark_integration.processor.processor_shard import ProcessorShard, Scripted, columns

N = columns(n=LongType())


@pytest.fixture
def new_york() -> Iterator[None]:
    """Set the time zone of the process."""
    with process_in("America/New_York"):
        yield


def test_user_keys_are_equal_as_the_store_has_them(tmp_path: Path) -> None:
    """NaN is one key, -0.0 is 0.0, and lists can be keys; so it is before and after they were stored."""
    schema = columns(d=DoubleType(), items=ArrayType(StringType()))
    shard = ProcessorShard(tmp_path / "shard", Scripted(lambda h: h.getMapState("m", schema, N)))

    def count(state: Any, *_: Any) -> Any:
        for n, key in enumerate([(math.nan, ["x"]), (-math.nan, ["x"]), (0.0, None), (-0.0, None), (None, [])]):
            before = state.getValue(key)
            state.updateValue(key, ((before.n if before else 0) + 10 + n,))
        return sorted(state.values())

    assert shard.each(["a"], count) == {"a": repr([(14,), (21,), (25,)])}
    assert shard.each(["a"], count) == {"a": repr([(28,), (42,), (50,)])}
    assert len(shard.stored("m.m")) == 3


def test_times_of_an_hour_that_a_clock_repeats_are_different_user_keys(tmp_path: Path, new_york: None) -> None:
    """In the worker's zone both are half past one; Spark's map has an entry for each."""
    times = [(dt.datetime(2024, 11, 3, hour, 30, tzinfo=dt.UTC),) for hour in (5, 6)]
    shard = ProcessorShard(
        tmp_path / "shard", Scripted(lambda handle: handle.getMapState("at", columns(at=TimestampType()), N))
    )

    def write(at: Any, *_: Any) -> Any:
        for n, time_of_day in enumerate(times):
            at.updateValue(time_of_day, (n,))
        return read(at)

    def read(at: Any, *_: Any) -> Any:
        return [at.getValue(time_of_day).n for time_of_day in times], len(list(at.keys()))

    assert shard.each(["a"], write) == {"a": "([0, 1], 2)"}
    assert shard.each(["a"], read) == {"a": "([0, 1], 2)"}
    assert [row["entry.at"] for row in shard.stored("m.at")] == [at for (at,) in times]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_the_end_of_the_calendar_is_a_user_key(tmp_path: Path, zone: str) -> None:
    """It stands for "for ever"; in UTC it is, by the process's zone, beyond Python's calendar."""
    end = (dt.datetime(9999, 12, 31, 23, 59, 59, 999999),)  # noqa: DTZ001  naive ones are of the process's zone
    with process_in(zone):
        shard = ProcessorShard(
            tmp_path / "shard", Scripted(lambda handle: handle.getMapState("at", columns(at=TimestampType()), N))
        )

        def count(at: Any, *_: Any) -> Any:
            before = at.getValue(end)
            at.updateValue(end, ((before.n if before else 0) + 1,))
            return list(at.iterator())

        assert shard.each(["a"], count) == {"a": repr([(end, (1,))])}
        assert shard.each(["a"], count) == {"a": repr([(end, (2,))])}


def test_a_null_inside_of_a_user_key_where_none_may_be_names_its_key(tmp_path: Path) -> None:
    """Whatever stored keys may have."""
    part = StructType([StructField("n", LongType(), False)])
    shard = ProcessorShard(
        tmp_path / "shard", Scripted(lambda handle: handle.getMapState("m", columns(p=part, q=LongType()), N))
    )

    def write(entries: Any, key: Any, _: Any) -> None:
        entries.updateValue(((None,) if key[0] == "b" else (1,), None), (1,))

    words = "null inside column 'p', in 'n', which the key of map state 'm' declares NOT NULL"
    with pytest.raises(SchemaMismatchError, match=words) as caught:
        shard.each(["a", "b", "c"], write)
    assert "raised in operator 'op' for key ('b',)" in caught.value.__notes__
    assert shard.stored("m.m") == []
