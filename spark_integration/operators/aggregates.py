"""What a user writes into ``agg``: ``holdfast.count()``, ``holdfast.max("delay")``.

Each is named and typed by Spark's own function of that name, which Spark resolves and never runs.
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

#: Makes what the workers run: of the names of output and input column, and of the types of both.
_Make = Callable[[str, str, T.DataType, T.DataType], Accumulator]
_MOST_DIGITS = 38
#: Of an approx_count_distinct: 2 ** 18 registers, the most for which HyperLogLog++ is published.
_LEAST_RSD = 0.0022


@dataclass(frozen=True)
class Aggregate:
    """An aggregate of a column; made by the functions of this module, such as `count`."""

    spark: Column  #: Spark's own aggregate
    argument: str | Column | None  #: What it takes; None for whole rows
    _make: _Make
    takes_hashes: bool = False  #: Whether the workers get Spark's hashes in place of the values

    def alias(self, name: str) -> Aggregate:
        """Name the aggregate, as ``Column.alias`` does."""
        return replace(self, spark=self.spark.alias(name))

    def accumulator(self, name: str, column: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        """Return the workers' aggregate, given the types of argument and result. Raises `InvalidArgumentError`."""
        return self._make(name, column, taken, returned)


def count(column: str | Column = "*") -> Aggregate:
    """Count rows or, given a column, its non-null values: bigint, never null.

    Examples
    --------
    >>> holdfast.stream(df).groupBy("user").agg(n=holdfast.count())
    """
    if isinstance(column, str) and column == "*":
        return Aggregate(F.count("*"), None, lambda name, _, __, ___: Count(name, None))
    return _of(F.count, column, lambda name, of, _, __: Count(name, of))


def sum(column: str | Column) -> Aggregate:  # noqa: A001 - Spark's name
    """Add up numbers: integers as bigint, floats as double, decimals with ten digits more; null without values.

    Notes
    -----
    A sum that its type cannot hold fails the query, as in Spark's ANSI mode.
    """

    def make(name: str, of: str, taken: T.DataType, returned: T.DataType) -> Accumulator:
        _require_number("sum", taken)
        return Sum(name, of, _arrow(returned))

    return _of(F.sum, column, make)


def mean(column: str | Column) -> Aggregate:
    """Average numbers as double, decimals with four places more; null without values. Also called `avg`."""

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
    """Return the value of the row with the smallest `ord`, of which null is left out; of equal ones any."""
    return _picked_by(F.min_by, column, ord, "min")


def max_by(column: str | Column, ord: str | Column) -> Aggregate:  # noqa: A002 - Spark's name
    """Return the value of the row with the largest `ord`, of which null is left out; of equal ones any.

    Examples
    --------
    >>> holdfast.stream(df).groupBy("auction").agg(winner=holdfast.max_by("bidder", "price"))
    """
    return _picked_by(F.max_by, column, ord, "max")


def any(column: str | Column) -> Aggregate:  # noqa: A001 - SQL's name
    """Tell whether any boolean is true, as Spark's ``bool_or``; null without values."""
    return _extreme(F.bool_or, column, "max")


def all(column: str | Column) -> Aggregate:  # noqa: A001 - SQL's name
    """Tell whether all booleans are true, as Spark's ``bool_and``; null without values."""
    return _extreme(F.bool_and, column, "min")


def first(column: str | Column, ignorenulls: bool = False) -> Aggregate:
    """Return the first value by arrival, null or not unless nulls are ignored; rows arrive in no fixed order."""
    return _picked(F.first, column, "first", ignorenulls)


def last(column: str | Column, ignorenulls: bool = False) -> Aggregate:
    """Return the last value by arrival, null or not unless nulls are ignored; rows arrive in no fixed order."""
    return _picked(F.last, column, "last", ignorenulls)


def collect_list(column: str | Column) -> Aggregate:
    """List the non-null values by arrival; an empty list without values. State keeps all of them, in one row."""
    return _collected(F.collect_list, column, "list")


def collect_set(column: str | Column) -> Aggregate:
    """List the distinct non-null values, in no fixed order; an empty list without values. State keeps them, in one row.

    Notes
    -----
    All NaN are one value, and so are 0.0 and -0.0. Structs, lists and maps are refused.
    """
    return _collected(F.collect_set, column, "set")


def count_distinct(column: str | Column) -> Aggregate:
    """Count the distinct non-null values exactly: bigint, never null. State keeps them as that of `collect_set`.

    Examples
    --------
    >>> holdfast.stream(df).groupBy("page").agg(users=holdfast.count_distinct("user"))
    """
    return _collected(F.count_distinct, column, "count")


def approx_count_distinct(column: str | Column, rsd: float = 0.05) -> Aggregate:
    """Estimate how many distinct non-null values there are: bigint, never null.

    State has two bytes for each, by default at most 1 KiB for a key.

    Parameters
    ----------
    column : str or Column
        No struct, list or map.
    rsd : float
        Relative standard deviation of the estimates. Half of it takes four times the state, and less than 0.0488 takes
        four bytes for each.

    Notes
    -----
    It is Spark's HyperLogLog++, of Spark's hashes. Its number is Spark's, but between 2.5 and 5 values a register, by
    default 1,280 to 2,560 of them: there it is at most 0.4 % less.

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
    """Return the column's value at a percentile, or a list of values at several; null without values.

    Parameters
    ----------
    column : str or Column
        Of numbers, dates or timestamps.
    percentage : float or sequence of float
        From 0 to 1: 0.5 is the median.
    accuracy : int
        Of n values, the returned one is at most n / accuracy ranks off; fewer than `accuracy` values give it exactly.

    Notes
    -----
    State keeps some of the values with their ranks, of 24 bytes each, in one row: at most about as many as `accuracy`,
    which should be less where there are many keys.

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
    """Return the sample variance as double, null for fewer than two values. Also called `var_samp`."""
    return _moments(F.var_samp, column, is_sample=True, is_root=False)


def var_pop(column: str | Column) -> Aggregate:
    """Return the population variance as double; null without values."""
    return _moments(F.var_pop, column, is_sample=False, is_root=False)


def stddev(column: str | Column) -> Aggregate:
    """Return the sample standard deviation as double, null for fewer than two values. Also called `stddev_samp`."""
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
    """Make an aggregate of three functions, each of which takes many rows at once.

    Parameters
    ----------
    column : str or Column
        What it takes.
    returnType : DataType or str
        Of its result.
    stateStructType : StructType or str
        Columns of its state; they are stored as ``name.column``.
    init : callable
        Takes the values of some rows, null or not; returns a dict of columns: the state of each row by itself.
    merge : callable
        Takes `Groups` of states and a table of these states; returns a dict of columns: one state for each group.
    finish : callable
        Takes a table of states; returns an array: the result of each.

    Notes
    -----
    A state may be all null, where an aggregate was added to a query that had none. `merge` sees states in any pieces:
    the states of rows, of earlier micro-batches, and of sessions that grow together. States come in Arrow's types, text
    as large_string.

    Raises
    ------
    InvalidArgumentError
        A type that state cannot hold, or not a function.

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
    """Tell whether a value is one number, text or time, whose equality and order are Arrow's."""
    is_collated = isinstance(t, T.StringType) and t != T.StringType()
    return isinstance(t, T.AtomicType) and not isinstance(t, T.NullType) and not is_collated


def _has_order(t: T.DataType) -> bool:
    """Tell whether values have Arrow's order: plain ones, and structs of such, by field."""
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
