"""The columnar state of aggregates: how it is created from rows, merged and turned into results.

::

    rows ─lift─▶ a state for each row ┐
                                      ├─reduce by key─▶ a state for each key ─result─▶ a value for each key
    stored ───────────────────────────┘                        │
       ▲───────────────────────────────────────────────────────┘

An accumulator reduces states only. Each row is first lifted to a state, so that rows, stored states and the states of
merging sessions are reduced in the same way, for all keys at once.

==========  =================================================================================================
`Count`     ``n``: the number of rows or values
`Sum`       ``total``
`Mean`      ``avg.sum``, ``avg.count``
`Extreme`   ``worst``
`Picked`    ``first`` and, if null counts as a value, ``first.set``
`PickedBy`  ``best``, ``best.by``
`Moments`   ``sd.count``, ``sd.mean``, ``sd.m2``: the sum of squared distances from the mean
`Collected` ``items``, or ``n.values`` if only their number is shown
`Own`       ``spread.low``, ``spread.high``: the columns that the user's functions return
==========  =================================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import RowOrder, inverse, normalize_keys, one_chunk, storage_type
from holdfast.backends.schema import NEW_QUERY, TableSchema
from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.vectorised.arrays import without_views
from holdfast.spark_integration.vectorised.groups import Groups

_LOW = (1 << 64) - 1


def divided(totals: pa.Array, counts: pa.Array, t: pa.Decimal128Type) -> pa.Array:
    """Return decimals divided by integers as type `t`, whose scale is not smaller; null if an operand is null.

    Raises `InvalidArgumentError` if a quotient has more digits than `t`.
    """
    is_null = totals.is_null().to_numpy(zero_copy_only=False) | counts.is_null().to_numpy(zero_copy_only=False)
    by: npt.NDArray[np.object_] = np.where(is_null, 1, counts.fill_null(1).to_numpy()).astype(object)
    unscaled = np.where(is_null, 0, _unscaled(totals)) * 10 ** (t.scale - totals.type.scale)
    halves = (2 * np.abs(unscaled) + by) // (2 * by)
    quotients = np.where(unscaled < 0, -halves, halves)
    if len(quotients) and int(halves.max()) >= 10**t.precision:
        raise InvalidArgumentError("an average has more digits than its type holds", type=str(t))
    return _of_unscaled(quotients, is_null, t)


def _unscaled(values: pa.Array) -> npt.NDArray[np.object_]:
    """Return the unscaled integers of decimals."""
    words = np.frombuffer(values.buffers()[1], np.uint64)[2 * values.offset : 2 * (values.offset + len(values))]
    low, high = words[0::2].astype(object), words[1::2].view(np.int64).astype(object)
    digits: npt.NDArray[np.object_] = high * (_LOW + 1) + low
    return digits


def _of_unscaled(digits: npt.NDArray[np.object_], is_null: npt.NDArray[np.bool_], t: pa.Decimal128Type) -> pa.Array:
    words = np.empty(2 * len(digits), np.uint64)
    words[0::2] = (digits & _LOW).astype(np.uint64)
    words[1::2] = (digits >> 64).astype(np.int64).view(np.uint64)
    validity = pa.array(~is_null).buffers()[1] if len(digits) else None
    return pa.Array.from_buffers(t, len(digits), [validity, pa.py_buffer(words)])


_INDEX = pa.int64()
_ARROW = (pa.Array, pa.ChunkedArray)
#: Metadata keys of a state column: the aggregate's output column, and its computation.
_COLUMN, _COMPUTES = b"holdfast.column", b"holdfast.computes"
# Fields left out of a description.
_UNDESCRIBED = {
    *("name", "column", "type", "by_type", "sum_type", "state"),  # the state's schema records these
    *("init", "merge", "finish", "percentages", "shown"),  # functions, and options that only affect results
}


@dataclass(frozen=True)
class Accumulator(ABC):
    """One aggregate, in the form sent to the workers."""

    name: str  #: The output column, and the prefix of the state's columns
    column: str | None  #: The input column; None for whole rows

    @property
    def is_by_arrival(self) -> bool:
        """Whether the result may depend on the order of rows."""
        return False

    @abstractmethod
    def fields(self) -> list[pa.Field]:
        """Return the columns of the state, in storage types."""

    @abstractmethod
    def lift(self, values: pa.Array) -> list[pa.Array]:
        """Return the state of each row. Without a `column`, any non-null value stands for a row."""

    @abstractmethod
    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        """Merge each group's states; columns added later may be null. Raises `InvalidArgumentError` on overflow."""

    def result(self, states: Sequence[pa.Array]) -> pa.Array:
        """Return the result of each state. Raises `InvalidArgumentError` if a result overflows its type."""
        return states[0]


@dataclass(frozen=True)
class Count(Accumulator):
    """The number of rows, or of a column's non-null values."""

    def fields(self) -> list[pa.Field]:
        return [pa.field(self.name, pa.int64())]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        return [values.is_valid().cast(pa.int64())]

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        return [groups.sum(states[0])]

    def result(self, states: Sequence[pa.Array]) -> pa.Array:
        return pc.fill_null(states[0], 0)


@dataclass(frozen=True)
class Sum(Accumulator):
    """The sum of integers, floats or decimals; null without values."""

    type: pa.DataType  #: The sum's type

    def fields(self) -> list[pa.Field]:
        return [pa.field(self.name, self.type)]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        return [_from_zero(values.cast(self.type))]

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        return [_fitting(groups.sum(states[0]), self.type)]


@dataclass(frozen=True)
class Mean(Accumulator):
    """The average; null without values."""

    #: The types of the stored sum and of the average
    sum_type: pa.DataType
    type: pa.DataType

    def fields(self) -> list[pa.Field]:
        return [pa.field(f"{self.name}.sum", self.sum_type), pa.field(f"{self.name}.count", pa.int64())]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        # Unsafe cast: an integer without an exact double is rounded, as in Spark.
        return [_from_zero(values.cast(self.sum_type, safe=False)), values.is_valid().cast(pa.int64())]

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        return [_fitting(groups.sum(states[0]), self.sum_type), groups.sum(states[1])]

    def result(self, states: Sequence[pa.Array]) -> pa.Array:
        total, count = states[0], _or_null(states[1])
        if pa.types.is_decimal(self.type):
            return divided(total, count, self.type)
        return pc.divide(total, count.cast(pa.float64()))


@dataclass(frozen=True)
class Extreme(Accumulator):
    """The smallest or largest value; NaN is the largest number, as in Spark."""

    type: pa.DataType
    which: Literal["min", "max"]

    def fields(self) -> list[pa.Field]:
        return [pa.field(self.name, storage_type(self.type))]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        return [values]

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        return [groups.min(states[0]) if self.which == "min" else groups.max(states[0])]


@dataclass(frozen=True)
class Picked(Accumulator):
    """The first or last value to arrive, in no fixed order; nulls count unless ignored."""

    type: pa.DataType
    which: Literal["first", "last"]
    ignores_nulls: bool
    is_by_arrival = True

    def fields(self) -> list[pa.Field]:
        value = pa.field(self.name, storage_type(self.type))
        return [value] if self.ignores_nulls else [value, pa.field(f"{self.name}.set", pa.bool_())]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        return [values] if self.ignores_nulls else [values, pa.repeat(True, len(values))]

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        is_set = states[0].is_valid() if self.ignores_nulls else pc.fill_null(states[1], False)
        # Groups keep the order of arrival; positions of unset states are null, which is sorted last and never picked.
        at = pc.if_else(is_set, pa.array(inverse(groups.order)), pa.scalar(None, _INDEX))
        pick = groups.first if self.which == "first" else groups.last
        return [pick(state, order_by=at) for state in states]


@dataclass(frozen=True)
class PickedBy(Accumulator):
    """The value of the row with the smallest or largest non-null order; takes structs of value and order."""

    type: pa.DataType
    by_type: pa.DataType
    which: Literal["min", "max"]

    def fields(self) -> list[pa.Field]:
        by = pa.field(f"{self.name}.by", storage_type(self.by_type))
        return [pa.field(self.name, storage_type(self.type)), by]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        value, by = values.flatten()
        rows = pa.array(np.arange(len(by)), mask=by.is_null().to_numpy(zero_copy_only=False))
        return [value.take(rows), by]

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        pick = groups.first if self.which == "min" else groups.last
        rows = pick(pa.array(np.arange(len(states[1]))), order_by=states[1])
        return [state.take(rows) for state in states]


@dataclass(frozen=True)
class Moments(Accumulator):
    """Variance and standard deviation of doubles, from count, mean and the sum of squared distances from the mean."""

    is_sample: bool  #: Whether to divide by the count minus one; the result is null if that is 0, as in Spark
    is_root: bool  #: Whether to return the square root: the standard deviation

    def fields(self) -> list[pa.Field]:
        parts = {"count": pa.int64(), "mean": pa.float64(), "m2": pa.float64()}
        return [pa.field(f"{self.name}.{part}", t) for part, t in parts.items()]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        mean = values.cast(pa.float64(), safe=False)
        # The distance of a value from itself: 0, or NaN for NaN and infinity.
        return [values.is_valid().cast(pa.int64()), mean, pc.subtract(mean, mean)]

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        if len(states[0]) == len(groups):
            return [one_chunk(state.take(pa.array(groups.order))) for state in states]
        n = states[0].cast(pa.float64())
        count = groups.sum(states[0])
        with np.errstate(invalid="ignore", over="ignore"):
            mean = pc.divide(groups.sum(pc.multiply(n, states[1])), _or_null(count).cast(pa.float64()))
            away = pc.subtract(states[1], mean.take(pa.array(groups.index)))
            m2 = groups.sum(pc.add(states[2], pc.multiply(n, pc.multiply(away, away))))
        return [count, mean, m2]

    def result(self, states: Sequence[pa.Array]) -> pa.Array:
        by = pc.subtract(states[0], 1 if self.is_sample else 0).cast(pa.float64())
        found = pc.divide(states[2], _or_null(by))
        return pc.sqrt(found) if self.is_root else found


@dataclass(frozen=True)
class Collected(Accumulator):
    """All non-null values by arrival, or the distinct values (one NaN, one zero), or the number of distinct values."""

    type: pa.DataType  #: The list's type
    which: Literal["list", "set", "count"]

    @property
    def is_by_arrival(self) -> bool:
        return self.which == "list"

    def fields(self) -> list[pa.Field]:
        return [pa.field(f"{self.name}.values" if self.which == "count" else self.name, self._type)]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        kept = values.drop_null()
        if self.which != "list":
            kept = normalize_keys(kept)
        return [lists(values.is_valid().to_numpy(zero_copy_only=False), kept, self._type)]

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        of, values = elements(one_chunk(states[0].take(pa.array(groups.order))))
        group = groups.index[groups.order][of]
        if self.which != "list":
            code = values.dictionary_encode().indices.to_numpy().astype(np.int64)
            first = np.unique(group + code * len(groups), return_index=True)[1]
            kept = np.sort(first)
            group, values = group[kept], values.take(pa.array(kept))
        return [lists(np.bincount(group, minlength=len(groups)), values, self._type)]

    def result(self, states: Sequence[pa.Array]) -> pa.Array:
        lengths = _lengths(states[0])
        return pa.array(lengths) if self.which == "count" else lists(lengths, states[0].flatten(), self._type)

    @property
    def _type(self) -> pa.DataType:
        return storage_type(self.type)


@dataclass(frozen=True)
class Own(Accumulator):
    """A user-defined aggregate, whose functions are each called once for all rows or all groups."""

    type: pa.DataType
    state: pa.Schema
    init: Callable[[pa.Array], Mapping[str, Any]]
    merge: Callable[[Groups, pa.Table], Mapping[str, Any]]
    finish: Callable[[pa.Table], Any]
    is_by_arrival = True

    def fields(self) -> list[pa.Field]:
        return [pa.field(f"{self.name}.{field.name}", storage_type(field.type)) for field in self.state]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        return self._states("init", self.init(values), len(values))

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        return self._states("merge", self.merge(groups, self._table(states)), len(groups))

    def result(self, states: Sequence[pa.Array]) -> pa.Array:
        field = pa.field(self.name, self.type)
        return self._column("finish", field, self.finish(self._table(states)), len(states[0]))

    def _table(self, states: Sequence[pa.Array]) -> pa.Table:
        return pa.Table.from_arrays([*states], names=self.state.names)

    def _states(self, function: str, returned: object, expected: int) -> list[pa.Array]:
        if not isinstance(returned, Mapping) or set(returned) != set(self.state.names):
            raise SchemaMismatchError(
                f"{function} of aggregate {self.name!r} must return a dict with the columns of stateStructType",
                declared=self.state.names,
                returned=[*returned] if isinstance(returned, Mapping) else type(returned).__name__,
            )
        return [
            self._column(function, f, returned[n], expected)
            for n, f in zip(self.state.names, self.fields(), strict=True)
        ]

    def _column(self, function: str, field: pa.Field, returned: Any, expected: int) -> pa.Array:
        try:
            column = without_views(returned if isinstance(returned, _ARROW) else pa.array(returned)).cast(field.type)
        except (ValueError, TypeError, OverflowError, pa.ArrowNotImplementedError) as exc:
            raise SchemaMismatchError(
                f"{function} of aggregate {self.name!r} returned a column that does not fit its type: {exc}",
                column=field.name,
                declared=str(field.type),
            ) from exc
        if len(column) != expected:
            raise SchemaMismatchError(
                f"{function} of aggregate {self.name!r} must return one value for each row or group",
                column=field.name,
                expected=expected,
                returned=len(column),
            )
        return one_chunk(column)


def lists(lengths: npt.NDArray[Any], values: pa.Array, t: pa.DataType) -> pa.Array:
    """Split values into lists of the given lengths."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    return pa.LargeListArray.from_arrays(offsets, values, type=t)


def elements(of: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Return the list number of each value, and the values."""
    return np.repeat(np.arange(len(of)), _lengths(of)), of.flatten()


def _lengths(of: pa.Array) -> npt.NDArray[np.int64]:
    """Return the length of each list; 0 for a null list."""
    lengths: npt.NDArray[np.int64] = pc.fill_null(pc.list_value_length(of), 0).to_numpy()
    return lengths


def _from_zero(values: pa.Array) -> pa.Array:
    """Add 0 to each float, since Spark's sum starts at 0: -0.0 becomes 0.0."""
    return pc.add(values, 0.0) if pa.types.is_floating(values.type) else values


def _or_null(count: pa.Array) -> pa.Array:
    """Replace counts of 0 by null, to divide by them."""
    return pc.if_else(pc.equal(count, 0), pa.scalar(None, count.type), count)


def _fitting(total: pa.Array, t: pa.DataType) -> pa.Array:
    try:
        return total.cast(t)
    except pa.ArrowInvalid as exc:
        problem = "a sum has more digits than its type holds: sum as double, or cast to a decimal with fewer digits"
        raise InvalidArgumentError(problem, type=str(t)) from exc


def state_types(accumulators: Sequence[Accumulator]) -> pa.Schema:
    """Return the state columns of several aggregates."""
    return pa.schema(
        [
            field.with_metadata({_COLUMN: accumulator.name, _COMPUTES: _described(accumulator)})
            for accumulator in accumulators
            for field in accumulator.fields()
        ]
    )


def computations(state: pa.Schema) -> dict[str, str]:
    """Return each aggregate's recorded computation by output column, given the state's columns."""
    found = [field.metadata for field in state if _COMPUTES in (field.metadata or {})]
    return {metadata[_COLUMN].decode(): metadata[_COMPUTES].decode() for metadata in found}


def _described(accumulator: Accumulator) -> str:
    own = {k: v for k, v in vars(accumulator).items() if k not in _UNDESCRIBED}
    options = ", ".join(f"{k}={v}" for k, v in sorted(own.items()))
    return f"{type(accumulator).__name__.lower()}({options})"


def lifted(accumulators: Sequence[Accumulator], rows: pa.Table) -> pa.Table:
    """Return the state of each row, for all aggregates."""
    taken: dict[str | None, pa.Array] = {}
    columns: list[pa.Array] = []
    for accumulator in accumulators:
        if accumulator.column not in taken:
            taken[accumulator.column] = _argument(rows, accumulator.column)
        columns += accumulator.lift(taken[accumulator.column])
    return pa.Table.from_arrays(columns, schema=state_types(accumulators))


def _argument(rows: pa.Table, column: str | None) -> pa.Array:
    if column is None:
        return pa.repeat(True, rows.num_rows)
    values = without_views(rows.column(column))
    return values.cast(storage_type(values.type))


def reduced(accumulators: Sequence[Accumulator], states: pa.Table, order: RowOrder) -> pa.Table:
    """Merge the states of each group, for all aggregates; an error names the aggregate's output column."""
    groups = Groups(states, order)
    columns: list[pa.Array] = []
    for accumulator, own in _parts(accumulators, states):
        try:
            columns += accumulator.reduce(groups, own)
        except InvalidArgumentError as exc:
            exc.facts = {"column": accumulator.name, **exc.facts}
            raise
    return pa.Table.from_arrays(columns, schema=state_types(accumulators))


def results(accumulators: Sequence[Accumulator], states: pa.Table | pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the results of all states by the aggregate's output column."""
    return {accumulator.name: accumulator.result(own) for accumulator, own in _parts(accumulators, states)}


def _parts(
    accumulators: Sequence[Accumulator], states: pa.Table | pa.RecordBatch
) -> list[tuple[Accumulator, list[pa.Array]]]:
    parts, start = [], 0
    for accumulator in accumulators:
        end = start + len(accumulator.fields())
        parts.append((accumulator, [one_chunk(column) for column in states.columns[start:end]]))
        start = end
    return parts


def require_same_aggregates(stored: StoredTables, declared: Mapping[str, TableSchema]) -> None:
    """Raise `SchemaMismatchError` if a column's aggregate differs from the aggregate that its state records."""
    for table in declared.keys() & stored.live.keys():
        before = computations(stored.live[table].value)
        for column, now in computations(declared[table].value).items():
            if before.get(column, now) != now:
                raise SchemaMismatchError(
                    f"column {column} was computed by another aggregate: give the new one a new name, {NEW_QUERY}",
                    stored=before[column],
                    defined=now,
                )
