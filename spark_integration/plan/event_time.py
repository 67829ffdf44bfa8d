"""The event-time column of a step's input, and its watermark."""

from __future__ import annotations

from typing import NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from holdfast.spark_integration.plan.session import name_folding
from holdfast.spark_integration.spark_types import Watermark
from holdfast.spark_integration.spark_versions import is_on

#: Completes an error that starts with, for example, "timeMode 'EventTime'".
NEEDS_WATERMARK = (
    "needs an input with a watermark, or no timer ever fires: call df.withWatermark(…). applyInArrowWithState and "
    "applyInPandasWithState pass on no watermark; transformWithState does, with eventTimeColumnName, and so do "
    "one-line operators with Spark's RocksDB state store"
)


class TimeColumn(NamedTuple):
    field: StructField
    watermark: Watermark


def time_column_of(df: DataFrame) -> TimeColumn | None:
    """Return the column with the watermark, or None. Raises `AnalysisException`."""
    fold = name_folding(df)
    marked: dict[str, TimeColumn] = {}
    for field in df.schema:
        watermark = Watermark.of(field)
        if watermark is not None:
            marked.setdefault(fold(field.name), TimeColumn(field, watermark))
    if len(marked) > 1 and is_on(df.sparkSession, "spark.sql.streaming.statefulOperator.allowMultiple"):
        names = ", ".join(time.field.name for time in marked.values())
        raise AnalysisException(
            "More than one event time columns are available. Please ensure there is at most one event time column per "
            f"stream: drop the others with df.drop. event time columns: ({names})",
            errorClass="MULTIPLE_EVENT_TIME_COLUMNS",
            messageParameters={"eventTimeCols": f"({names})"},
        )
    return next(iter(marked.values()), None)


def without_watermark(output: StructType) -> StructType:
    """Remove the watermark from output columns, because ``applyInPandasWithState`` passes on no watermark.

    With it, Spark would accept a downstream window in append mode, which would never emit rows.
    """
    return StructType([StructField(f.name, f.dataType, f.nullable, Watermark.removed(f.metadata)) for f in output])


def marked_as_delivered(output: StructType, time_mode: str) -> StructType:
    """Keep the watermark of a processor's output columns only if ``transformWithState`` passes on a watermark."""
    return without_watermark(output) if time_mode == "ProcessingTime" else output
