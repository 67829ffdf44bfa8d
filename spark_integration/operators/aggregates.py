"""Aggregates for ``agg``: ``holdfast.count()``, ``holdfast.max("delay")``.

Spark's function of the same name gives each aggregate its name and type; Spark resolves it and never runs it.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.operators.accumulators import (
    Accumulator,
    Collected,
    Count,
    Extreme,
    Mean,
    Moments,
    Own,
    Picked,
    PickedBy,
    Sum,
)
from holdfast.spark_integration.operators.sketches import Ranked, Registers
from holdfast.spark_integration.plan.arguments import declared_struct
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.vectorised.groups import Groups

#: Makes the workers' aggregate, given the names of the output and input columns and the types of input and output.
_Make = Callable[[str, str, T.DataType, T.DataType], Accumulator]
_MOST_DIGITS = 38
#: Smallest `rsd` of approx_count_distinct: 2 ** 18 registers, the most that the HyperLogLog++ paper covers.
_LEAST_RSD = 0.0022


@dataclass(frozen=True)
class Aggregate:
    """An aggregate of a column; created by the functions of this module, such as `count`."""

    spark: Column  #: Spark's own aggregate
    argument: str | Column | None  #: The input; None for whole rows
    _make: _Make
    takes_hashes: bool = False  #: Whether workers receive Spark's hashes instead of the values

    def alias(self, name: str) -> Aggregate:
        """Name the aggregate, as ``Column.alias`` does."""
        return replace(self, spark=self.spark.alias(name))

    def accumulator(self, name: str, column: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        """Return the workers' aggregate for these argument and result types. Raises `InvalidArgumentError`."""
        return self._make(name, column, taken, returned)


def count(column: str | Column = "*") -> Aggregate:
    """Count rows, or a column's non-null values, as bigint; never null.

    Examples
    --------
    >>> holdfast.stream(df).groupBy("user").agg(n=holdfast.count())
    """
    if isinstance(column, str) and column == "*":
        return Aggregate(F.count("*"), None, lambda name, _, __, ___: Count(name, None))
    return _of(F.count, column, lambda name, of, _, __: Count(name, of))


def sum(column: str | Column) -> Aggregate:  # noqa: A001 - Spark's name
    """Sum numbers: integers as bigint, floats as double, decimals with ten more digits; null without values.

    Notes
    -----
    A sum that overflows its type fails the query, as in Spark's ANSI mode.
    """

    def make(name: str, of: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        _require_number("sum", taken)
        return Sum(name, of, _arrow(returned))

    return _of(F.sum, column, make)


def mean(column: str | Column) -> Aggregate:
    """Average numbers as double, decimals with four more decimal places; null without values. Alias: `avg`."""

    def make(name: str, of: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        _require_number("mean", taken)
        sum_type = T.DoubleType() if not isinstance(taken, T.DecimalType) else _sum_of(taken)
        return Mean(name, of, _arrow(sum_type), _arrow(returned))

    return _of(F.avg, column, make)


avg = mean


def min(column: str | Column) -> Aggregate:  # noqa: A001 - Spark's name
    """Return the smallest value; NaN is the largest number; null without values. Structs are compared by field."""
    return _extreme(F.min, column, "min")


def max(column: str | Column) -> Aggregate:  # noqa: A001 - Spark's name
    """Return the largest value; NaN is the largest number; null without values. Structs are compared by field."""
    return _extreme(F.max, column, "max")


def min_by(column: str | Column, ord: str | Column) -> Aggregate:  # noqa: A002 - Spark's name
    """Return the value of the row with the smallest non-null `ord`; any such row if several tie."""
    return _picked_by(F.min_by, column, ord, "min")


def max_by(column: str | Column, ord: str | Column) -> Aggregate:  # noqa: A002 - Spark's name
    """Return the value of the row with the largest non-null `ord`; any such row if several tie.

    Examples
    --------
    >>> holdfast.stream(df).groupBy("auction").agg(winner=holdfast.max_by("bidder", "price"))
    """
    return _picked_by(F.max_by, column, ord, "max")


def any(column: str | Column) -> Aggregate:  # noqa: A001 - SQL's name
    """Return whether any value is true, as Spark's ``bool_or`` does; null without values."""
    return _extreme(F.bool_or, column, "max")


def all(column: str | Column) -> Aggregate:  # noqa: A001 - SQL's name
    """Return whether all values are true, as Spark's ``bool_and`` does; null without values."""
    return _extreme(F.bool_and, column, "min")


def first(column: str | Column, ignorenulls: bool = False) -> Aggregate:
    """Return the first value to arrive, in no fixed order; nulls count unless ignored."""
    return _picked(F.first, column, "first", ignorenulls)


def last(column: str | Column, ignorenulls: bool = False) -> Aggregate:
    """Return the last value to arrive, in no fixed order; nulls count unless ignored."""
    return _picked(F.last, column, "last", ignorenulls)


def collect_list(column: str | Column) -> Aggregate:
    """List the non-null values by arrival; empty without values. One row of state holds them all."""
    return _collected(F.collect_list, column, "list")


def collect_set(column: str | Column) -> Aggregate:
    """List the distinct non-null values in no fixed order; empty without values. One row of state holds them all.

    Notes
    -----
    All NaNs count as one value; so do 0.0 and -0.0. Structs, lists and maps are refused.
    """
    return _collected(F.collect_set, column, "set")


def count_distinct(column: str | Column) -> Aggregate:
    """Count the distinct non-null values exactly, as bigint; never null. One row of state holds them all.

    Examples
    --------
    >>> holdfast.stream(df).groupBy("page").agg(users=holdfast.count_distinct("user"))
    """
    return _collected(F.count_distinct, column, "count")


def approx_count_distinct(column: str | Column, rsd: float = 0.05) -> Aggregate:
    """Estimate the number of distinct non-null values as bigint; never null.

    State takes two bytes per distinct value, by default at most 1 KiB per key.

    Parameters
    ----------
    column : str or Column
        Any type except structs, lists and maps.
    rsd : float
        Relative standard deviation of the estimates. Halving it quadruples the state; below 0.0488 a distinct value
        takes four bytes.

    Notes
    -----
    This is Spark's HyperLogLog++ over Spark's hashes. The estimate equals Spark's, except between 2.5 and 5 values per
    register (by default 1,280 to 2,560 values), where it is at most 0.4 % lower.

    Raises
    ------
    InvalidArgumentError
        `rsd` is less than 0.0022.

    Examples
    --------
    >>> holdfast.stream(df).groupBy("page").agg(users=holdfast.approx_count_distinct("user"))
    """
    if not rsd >= _LEAST_RSD:
        raise InvalidArgumentError(f"rsd must be at least {_LEAST_RSD}: use count_distinct", given=rsd)
    bits = math.ceil(2 * math.log(1.106 / rsd) / math.log(2))

    def make(name: str, of: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        if not _is_plain(taken):
            raise _no_such("approx_count_distinct", taken)
        return Registers(name, of, bits)

    return replace(_of(lambda given: F.approx_count_distinct(given, rsd), column, make), takes_hashes=True)


def percentile_approx(column: str | Column, percentage: float | Sequence[float], accuracy: int = 10_000) -> Aggregate:
    """Return the column's value at a percentile, or a list for several percentiles; null without values.

    Parameters
    ----------
    column : str or Column
        Numbers, dates or timestamps.
    percentage : float or sequence of float
        From 0 to 1: 0.5 is the median.
    accuracy : int
        For n values, the result is at most n / accuracy ranks off; it is exact for fewer than `accuracy` values.

    Notes
    -----
    One row of state holds a sample of the values with their ranks: about `accuracy` entries of 24 bytes at most. Lower
    `accuracy` if there are many keys.

    Examples
    --------
    >>> holdfast.stream(df).groupBy("carrier").agg(delays=holdfast.percentile_approx("delay", [0.5, 0.99], 1000))
    """
    percentages = [percentage] if isinstance(percentage, (int, float)) else [*percentage]

    def make(name: str, of: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        if not isinstance(taken, (T.IntegralType, T.FractionalType, T.DateType, T.TimestampType, T.TimestampNTZType)):
            raise _no_such("percentile_approx", taken)
        return Ranked(name, of, _arrow(taken), _arrow(returned), tuple(map(float, percentages)), accuracy)

    return _of(lambda given: F.percentile_approx(given, percentage, accuracy), column, make)


def variance(column: str | Column) -> Aggregate:
    """Return the sample variance as double; null for fewer than two values. Alias: `var_samp`."""
    return _moments(F.var_samp, column, is_sample=True, is_root=False)


def var_pop(column: str | Column) -> Aggregate:
    """Return the population variance as double; null without values."""
    return _moments(F.var_pop, column, is_sample=False, is_root=False)


def stddev(column: str | Column) -> Aggregate:
    """Return the sample standard deviation as double; null for fewer than two values. Alias: `stddev_samp`."""
    return _moments(F.stddev_samp, column, is_sample=True, is_root=True)


def stddev_pop(column: str | Column) -> Aggregate:
    """Return the population standard deviation as double; null without values."""
    return _moments(F.stddev_pop, column, is_sample=False, is_root=True)


def aggregate(
    column: str | Column,
    returnType: T.DataType | str,
    stateStructType: T.StructType | str,
    init: Callable[[pa.Array], Mapping[str, Any]],
    merge: Callable[[Groups, pa.Table], Mapping[str, Any]],
    finish: Callable[[pa.Table], Any],
) -> Aggregate:
    """Define an aggregate by three functions, each of which handles many rows per call.

    Parameters
    ----------
    column : str or Column
        The input.
    returnType : DataType or str
        The type of the result.
    stateStructType : StructType or str
        The columns of the state; they are stored as ``name.column``.
    init : callable
        Takes the values of a batch of rows, nulls included; returns a dict of columns: the state of each row.
    merge : callable
        Takes `Groups` of states and a table of the states; returns a dict of columns: one state per group.
    finish : callable
        Takes a table of states; returns an array with the result of each state.

    Notes
    -----
    A state may be all null if the aggregate was added to an old query. `merge` gets any mix of states: of single
    rows, of earlier micro-batches and of merging sessions. States have Arrow's types; text is large_string.

    Raises
    ------
    InvalidArgumentError
        State cannot hold a type, or an argument is not a function.

    Examples
    --------
    >>> spread = holdfast.aggregate(
    ...     "delay",
    ...     "double",
    ...     "low double, high double",
    ...     init=lambda delays: {"low": delays, "high": delays},
    ...     merge=lambda groups, s: {"low": groups.min(s["low"]), "high": groups.max(s["high"])},
    ...     finish=lambda s: pc.subtract(s["high"], s["low"]),
    ... )
    >>> holdfast.stream(df).groupBy("carrier").agg(spread=spread)
    """
    state = arrow_schema(declared_struct(stateStructType, "stateStructType"), "stateStructType")
    for what, given in (("init", init), ("merge", merge), ("finish", finish)):
        if not callable(given):
            raise InvalidArgumentError(f"{what} must be a function of whole columns", given=type(given).__name__)

    def make(name: str, of: str, _: T.DataType, returned: T.DataType) -> Accumulator:
        return Own(name, of, _arrow(returned), state, init, merge, finish)

    return _of(lambda _: F.lit(None).cast(returnType).alias(f"aggregate({column})"), column, make)


def _extreme(
    function: Callable[[str | Column], Column], column: str | Column, which: Literal["min", "max"]
) -> Aggregate:
    def make(name: str, of: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        if not _has_order(returned):
            raise _no_such(which, taken)
        return Extreme(name, of, _arrow(returned), which)

    return _of(function, column, make)


def _picked_by(
    function: Callable[[str | Column, str | Column], Column],
    column: str | Column,
    by: str | Column,
    which: Literal["min", "max"],
) -> Aggregate:
    def make(name: str, of: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        by_type = cast(T.StructType, taken)["by"].dataType
        if not _has_order(by_type):
            raise _no_such(f"{which}_by", by_type)
        return PickedBy(name, of, _arrow(returned), _arrow(by_type), which)

    value, order = (F.col(given) if isinstance(given, str) else given for given in map(_checked, (column, by)))
    return Aggregate(function(column, by), F.struct(value.alias("value"), order.alias("by")), make)


def _picked(
    function: Callable[..., Column], column: str | Column, which: Literal["first", "last"], ignores_nulls: bool
) -> Aggregate:
    def make(name: str, of: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        return Picked(name, of, _arrow(returned), which, ignores_nulls)

    return _of(lambda given: function(given, ignores_nulls), column, make)


def _collected(
    function: Callable[[str | Column], Column], column: str | Column, which: Literal["list", "set", "count"]
) -> Aggregate:
    def make(name: str, of: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        if which != "list" and not _is_plain(taken):
            raise _no_such("set", taken)
        return Collected(name, of, _arrow(T.ArrayType(taken, containsNull=False)), which)

    return _of(function, column, make)


def _moments(
    function: Callable[[str | Column], Column], column: str | Column, *, is_sample: bool, is_root: bool
) -> Aggregate:
    def make(name: str, of: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        _require_number("variance", taken)
        return Moments(name, of, is_sample, is_root)

    return _of(function, column, make)


def _of(function: Callable[[str | Column], Column], column: str | Column, make: _Make) -> Aggregate:
    return Aggregate(function(_checked(column)), column, make)


def _checked(column: str | Column) -> str | Column:
    if not isinstance(column, (str, Column)):
        raise InvalidArgumentError("an aggregate takes a column or its name", given=type(column).__name__)
    return column


def _is_plain(t: T.DataType) -> bool:
    """Return whether the type is an atomic type whose equality and order are Arrow's."""
    is_collated = isinstance(t, T.StringType) and t != T.StringType()
    return isinstance(t, T.AtomicType) and not isinstance(t, T.NullType) and not is_collated


def _has_order(t: T.DataType) -> bool:
    """Return whether values have Arrow's order: plain types, and structs of plain types by field."""
    return builtins.all(_has_order(field.dataType) for field in t) if isinstance(t, T.StructType) else _is_plain(t)


def _require_number(what: str, taken: T.DataType) -> None:
    if not isinstance(taken, (T.IntegralType, T.FractionalType)):
        raise _no_such(what, taken)


def _no_such(what: str, taken: T.DataType) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"holdfast has no {what} of this type: cast the column, or compute the aggregate in applyInArrowWithState",
        type=taken.simpleString(),
    )


def _sum_of(t: T.DecimalType) -> T.DecimalType:
    return T.DecimalType(builtins.min(t.precision + 10, _MOST_DIGITS), t.scale)


def _arrow(t: T.DataType) -> pa.DataType:
    return arrow_schema(T.StructType([T.StructField("value", t)]), "an aggregate").field(0).type
