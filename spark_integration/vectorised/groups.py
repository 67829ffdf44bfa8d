"""Groups a micro-batch's rows by key and reduces each key's rows.

Rows are sorted by key once, so that each reduction is one pass over contiguous ranges for all keys.
Nulls are skipped, as in SQL aggregates: the result is null only if all values of a key are null. `first` and `last`
pick a row, like Spark's functions by default: the result is null if the picked row's value is null.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import IntArray, RowOrder, one_chunk, to_bools
from holdfast.backends.options import did_you_mean
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.vectorised.arrays import best_rows, comparable, ranks, without_views

_INT64 = np.iinfo(np.int64)
#: Up to this many rows per key, differences of a running total are faster than a sum per key.
_FEW_ROWS = 8


class Groups:
    """Reductions of the micro-batch's columns to one value per key, in the order of `ShardBatch.keys`.

    Every method takes the name of an input column, or an array with one value per input row, and returns a
    `pyarrow.Array` of shape (number of keys,). A key without rows, called for its timer, has a count of 0 and null for
    all other results.
    """

    def __init__(self, rows: pa.Table, order: RowOrder, empty: int = 0) -> None:
        self._rows = rows
        self._ordered = order
        self._order: IntArray = order.rows
        self._first = order.first
        self._starts: IntArray = np.flatnonzero(order.first)
        self._empty = empty

    def __len__(self) -> int:
        return len(self._starts) + self._empty

    def with_empty(self, keys: int) -> Groups:
        """Return these groups, followed by `keys` groups without rows."""
        return Groups(self._rows, self._ordered, self._empty + keys)

    @property
    def order(self) -> IntArray:
        """The row numbers sorted by key, as in `ShardBatch.keys`, each key's rows by arrival; shape (rows,)."""
        return self._order

    @property
    def index(self) -> IntArray:
        """The position of each input row's key in `ShardBatch.keys`; shape (rows,)."""
        return self._ordered.key_of_row

    def _ends(self) -> IntArray:
        """Return the end of each key's range in `order`."""
        return np.append(self._starts[1:], len(self._order))

    def _sorted_index(self) -> IntArray:
        index: IntArray = np.cumsum(self._first) - 1
        return index

    def count(self, column: str | pa.Array | None = None) -> pa.Array:
        """Count each key's rows or, given a column, its non-null values; int64."""
        counts = self._ends() - self._starts if column is None else self._count_valid(self._column(column))
        return pa.array(np.concatenate([counts, np.zeros(self._empty, np.int64)]))

    def sum(self, column: str | pa.Array) -> pa.Array:
        """Sum; int64 for integers, float64 for floats, 38-digit decimals for decimals.

        Raises
        ------
        InvalidArgumentError
            The values are not numbers, or a sum overflows its type.
        """
        values = self._numbers(column)
        if pa.types.is_decimal(values.type):
            return self._for_all(self._sum_decimals(values))
        if pa.types.is_integer(values.type):
            self._require_no_overflow(values)
            totals = self._sum_integers(self._sorted(values, 0).astype(np.int64, copy=False))
        else:
            totals = self._reduce(np.add, self._sorted(values, 0.0).astype(np.float64, copy=False))
        return self._for_all(self._null_where_empty(values, totals))

    def mean(self, column: str | pa.Array) -> pa.Array:
        """Average as float64.

        Raises
        ------
        InvalidArgumentError
            The values are not numbers.
        """
        values = self._numbers(column).cast(pa.float64(), safe=False)
        counts = self._count_valid(values)
        totals = self._reduce(np.add, self._sorted(values, 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._for_all(pa.array(totals / counts, mask=counts == 0))

    def min(self, column: str | pa.Array) -> pa.Array:
        """Smallest value; NaN counts as the largest number, as in Spark."""
        return self._for_all(self._extreme(column, "min"))

    def max(self, column: str | pa.Array) -> pa.Array:
        """Largest value; NaN counts as the largest number, as in Spark."""
        return self._for_all(self._extreme(column, "max"))

    def first(self, column: str | pa.Array, order_by: str | pa.Array | None = None) -> pa.Array:
        """Value of each key's first row, even if null, by `order_by` (nulls last), else by arrival, which may vary."""
        return self._for_all(self._column(column).take(pa.array(self._picked(order_by, last=False))))

    def last(self, column: str | pa.Array, order_by: str | pa.Array | None = None) -> pa.Array:
        """Value of each key's last row, even if null, by `order_by` (nulls first), else by arrival, which may vary."""
        return self._for_all(self._column(column).take(pa.array(self._picked(order_by, last=True))))

    def collect(self, column: str | pa.Array) -> pa.Array:
        """List each key's non-null values in order of arrival; the list is empty for a key without values."""
        return self._listed(self._column(column), self._order)

    def top(self, column: str | pa.Array, n: int, order_by: str | pa.Array | None = None) -> pa.Array:
        """List the `n` largest values, or the values of the `n` rows largest by `order_by`, in descending order.

        Nulls are skipped, ties are in order of arrival, NaN is the largest number.

        Raises
        ------
        InvalidArgumentError
            `n` is less than 1, or the values have no order.
        """
        if n < 1:
            raise InvalidArgumentError("n must be at least 1", n=n)
        values = self._column(column)
        by = values if order_by is None else self._column(order_by)
        rank = ranks(by)[self._order]
        key = self._sorted_index()
        order = np.lexsort([-rank, key])
        kept = order[(np.arange(len(order)) - self._starts[key] < n) & (rank[order] > 0)]
        return self._listed(values, self._order[kept])

    def _listed(self, values: pa.Array, rows: IntArray) -> pa.Array:
        """Return the list of each key's non-null values; `rows` are sorted by key."""
        rows = rows[values.is_valid().to_numpy(zero_copy_only=False)[rows]]
        ends = np.cumsum(np.bincount(self.index[rows], minlength=len(self)))
        offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
        return pa.ListArray.from_arrays(offsets, one_chunk(values.take(pa.array(rows))))

    def _for_all(self, with_rows: pa.Array) -> pa.Array:
        """Append a null for each key without rows."""
        if not self._empty:
            return with_rows
        return pa.concat_arrays([with_rows, pa.nulls(self._empty, with_rows.type)])

    def _numbers(self, column: str | pa.Array) -> pa.Array:
        values = self._column(column)
        kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
        if not any(is_kind(values.type) for is_kind in kinds):
            raise InvalidArgumentError("sums and means need numeric values", type=str(values.type))
        return values

    def _column(self, column: str | pa.Array | pa.ChunkedArray) -> pa.Array:
        if isinstance(column, str):
            if column not in self._rows.schema.names:
                columns = self._rows.schema.names
                near = did_you_mean(column, columns)
                raise InvalidArgumentError(f"the input has no column {column!r}{near}", columns=list(columns))
            column = self._rows.column(column)
        values = without_views(column if isinstance(column, (pa.Array, pa.ChunkedArray)) else pa.array(column))
        if len(values) != len(self._order):
            raise InvalidArgumentError(
                "a column must have one value for each input row", values=len(values), rows=len(self._order)
            )
        return values

    def _sorted(self, values: pa.Array, fill: Any) -> npt.NDArray[Any]:
        if values.null_count:
            values = pc.fill_null(values, pa.scalar(fill, values.type))
        return values.to_numpy(zero_copy_only=False)[self._order]

    def _reduce(self, function: np.ufunc, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if len(values) == len(self._starts):
            return values
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN, as in Spark
            reduced: npt.NDArray[Any] = function.reduceat(values, self._starts)
        return reduced

    def _count_valid(self, values: pa.Array) -> IntArray:
        valid = values.is_valid().to_numpy(zero_copy_only=False)[self._order]
        return self._reduce(np.add, valid.astype(np.int64))

    def _null_where_empty(self, values: pa.Array, reduced: npt.NDArray[Any]) -> pa.Array:
        if not values.null_count:
            return pa.array(reduced)
        return pa.array(reduced, mask=self._count_valid(values) == 0)

    def _sum_integers(self, values: IntArray) -> IntArray:
        """Sum integers that do not overflow; for few rows per key, through a running total, which may wrap around."""
        if not len(self._starts) < len(values) <= _FEW_ROWS * len(self._starts):
            return self._reduce(np.add, values)
        totals = np.cumsum(values)[self._ends() - 1]
        totals[1:] -= totals[:-1].copy()
        return totals

    def _sum_decimals(self, values: pa.Array) -> pa.Array:
        # Arrow does not check for overflow: sum with twice the digits, which cannot overflow.
        totals = self._by_arrow(values.cast(pa.decimal256(76, values.type.scale)), "sum")
        try:
            return totals.cast(pa.decimal128(38, values.type.scale))
        except pa.ArrowInvalid as exc:
            raise _too_large(values.type) from exc

    def _require_no_overflow(self, values: pa.Array) -> None:
        """Bound all sums by the largest value times the most rows; sum exactly only if the bound overflows."""
        bounds = pc.min_max(values).as_py()
        if bounds["min"] is None:
            return
        largest = max(abs(bounds["min"]), abs(bounds["max"]))
        if largest * int((self._ends() - self._starts).max()) <= _INT64.max:
            return
        exact = self._reduce(np.add, self._sorted(values, 0).astype(object))
        if any(not _INT64.min <= total <= _INT64.max for total in exact):
            raise _too_large(values.type)

    def _extreme(self, column: str | pa.Array, which: str) -> pa.Array:
        values = self._column(column)
        if pa.types.is_struct(values.type):
            return values.take(pa.array(self._picked(values, last=which == "max")))
        if pa.types.is_temporal(values.type):
            plain = values.view(pa.int32() if values.type.bit_width == 32 else pa.int64())
            return self._extreme(plain, which).view(values.type)
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            return self._by_arrow(values, which)
        if pa.types.is_floating(values.type):
            # fmin skips NaN, so the result is NaN only if all values are NaN.
            fill: Any = np.nan if which == "min" else -np.inf
            function: np.ufunc = np.fmin if which == "min" else np.maximum
        else:
            limits = np.iinfo(values.type.to_pandas_dtype())
            fill = limits.max if which == "min" else limits.min
            function = np.minimum if which == "min" else np.maximum
        return self._null_where_empty(values, self._reduce(function, self._sorted(values, fill)))

    def _by_arrow(self, values: pa.Array, function: str) -> pa.Array:
        """Reduce values of a type that numpy lacks through Arrow's ``group_by``."""
        taken = values.take(pa.array(self._order))
        table = pa.table({"group": pa.array(self._sorted_index()), "value": taken})
        try:
            reduced = table.group_by("group", use_threads=False).aggregate([("value", function)])
        except pa.ArrowNotImplementedError as exc:
            raise InvalidArgumentError(f"values of this type have no {function}", type=str(values.type)) from exc
        return one_chunk(reduced.sort_by("group").column(f"value_{function}"))

    def _picked(self, order_by: str | pa.Array | None, *, last: bool) -> IntArray:
        found = self._ordered
        if order_by is not None:
            order = self._column(order_by)
            columns = comparable(order)
            if order.null_count and not last:
                columns.insert(0, to_bools(order.is_null()))  # rows with a value come first
            found = best_rows(found, columns, largest=last)
        # A key's last row precedes the first row of the next key.
        return found.rows[np.roll(found.first, -1) if last else found.first]


def _too_large(data_type: pa.DataType) -> InvalidArgumentError:
    return InvalidArgumentError(
        "a sum overflows its type: cast the column to float64, or integers to decimals", type=str(data_type)
    )
