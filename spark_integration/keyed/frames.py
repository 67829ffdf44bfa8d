"""Converts each key's rows to pandas frames, and returned frames to Arrow, exactly as Spark does.

Spark converts each key's rows separately, so an integer column is int64 for a key without nulls and float64 for a key
with a null. This module converts the rows of a slab together: keys that have nulls in the same columns share one
conversion. Every key gets the frame that a separate conversion would give.

For a processor, Spark 4.1 and later split the frame into Python rows and build the key's frame from them, so pandas
infers its dtypes from Python values:

====================  =================================  ================================
column                converted by Arrow                 built from Python values
====================  =================================  ================================
byte, short, int      int8, int16, int32                 int64
integers with nulls   float64                            float64
float                 float32                            float64
interval              timedelta64                        datetime64 if all are null
nullable integers     Int8, Int16, Int32, Int64          int8 …; object if any is null
====================  =================================  ================================

Returned frames pass Spark's checks. Frames with the same labels and dtypes are converted together, column by column;
others separately, because a null in one frame must not turn the integers of a different frame into floats.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql.types import StructType

from holdfast.backends.arrow.rows import BoolArray, IntArray, one_chunk
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.keyed.frame_blocks import Array, blocks_of, concatenated, consecutive, joined_columns
from holdfast.spark_integration.keyed.slabs import KeySlabs
from holdfast.spark_integration.spark_types import arrow_schema, require_nulls_allowed, require_utf8

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Frames are released in groups of this size, so that the next frames reuse memory that is still in the CPU's cache.
GATHERED_FRAMES = 256


@dataclass(frozen=True)
class FrameFormat:
    """The session settings that control Spark's conversions between Arrow and pandas."""

    timezone: str  #: Session time zone, in which timestamps are shown
    prefer_int_ext_dtype: bool = False  #: Whether integers become pandas' nullable types
    safecheck: bool = True  #: Whether to reject output that overflows or loses digits
    #: Whether to match output columns by name if they have names, instead of by position
    assign_cols_by_name: bool = True
    int_to_decimal_coercion_enabled: bool = False  #: Whether to accept integers as decimals
    #: Whether frames are built from Python values, as for a processor: `spark_versions.makes_frames_anew`.
    from_python: bool = False

    @classmethod
    def of_session(cls, session: SparkSession) -> FrameFormat:
        """Read the current settings of a session."""

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
        """Convert columns to the series that Spark's worker would build. Raises `InvalidArgumentError`."""
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
        return [_inferred(s) for s in series] if self.from_python else series

    def _shown_type(self, data_type: pa.DataType) -> pa.DataType:
        if self.from_python and pa.types.is_floating(data_type):
            return pa.float64()
        if self.from_python and pa.types.is_integer(data_type) and not self.prefer_int_ext_dtype:
            return pa.int64()
        return in_zone(data_type, self.timezone)

    def to_frame(self, rows: pa.Table) -> pd.DataFrame:
        """Convert rows to the frame that Spark's worker would build."""
        return pd.concat(self.to_series(rows), axis=1)


def _with_all_digits(series: pd.Series[Any], column: pa.Array) -> pd.Series[Any]:
    """Restore the digits of nullable integers: pandas 2 converts some of them through float64."""
    if not (pa.types.is_int64(column.type) and column.null_count):
        return series
    values = column.fill_null(0).to_numpy().copy()
    mask = column.is_null().to_numpy(zero_copy_only=False)
    return pd.Series(pd.arrays.IntegerArray(values, mask), name=series.name)


def _inferred(series: pd.Series[Any]) -> pd.Series[Any]:
    """Convert a column to the dtype that pandas infers from its values, if the dtypes may differ."""
    is_inferred = isinstance(series.dtype, np.dtype) and not (series.dtype.kind == "m" and series.isna().all())
    return series if is_inferred else pd.Series(pd.DataFrame(list(zip(series)))[0], name=series.name)


class KeyFrames(KeySlabs[pd.DataFrame]):
    """A shard's rows as frames per key, several for a key with more than `rows_each` rows; see `KeySlabs`."""

    def __init__(
        self, rows: pa.Table, order: IntArray, starts: IntArray, frame_format: FrameFormat, rows_each: int
    ) -> None:
        super().__init__(rows, order, starts, rows_each)
        self._format = frame_format
        self._names = pd.Index(rows.column_names, dtype=object)

    def empty(self, count: int) -> Iterator[pd.DataFrame]:
        """Yield an empty frame for each of `count` keys, which have timed out."""
        return consecutive(pd.DataFrame(columns=self._names.view()), np.zeros(count, np.int64))

    def cut(self, rows: pa.Table, bounds: IntArray) -> Iterator[Iterator[pd.DataFrame]]:
        yield from map(iter, zip(cut(rows, bounds, self._format.to_frame)))

    def convert(self, rows: pa.Table) -> Iterator[pd.DataFrame]:
        yield self._format.to_frame(rows)


def key_tuples(keys: pa.Table, frame_format: FrameFormat) -> list[tuple[Any, ...]]:
    """Convert keys to the tuples that a function gets: the first value of each key column's pandas series."""
    bounds = np.arange(len(keys) + 1)
    columns = []
    for name, column in zip(keys.column_names, keys.columns, strict=True):
        classes = _null_classes(pa.table({name: column}), bounds)
        values: list[Any] = [None] * len(keys)
        for which in range(classes.max(initial=-1) + 1):
            chosen = np.flatnonzero(classes == which)
            [series] = frame_format.to_series(pa.table({name: column.take(pa.array(chosen))}))
            for at, value in zip(chosen.tolist(), _scalars(series), strict=True):
                values[at] = value
        columns.append(values)
    return list(zip(*columns, strict=True))


def _scalars(series: pd.Series[Any]) -> list[Any]:
    """Return ``series[0]``, ``series[1]`` …: numpy scalars, not Python's, for the types of numpy."""
    values = series.array
    return list(values.to_numpy() if isinstance(series.dtype, np.dtype) and series.dtype.kind not in "mM" else values)


def cut(rows: pa.Table, bounds: IntArray, to_frame: Callable[[pa.Table], pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Yield a frame for each key; key i has rows ``bounds[i]`` to ``bounds[i + 1]``, exclusive."""
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
    """Number the keys so that keys with nulls in the same columns share a number."""
    nulls = list(itertools.chain.from_iterable(_nulls(one_chunk(column)) for column in rows.columns))
    if not nulls:
        return np.zeros(len(bounds) - 1, np.int64)
    patterns = np.stack([np.logical_or.reduceat(mask, bounds[:-1]) for mask in nulls], axis=1)
    classes: IntArray = np.unique(np.packbits(patterns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    return classes


def _nulls(column: pa.Array) -> Iterator[BoolArray]:
    """Yield a mask of the null rows for each part of a column whose pandas type depends on nulls."""
    if pa.types.is_nested(column.type):
        if column.null_count:
            yield column.is_null().to_numpy(zero_copy_only=False)
        yield from _nested_nulls(column)
    elif column.null_count and (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        yield column.is_null().to_numpy(zero_copy_only=False)
    elif column.null_count and pa.types.is_duration(column.type):  # the dtype changes only if all are null
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
    """Return the type with all timestamps in one time zone, as Spark sends them to its workers."""
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


class OutputFrames:
    """Gathers the frames of many keys and converts them together, as soon as they have more than `rows_each` rows.

    After a failed conversion, `failed_key` is the key whose frame caused the failure.
    """

    #: Whether booleans stay booleans; in Spark's worker, they become objects.
    keeps_booleans = False

    def __init__(self, schema: StructType, frame_format: FrameFormat, rows_each: int) -> None:
        self._schema = schema
        self.names = schema.names
        self._arrow = arrow_schema(schema, "outputStructType", keep_not_null=True)
        self._format = frame_format
        self._rows_each = rows_each
        self.failed_key: tuple[Any, ...] | None = None
        self._rows = 0
        self._alike: dict[tuple[Any, ...], _AlikeFrames] = {}

    def add_all(self, returned: object, key: tuple[Any, ...]) -> Iterator[pa.RecordBatch]:
        """Add a function's output for a key; yield batches as they fill."""
        for frame in self.frames_of(returned):
            rows = len(frame)
            if rows:
                self._add(frame, rows, key)
                if self._rows > self._rows_each:
                    yield from self.finish()

    def frames_of(self, returned: object) -> Iterator[pd.DataFrame]:
        """Yield the frames of a function's output; check their type, and the width of frames without rows."""
        for frame in _iterable(returned):
            if not isinstance(frame, pd.DataFrame):
                raise _wrong_return("iterator of pandas.DataFrame", f"iterator of {type(frame).__name__}")
            if not len(frame):
                self._require_width(len(frame.columns))
            yield frame

    def blocks_of(self, frame: pd.DataFrame) -> tuple[tuple[bytes, ...], list[Array]]:
        return blocks_of(frame)

    def _add(self, frame: pd.DataFrame, rows: int, key: tuple[Any, ...]) -> None:
        places, blocks = self.blocks_of(frame)
        labels = tuple(frame.columns.tolist())
        likeness = (labels, places, *[block.dtype for block in blocks])
        alike = self._alike.get(likeness)
        if alike is None:
            alike = self._alike[likeness] = _AlikeFrames(places, self.places(labels))
        alike.add(blocks, self._rows, rows, key)
        self._rows += rows

    def finish(self) -> Iterator[pa.RecordBatch]:
        alike, self._alike, self._rows = list(self._alike.values()), {}, 0
        if not alike:
            return
        batches = [self._converted(frames) for frames in alike]
        if len(batches) == 1:
            yield batches[0]
            return
        arrived = np.concatenate([frames.row_numbers() for frames in alike])
        yield pa.concat_batches(batches).take(pa.array(np.argsort(arrived)))

    def _require_width(self, columns: int) -> None:
        if columns and columns != len(self.names):
            raise PySparkRuntimeError(
                errorClass="RESULT_COLUMN_SCHEMA_MISMATCH",
                messageParameters={"expected": str(len(self.names)), "actual": str(columns)},
            )

    def places(self, labels: tuple[Any, ...]) -> list[int]:
        """Return the position of each output column in a frame with these labels."""
        self._require_width(len(labels))
        names = self.names
        if not labels or not (self._format.assign_cols_by_name and any(isinstance(label, str) for label in labels)):
            return list(range(len(labels)))
        if set(labels) != set(names):
            missing = [name for name in names if name not in labels]
            extra = [str(label) for label in labels if label not in names]
            raise PySparkRuntimeError(
                errorClass="RESULT_COLUMN_NAMES_MISMATCH",
                messageParameters={
                    "missing": f" Missing: {', '.join(missing)}." if missing else "",
                    "extra": f" Unexpected: {', '.join(extra)}." if extra else "",
                },
            )
        return [labels.index(name) for name in names]

    def _converted(self, frames: _AlikeFrames) -> pa.RecordBatch:
        """Convert frames together; on failure, bisect to find the first frame that fails alone."""
        try:
            return self._convert(frames)
        except Exception:  # raised by pandas, Arrow or the values
            if len(frames.keys) == 1:
                self.failed_key = frames.keys[0]
                raise
        return pa.concat_batches([self._converted(half) for half in frames.halves()])

    def _convert(self, frames: _AlikeFrames) -> pa.RecordBatch:
        batch = self._by_spark(frames)
        if frames.are_of_arrow:  # Python's strings always encode as UTF-8
            require_utf8(batch, "the output")
        for column, field in zip(batch.columns, self._arrow, strict=True):
            require_nulls_allowed(column, field, "the function")
        return pa.RecordBatch.from_arrays(
            [column.cast(field.type) for column, field in zip(batch.columns, self._arrow, strict=True)],
            schema=self._arrow,
        )

    def _by_spark(self, frames: _AlikeFrames) -> pa.RecordBatch:
        columns = frames.columns(keeps_booleans=self.keeps_booleans)
        if not columns:  # Spark fills rows without columns with nulls
            return pa.RecordBatch.from_arrays([pa.nulls(frames.rows, f.type) for f in self._arrow], self._schema.names)
        return spark_versions.pandas_to_arrow(
            columns,
            self._schema,
            self._format.timezone,
            safecheck=self._format.safecheck,
            int_to_decimal_coercion_enabled=self._format.int_to_decimal_coercion_enabled,
        )


class _AlikeFrames:
    """Frames with the same labels and blocks; `places` are the output columns' positions, `keys` the frames' keys."""

    def __init__(self, blocks: tuple[bytes, ...], places: list[int]) -> None:
        self.keys: list[tuple[Any, ...]] = []
        self._blocks = blocks
        self._places = places
        self._gathered: list[list[Array]] = []
        self._loose: list[list[Array]] = []
        self._starts: list[int] = []
        self._sizes: list[int] = []

    @property
    def rows(self) -> int:
        return sum(self._sizes)

    @property
    def are_of_arrow(self) -> bool:
        return any(_is_of_arrow(column) for column in self._arrays())

    def add(self, blocks: list[Array], start: int, size: int, key: tuple[Any, ...]) -> None:
        """Add a key's frame whose first row has the number `start`."""
        self.keys.append(key)
        self._starts.append(start)
        self._sizes.append(size)
        self._loose.append(blocks)
        if len(self._loose) == GATHERED_FRAMES:
            self._gather()

    def halves(self) -> Iterator[_AlikeFrames]:
        columns, middle = self._arrays(), len(self.keys) // 2
        row = sum(self._sizes[:middle])
        for some, rows in ((slice(middle), slice(row)), (slice(middle, None), slice(row, None))):
            half = _AlikeFrames(self._blocks, self._places)
            half.keys, half._starts, half._sizes = self.keys[some], self._starts[some], self._sizes[some]
            half._gathered = [[column[rows] for column in columns]]
            yield half

    def columns(self, *, keeps_booleans: bool) -> list[pd.Series[Any]]:
        """Return the output columns of all frames together, in the dtypes of Spark's worker."""
        columns = self._arrays()
        return _gathered_by_spark([columns[place] for place in self._places], keeps_booleans=keeps_booleans)

    def row_numbers(self) -> IntArray:
        """Return each row's number among the rows of all frames."""
        sizes = np.asarray(self._sizes)
        firsts = np.cumsum(sizes) - sizes
        numbers: IntArray = np.arange(sizes.sum()) + np.repeat(np.asarray(self._starts) - firsts, sizes)
        return numbers

    def _arrays(self) -> list[Array]:
        if self._loose:
            self._gather()
        if len(self._gathered) > 1:
            self._gathered = [[concatenated(parts) for parts in zip(*self._gathered, strict=True)]]
        return self._gathered[0]

    def _gather(self) -> None:
        self._gathered.append(joined_columns(self._blocks, self._loose))
        self._loose = []


def _gathered_by_spark(columns: list[Array], *, keeps_booleans: bool) -> list[pd.Series[Any]]:
    """Return columns in the dtypes from which Spark's worker converts them to Arrow.

    The worker concatenates all keys' frames with a frame that has no rows and only object columns, which changes the
    dtypes of integers, booleans and nulls. This function does the same.
    """
    series = {at: pd.Series(_in_one_piece(c), dtype=c.dtype, copy=False) for at, c in enumerate(columns)}
    changed = {
        at: one
        for at, one in series.items()
        if not _is_of_arrow(one.array) and not (keeps_booleans and one.dtype == np.bool_)
    }
    frame = pd.DataFrame(changed, copy=False)
    without_rows = pd.DataFrame(dict.fromkeys(frame.columns), index=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # pandas 3 will take the empty frame's dtypes into account
        gathered = pd.concat([frame, without_rows], ignore_index=True)
    return [gathered[at] if at in gathered else series[at] for at in series]


def _in_one_piece(column: Any) -> Array:
    """Combine the chunks of an Arrow-backed column; Spark's worker fails on more than one."""
    if not _is_of_arrow(column):
        return cast("Array", column)
    return cast("Array", type(column)(column.__arrow_array__().combine_chunks()))


def _is_of_arrow(column: Array) -> bool:
    return isinstance(column.dtype, pd.ArrowDtype) or getattr(column.dtype, "storage", None) == "pyarrow"


def _iterable(returned: Any) -> Iterable[Any]:
    if isinstance(returned, pd.DataFrame):
        raise _wrong_return("iterable of pandas.DataFrame", type(returned).__name__)
    try:
        return iter(returned)
    except TypeError:
        raise _wrong_return("iterable", type(returned).__name__) from None


def _wrong_return(expected: str, actual: str) -> PySparkTypeError:
    return PySparkTypeError(errorClass="UDF_RETURN_TYPE", messageParameters={"expected": expected, "actual": actual})


class GatheredOutput(Protocol):
    """The output of many keys, converted together."""

    failed_key: tuple[Any, ...] | None  #: After a failed conversion, the key whose output failed

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining output."""


def note_key(exc: BaseException, operator: str, key: tuple[Any, ...]) -> None:
    """Add a note with the operator and key to an exception."""
    exc.add_note(f"raised in operator {operator!r} for key {tuple(key)!r}")


def finished(output: GatheredOutput, operator: str) -> Iterator[pa.RecordBatch]:
    """Yield the remaining output; note the key on a conversion error."""
    try:
        yield from output.finish()
    except Exception as exc:
        if output.failed_key is not None:
            note_key(exc, operator, output.failed_key)
        raise
