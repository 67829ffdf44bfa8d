"""Reductions over each key's rows, against the same computed row by row in plain Python."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.run import TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.vectorised.batch import group_rows
from holdfast.spark_integration.vectorised.groups import Groups

KEY = pa.schema([("k", pa.string())])
SCHEMA = TableSchema.of("state", KEY, pa.schema([("n", pa.int64())]))
KEYS: list[str | None] = [None, "", "a", "b", "c"]

#: Values of each type that can be compared, the awkward ones among them.
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.one_of(st.floats(), st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf])),
    pa.decimal128(38, 2): st.decimals(-(10**30), 10**30, places=2),
    pa.bool_(): st.booleans(),
    pa.date32(): st.dates(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(dt.UTC)),
    pa.timestamp("us"): st.datetimes(),
    pa.duration("us"): st.timedeltas(dt.timedelta(-(10**6)), dt.timedelta(10**6)),
    pa.string(): st.text(max_size=3),
    pa.binary(): st.binary(max_size=3),
}
NUMBERS = [t for t in VALUES if pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t)]


def groups_of(keys: list[str | None], **columns: pa.Array) -> tuple[Groups, list[str | None]]:
    """Return the groups of these rows and their keys; half of all keys share a hash."""
    rows = pa.table({"k": pa.array(keys, pa.string()), **columns})
    hashes = np.array([KEYS.index(k) % 2 for k in keys], np.uint64)
    found, shown, groups = group_rows(rows, SCHEMA.conform(rows.select(["k"]), "key"), hashes, KEY)
    assert len(groups) == len(found) == shown.num_rows
    return groups, shown.column("k").to_pylist()


def expected(keys: list[str | None], order: list[str | None], values: list[Any], of: Callable[[list[Any]], Any]) -> Any:
    """Return `of` the values of each key, in the order of `order`."""
    return [of([v for k, v in zip(keys, values, strict=True) if k == key]) for key in order]


def valid(values: list[Any]) -> list[Any]:
    return [v for v in values if v is not None]


def rank(value: Any) -> Any:
    """Order NaN above all numbers, as Spark does."""
    return (math.isnan(value), 0 if math.isnan(value) else value) if isinstance(value, float) else value


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Tell whether two lists are equal, NaN being equal to itself."""
    return len(found) == len(wanted) and all(
        a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
        for a, b in zip(found, wanted, strict=True)
    )


@st.composite
def columns(draw: st.DrawFn, types: list[pa.DataType]) -> tuple[list[str | None], pa.Array]:
    """Draw keys and one value for each; no row at all is a case like any other."""
    data_type = draw(st.sampled_from(types))
    rows = draw(st.lists(st.tuples(st.sampled_from(KEYS), st.none() | VALUES[data_type]), max_size=20))
    return [k for k, _ in rows], pa.array([v for _, v in rows], data_type)


@given(columns(list(VALUES)))
def test_every_key_stands_once_and_index_leads_to_it(drawn: tuple[list[str | None], pa.Array]) -> None:
    keys, values = drawn
    groups, order = groups_of(keys, v=values)
    assert sorted(order, key=KEYS.index) == sorted(set(keys), key=KEYS.index)
    assert [order[i] for i in groups.index] == keys
    assert groups.index.shape == (len(keys),)


@given(columns(list(VALUES)))
def test_count_counts_rows_or_values(drawn: tuple[list[str | None], pa.Array]) -> None:
    keys, values = drawn
    groups, order = groups_of(keys, v=values)
    plain = values.to_pylist()
    assert groups.count().to_pylist() == expected(keys, order, plain, len)
    assert groups.count("v").to_pylist() == expected(keys, order, plain, lambda vs: len(valid(vs)))
    assert groups.count().type == groups.count("v").type == pa.int64()


@given(columns(list(VALUES)), st.sampled_from(["min", "max"]))
def test_min_and_max_of_every_type(drawn: tuple[list[str | None], pa.Array], which: str) -> None:
    keys, values = drawn
    groups, order = groups_of(keys, v=values)
    pick = min if which == "min" else max
    found = getattr(groups, which)("v")
    assert found.type == values.type
    wanted = expected(keys, order, values.to_pylist(), lambda vs: pick(valid(vs), key=rank, default=None))
    assert same(found.to_pylist(), wanted)


@given(columns(NUMBERS))
def test_sum_is_exact_or_refused(drawn: tuple[list[str | None], pa.Array]) -> None:
    keys, values = drawn
    groups, order = groups_of(keys, v=values)
    if pa.types.is_floating(values.type):
        plain = values.cast(pa.float64()).to_pylist()
        found = groups.sum("v")
        assert found.type == pa.float64()
        with np.errstate(all="ignore"):
            wanted = expected(keys, order, plain, lambda vs: np.sum(valid(vs)) if valid(vs) else None)
        # Additions in another order differ by what the largest value loses.
        loss = 1e-9 * max((abs(v) for v in valid(plain) if math.isfinite(v)), default=0.0)
        np.testing.assert_allclose(*(np.array(x, float) for x in (found.to_pylist(), wanted)), rtol=1e-9, atol=loss)
        return
    with localcontext(prec=100):
        wanted = expected(keys, order, values.to_pylist(), lambda vs: sum(valid(vs)) if valid(vs) else None)
    if any(not -(2**63) <= total < 2**63 for total in valid(wanted)) and pa.types.is_integer(values.type):
        with pytest.raises(InvalidArgumentError, match="larger than its type holds"):
            groups.sum("v")
    else:
        assert groups.sum("v").to_pylist() == wanted


@given(columns(NUMBERS))
def test_mean_is_that_of_the_values_that_are_there(drawn: tuple[list[str | None], pa.Array]) -> None:
    keys, values = drawn
    groups, order = groups_of(keys, v=values)
    plain = [None if v is None else float(v) for v in values.to_pylist()]
    with np.errstate(all="ignore"):
        wanted = expected(keys, order, plain, lambda vs: np.mean(valid(vs)) if valid(vs) else None)
        found = groups.mean("v")
    assert found.type == pa.float64()
    assert found.is_null().to_pylist() == [w is None for w in wanted]
    np.testing.assert_allclose(*(np.array(x, float) for x in (found.to_pylist(), wanted)), rtol=1e-9, atol=1e-9)


@given(columns(list(VALUES)), st.booleans())
def test_first_and_last_as_rows_arrived_nulls_included(drawn: tuple[list[str | None], pa.Array], last: bool) -> None:
    keys, values = drawn
    groups, order = groups_of(keys, v=values)
    found = groups.last("v") if last else groups.first("v")
    assert found.type == values.type
    assert same(found.to_pylist(), expected(keys, order, values.to_pylist(), lambda vs: vs[-1 if last else 0]))


@given(columns(list(VALUES)), st.booleans())
def test_first_and_last_by_another_column(drawn: tuple[list[str | None], pa.Array], last: bool) -> None:
    """A row without an order is chosen only where the key has no other; of equal ones the first or last to arrive."""
    keys, by = drawn
    groups, order = groups_of(keys, by=by, row=pa.array(range(len(keys)), pa.int64()))

    def choose(rows: list[int]) -> int:
        ordered = [r for r in rows if by[r].is_valid] or rows
        if not by[ordered[0]].is_valid:
            return rows[-1 if last else 0]
        best = (max if last else min)(rank(by[r].as_py()) for r in ordered)
        ties = [r for r in ordered if rank(by[r].as_py()) == best]
        return ties[-1 if last else 0]

    found = groups.last("row", "by") if last else groups.first("row", order_by=by)
    assert found.to_pylist() == expected(keys, order, list(range(len(keys))), choose)


def test_no_rows_give_no_groups_in_the_right_types() -> None:
    """A shard may be called without data: every reduction must answer."""
    for data_type in VALUES:
        groups, _ = groups_of([], v=pa.array([], data_type))
        assert len(groups) == len(groups.index) == len(groups.count()) == len(groups.count("v")) == 0
        for found in (groups.min("v"), groups.max("v"), groups.first("v"), groups.last("v"), groups.last("v", "v")):
            assert (len(found), found.type) == (0, data_type)
    groups, _ = groups_of([], n=pa.array([], pa.int32()), x=pa.array([], pa.float32()))
    assert groups.sum("n").type == pa.int64()
    assert groups.sum("x").type == groups.mean("n").type == pa.float64()


def test_nan_is_the_largest_number_beside_a_null_too() -> None:
    """NaN and null in one group: min is NaN, neither null nor an infinity that nobody wrote."""
    groups, order = groups_of(["a", "a", "b", "b"], v=pa.array([math.nan, None, math.nan, 1.0]))
    assert dict(zip(order, groups.min("v").to_pylist(), strict=True))["b"] == 1.0
    assert all(map(math.isnan, [*groups.max("v").to_pylist(), groups.min("v")[order.index("a")].as_py()]))


@pytest.mark.parametrize("rows_each", [1, 2, 8, 9, 100])
def test_sums_are_exact_though_those_of_all_keys_together_are_not(rows_each: int) -> None:
    """With few rows a key, sums are differences of a running total, which passes the largest integer."""
    value = (2**63 - 1) // rows_each
    groups, _ = groups_of(["a", "b", "c"] * rows_each, v=pa.array([value] * 3 * rows_each))
    assert groups.sum("v").to_pylist() == [value * rows_each] * 3


def test_the_least_int64_is_a_sum_like_any_other() -> None:
    groups, _ = groups_of(["a", "a"], v=pa.array([-(2**62), -(2**62)]))
    assert groups.sum("v").to_pylist() == [-(2**63)]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([2**63 - 1, 1]),
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.array([Decimal("9" * 38), Decimal("9" * 38)], pa.decimal128(38, 0)),
    ],
)
def test_a_sum_that_does_not_fit_is_refused_and_says_what_to_do(values: pa.Array) -> None:
    """Arrow and numpy would both wrap around in silence."""
    groups, _ = groups_of(["a", "a"], v=values)
    with pytest.raises(InvalidArgumentError, match="float64"):
        groups.sum("v")


def test_large_integers_have_a_mean() -> None:
    groups, _ = groups_of(["a", "a"], v=pa.array([2**53 + 1, 2**53 + 1]))
    assert groups.mean("v").to_pylist() == [float(2**53)]


def test_sums_of_short_decimals_outgrow_their_type() -> None:
    groups, _ = groups_of(["a", "a"], v=pa.array([Decimal("9.9")] * 2, pa.decimal128(2, 1)))
    assert groups.sum("v").to_pylist() == [Decimal("19.8")]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.sum("s"), "only numbers"),
        (lambda g: g.mean("s"), "only numbers"),
        (lambda g: g.mean("nested"), "only numbers"),
        (lambda g: g.max("nested"), "have no max"),
        (lambda g: g.last("s", order_by="nested"), "cannot be ordered"),
        (lambda g: g.sum("absent"), "no column 'absent'"),
        (lambda g: g.sum("nestde"), "no column 'nestde'; did you mean 'nested'"),
        (lambda g: g.count(pa.array([1])), "one value for each input row"),
    ],
)
def test_what_cannot_be_reduced_is_named(call: Callable[[Groups], object], message: str) -> None:
    groups, _ = groups_of(["a", "b"], s=pa.array(["1", "2"]), nested=pa.array([[1], [2]]))
    with pytest.raises(InvalidArgumentError, match=message):
        call(groups)


def test_computed_columns_may_come_in_chunks_or_from_numpy() -> None:
    groups, order = groups_of(["b", "a", "b"], v=pa.array([1, 2, 3]))
    wanted = [{"a": 2, "b": 4}[k or ""] for k in order]
    assert groups.sum(pa.chunked_array([[1], [2, 3]])).to_pylist() == wanted
    assert groups.sum(np.array([1, 2, 3])).to_pylist() == wanted


def test_computed_text_may_come_in_views() -> None:
    groups, order = groups_of(["b", "a", "b"], v=pa.array([1, 2, 3]))
    text = pa.array(["x", "y", "w"], pa.string_view())
    assert groups.min(text).to_pylist() == [{"a": "y", "b": "w"}[k or ""] for k in order]
    assert groups.first("v", order_by=text).to_pylist() == [{"a": 2, "b": 3}[k or ""] for k in order]
    assert groups.last(text).to_pylist() == [{"a": "y", "b": "w"}[k or ""] for k in order]


@pytest.mark.parametrize("t", VALUES, ids=str)
def test_values_are_listed(t: pa.DataType) -> None:
    """All of them by arrival, or the largest ones: without nulls; none for a key without rows."""

    @given(
        st.lists(st.tuples(st.sampled_from(KEYS), st.none() | VALUES[t], st.none() | st.integers(-2, 2)), max_size=9)
    )
    def check(rows: list[tuple[str | None, Any, int | None]]) -> None:
        values = pa.array([value for _, value, _ in rows], t)
        shown = values.to_pylist()
        groups, keys = groups_of(
            [key for key, _, _ in rows], v=values, by=pa.array([by for _, _, by in rows], pa.int64())
        )
        groups = groups.with_empty(1)
        collected = [
            [v for (k, _, _), v in zip(rows, shown, strict=True) if k == key and v is not None] for key in keys
        ]
        assert repr(groups.collect("v").to_pylist()) == repr([*collected, []])
        assert groups.collect("v").type == pa.list_(t)
        largest = [sorted(own, key=_above, reverse=True)[:2] for own in collected]
        assert repr(groups.top("v", 2).to_pylist()) == repr([*largest, []])
        by_other = []
        for key in keys:
            own = [(by, v) for (k, _, by), v in zip(rows, shown, strict=True) if k == key and by is not None]
            chosen = sorted(own, key=lambda pair: pair[0], reverse=True)[:2]
            by_other.append([v for _, v in chosen if v is not None])
        assert repr(groups.top("v", 2, order_by="by").to_pylist()) == repr([*by_other, []])

    check()


def _above(value: Any) -> Any:
    """Return what sorts as Spark does; -0.0 is 0.0."""
    return (math.isnan(value), 0 if math.isnan(value) else value) if isinstance(value, float) else value


def test_nothing_is_no_number_of_values() -> None:
    groups, _ = groups_of(["a"], v=pa.array([1]))
    with pytest.raises(InvalidArgumentError, match="at least one"):
        groups.top("v", 0)
    with pytest.raises(InvalidArgumentError, match="no order"):
        groups.top(pa.array([[1]]), 1)
