"""Turns ``dropDuplicates`` into a definition."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.operators.deduplication import Deduplication, DeduplicationByTime
from holdfast.spark_integration.operators.defining import after_1970
from holdfast.spark_integration.operators.ends import Ttl
from holdfast.spark_integration.plan.definition import KeyedRows
from holdfast.spark_integration.plan.event_time import event_time_of, watermark_of
from holdfast.spark_integration.plan.grouping_keys import resolve_keys
from holdfast.spark_integration.plan.operator_plan import BEHIND_ANOTHER, operator_plan
from holdfast.spark_integration.spark_types import arrow_schema, types_of_keys

_NO_DURATION = "is a duration of weeks, days or shorter units, and longer than nothing, such as '1 day'"


def deduplicated(df: DataFrame, subset: Sequence[str] | None, ttl: str | None, name: str) -> DataFrame:
    """Define ``dropDuplicates``.

    Raises as Spark's own method, and `InvalidArgumentError` if `ttl` is no duration, a column's type cannot be
    compared, or a setting is wrong.
    """
    _ = df.dropDuplicates(subset).schema  # type: ignore[arg-type]  # refuses what cannot be a subset
    kind = Deduplication if ttl is None else DeduplicationByTime
    rows = _rows(df, subset, None if ttl is None else duration_us(df, ttl), kind)
    # With a watermark Spark drops late rows, whether keys are forgotten or not.
    is_timed = df.isStreaming and event_time_of(df) is not None
    return operator_plan(rows, StructType(df.schema.fields), "append", name, is_timed=is_timed)


def _rows(
    df: DataFrame, subset: Sequence[str] | None, ttl_us: int | None, by_event_time: type[Deduplication]
) -> KeyedRows:
    event_time = event_time_of(df) if df.isStreaming else None
    keys = resolve_keys(df, list(df.columns if subset is None else subset))
    is_in_key = event_time is not None and event_time.name in [key.field.name for key in keys.keys]
    is_late_then = ttl_us is None and is_in_key
    if is_late_then:
        ttl_us = 0  # behind the watermark its duplicates are late
    kind, clock = (Deduplication, None) if event_time is None else (by_event_time, event_time.name)
    function = kind(
        types_of_keys([key.field for key in keys.keys]),
        arrow_schema(StructType(df.schema.fields), "the input", keep_not_null=True),
        None if ttl_us is None else Ttl(ttl_us, clock),
        keeps_without_time=is_late_then,
    )
    return KeyedRows(df, keys.keys, function)


def deduplicated_within_watermark(df: DataFrame, subset: Sequence[str] | None, name: str) -> DataFrame:
    """Define ``dropDuplicatesWithinWatermark``; raises as `deduplicated`.

    Raises `InvalidArgumentError` if the DataFrame is no stream, or has no watermark.
    """
    _ = df.dropDuplicatesWithinWatermark(subset).schema  # type: ignore[arg-type]  # refuses what cannot be a subset
    watermark = watermark_of(df) if df.isStreaming else None
    if watermark is None:
        raise InvalidArgumentError(
            "dropDuplicatesWithinWatermark needs a stream with a watermark: df.withWatermark('at', '10 minutes'), "
            f"within which duplicates are found{BEHIND_ANOTHER}"
        )
    rows = _rows(df, subset, watermark.delay_ms * 1000, Deduplication)
    return operator_plan(rows, StructType(df.schema.fields), "append", name, is_timed=True)


def duration_us(df: DataFrame, given: object, argument: str = "ttl") -> int:
    """Return a duration such as ``1 day`` in microseconds, as Spark reads it.

    Raises `InvalidArgumentError` unless it is a positive duration.
    """
    if not isinstance(given, str):
        raise InvalidArgumentError(f"{argument} {_NO_DURATION}", given=repr(given))
    try:
        return after_1970(df.sparkSession, F.window("t", given), "end")
    except (AnalysisException, IllegalArgumentException) as exc:
        raise InvalidArgumentError(f"{argument} {_NO_DURATION}", given=repr(given)) from exc
