"""The event-time column of a step's input, and its watermark."""

from __future__ import annotations

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from holdfast.spark_integration.plan.session import name_folding
from holdfast.spark_integration.spark_types import WATERMARK_METADATA
from holdfast.spark_integration.spark_versions import is_on

#: Behind "timeMode 'EventTime' …", what a step without a watermark is told.
NEEDS_WATERMARK = (
    "needs an input with a watermark, or no timer ever fires: df.withWatermark(…). applyInArrowWithState and "
    "applyInPandasWithState hand none on; transformWithState does, by eventTimeColumnName"
)


def event_time_of(df: DataFrame) -> StructField | None:
    """Return the column that carries the watermark.

    Raises
    ------
    AnalysisException
        There are several, as after a join; Spark's own operators reject them when the query starts.
    """
    fold = name_folding(df)
    marked: dict[str, StructField] = {}
    for field in df.schema:
        if WATERMARK_METADATA in (field.metadata or {}):
            marked.setdefault(fold(field.name), field)
    if len(marked) > 1 and is_on(df.sparkSession, "spark.sql.streaming.statefulOperator.allowMultiple"):
        names = ", ".join(field.name for field in marked.values())
        raise AnalysisException(
            "More than one event time columns are available. Please ensure there is at most one event time column per "
            f"stream: drop the others with df.drop. event time columns: ({names})",
            errorClass="MULTIPLE_EVENT_TIME_COLUMNS",
            messageParameters={"eventTimeCols": f"({names})"},
        )
    return next(iter(marked.values()), None)


def without_watermark(output: StructType) -> StructType:
    """Return the output's columns without marks of a watermark, as a schema copied from the input's has them.

    ``applyInPandasWithState`` hands no watermark on. Behind a marked column Spark would accept a window in append mode,
    which never emits anything and whose state grows for ever; without the mark it refuses it.
    """
    fields = [(f, {k: v for k, v in (f.metadata or {}).items() if k != WATERMARK_METADATA}) for f in output]
    return StructType([StructField(f.name, f.dataType, f.nullable, metadata) for f, metadata in fields])


def marked_as_delivered(output: StructType, time_mode: str) -> StructType:
    """Return a processor's output, with marks of a watermark only where Spark's ``transformWithState`` hands it on.

    In processing time it does not.
    """
    return without_watermark(output) if time_mode == "ProcessingTime" else output
