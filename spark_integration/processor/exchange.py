"""What differs between the two APIs: how a processor sees rows and keys, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkValueError
from pyspark.sql.types import StructType

from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.keyed.failed_keys import GatheredOutput
from holdfast.spark_integration.keyed.frame_blocks import Array
from holdfast.spark_integration.keyed.frames import FrameFormat, KeyFrames, key_tuples
from holdfast.spark_integration.keyed.group_state import copier
from holdfast.spark_integration.keyed.key_order import KeyOrder
from holdfast.spark_integration.keyed.output_frames import OutputFrames
from holdfast.spark_integration.keyed.slabs import KeySlabs
from holdfast.spark_integration.processor.rows import KeyRowObjects, OutputRows, python_columns

KeyTuple = tuple[Any, ...]


class ProcessorOutput(GatheredOutput, Protocol):
    """Gathers what a processor returns for many keys."""

    def add_all(self, returned: Any, key: KeyTuple) -> Iterator[pa.RecordBatch]:
        """Iterate over what it returned for a key; yield batches as they fill."""


class Exchange(Protocol):
    """How rows, keys and output look; travels to the workers."""

    def slabs(self, rows: pa.Table, order: KeyOrder) -> KeySlabs[Any]:
        """Return the rows by key, in the pieces that ``handleInputRows`` iterates over."""

    def keys(self, shown: pa.Table) -> list[KeyTuple]:
        """Return keys as ``handleInputRows`` gets them."""

    def output(self) -> ProcessorOutput:
        """Return where output goes."""


@dataclass(frozen=True)
class RowExchange:
    """Of ``transformWithState``: `Row` objects.

    Attributes
    ----------
    output_schema : StructType
    timezone : str
        The session's.
    rows_each : int
        How many rows are converted at once.
    """

    output_schema: StructType
    timezone: str
    rows_each: int

    def slabs(self, rows: pa.Table, order: KeyOrder) -> KeySlabs[Any]:
        return KeyRowObjects(rows, order.rows, order.starts, self.rows_each, self.timezone)

    def keys(self, shown: pa.Table) -> list[KeyTuple]:
        return list(zip(*python_columns(shown, self.timezone), strict=True))

    def output(self) -> ProcessorOutput:
        return OutputRows(self.output_schema, self.rows_each)

    def beside_initial_state(self) -> RowExchange:
        """Return the exchange of an initial state, and of the micro-batch that it comes with."""
        return self


@dataclass(frozen=True)
class FrameExchange:
    """Of ``transformWithStateInPandas``: frames.

    Attributes
    ----------
    output_schema : StructType
    frame_format : FrameFormat
        Of the output.
    rows_each : int
        Maximum rows per frame.
    made_anew : bool
        Whether frames and keys are made of Python's values.
    """

    output_schema: StructType
    frame_format: FrameFormat
    rows_each: int
    made_anew: bool = field(default_factory=spark_versions.makes_frames_anew)

    def slabs(self, rows: pa.Table, order: KeyOrder) -> KeySlabs[Any]:
        shown = replace(self.frame_format, made_anew=self.made_anew)
        return KeyFrames(rows, order.rows, order.starts, shown, self.rows_each)

    def keys(self, shown: pa.Table) -> list[KeyTuple]:
        if not self.made_anew:
            return key_tuples(shown, self.frame_format)
        return list(zip(*map(self._key_column, shown.column_names, shown.columns), strict=True))

    def _key_column(self, name: str, column: pa.ChunkedArray) -> list[Any]:
        """Return Python's values; times as pandas has them, timestamps without a zone, in the session's time."""
        if pa.types.is_nested(column.type):
            return [value for (value,) in key_tuples(pa.table({name: column}), self.frame_format)]
        if pa.types.is_timestamp(column.type) or pa.types.is_duration(column.type):
            [series] = self.frame_format.to_series(pa.table({name: column}))
            return list(series)
        [values] = python_columns(pa.table({name: column}), self.frame_format.timezone)
        if self.frame_format.prefer_int_ext_dtype and pa.types.is_integer(column.type):
            number = column.type.to_pandas_dtype()
            return [None if value is None else number(value) for value in values]
        return values

    def beside_initial_state(self) -> FrameExchange:
        """Return the exchange of an initial state, and of the micro-batch that it comes with."""
        return replace(self, made_anew=spark_versions.makes_frames_anew(beside_initial_state=True))

    def output(self) -> ProcessorOutput:
        return _ProcessorFrames(self.output_schema, self.frame_format, self.rows_each)


class _ProcessorFrames(OutputFrames):
    """Takes frames by Spark's rules for processors: its worker converts each frame by itself, as it is yielded.

    So a frame, or a list in it, may be changed later and yielded again, booleans are numbers where these are declared,
    and there may be more columns than are needed.
    """

    keeps_booleans = True

    def __init__(self, schema: StructType, frame_format: FrameFormat, rows_each: int) -> None:
        super().__init__(schema, frame_format, rows_each)
        self._copied = copier(schema)

    def blocks_of(self, frame: pd.DataFrame) -> tuple[tuple[bytes, ...], list[Array]]:
        places, blocks = super().blocks_of(frame)
        return places, [self._as_it_is(block) for block in blocks]

    def _as_it_is(self, block: Any) -> Array:
        kept: Array = block.copy()
        if self._copied is not None and kept.dtype == np.object_ and isinstance(kept, np.ndarray):
            for at, value in np.ndenumerate(kept):
                kept[at] = self._copied(value)
        return kept

    def frames_of(self, returned: object) -> Iterator[pd.DataFrame]:
        return frames_of(returned)

    def places(self, labels: tuple[Any, ...]) -> list[int]:
        names = self.names
        if not (self._format.assign_cols_by_name and any(isinstance(label, str) for label in labels)):
            if len(labels) < len(names):
                raise SchemaMismatchError(
                    "the processor returned a frame with fewer columns than outputStructType declares",
                    columns=len(labels),
                    declared=len(names),
                )
            return list(range(len(names)))
        missing = [name for name in names if name not in labels]
        if missing:
            raise SchemaMismatchError(
                "the processor returned a frame without a column that outputStructType declares",
                missing=missing,
                given=sorted(map(str, labels)),
            )
        return [labels.index(name) for name in names]


def frames_of(returned: Any) -> Iterator[pd.DataFrame]:
    """Iterate over what a processor returned for a key.

    Raises
    ------
    PySparkValueError
        An element is no frame.
    """
    for frame in returned:
        if not isinstance(frame, pd.DataFrame):
            raise PySparkValueError(
                "Invalid return type. Please make sure that the UDF returns a pandas.DataFrame when the specified "
                f"return type is StructType. (an element is a {type(frame).__name__})"
            )
        yield frame
