"""Checks the frames that a function returns, as Spark does, and gathers them into Arrow batches.

Frames of many keys are converted together, column by column, but only those with the same labels and dtypes: a null in
one frame must not turn another's integers into floats.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql.types import StructType

from holdfast.backends.arrow.rows import IntArray
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.keyed.frame_blocks import Array, blocks_of, concatenated, joined_columns
from holdfast.spark_integration.keyed.frames import FrameFormat
from holdfast.spark_integration.spark_types import arrow_schema, require_nulls_allowed, require_utf8

# Frames are released after this many: the next ones reuse their memory while it is still in the CPU's cache.
GATHERED_FRAMES = 256


class OutputFrames:
    """Gathers the frames of many keys and converts them together.

    A batch is yielded once it has more rows than `rows_each`; after a failed conversion, `failed_key` is the key whose
    frame caused it.
    """

    #: Whether booleans are converted as booleans, and not as the objects that Spark's worker makes of them.
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
        """Iterate over what the function returned for a key; yield batches as they fill.

        Raises as Spark does where these are no frames, or not of the output's columns and types; `SchemaMismatchError`
        for nulls where the output declares NOT NULL; `InvalidArgumentError` for text that is not UTF-8.
        """
        for frame in self.frames_of(returned):
            rows = len(frame)
            if rows:
                self._add(frame, rows, key)
                if self._rows > self._rows_each:
                    yield from self.finish()

    def frames_of(self, returned: object) -> Iterator[pd.DataFrame]:
        """Iterate over what the function returned, and check each frame; columns of one with rows are checked later."""
        for frame in _iterable(returned):
            if not isinstance(frame, pd.DataFrame):
                raise _wrong_return("iterator of pandas.DataFrame", f"iterator of {type(frame).__name__}")
            if not len(frame):
                self._require_width(len(frame.columns))
            yield frame

    def blocks_of(self, frame: pd.DataFrame) -> tuple[tuple[bytes, ...], list[Array]]:
        """Return the blocks of a frame, to be converted later."""
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
        """Yield what is left."""
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
        """Return, for each column of the output, its position in a frame with these labels."""
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
        """Convert frames together; if that fails, halve them until the frame that fails by itself is found."""
        try:
            return self._convert(frames)
        except Exception:  # raised by pandas, by Arrow, or by the values themselves
            if len(frames.keys) == 1:
                self.failed_key = frames.keys[0]
                raise
        return pa.concat_batches([self._converted(half) for half in frames.halves()])

    def _convert(self, frames: _AlikeFrames) -> pa.RecordBatch:
        batch = self._by_spark(frames)
        if frames.are_of_arrow:  # Python's own text is always UTF-8
            require_utf8(batch, "the output")
        for column, field in zip(batch.columns, self._arrow, strict=True):
            require_nulls_allowed(column, field, "the function")
        return pa.RecordBatch.from_arrays(
            [column.cast(field.type) for column, field in zip(batch.columns, self._arrow, strict=True)],
            schema=self._arrow,
        )

    def _by_spark(self, frames: _AlikeFrames) -> pa.RecordBatch:
        columns = frames.columns(keeps_booleans=self.keeps_booleans)
        if not columns:  # rows without columns: Spark makes nulls of them
            return pa.RecordBatch.from_arrays([pa.nulls(frames.rows, f.type) for f in self._arrow], self._schema.names)
        return spark_versions.pandas_to_arrow(
            columns,
            self._schema,
            self._format.timezone,
            safecheck=self._format.safecheck,
            int_to_decimal_coercion_enabled=self._format.int_to_decimal_coercion_enabled,
        )


class _AlikeFrames:
    """Frames with the same labels and blocks; `keys` has the key of each frame.

    `blocks` are the places of their blocks, `places` the position of each column of the output in the frames.
    """

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
        """Whether any column is backed by Arrow."""
        return any(_is_of_arrow(column) for column in self._arrays())

    def add(self, blocks: list[Array], start: int, size: int, key: tuple[Any, ...]) -> None:
        """Add a key's frame, whose rows are numbered from `start`."""
        self.keys.append(key)
        self._starts.append(start)
        self._sizes.append(size)
        self._loose.append(blocks)
        if len(self._loose) == GATHERED_FRAMES:
            self._gather()

    def halves(self) -> Iterator[_AlikeFrames]:
        """Yield the first half of the frames, then the second."""
        columns, middle = self._arrays(), len(self.keys) // 2
        row = sum(self._sizes[:middle])
        for some, rows in ((slice(middle), slice(row)), (slice(middle, None), slice(row, None))):
            half = _AlikeFrames(self._blocks, self._places)
            half.keys, half._starts, half._sizes = self.keys[some], self._starts[some], self._sizes[some]
            half._gathered = [[column[rows] for column in columns]]
            yield half

    def columns(self, *, keeps_booleans: bool) -> list[pd.Series[Any]]:
        """Return the output's columns over all frames, as Spark's worker would have them."""
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
    """Return columns in the dtypes from which Spark's worker converts them.

    The worker concatenates the frames of all keys and appends one without rows, whose columns are objects. That turns
    integers, booleans and all-null columns into objects: so True is no bigint, while an int is a decimal or a date. The
    same concatenation is made here, so pandas decides here too.
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
    """Return a column in a single chunk; Spark's worker has several in an Arrow-backed column and fails on them."""
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
