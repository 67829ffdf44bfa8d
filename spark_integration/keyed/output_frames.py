"""The frames that a function returns, checked as Spark checks them, and gathered into Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql.conversion import PandasToArrowConversion
from pyspark.sql.types import StructType

from holdfast.spark_integration.columns import arrow_schema
from holdfast.spark_integration.keyed.frames import FrameFormat


class OutputFrames:
    """Gathers the frames of many keys, and converts them together.

    Parameters
    ----------
    schema : StructType
        Of the output.
    frame_format : FrameFormat
    rows_each : int
        A batch is given out when it has more rows.
    """

    def __init__(self, schema: StructType, frame_format: FrameFormat, rows_each: int) -> None:
        self._schema = schema
        self._arrow = arrow_schema(schema, "outputStructType")
        self._format = frame_format
        self._rows_each = rows_each
        self._frames: list[pd.DataFrame] = []
        self._rows = 0

    def add_all(self, returned: object) -> Iterator[pa.RecordBatch]:
        """Take what the function returned for one key, as it is iterated; yield batches that are full.

        Raises
        ------
        PySparkTypeError
            Not an iterable of frames.
        PySparkRuntimeError
            A frame has another number of columns, or other names, than the output.
        PySparkValueError
            Values that the output's types cannot hold.
        """
        for frame in _iterable(returned):
            self._check(frame)
            if len(frame):
                self._frames.append(frame)
                self._rows += len(frame)
                if self._rows > self._rows_each:
                    yield from self.finish()

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield what is left."""
        frames, self._frames, self._rows = self._frames, [], 0
        if frames:
            yield self._convert(pd.concat(frames, ignore_index=True))

    def _check(self, frame: object) -> None:
        if not isinstance(frame, pd.DataFrame):
            raise _wrong_return("iterator of pandas.DataFrame", f"iterator of {type(frame).__name__}")
        columns = len(frame.columns)
        if columns != len(self._schema) and not (columns == 0 and frame.empty):
            raise PySparkRuntimeError(
                errorClass="RESULT_COLUMN_SCHEMA_MISMATCH",
                messageParameters={"expected": str(len(self._schema)), "actual": str(columns)},
            )

    def _convert(self, frame: pd.DataFrame) -> pa.RecordBatch:
        batch = PandasToArrowConversion.convert(
            frame,
            self._schema,
            timezone=self._format.timezone,
            safecheck=self._format.safecheck,
            arrow_cast=True,
            assign_cols_by_name=self._format.assign_cols_by_name,
            int_to_decimal_coercion_enabled=self._format.int_to_decimal_coercion_enabled,
        )
        return batch.cast(self._arrow)


def _iterable(returned: Any) -> Iterable[Any]:
    if isinstance(returned, pd.DataFrame):
        raise _wrong_return("iterable of pandas.DataFrame", type(returned).__name__)
    try:
        return iter(returned)
    except TypeError:
        raise _wrong_return("iterable", type(returned).__name__) from None


def _wrong_return(expected: str, actual: str) -> PySparkTypeError:
    return PySparkTypeError(errorClass="UDF_RETURN_TYPE", messageParameters={"expected": expected, "actual": actual})
