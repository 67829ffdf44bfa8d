"""States of aggregates in columns, beside the same in plain Python."""

from __future__ import annotations

import math
import statistics
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.arrow.rows import RowOrder
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.operators.accumulators import (
    Accumulator,
    Count,
    Extreme,
    Mean,
    Moments,
    Picked,
    Sum,
    divided,
    lifted,
    reduced,
    results,
)


def _valid(rows: list[Any]) -> list[Any]:
    return [row for row in rows if row is not None]


def _sum(rows: list[Any]) -> Any:
    return sum(_valid(rows)) if _valid(rows) else None


def _mean(rows: list[Any]) -> Any:
    return sum(_valid(rows)) / len(_valid(rows)) if _valid(rows) else None


def _decimal_mean(rows: list[Any]) -> Any:
    return _mean(rows) and (_mean(rows) + 0).quantize(Decimal("1e-6"), ROUND_HALF_UP)


def _extreme(which: Any, rows: list[Any]) -> Any:
    return which(_valid(rows)) if _valid(rows) else None


SMALL = pa.decimal128(10, 2)
FLOATS = st.none() | st.integers(-40, 40).map(lambda n: n / 4)
#: Accumulators of a column ``v``, the type of the column, its values, and the same in plain Python.
KINDS: dict[str, tuple[Accumulator, pa.DataType, st.SearchStrategy[Any], Any]] = {
    "count rows": (Count("a", None), pa.int64(), st.none() | st.integers(0, 3), len),
    "count": (Count("a", "v"), pa.int64(), st.none() | st.integers(0, 3), lambda rows: len(_valid(rows))),
    "sum": (Sum("a", "v", pa.int64()), pa.int32(), st.none() | st.integers(-9, 9), _sum),
    "sum of floats": (Sum("a", "v", pa.float64()), pa.float32(), FLOATS, _sum),
    "sum of decimals": (
        Sum("a", "v", pa.decimal128(20, 2)),
        SMALL,
        st.none() | st.decimals(-99, 99, places=2),
        _sum,
    ),
    "mean": (Mean("a", "v", pa.float64(), pa.float64()), pa.float64(), FLOATS, _mean),
    "mean of decimals": (
        Mean("a", "v", pa.decimal128(20, 2), pa.decimal128(14, 6)),
        SMALL,
        st.none() | st.decimals(-99, 99, places=2),
        _decimal_mean,
    ),
    "min": (
        Extreme("a", "v", pa.string(), "min"),
        pa.string(),
        st.none() | st.text(),
        lambda rows: _extreme(min, rows),
    ),
    "max": (
        Extreme("a", "v", pa.bool_(), "max"),
        pa.bool_(),
        st.none() | st.booleans(),
        lambda rows: _extreme(max, rows),
    ),
    "first": (Picked("a", "v", pa.string(), "first", False), pa.string(), st.none() | st.text(), lambda rows: rows[0]),
    "last": (
        Picked("a", "v", pa.int64(), "last", False),
        pa.int64(),
        st.none() | st.integers(0, 9),
        lambda rows: rows[-1],
    ),
    "first not null": (
        Picked("a", "v", pa.int64(), "first", True),
        pa.int64(),
        st.none() | st.integers(0, 9),
        lambda rows: next(iter(_valid(rows)), None),
    ),
    "last not null": (
        Picked("a", "v", pa.int64(), "last", True),
        pa.int64(),
        st.none() | st.integers(0, 9),
        lambda rows: next(reversed(_valid(rows)), None),
    ),
    "variance": (
        Moments("a", "v", True, False),
        pa.float64(),
        FLOATS,
        lambda rows: statistics.variance(_valid(rows)) if len(_valid(rows)) > 1 else None,
    ),
    "deviation": (
        Moments("a", "v", False, True),
        pa.int64(),
        st.none() | st.integers(-9, 9),
        lambda rows: statistics.pstdev(_valid(rows)) if _valid(rows) else None,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_states_reduced_in_any_pieces_are_those_of_all_rows(kind: str, data: st.DataObject) -> None:
    """However rows are spread over micro-batches, a group's value is that of all its rows in their order."""
    accumulator, data_type, values, plain = KINDS[kind]
    rows: dict[int, list[Any]] = {}
    states = None
    groups = np.zeros(0, np.int64)
    for batch in data.draw(
        st.lists(st.lists(st.tuples(st.integers(0, 3), values), min_size=1), min_size=1, max_size=4)
    ):
        for group, value in batch:
            rows.setdefault(group, []).append(value)
        new = lifted([accumulator], pa.table({"v": pa.array([value for _, value in batch], data_type)}))
        states = new if states is None else pa.concat_tables([states, new])
        groups = np.concatenate([groups, [group for group, _ in batch]])
        order = np.argsort(groups, kind="stable")
        states = reduced([accumulator], states, RowOrder(order, np.append(True, np.diff(groups[order]) != 0)))
        groups = np.unique(groups)
    assert states is not None
    found = dict(zip(groups.tolist(), results([accumulator], states)[accumulator.name].to_pylist(), strict=True))
    for group, expected in {group: plain(of) for group, of in rows.items()}.items():
        if isinstance(expected, float):
            assert math.isclose(found[group], expected, rel_tol=1e-9, abs_tol=1e-9)
        else:
            assert found[group] == expected


@given(
    st.lists(st.tuples(st.none() | st.integers(-(10**30), 10**30), st.none() | st.integers(1, 10**9)), max_size=20),
    st.integers(0, 5),
)
def test_decimals_are_divided_half_up(pairs: list[tuple[int | None, int | None]], offset: int) -> None:
    """As Spark rounds averages, away from zero, for negative ones, too; also of a column that is part of another."""
    with localcontext() as exact_context:
        exact_context.prec = 80
        totals = pa.array([None if n is None else Decimal(n).scaleb(-2) for n, _ in pairs], pa.decimal128(38, 2))
        counts = pa.array([n for _, n in pairs], pa.int64())
        found = divided(totals.slice(offset), counts.slice(offset), pa.decimal128(38, 6)).to_pylist()
        for value, (total, count) in zip(found, pairs[offset:], strict=True):
            if total is None or count is None:
                assert value is None
            else:
                exact = abs(total) * 10**4
                assert abs(value.scaleb(6)) == (2 * exact + count) // (2 * count)
                assert value == 0 or (value < 0) == (total < 0)


def test_a_sum_that_its_type_cannot_hold_is_refused() -> None:
    """It would wrap around, or lose digits; the error names the column."""
    one = Sum("total", "v", pa.decimal128(3, 0))
    states = lifted([one], pa.table({"v": pa.array([999, 1], pa.decimal128(3, 0))}))
    with pytest.raises(InvalidArgumentError, match="'total' is larger than its type holds"):
        reduced([one], states, RowOrder(np.arange(2), np.array([True, False])))
    two = Sum("total", "v", pa.int64())
    states = lifted([two], pa.table({"v": [2**63 - 1, 1]}))
    with pytest.raises(InvalidArgumentError, match="larger than its type holds"):
        reduced([two], states, RowOrder(np.arange(2), np.array([True, False])))


def test_an_average_with_too_many_digits_is_refused() -> None:
    """Its type has the scale that Spark gives it, and may lack digits before the point."""
    with pytest.raises(InvalidArgumentError, match="more digits than its type holds"):
        divided(pa.array([Decimal(1000)], pa.decimal128(10, 0)), pa.array([1]), pa.decimal128(5, 2))


def test_integers_that_no_double_has_are_rounded() -> None:
    """Spark casts a bigint to the nearest double, so such a value must not end the query."""
    rows = pa.table({"v": pa.array([(1 << 53) + 1, (1 << 62) + 3, None], pa.int64())})
    order = RowOrder(np.arange(3), np.array([True, False, False]))
    for one in (Mean("a", "v", pa.float64(), pa.float64()), Moments("a", "v", is_sample=True, is_root=False)):
        (found,) = results([one], reduced([one], lifted([one], rows), order)).values()
        values = [float((1 << 53) + 1), float((1 << 62) + 3)]
        expected = _mean(values) if isinstance(one, Mean) else statistics.variance(values)
        assert found[0].as_py() == pytest.approx(expected)


def test_a_sum_begins_with_0() -> None:
    """So that of -0.0 alone it is 0.0, as in Spark, whose sums begin with 0.0."""
    rows = pa.table({"v": pa.array([-0.0])})
    for one in (Sum("a", "v", pa.float64()), Mean("a", "v", pa.float64(), pa.float64())):
        (found,) = results(
            [one], reduced([one], lifted([one], rows), RowOrder(np.arange(1), np.array([True])))
        ).values()
        assert math.copysign(1, found[0].as_py()) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_variance_of_one_value_that_is_no_number_is_none(value: float) -> None:
    """It is NaN as in Spark, also before a second value comes."""
    rows, one = pa.table({"v": pa.array([value])}), Moments("a", "v", is_sample=False, is_root=False)
    (found,) = results([one], reduced([one], lifted([one], rows), RowOrder(np.arange(1), np.array([True])))).values()
    assert math.isnan(found[0].as_py())
