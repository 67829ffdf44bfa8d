"""Turns ``dropDuplicates`` into a definition."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.hosts.group_state import GroupStateHost
from holdfast.spark_integration.operators.deduplication import Deduplication, DeduplicationByTime
from holdfast.spark_integration.operators.ends import Ttl
from holdfast.spark_integration.operators.windows import after_1970
from holdfast.spark_integration.plan.arguments import operator_name
from holdfast.spark_integration.plan.definition import Definition, KeyedRows
from holdfast.spark_integration.plan.event_time import event_time_of, without_watermark
from holdfast.spark_integration.plan.grouping_keys import resolve_keys
from holdfast.spark_integration.plan.session import checked_settings, rows_each
from holdfast.spark_integration.spark_types import WATERMARK_METADATA, arrow_schema, types_of_keys
from holdfast.spark_integration.transport.output import output_of_tables

_NO_DURATION = "is a duration of weeks, days or shorter units, and longer than nothing, such as '1 day'"


def deduplicated(df: DataFrame, subset: Sequence[str] | None, ttl: str | None, name: str) -> DataFrame:
    """Define ``dropDuplicates``.

    Raises
    ------
    AnalysisException, PySparkTypeError
        As Spark's own method raises them: no such column, or something else than a list of names.
    InvalidArgumentError
        `ttl` is no duration, or a column has a type that cannot be compared; or a setting is wrong.
    """
    _ = df.dropDuplicates(subset).schema  # type: ignore[arg-type]  # refuses what cannot be a subset
    if ttl is None:
        return _planned(df, subset, None, Deduplication, name)
    return _planned(df, subset, duration_us(df, ttl), DeduplicationByTime, name)


def _planned(
    df: DataFrame, subset: Sequence[str] | None, ttl_us: int | None, by_event_time: type[Deduplication], name: str
) -> DataFrame:
    event_time = event_time_of(df) if df.isStreaming else None
    keys = resolve_keys(df, list(df.columns if subset is None else subset))
    is_in_key = event_time is not None and event_time.name in [key.field.name for key in keys.keys]
    is_late_then = ttl_us is None and is_in_key
    if is_late_then:
        ttl_us = 0  # behind the watermark its duplicates are late
    settings = checked_settings(df, stacklevel=4)
    output = StructType(df.schema.fields)
    kind, clock = (Deduplication, None) if event_time is None else (by_event_time, event_time.name)
    function = kind(
        types_of_keys([key.field for key in keys.keys]),
        arrow_schema(output, "the input", keep_not_null=True),
        None if ttl_us is None else Ttl(ttl_us, clock),
        keeps_without_time=is_late_then,
    )
    return Definition(
        rows=KeyedRows(df, keys.keys, function),
        name=operator_name(None, name),
        output=output_of_tables(without_watermark(output), rows_each(df), settings.transport),
        # With a watermark Spark drops late rows, whether keys are forgotten or not.
        host=GroupStateHost("append", "NoTimeout" if event_time is None else "EventTimeTimeout"),
        transport="packed" if event_time is None else None,
        settings=settings,
    ).plan()


def deduplicated_within_watermark(df: DataFrame, subset: Sequence[str] | None, name: str) -> DataFrame:
    """Define ``dropDuplicatesWithinWatermark``; raises as `deduplicated`.

    Raises
    ------
    InvalidArgumentError
        The DataFrame is no stream, or has no watermark.
    """
    _ = df.dropDuplicatesWithinWatermark(subset).schema  # type: ignore[arg-type]  # refuses what cannot be a subset
    event_time = event_time_of(df) if df.isStreaming else None
    if event_time is None:
        raise InvalidArgumentError(
            "dropDuplicatesWithinWatermark needs a stream with a watermark: df.withWatermark('at', '10 minutes'), "
            "within which duplicates are found"
        )
    delay_ms = int((event_time.metadata or {})[WATERMARK_METADATA])
    return _planned(df, subset, delay_ms * 1000, Deduplication, name)


def duration_us(df: DataFrame, given: object, argument: str = "ttl") -> int:
    """Return a duration such as ``1 day`` in microseconds, as Spark reads it.

    Raises
    ------
    InvalidArgumentError
        It is none, or not longer than nothing.
    """
    if not isinstance(given, str):
        raise InvalidArgumentError(f"{argument} {_NO_DURATION}", given=repr(given))
    try:
        return after_1970(df.sparkSession, F.window("t", given), "end")
    except (AnalysisException, IllegalArgumentException) as exc:
        raise InvalidArgumentError(f"{argument} {_NO_DURATION}", given=repr(given)) from exc
