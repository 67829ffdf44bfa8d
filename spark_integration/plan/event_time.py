"""The event-time column of a step's input, and its watermark."""

from __future__ import annotations

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from holdfast.spark_integration.plan.session import name_folding
from holdfast.spark_integration.spark_types import WATERMARK_METADATA


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
    if len(marked) > 1 and df.sparkSession.conf.get("spark.sql.streaming.statefulOperator.allowMultiple") == "true":
        names = ", ".join(field.name for field in marked.values())
        raise AnalysisException(
            "More than one event time columns are available. Please ensure there is at most one event time column per "
            f"stream: drop the others with df.drop. event time columns: ({names})",
            errorClass="MULTIPLE_EVENT_TIME_COLUMNS",
            messageParameters={"eventTimeCols": f"({names})"},
        )
    return next(iter(marked.values()), None)


def with_watermark(output: StructType, df: DataFrame) -> StructType:
    """Return the output's columns; the event-time column, if it keeps its name, keeps the input's watermark."""
    event_time = event_time_of(df)
    return StructType(
        [
            StructField(f.name, f.dataType, f.nullable, event_time.metadata)
            if event_time is not None and (f.name, f.dataType) == (event_time.name, event_time.dataType)
            else f
            for f in output
        ]
    )
