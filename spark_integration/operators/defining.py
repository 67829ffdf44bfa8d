"""Turns ``agg`` into a definition, alone or behind ``window(…)`` and ``session(…)``.

Spark resolves it as its own aggregation, which gives the output's schema, and computes keys, windows and arguments
before the shuffle::

    df ─▶ keys, window_start, end, arguments ─▶ shards ─▶ keys, window, aggregates
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField, StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.operators.accumulators import Accumulator
from holdfast.spark_integration.operators.aggregates import Aggregate
from holdfast.spark_integration.operators.aggregation import WINDOW_END, WINDOW_START, Aggregation, Window
from holdfast.spark_integration.operators.sessions import SESSION_START, Sessions
from holdfast.spark_integration.plan.definition import KeyedRows
from holdfast.spark_integration.plan.event_time import event_time_of
from holdfast.spark_integration.plan.grouping_keys import Grouping, Key
from holdfast.spark_integration.plan.operator_plan import BEHIND_ANOTHER, Mode, operator_plan
from holdfast.spark_integration.spark_types import Watermark, arrow_schema, types_of_keys
from holdfast.spark_integration.transport.transport import quoted

_ARGUMENT, _WINDOW = "__holdfast_argument_", "__holdfast_window"
#: What Spark marks a column with that it has made of `window` or `session_window`.
_WINDOW_MARKS = ("spark.timeWindow", "spark.sessionWindow")


@dataclass(frozen=True)
class Aggregated:
    """The input of an aggregation, as Spark has resolved it."""

    df: DataFrame  #: Keys, the window's start and end if there is one, and arguments
    keys: list[Key]  #: Columns of `df`
    accumulators: tuple[Accumulator, ...]
    output: StructType  #: As of Spark's own aggregation

    @property
    def is_timed(self) -> bool:
        """Whether windows are over some time."""
        return self.df.isStreaming and event_time_of(self.df) is not None

    def key_types(self, *more: str) -> pa.Schema:
        """Return the types of the keys and, behind them, of other columns of `df`."""
        return types_of_keys([*(key.field for key in self.keys), *(self.df.schema[name] for name in more)])

    @property
    def output_types(self) -> pa.Schema:
        """The output in the types that the workers return."""
        return arrow_schema(self.output, "the output", keep_not_null=True)


def aggregated(
    df: DataFrame,
    grouping: Grouping,
    window: Column | None,
    positional: Sequence[Aggregate],
    named: Mapping[str, Aggregate],
) -> Aggregated:
    """Resolve an aggregation.

    Raises `AnalysisException` as Spark's own aggregation, and `InvalidArgumentError` if there is no aggregate, holdfast
    lacks one, or a key is a window.
    """
    given: list[object] = [*positional, *named.values()]
    wrong = [one for one in given if not isinstance(one, Aggregate)]
    if wrong or not given:
        raise InvalidArgumentError(
            "agg takes holdfast's aggregates: agg(n=holdfast.count(), worst=holdfast.max('delay')). Use Spark's "
            "functions within them, as in holdfast.sum(F.abs('delay'))",
            given=[type(one).__name__ for one in wrong],
        )
    for key in grouping.keys:
        _require_plain(key.field)
        if window is not None:
            _require_free(key.field.name, WINDOW_START, WINDOW_END)
    keys = [key.expression.alias(key.field.name) for key in grouping.keys]
    aggregates = [*positional, *(aggregate.alias(name) for name, aggregate in named.items())]
    by = keys if window is None else [*keys, window]
    output = df.groupBy(*by).agg(*[aggregate.spark for aggregate in aggregates]).schema
    carried, columns = _carried(df, keys, window, aggregates)
    fields = zip(aggregates, columns, output.fields[len(by) :], strict=True)
    accumulators = tuple(
        aggregate.accumulator(field.name, column or "", carried.schema[column or 0].dataType, field.dataType)
        for aggregate, column, field in fields
    )
    by_name = [Key(carried.schema[key.field.name], quoted(key.field.name), key.field.name) for key in grouping.keys]
    return Aggregated(carried, by_name, accumulators, output)


def _require_plain(field: StructField) -> None:
    metadata = field.metadata or {}
    if any(mark in metadata for mark in _WINDOW_MARKS) or Watermark.of(field) is not None:
        raise InvalidArgumentError(
            "state grouped by event time would never be over: use groupBy(…).window('at', '1 hour').agg(…) or "
            "groupBy(…).session('at', '5 minutes').agg(…)",
            key=field.name,
        )


def _require_free(key: str, *taken: str) -> None:
    if key in taken:
        raise InvalidArgumentError(
            "a key has the name of a column in which windows or sessions are kept: rename it, as in "
            "groupBy(F.col('a').alias('b'))",
            key=key,
        )


def _carried(
    df: DataFrame, keys: Sequence[Column], window: Column | None, aggregates: Sequence[Aggregate]
) -> tuple[DataFrame, list[str | None]]:
    """Return the columns that the shards need, and which of them each aggregate takes."""
    arguments: dict[str, Column] = {}
    taken: list[str | None] = []
    of_name: dict[str, str] = {}
    for aggregate in aggregates:
        given = aggregate.argument
        if given is None:
            taken.append(None)
            continue
        if isinstance(given, str) and given in of_name:
            taken.append(of_name[given])
            continue
        name = f"{_ARGUMENT}{len(arguments)}"
        # Within an expression, so that it does not carry the mark of a watermark.
        arguments[name] = F.coalesce(F.col(given) if isinstance(given, str) else given).alias(name)
        taken.append(name)
        if isinstance(given, str):
            of_name[given] = name
    if window is None:
        return df.select(*keys, *arguments.values()), taken
    made = df.select(*keys, *arguments.values(), window.alias(_WINDOW))
    watermark = Watermark.of(made.schema[_WINDOW])
    mark: dict[str, Any] = {} if watermark is None else {**watermark.metadata}
    others = [quoted(name) for name in made.columns[:-1]]
    start, end = (F.col(_WINDOW).getField(part) for part in ("start", "end"))
    return made.select(*others, start.alias(WINDOW_START), end.alias(WINDOW_END, metadata=mark)), taken


def checked_mode(given: object) -> Mode:
    """Return an output mode.

    Raises `InvalidArgumentError` if there is no such mode.
    """
    mode = str(given).lower()
    if mode not in ("append", "update"):
        raise InvalidArgumentError(
            f"outputMode must be 'append' or 'update', not {given!r}; a complete result is what holdfast.read_state "
            "returns"
        )
    return "append" if mode == "append" else "update"


def by_key(found: Aggregated, mode: Mode, name: str) -> DataFrame:
    """Define ``groupBy(…).agg(…)``.

    Raises `InvalidArgumentError` if the mode is append, or a setting is wrong.
    """
    if mode == "append":
        raise InvalidArgumentError(
            "append mode shows a result once, when it is final, and without a window none ever is: use "
            "outputMode='update', or groupBy(…).window(…)"
        )
    function = Aggregation(found.key_types(), found.accumulators, found.output_types, mode, None)
    return operator_plan(KeyedRows(found.df, found.keys, function), found.output, mode, name, is_timed=False)


def by_window(found: Aggregated, length_us: int, definition: str, mode: Mode, name: str) -> DataFrame:
    """Define ``groupBy(…).window(…).agg(…)``.

    Raises `InvalidArgumentError` if the mode is append and there is no watermark, or a setting is wrong.
    """
    if mode == "append" and found.df.isStreaming and not found.is_timed:
        raise InvalidArgumentError(
            "append mode shows windows once they are over, which takes a watermark on their time column: "
            f"df.withWatermark('at', '10 seconds'); or use outputMode='update'{BEHIND_ANOTHER}"
        )
    start = found.df.schema[WINDOW_START]
    column = found.output.fields[len(found.keys)].name
    window = Window(column, length_us, definition, found.is_timed)
    emits: Mode = mode if found.df.isStreaming else "update"
    function = Aggregation(found.key_types(WINDOW_START), found.accumulators, found.output_types, emits, window)
    keys = [*found.keys, Key(start, quoted(WINDOW_START), WINDOW_START)]
    return operator_plan(KeyedRows(found.df, keys, function), found.output, mode, name, is_timed=found.is_timed)


def by_session(found: Aggregated, name: str) -> DataFrame:
    """Define ``groupBy(…).session(…).agg(…)``.

    Raises `InvalidArgumentError` if there is no watermark, or a setting is wrong.
    """
    if found.df.isStreaming and not found.is_timed:
        raise InvalidArgumentError(
            "sessions are shown once they are over, which takes a watermark on their time column: "
            f"df.withWatermark('at', '10 seconds'){BEHIND_ANOTHER}"
        )
    start = found.df.schema[WINDOW_START]
    named_start = StructField(SESSION_START, start.dataType)
    for key in found.keys:
        _require_free(key.field.name, SESSION_START)
    function = Sessions(
        types_of_keys([*(key.field for key in found.keys), named_start]),
        found.accumulators,
        found.output_types,
        found.output.fields[len(found.keys)].name,
        found.df.isStreaming,
    )
    rows = KeyedRows(found.df, found.keys, function)
    return operator_plan(rows, found.output, "append", name, is_timed=found.is_timed)


@dataclass(frozen=True)
class WindowedStream:
    """A DataFrame grouped by key and by windows of time; see `GroupedStream.window`."""

    df: DataFrame
    grouping: Grouping
    window: Column
    length_us: int
    definition: str

    def agg(
        self,
        *aggregates: Aggregate,
        outputMode: str = "append",
        name: str = "window",
        **named: Aggregate,
    ) -> DataFrame:
        """Aggregate each key's rows of each window, as ``groupBy(…, F.window(…)).agg(…)`` does.

        Parameters
        ----------
        *aggregates : Aggregate
            With Spark's names, such as ``max(delay)``, or those that `Aggregate.alias` has given.
        outputMode : {"append", "update"}
            Show a window once, when the watermark has passed its end; or whenever it changes. The query must be started
            in the same mode.
        name : str
            Name of the operator, which identifies its state for good. Unique in a query.
        **named : Aggregate
            By column.

        Returns
        -------
        pyspark.sql.DataFrame
            The keys, ``window`` with ``start`` and ``end``, and the aggregates, in Spark's types.

        Raises
        ------
        AnalysisException
            As of Spark's own aggregation: no such column, or one of a wrong type.
        InvalidArgumentError
            No aggregate, append mode without a watermark, or a wrong name, mode or setting; nothing has run.
        """
        mode = checked_mode(outputMode)
        found = aggregated(self.df, self.grouping, self.window, aggregates, named)
        return by_window(found, self.length_us, self.definition, mode, name)


@dataclass(frozen=True)
class SessionStream:
    """A DataFrame grouped by key and by sessions; see `GroupedStream.session`."""

    df: DataFrame
    grouping: Grouping
    session: Column

    def agg(self, *aggregates: Aggregate, name: str = "session", **named: Aggregate) -> DataFrame:
        """Aggregate each key's sessions, as ``groupBy(…, F.session_window(…)).agg(…)`` does, in append mode.

        Parameters
        ----------
        *aggregates : Aggregate
            With Spark's names, such as ``max(delay)``, or those that `Aggregate.alias` has given.
        name : str
            Name of the operator, which identifies its state for good. Unique in a query.
        **named : Aggregate
            By column.

        Returns
        -------
        pyspark.sql.DataFrame
            The keys, ``session_window`` with ``start`` and ``end``, and the aggregates, in Spark's types. A
            session is shown once, when the watermark has passed its end.

        Raises
        ------
        AnalysisException
            As of Spark's own aggregation: no such column, or one of a wrong type.
        InvalidArgumentError
            No aggregate, no watermark, or a wrong name or setting; nothing has run.
        """
        return by_session(aggregated(self.df, self.grouping, self.session, aggregates, named), name)


def windowed(
    df: DataFrame,
    grouping: Grouping,
    timeColumn: str | Column,
    windowDuration: str,
    slideDuration: str | None,
    startTime: str | None,
) -> WindowedStream:
    """Group by windows; parameters and errors are those of Spark's `window`."""
    session = df.sparkSession
    window = F.window(timeColumn, windowDuration, slideDuration, startTime)
    length_us = after_1970(session, F.window("t", windowDuration), "end")
    slide = slideDuration or windowDuration
    slide_us = length_us if slideDuration is None else after_1970(session, F.window("t", slideDuration), "end")
    start_us = (
        0 if startTime is None else after_1970(session, F.window("t", slide, slide, startTime), "start") % slide_us
    )
    definition = f"length_us={length_us}, slide_us={slide_us}, start_us={start_us}"
    return WindowedStream(df, grouping, window, length_us, definition)


def by_sessions(df: DataFrame, grouping: Grouping, timeColumn: str | Column, gap: str | Column) -> SessionStream:
    """Group by sessions; parameters are those of Spark's `session_window`, which looks at the gap row by row.

    Raises `InvalidArgumentError` unless the gap is a positive duration: Spark would fail in a micro-batch, or drop all
    rows.
    """
    if isinstance(gap, str):
        end = F.lit("1970-01-01 00:00:00 UTC").cast("timestamp") + F.lit(gap).try_cast("interval")
        [[end_us]] = df.sparkSession.sql("SELECT * FROM VALUES (1) AS one(n)").select(F.unix_micros(end)).collect()
        if end_us is None or end_us <= 0:
            raise InvalidArgumentError(
                "gap must be a duration longer than nothing, such as '5 minutes'", given=repr(gap)
            )
    return SessionStream(df, grouping, F.session_window(timeColumn, gap))


def after_1970(session: SparkSession, window: Column, part: str) -> int:
    """Return the start or the end, in microseconds, of the window that 1970 begins in; Spark runs no job for it.

    Raises what Spark raises for what is no duration.
    """
    epoch = session.sql("SELECT * FROM VALUES (TIMESTAMP'1970-01-01 00:00:00 UTC') AS epoch(t)")
    found = epoch.select(window.alias("w")).select(F.unix_micros(F.col("w").getField(part)))
    return int(found.collect()[0][0])
