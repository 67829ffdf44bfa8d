"""Conversions of state: items T, in Spark's worker, whose local time zone is UTC."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from decimal import Decimal
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
from pyspark.sql import Row

from tests.spark.processors.probes.probe import NOW, Error, Probes, States, attempt

probe = Probes()
_MISFIT = Error("StateValueError")


@probe((1, 2**62, 1.1, "x", True, b"\x00a", Decimal("1.50")))
def t1_each_type_comes_back(s: States) -> Iterator[object]:
    yield s.kept(i=1, l=2**62, d=1.1, s="x", flag=True, raw=b"\x00a", dec=Decimal("1.5"))


@probe(dt.date(2026, 1, 2), NOW, NOW, dt.timedelta(days=-1, microseconds=5))
def t1_each_type_of_time_comes_back(s: States) -> Iterator[object]:
    yield s.kept(day=NOW.date())
    yield s.kept(ts=NOW)
    yield s.kept(ntz=NOW)
    yield s.kept(span=dt.timedelta(days=-1, microseconds=5))


@probe([1, None, 3], {"a": 1, "b": None}, Row(x=1, y="z"), [Row(m={"k": [1, 2]}), None])
def t5_nested_values_come_back(s: States) -> Iterator[object]:
    yield s.kept(array=[1, None, 3])
    yield s.kept(map={"a": 1, "b": None})
    yield s.kept(st=(1, "z"))
    yield s.kept(deep=[({"k": [1, 2]},), None])


@probe(*[Row(x=1, y="z")] * 4, [1, 2], [])
def t5_structs_take_sequences_rows_and_dicts_and_arrays_tuples(s: States) -> Iterator[object]:
    yield s.kept(st=[1, "z"])
    yield s.kept(st=Row(x=1, y="z"))
    yield s.kept(st={"y": "z", "x": 1})
    yield s.kept(st=Row(1, "z"))
    yield s.kept(array=(1, 2))
    yield s.kept(array=())


@probe(Row(x=1, y=None), {}, [Row(m=None), Row(m={})])
def t5_nulls_inside_are_kept(s: States) -> Iterator[object]:
    yield s.kept(st=(1, None))
    yield s.kept(map={})
    yield s.kept(deep=[(None,), ({},)])


@probe(1, 2.5, True, "x", NOW, dt.timedelta(seconds=1))
def t1_numpy_and_pandas_scalars_are_pythons(s: States) -> Iterator[object]:
    yield s.kept(i=np.int64(1))
    yield s.kept(d=np.float64(2.5))
    yield s.kept(flag=np.bool_(True))
    yield s.kept(s=np.str_("x"))
    yield s.kept(ts=pd.Timestamp(NOW))
    yield s.kept(span=pd.Timedelta(seconds=1))


@probe([1, 2], {"a": 3}, Row(x=4, y="z"))
def t1_numpy_scalars_inside_are_pythons(s: States) -> Iterator[object]:
    yield s.kept(array=[np.int64(1), np.int32(2)])
    yield s.kept(map={"a": np.int64(3)})
    yield s.kept(st=(np.int64(4), "z"))


@probe(NOW, dt.timedelta(seconds=2))
def t6_datetimes_of_numpy(s: States) -> Iterator[object]:
    yield s.kept(ts=np.datetime64(NOW))
    yield s.kept(span=np.timedelta64(2, "s"))


@probe(1.100000023841858, "inf", True, True, False)
def t6_float_has_32_bits_and_nan_is_a_value(s: States) -> Iterator[object]:
    yield s.kept(f=1.1)
    yield str(s.kept(d=math.inf))
    yield math.isnan(s.kept(d=math.nan))
    yield math.isnan(s.kept(f=math.nan))
    yield s.kept(d=math.nan) is None


@probe(b"ab", b"ab", b"ab", b"")
def t6_binary_takes_bytes_bytearrays_and_text(s: States) -> Iterator[object]:
    yield bytes(s.kept(raw=b"ab"))
    yield bytes(s.kept(raw=bytearray(b"ab")))
    yield bytes(s.kept(raw="ab"))
    yield bytes(s.kept(raw=b""))


@probe(dt.date(2026, 1, 2))
def t6_a_date_takes_the_day_of_a_datetime(s: States) -> Iterator[object]:
    yield s.kept(day=NOW)


@probe(NOW, NOW - dt.timedelta(hours=1), NOW)
def t4_timestamps_are_naive_in_the_workers_zone(s: States) -> Iterator[object]:
    """An aware one is converted; the session's zone plays no part."""
    yield s.kept(ts=NOW)
    yield s.kept(ts=NOW.replace(tzinfo=ZoneInfo("Europe/Paris")))
    yield s.kept(ts=NOW.replace(tzinfo=dt.UTC))


@probe(NOW)
def t4_nanoseconds_are_cut(s: States) -> Iterator[object]:
    yield s.kept(ts=pd.Timestamp(NOW) + pd.Timedelta(999, "ns"))


@probe(_MISFIT, None, spark=(Error("ValueError"), None))
def t4_not_a_time_is_an_error(s: States) -> Iterator[object]:
    yield attempt(lambda: s.kept(ts=pd.NaT))
    yield s.typed.get()


@probe(Decimal("1.01"), Decimal("-1.01"), Decimal("1.00"), Decimal("99999999.99"))
def t3_decimals_are_rounded_half_up_to_the_scale(s: States) -> Iterator[object]:
    yield s.kept(dec=Decimal("1.005"))
    yield s.kept(dec=Decimal("-1.005"))
    yield s.kept(dec=Decimal("1.004"))
    yield s.kept(dec=Decimal("99999999.99"))


@probe(
    _MISFIT,
    spark=(Error("PySparkRuntimeError", "[NUMERIC_VALUE_OUT_OF_RANGE.WITHOUT_SUGGESTION]"),),
    ends_spark=True,
)
def t3_a_decimal_that_is_too_large(s: States) -> Iterator[object]:
    yield attempt(lambda: s.kept(dec=Decimal("123456789.01")))


@probe([1, 2], spark=(Error("PySparkRuntimeError", "Error updating value state: "),), ends_spark=True)
def t5_a_numpy_array(s: States) -> Iterator[object]:
    """Q3: on Spark it fails on the server; it is a sequence, so we take it."""
    yield attempt(lambda: s.kept(array=np.array([1, 2])))


@probe(
    _MISFIT,
    spark=(Error("PySparkRuntimeError", "Error updating value state: [STRUCT_ARRAY_LENGTH_MISMATCH]"),),
    ends_spark=True,
)
def t5_a_struct_that_is_too_short(s: States) -> Iterator[object]:
    yield attempt(lambda: s.kept(st=(1,)))


@probe(*[_MISFIT] * 4, spark=(None,) * 4)
def t2_what_is_no_int_in_an_int_column(s: States) -> Iterator[object]:
    """Q3: a null on Spark."""
    for value in (1.5, "1", Decimal("1.5"), [1]):
        yield attempt(lambda: s.kept(i=value))  # noqa: B023  called at once


@probe(*[_MISFIT] * 3, spark=(None,) * 3)
def t2_what_is_no_float_in_a_double_column(s: States) -> Iterator[object]:
    """Q3: a null on Spark."""
    for value in ("1.0", "", [1.0]):
        yield attempt(lambda: s.kept(d=value))  # noqa: B023  called at once


@probe(_MISFIT, _MISFIT, spark=(None, None))
def t2_what_is_no_decimal_in_a_decimal_column(s: States) -> Iterator[object]:
    """Q3: a null on Spark."""
    yield attempt(lambda: s.kept(dec=1.5))
    yield attempt(lambda: s.kept(dec="1"))


@probe(3.0, 1, 1, Decimal("1.00"), spark=(None,) * 4)
def t2_what_has_the_same_value_in_the_columns_type(s: States) -> Iterator[object]:
    """Q3: a null on Spark, even an int in a double column."""
    yield s.kept(d=3)
    yield s.kept(i=1.0)
    yield s.kept(i=True)
    yield s.kept(dec=1)


@probe(_MISFIT, _MISFIT, _MISFIT, spark=(0, None, 705032704))
def t2_ints_that_are_too_wide(s: States) -> Iterator[object]:
    """Q3: Spark cuts them to the width; what is too wide for a long is null."""
    yield attempt(lambda: s.kept(i=2**40))
    yield attempt(lambda: s.kept(l=2**70))
    yield attempt(lambda: s.kept(i=5_000_000_000))


@probe("9", _MISFIT, spark=("9", "[1, 2]"))
def t2_numbers_are_text_in_a_string_column(s: States) -> Iterator[object]:
    """On Spark lists are text too, Java's."""
    yield s.kept(s=9)
    yield attempt(lambda: s.kept(s=[1, 2]))


@probe(_MISFIT, spark=(Error("AttributeError"),))
def t2_text_in_a_timestamp_column(s: States) -> Iterator[object]:
    yield attempt(lambda: s.kept(ntz="2026-01-02"))
