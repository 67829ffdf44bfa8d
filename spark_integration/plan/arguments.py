"""Checks the arguments of the APIs when a step is defined; Spark's own checks raise Spark's errors.

Changes to state columns, ``stateChanges={"drop": ["m"], "rename": {"old": "new"}}``, may remain in the code after they
were applied. A dropped or renamed column must not be declared, so that no change is applied twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, Literal, NoReturn

from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType, TimestampType

from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.options import did_you_mean
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.hosts.host import StatefulProcessorHost
from holdfast.spark_integration.plan.event_time import NEEDS_WATERMARK, time_column_of
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.shard.pointer_row import OPERATOR_NAME
from holdfast.spark_integration.shard.timeout import TIME_MODES, TimeMode
from holdfast.spark_integration.spark_types import parse_struct
from holdfast.spark_integration.spark_versions import (
    is_classic,
    require_host_of_processors,
    require_protobuf,
    wrong_type,
)
from holdfast.spark_integration.transport.packed import quoted
from holdfast.spark_integration.ttl.expiry import EXPIRES

Mode = Literal["append", "update"]
_NO_DURATION = "must be a positive duration of weeks, days or shorter units, such as '1 day'"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
#: Spark's default, which transformWithState rejects in the first micro-batch, like unknown providers.
_UNFIT_PROVIDER = ".HDFSBackedStateStoreProvider"
_FIT_PROVIDER = ".RocksDBStateStoreProvider"
_OUTPUT_MODES = ("append", "update", "complete")
#: The type of `stateChanges` in the APIs.
StateChanges = Mapping[str, Any]
_DROP, _RENAME = "drop", "rename"


def operator_name(func: object, name: str | None) -> str:
    """Return the operator's name, a valid folder name. Raises `InvalidArgumentError`.

    The default is the name of the function or class, without leading underscores, which would hide the folder.
    """
    chosen = getattr(func, "__name__", "").lstrip("_") if name is None else name
    if not isinstance(chosen, str) or not OPERATOR_NAME.fullmatch(chosen):
        raise InvalidArgumentError(
            f"{chosen!r} cannot name an operator: pass name= with letters from a to z, digits, '_', '.' and '-', "
            "starting with a letter or digit, at most 100 characters"
        )
    return chosen


def require_takes_batch(func: object) -> None:
    """Check that a vectorised function can be called with a shard's batch. Raises `InvalidArgumentError`."""
    if not callable(func):
        raise InvalidArgumentError("func must be callable", given=type(func).__name__)
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(None)
    except TypeError as exc:
        raise InvalidArgumentError(
            "func must take one argument, the batch with rows, state and timers", given=f"func{signature}"
        ) from exc


def declared_struct(schema: StructType | str, what: str) -> StructType:
    """Parse a schema with Spark's rules and errors."""
    parsed: object = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(parsed, StructType):
        raise wrong_type(what, "StructType or str", schema)
    return parse_struct(parsed, what)


def require_accepted_by_spark(
    df: DataFrame, func: Any, output: StructType | str, state: StructType, output_mode: str, timeout_conf: str
) -> None:
    """Raise Spark's errors for these arguments: call Spark's ``applyInPandasWithState`` and discard the result."""
    if not isinstance(output_mode, str):
        raise wrong_type("outputMode", "str", output_mode)
    # Use any column as the key: Spark rejects key expressions, which holdfast accepts.
    grouped = df.groupBy(quoted(df.columns[0]))
    grouped.applyInPandasWithState(func, output, state, output_mode, timeout_conf)


def checked_mode(given: object) -> Mode:
    """Normalise an output mode. Raises `InvalidArgumentError`."""
    mode = str(given).lower()
    if mode not in ("append", "update"):
        raise InvalidArgumentError(
            f"outputMode must be 'append' or 'update', not {given!r}. For complete mode, Spark requires an aggregation "
            "of its own: upsert the rows of update mode by key instead, or read all state with holdfast.read_state"
        )
    return "append" if mode == "append" else "update"


def after_1970(session: SparkSession, window: Column, part: str) -> int:
    """Return the start or end, in microseconds, of the window that contains the epoch, without a Spark job."""
    epoch = session.sql("SELECT * FROM VALUES (TIMESTAMP'1970-01-01 00:00:00 UTC') AS epoch(t)")
    found = epoch.select(window.alias("w")).select(F.unix_micros(F.col("w").getField(part)))
    return int(found.collect()[0][0])


def duration_us(df: DataFrame, given: object, argument: str = "ttl") -> int:
    """Let Spark parse a duration such as ``1 day``; return microseconds. Raises `InvalidArgumentError`."""
    if not isinstance(given, str):
        raise InvalidArgumentError(f"{argument} {_NO_DURATION}", given=repr(given))
    try:
        return after_1970(df.sparkSession, F.window("t", given), "end")
    except (AnalysisException, IllegalArgumentException) as exc:
        raise InvalidArgumentError(f"{argument} {_NO_DURATION}", given=repr(given)) from exc


def processor_host(
    output_mode: str, time_mode: str, event_time_column: str, output: StructType, df: DataFrame
) -> StatefulProcessorHost:
    """Return the host for the arguments of ``transformWithState``. Raises the errors of the functions below."""
    mode, times = output_mode_of(output_mode), time_mode_of(time_mode, df)
    require_protobuf()
    if df.isStreaming:
        require_host_of_processors(classic=is_classic(df.sparkSession))
        provider = str(df.sparkSession.conf.get(_PROVIDER))
        if provider.endswith(_UNFIT_PROVIDER):
            raise InvalidArgumentError(
                "processors run in Spark's transformWithState, which needs Spark's RocksDB state store: set "
                f"{_PROVIDER} to org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
                is_now=provider,
            )
    if event_time_column:
        require_event_time(event_time_column, output, times, df)
    return StatefulProcessorHost(mode, times, event_time_column)


def can_host_processors(session: SparkSession, provider: str | None = None) -> bool:
    """Return whether a session can run processors with `provider`, by default with its own state store."""
    if not str(provider or session.conf.get(_PROVIDER)).endswith(_FIT_PROVIDER):
        return False
    try:
        require_protobuf()
        require_host_of_processors(classic=is_classic(session))
    except InvalidArgumentError:
        return False
    return True


def time_mode_of(given: object, df: DataFrame) -> TimeMode:
    """Normalise a time mode, ignoring case. Raises `IllegalArgumentException`, `InvalidArgumentError`."""
    mode = TIME_MODES.get(str(given).lower())
    if mode is None:
        raise IllegalArgumentException(
            f"[STATEFUL_PROCESSOR_UNKNOWN_TIME_MODE] Unknown time mode {given}. Accepted timeMode modes are 'none', "
            "'processingTime', 'eventTime'"
        )
    if mode == "EventTime" and df.isStreaming and time_column_of(df) is None:
        raise InvalidArgumentError(f"timeMode 'EventTime' {NEEDS_WATERMARK}")
    return mode


def output_mode_of(given: object) -> str:
    """Normalise a processor's output mode, which has no effect on results. Raises `IllegalArgumentException`."""
    mode = str(given).lower()
    if mode not in _OUTPUT_MODES:
        raise IllegalArgumentException(
            f"[STREAMING_OUTPUT_MODE.INVALID] Invalid streaming output mode: {given}. Accepted output modes are "
            "'Append', 'Complete', 'Update'."
        )
    return mode


def require_event_time(column: str, output: StructType, time_mode: TimeMode, df: DataFrame) -> None:
    """Check ``eventTimeColumnName``; Spark checks neither the column's type nor the time mode."""
    field = next((field for field in output if field.name == column), None)
    if field is not None and not isinstance(field.dataType, TimestampType):
        raise InvalidArgumentError(
            "eventTimeColumnName must name a timestamp column of the output",
            column=column,
            type=field.dataType.simpleString(),
        )
    if time_mode == "ProcessingTime":
        raise InvalidArgumentError(
            "eventTimeColumnName has no effect with timeMode 'ProcessingTime', which passes on no watermark, so "
            "downstream operators would never emit rows: use 'EventTime' or 'None'",
            column=column,
        )
    time = time_column_of(df)
    if time is not None and time.watermark.held_back_ms:
        raise InvalidArgumentError(
            "eventTimeColumnName cannot follow a join: a join may emit rows older than the watermark, and Spark fails "
            "a query whose processor returns such rows. Omit eventTimeColumnName",
            column=column,
        )
    if not df.isStreaming and time is None:
        raise AnalysisException(
            "[CANNOT_ASSIGN_EVENT_TIME_COLUMN_WITHOUT_WATERMARK] Watermark needs to be defined to reassign event time "
            "column. Failed to find watermark definition in the streaming query."
        )


def changes_of_tables(given: StateChanges | None, tables: Mapping[str, Collection[str]]) -> dict[str, ColumnChanges]:
    """Return the changes to columns by state table; with `STATE_TABLE` alone, changes may be passed directly.

    Raises `InvalidArgumentError` for invalid changes and unknown tables.
    """
    known = dict(tables)
    if list(known) == [STATE_TABLE] and isinstance(given, Mapping) and given.keys() & {_DROP, _RENAME}:
        given = {STATE_TABLE: given}
    return {name: _changes(of, name, known[name]) for name, of in _by_table(given, known, "state table").items()}


def changes_of_variables(given: StateChanges | None, variables: Collection[StateVariable]) -> dict[str, ColumnChanges]:
    """Return the changes to columns by table, given the changes by state variable; see `changes_of_tables`."""
    known = {variable.name: variable for variable in variables}
    return {
        known[name].table: _changes(of, name, known[name].schema.names)
        for name, of in _by_table(given, known, "state variable").items()
    }


def _by_table(given: Any, known: Mapping[str, object], what: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        _refuse("it must be a mapping", given=given)
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        near = did_you_mean(unknown[0], [*known, _DROP, _RENAME])
        _refuse(f"name a {what} that the operator declares{near}", unknown=unknown, declared=list(known))
    return given


def _changes(given: Any, table: str, declared: Collection[str]) -> ColumnChanges:
    unknown = [str(name) for name in given if name not in (_DROP, _RENAME)] if isinstance(given, Mapping) else [""]
    if unknown:
        near = did_you_mean(unknown[0], (_DROP, _RENAME))
        _refuse(f"use only 'drop' and 'rename'{near}", table=table, given=given)
    drop, rename = given.get(_DROP, ()), given.get(_RENAME, {})
    if not isinstance(drop, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in drop):
        _refuse("'drop' must be a list of column names", table=table, given=drop)
    if not isinstance(rename, Mapping) or not all(isinstance(n, str) for pair in rename.items() for n in pair):
        _refuse("'rename' must map old column names to new names", table=table, given=rename)
    gone = [*drop, *rename]
    if both := sorted({*drop} & {*rename}):
        _refuse("a column cannot be both dropped and renamed", table=table, columns=both)
    if still := sorted({*gone} & {*declared}):
        _refuse(
            "a dropped or renamed column is still declared: if the change was applied and a new column now has the "
            "name, remove the change from stateChanges",
            table=table,
            columns=still,
        )
    if missing := sorted({*rename.values()} - {*declared}):
        near = did_you_mean(missing[0], declared)
        _refuse(f"a column is renamed to a name that is not declared{near}", table=table, columns=missing)
    if len({*rename.values()}) < len(rename):
        _refuse("two columns are renamed to the same name", table=table, rename=dict(rename))
    if EXPIRES in gone:
        _refuse(f"{EXPIRES!r} is reserved by holdfast: it cannot be dropped or renamed", table=table)
    return ColumnChanges(frozenset(drop), dict(rename))


def _refuse(why: str, **facts: object) -> NoReturn:
    raise InvalidArgumentError(
        "stateChanges must look like {'drop': ['m'], 'rename': {'old': 'new'}}, or map state tables or a "
        f"processor's variables to such changes: {why}",
        **facts,
    )


def has_no_result(owner: object, name: str, until: str) -> AttributeError:
    """Return the error for a missing attribute, such as a DataFrame's; `until` is the call that returns a DataFrame."""
    if hasattr(DataFrame, name) and not name.startswith("_"):
        return AttributeError(f"only a result has {name}, and nothing is computed yet: {until}.{name}", name=name)
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)
