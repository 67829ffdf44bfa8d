"""pandas frames for each key, cut from rows sorted by key, with exactly the dtypes that Spark gives them.

Spark converts each key's rows separately, so an integer column is int64 for a key without nulls and float64 for a key
with one. Here the rows of many keys, a slab, are converted together: one conversion for all keys that have nulls in the
same columns. Every key sees what it would see alone, without a conversion of its own.

For a processor, Spark 4.1 and later take the frame apart into rows and make the key's frame from these, so its dtypes
are what pandas infers from Python's values:

====================  =================================  ================================
column                as Arrow converts it               made anew
====================  =================================  ================================
byte, short, int      int8, int16, int32                 int64
integers with nulls   float64                            float64
float                 float32                            float64
interval              timedelta64                        datetime64 where all are null
nullable integers     Int8, Int16, Int32, Int64          int8 …; object where any is null
====================  =================================  ================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import BoolArray, IntArray, one_chunk
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.keyed.frame_blocks import consecutive
from holdfast.spark_integration.keyed.slabs import KeySlabs
from holdfast.spark_integration.spark_types import require_utf8

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class FrameFormat:
    """The session settings that govern Spark's conversions between Arrow and pandas."""

    timezone: str  #: The session's: timestamps are shown in it
    prefer_int_ext_dtype: bool = False  #: Whether integers become pandas' nullable types
    safecheck: bool = True  #: Whether output that overflows or loses digits is rejected
    #: Whether output columns are matched by name, if they have names, instead of by position
    assign_cols_by_name: bool = True
    int_to_decimal_coercion_enabled: bool = False  #: Whether integers are accepted as decimals
    #: Whether frames are made from Python's values, as for a processor: `spark_versions.makes_frames_anew`.
    made_anew: bool = False

    @classmethod
    def of_session(cls, session: SparkSession) -> FrameFormat:
        """Return a session's current settings."""

        def is_on(name: str) -> bool:
            return spark_versions.is_on(session, f"spark.sql.{name}")

        return cls(
            timezone=str(session.conf.get("spark.sql.session.timeZone")),
            prefer_int_ext_dtype=spark_versions.prefers_nullable_integers(session),
            safecheck=is_on("execution.pandas.convertToArrowArraySafely"),
            assign_cols_by_name=is_on("legacy.execution.pandas.groupedMap.assignColumnsByName"),
            int_to_decimal_coercion_enabled=spark_versions.takes_integers_as_decimals(session),
        )

    def to_series(self, rows: pa.Table) -> list[pd.Series[Any]]:
        """Return each column as Spark's worker would show it.

        Raises `InvalidArgumentError` for text that is not UTF-8, on which Spark's worker fails too, without naming the
        column.
        """
        columns = [one_chunk(column) for column in rows.columns]
        types = [self._shown_type(column.type) for column in columns]
        columns = [c if c.type == t else c.cast(t) for c, t in zip(columns, types, strict=True)]
        batch = pa.RecordBatch.from_arrays(columns, names=rows.column_names)
        try:
            series = spark_versions.arrow_to_pandas(
                batch, self.timezone, prefer_int_ext_dtype=self.prefer_int_ext_dtype
            )
        except (UnicodeDecodeError, pa.ArrowException):
            require_utf8(batch, "the input")
            raise
        if self.prefer_int_ext_dtype:
            series = [_with_all_digits(s, c) for s, c in zip(series, columns, strict=True)]
        return [_inferred(s) for s in series] if self.made_anew else series

    def _shown_type(self, data_type: pa.DataType) -> pa.DataType:
        if self.made_anew and pa.types.is_floating(data_type):
            return pa.float64()
        if self.made_anew and pa.types.is_integer(data_type) and not self.prefer_int_ext_dtype:
            return pa.int64()
        return in_zone(data_type, self.timezone)

    def to_frame(self, rows: pa.Table) -> pd.DataFrame:
        """Return rows as the frame that Spark's worker would build."""
        return pd.concat(self.to_series(rows), axis=1)


def _with_all_digits(series: pd.Series[Any], column: pa.Array) -> pd.Series[Any]:
    """Return a nullable integer column with all its digits: pandas 2 converts some values by way of float64."""
    if not (pa.types.is_int64(column.type) and column.null_count):
        return series
    values = column.fill_null(0).to_numpy().copy()
    mask = column.is_null().to_numpy(zero_copy_only=False)
    return pd.Series(pd.arrays.IntegerArray(values, mask), name=series.name)


def _inferred(series: pd.Series[Any]) -> pd.Series[Any]:
    """Return a column in the dtype that pandas infers from its values, if that may differ."""
    is_inferred = isinstance(series.dtype, np.dtype) and not (series.dtype.kind == "m" and series.isna().all())
    return series if is_inferred else pd.Series(pd.DataFrame(list(zip(series)))[0], name=series.name)


class KeyFrames(KeySlabs[pd.DataFrame]):
    """The rows of a shard in one micro-batch, as frames by key.

    A key with more than `rows_each` rows has several frames; see `KeySlabs` for the rest.
    """

    def __init__(
        self, rows: pa.Table, order: IntArray, starts: IntArray, frame_format: FrameFormat, rows_each: int
    ) -> None:
        super().__init__(rows, order, starts, rows_each)
        self._format = frame_format
        self._names = pd.Index(rows.column_names, dtype=object)

    def empty(self, count: int) -> Iterator[pd.DataFrame]:
        """Yield the empty frames that a function gets for keys that have timed out, one each."""
        return consecutive(pd.DataFrame(columns=self._names.view()), np.zeros(count, np.int64))

    def cut(self, rows: pa.Table, bounds: IntArray) -> Iterator[Iterator[pd.DataFrame]]:
        yield from map(iter, zip(cut(rows, bounds, self._format.to_frame)))

    def convert(self, rows: pa.Table) -> Iterator[pd.DataFrame]:
        yield self._format.to_frame(rows)


def key_tuples(keys: pa.Table, frame_format: FrameFormat) -> list[tuple[Any, ...]]:
    """Return keys as a function gets them: tuples of the first value of each key column's pandas series."""
    bounds = np.arange(len(keys) + 1)
    columns = []
    for name, column in zip(keys.column_names, keys.columns, strict=True):
        classes = _null_classes(pa.table({name: column}), bounds)
        values = np.empty(len(keys), object)
        for which in range(classes.max(initial=-1) + 1):
            chosen = np.flatnonzero(classes == which)
            [series] = frame_format.to_series(pa.table({name: column.take(pa.array(chosen))}))
            for at, value in zip(chosen.tolist(), _scalars(series), strict=True):
                values[at] = value
        columns.append(values.tolist())
    return list(zip(*columns, strict=True))


def _scalars(series: pd.Series[Any]) -> list[Any]:
    """Return ``series[0]``, ``series[1]`` …: numpy's scalars rather than Python's, where numpy has them."""
    values = series.array
    return list(values.to_numpy() if isinstance(series.dtype, np.dtype) and series.dtype.kind not in "mM" else values)


def cut(rows: pa.Table, bounds: IntArray, to_frame: Callable[[pa.Table], pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Yield a frame for each key; key i has the rows from ``bounds[i]`` up to ``bounds[i + 1]``."""
    classes = _null_classes(rows, bounds)
    sizes = np.diff(bounds)
    of_class = []
    for which in range(classes.max(initial=-1) + 1):
        chosen = classes == which
        some = rows if chosen.all() else rows.filter(pa.array(np.repeat(chosen, sizes)))
        of_class.append(consecutive(to_frame(some), sizes[chosen]))
    if len(of_class) == 1:
        return of_class[0]
    return (next(of_class[which]) for which in classes.tolist())


def _null_classes(rows: pa.Table, bounds: IntArray) -> IntArray:
    """Return a small number per key, equal for keys that have nulls in the same places."""
    nulls = list(itertools.chain.from_iterable(_nulls(one_chunk(column)) for column in rows.columns))
    if not nulls:
        return np.zeros(len(bounds) - 1, np.int64)
    patterns = np.stack([np.logical_or.reduceat(mask, bounds[:-1]) for mask in nulls], axis=1)
    classes: IntArray = np.unique(np.packbits(patterns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    return classes


def _nulls(column: pa.Array) -> Iterator[BoolArray]:
    """Yield a mask of the rows with nulls, for each part of a column whose pandas type depends on them."""
    if pa.types.is_nested(column.type):
        if column.null_count:
            yield column.is_null().to_numpy(zero_copy_only=False)
        yield from _nested_nulls(column)
    elif column.null_count and (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        yield column.is_null().to_numpy(zero_copy_only=False)
    elif column.null_count and pa.types.is_duration(column.type):  # whether all are null
        yield column.is_valid().to_numpy(zero_copy_only=False)


def _nested_nulls(column: pa.Array) -> Iterator[BoolArray]:
    if pa.types.is_struct(column.type):
        for part in column.flatten():
            yield from _nulls(part)
        return
    if pa.types.is_map(column.type):
        column = column.cast(pa.large_list(pa.struct([column.type.key_field, column.type.item_field])))
    parents = pc.list_parent_indices(column).to_numpy()
    for mask in _nulls(column.flatten()):
        of_rows = np.zeros(len(column), bool)
        of_rows[parents[mask]] = True
        yield of_rows


def in_zone(data_type: pa.DataType, timezone: str) -> pa.DataType:
    """Return a type with all its timestamps in one time zone, as Spark sends them to its workers."""
    t = data_type
    if pa.types.is_timestamp(t):
        return t if t.tz is None else pa.timestamp(t.unit, timezone)
    if pa.types.is_list(t) or pa.types.is_large_list(t):
        return pa.list_(t.value_field.with_type(in_zone(t.value_type, timezone)))
    if pa.types.is_map(t):
        return pa.map_(in_zone(t.key_type, timezone), t.item_field.with_type(in_zone(t.item_type, timezone)))
    if pa.types.is_struct(t):
        return pa.struct([f.with_type(in_zone(f.type, timezone)) for f in t])
    return t
