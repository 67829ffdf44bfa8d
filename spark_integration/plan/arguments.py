"""Checks an API's arguments when the step is defined; what Spark rejects fails with Spark's own error."""

from __future__ import annotations

from typing import Any, Literal, cast

from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType, TimestampType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.hosts.stateful_processor import StatefulProcessorHost
from holdfast.spark_integration.plan.event_time import NEEDS_WATERMARK, time_column_of
from holdfast.spark_integration.shard.pointer_row import OPERATOR_NAME
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode
from holdfast.spark_integration.spark_types import parse_struct
from holdfast.spark_integration.spark_versions import (
    is_classic,
    require_host_of_processors,
    require_protobuf,
    wrong_type,
)
from holdfast.spark_integration.transport.transport import quoted


def operator_name(func: object, name: str | None) -> str:
    """Return the operator's name, which must be a valid folder name. Raises `InvalidArgumentError`.

    Without a name it is that of the function or class, less the underscores that make it private: to Spark and others
    who read savepoints, a folder that begins with one is hidden.
    """
    chosen = getattr(func, "__name__", "").lstrip("_") if name is None else name
    if not isinstance(chosen, str) or not OPERATOR_NAME.fullmatch(chosen):
        raise InvalidArgumentError(
            f"{chosen!r} cannot name an operator: pass name= with letters from a to z, digits, '_', '.' and '-', "
            "beginning with a letter or digit, at most 100 characters"
        )
    return chosen


def declared_struct(schema: StructType | str, what: str) -> StructType:
    """Return a schema passed to one of Spark's own APIs; raise Spark's errors."""
    parsed: object = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(parsed, StructType):
        raise wrong_type(what, "StructType or str", schema)
    return parse_struct(parsed, what)


def require_accepted_by_spark(
    df: DataFrame,
    func: Any,
    output: StructType | str,
    state: StructType,
    output_mode: str,
    timeout_conf: str,
) -> None:
    """Raise what Spark raises for these arguments: define its own ``applyInPandasWithState`` and discard it."""
    if not isinstance(output_mode, str):
        raise wrong_type("outputMode", "str", output_mode)
    # Any column will do as the key: Spark rejects expressions here, holdfast accepts them.
    grouped = df.groupBy(quoted(df.columns[0]))
    grouped.applyInPandasWithState(func, output, state, output_mode, timeout_conf)


Mode = Literal["append", "update"]


_NO_DURATION = "is a duration of weeks, days or shorter units, and longer than nothing, such as '1 day'"


def checked_mode(given: object) -> Mode:
    """Return an output mode. Raises `InvalidArgumentError` if there is no such mode."""
    mode = str(given).lower()
    if mode not in ("append", "update"):
        raise InvalidArgumentError(
            f"outputMode must be 'append' or 'update', not {given!r}; a complete result is what holdfast.read_state "
            "returns"
        )
    return "append" if mode == "append" else "update"


def after_1970(session: SparkSession, window: Column, part: str) -> int:
    """Return the start or the end, in microseconds, of the window that 1970 begins in; Spark runs no job for it."""
    epoch = session.sql("SELECT * FROM VALUES (TIMESTAMP'1970-01-01 00:00:00 UTC') AS epoch(t)")
    found = epoch.select(window.alias("w")).select(F.unix_micros(F.col("w").getField(part)))
    return int(found.collect()[0][0])


def duration_us(df: DataFrame, given: object, argument: str = "ttl") -> int:
    """Return a duration such as ``1 day`` in microseconds, as Spark reads it. Raises `InvalidArgumentError`."""
    if not isinstance(given, str):
        raise InvalidArgumentError(f"{argument} {_NO_DURATION}", given=repr(given))
    try:
        return after_1970(df.sparkSession, F.window("t", given), "end")
    except (AnalysisException, IllegalArgumentException) as exc:
        raise InvalidArgumentError(f"{argument} {_NO_DURATION}", given=repr(given)) from exc


# Spark knows the first by another name, too.
_MODES = {mode.lower(): mode for mode in TIMEOUT_CONF} | {"notime": "None"}
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
#: Spark's default. In the first micro-batch Spark refuses it, and others that it does not know.
_UNFIT_PROVIDER = ".HDFSBackedStateStoreProvider"
_FIT_PROVIDER = ".RocksDBStateStoreProvider"
_OUTPUT_MODES = ("append", "update", "complete")


def processor_host(
    output_mode: str, time_mode: str, event_time_column: str, output: StructType, df: DataFrame
) -> StatefulProcessorHost:
    """Return the host for the arguments of ``transformWithState``; raises as the functions below."""
    mode, times = output_mode_of(output_mode), time_mode_of(time_mode, df)
    require_protobuf()
    if df.isStreaming:
        require_host_of_processors(classic=is_classic(df.sparkSession))
        _require_state_store(df.sparkSession)
    if event_time_column:
        require_event_time(event_time_column, output, times, df)
    return StatefulProcessorHost(mode, times, event_time_column)


def can_host_processors(session: SparkSession) -> bool:
    """Tell whether a session runs processors, and so what hands a watermark on."""
    if not str(session.conf.get(_PROVIDER)).endswith(_FIT_PROVIDER):
        return False
    try:
        require_protobuf()
        require_host_of_processors(classic=is_classic(session))
    except InvalidArgumentError:
        return False
    return True


def _require_state_store(session: SparkSession) -> None:
    provider = str(session.conf.get(_PROVIDER))
    if provider.endswith(_UNFIT_PROVIDER):
        raise InvalidArgumentError(
            "Spark's transformWithState, in which processors run, needs Spark's RocksDB state store: set "
            f"{_PROVIDER} to org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
            is_now=provider,
        )


def time_mode_of(given: object, df: DataFrame) -> TimeMode:
    """Return a time mode, which may be given in any case. Raises `IllegalArgumentException`, `InvalidArgumentError`."""
    mode = _MODES.get(str(given).lower())
    if mode is None:
        raise IllegalArgumentException(
            f"[STATEFUL_PROCESSOR_UNKNOWN_TIME_MODE] Unknown time mode {given}. Accepted timeMode modes are 'none', "
            "'processingTime', 'eventTime'"
        )
    if mode == "EventTime" and df.isStreaming and time_column_of(df) is None:
        raise InvalidArgumentError(f"timeMode 'EventTime' {NEEDS_WATERMARK}")
    return cast("TimeMode", mode)


def output_mode_of(given: object) -> str:
    """Return an output mode, which may be given in any case. Raises `IllegalArgumentException`.

    It changes nothing that an operator does, as on Spark, where "complete" is refused for the query alone.
    """
    mode = str(given).lower()
    if mode not in _OUTPUT_MODES:
        raise IllegalArgumentException(
            f"[STREAMING_OUTPUT_MODE.INVALID] Invalid streaming output mode: {given}. Accepted output modes are "
            "'Append', 'Complete', 'Update'."
        )
    return mode


def require_event_time(column: str, output: StructType, time_mode: TimeMode, df: DataFrame) -> None:
    """Check the column that ``eventTimeColumnName`` names; Spark checks neither its type nor the time mode."""
    field = next((field for field in output if field.name == column), None)
    if field is not None and not isinstance(field.dataType, TimestampType):
        raise InvalidArgumentError(
            "eventTimeColumnName must name a timestamp column of the output: a watermark is a time",
            column=column,
            type=field.dataType.simpleString(),
        )
    if time_mode == "ProcessingTime":
        raise InvalidArgumentError(
            "eventTimeColumnName has no effect with timeMode 'ProcessingTime', whose operator passes no watermark "
            "on: operators behind it would never emit anything. Use 'EventTime' or 'None'",
            column=column,
        )
    time = time_column_of(df)
    if time is not None and time.watermark.held_back_ms:
        raise InvalidArgumentError(
            "eventTimeColumnName cannot follow a join: Spark fails a query whose processor returns rows older than the "
            "watermark, as a join's may be. Leave it out",
            column=column,
        )
    if not df.isStreaming and time is None:
        raise AnalysisException(
            "[CANNOT_ASSIGN_EVENT_TIME_COLUMN_WITHOUT_WATERMARK] Watermark needs to be defined to reassign event time "
            "column. Failed to find watermark definition in the streaming query."
        )
