"""Checks the arguments of ``transformWithState`` at definition; Spark checks most of them in the first batch."""

from __future__ import annotations

from typing import cast

from pyspark.errors import IllegalArgumentException
from pyspark.sql import DataFrame

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.plan.event_time import event_time_of
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode

_MODES = {mode.lower(): mode for mode in TIMEOUT_CONF}
_OUTPUT_MODES = ("append", "update")


def time_mode_of(given: object, df: DataFrame) -> TimeMode:
    """Return a time mode, which may be given in any case.

    Raises
    ------
    IllegalArgumentException
        There is no such mode.
    InvalidArgumentError
        Event time, for a stream without a watermark: no timer would ever fire.
    """
    mode = _MODES.get(str(given).lower())
    if mode is None:
        raise IllegalArgumentException(
            f"[STATEFUL_PROCESSOR_UNKNOWN_TIME_MODE] Unknown time mode {given}. Accepted timeMode modes are 'none', "
            "'processingTime', 'eventTime'"
        )
    if mode == "EventTime" and df.isStreaming and event_time_of(df) is None:
        raise InvalidArgumentError(
            "timeMode 'EventTime' needs an input with a watermark, or no timer ever fires: df.withWatermark(…)"
        )
    return cast("TimeMode", mode)


def output_mode_of(given: object) -> str:
    """Return an output mode, which may be given in any case.

    Raises
    ------
    IllegalArgumentException
        There is no such mode.
    InvalidArgumentError
        Complete mode, which needs an aggregation.
    """
    mode = str(given).lower()
    if mode == "complete":
        raise InvalidArgumentError("outputMode must be 'append' or 'update': 'complete' needs a streaming aggregation")
    if mode not in _OUTPUT_MODES:
        raise IllegalArgumentException(
            f"[STREAMING_OUTPUT_MODE.INVALID] Invalid streaming output mode: {given}. Accepted output modes are "
            "'Append', 'Complete', 'Update'."
        )
    return mode


def refuse_what_is_missing(initial_state: object, event_time_column: str) -> None:
    """Refuse arguments of Spark's method that holdfast does not know yet.

    Raises
    ------
    InvalidArgumentError
        One is given.
    """
    if initial_state is not None:
        raise InvalidArgumentError(
            "initialState is not supported yet: put the initial rows into the stream, or use Spark's operator"
        )
    if event_time_column:
        raise InvalidArgumentError(
            "eventTimeColumnName is not supported yet: no operator that needs a watermark can stand behind this one",
            eventTimeColumnName=event_time_column,
        )
