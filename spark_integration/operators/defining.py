"""Turns ``agg`` into a definition.

Spark resolves it as its own aggregation, which gives the output's schema, and computes keys, windows and arguments
before the shuffle::

    df ─▶ keys, window_start, end, arguments ─▶ shards ─▶ keys, window, aggregates
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField, StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.hosts.group_state import GroupStateHost
from holdfast.spark_integration.operators.accumulators import Accumulator
from holdfast.spark_integration.operators.aggregates import Aggregate
from holdfast.spark_integration.operators.aggregation import WINDOW_END, WINDOW_START, Aggregation, Window
from holdfast.spark_integration.operators.sessions import SESSION_START, Sessions
from holdfast.spark_integration.plan.arguments import operator_name
from holdfast.spark_integration.plan.definition import Definition, KeyedRows
from holdfast.spark_integration.plan.event_time import event_time_of, without_watermark
from holdfast.spark_integration.plan.grouping_keys import Grouping, Key
from holdfast.spark_integration.plan.session import checked_settings, rows_each
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.spark_types import WATERMARK_METADATA, arrow_schema, types_of_keys
from holdfast.spark_integration.transport.output import output_of_tables
from holdfast.spark_integration.transport.transport import quoted

Mode = Literal["append", "update"]
_ARGUMENT, _WINDOW = "__holdfast_argument_", "__holdfast_window"
#: What Spark marks a column with that it has made of `window` or `session_window`.
_WINDOW_MARKS = ("spark.timeWindow", "spark.sessionWindow")


@dataclass(frozen=True)
class Aggregated:
    """The input of an aggregation, as Spark has resolved it.

    Attributes
    ----------
    df : DataFrame
        Keys, the window's start and end if there is one, and arguments.
    keys : list of Key
        Columns of `df`.
    accumulators : tuple of Accumulator
    output : StructType
        As of Spark's own aggregation.
    """

    df: DataFrame
    keys: list[Key]
    accumulators: tuple[Accumulator, ...]
    output: StructType

    @property
    def has_watermark(self) -> bool:
        """Whether windows are over some time."""
        return event_time_of(self.df) is not None

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

    Raises
    ------
    AnalysisException
        As of Spark's own aggregation: no such column, or one of a wrong type.
    InvalidArgumentError
        No aggregate, something else in its place, or one that holdfast has not; or a key is a window.
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
    if any(mark in metadata for mark in _WINDOW_MARKS) or WATERMARK_METADATA in metadata:
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
    metadata = made.schema[_WINDOW].metadata or {}
    mark = {k: v for k, v in metadata.items() if k == WATERMARK_METADATA}
    others = [quoted(name) for name in made.columns[:-1]]
    start, end = (F.col(_WINDOW).getField(part) for part in ("start", "end"))
    return made.select(*others, start.alias(WINDOW_START), end.alias(WINDOW_END, metadata=mark)), taken


def checked_mode(given: object) -> Mode:
    """Return an output mode.

    Raises
    ------
    InvalidArgumentError
        There is no such mode.
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

    Raises
    ------
    InvalidArgumentError
        The mode is append, or a setting is wrong.
    """
    if mode == "append":
        raise InvalidArgumentError(
            "append mode shows a result once, when it is final, and without a window none ever is: use "
            "outputMode='update', or groupBy(…).window(…)"
        )
    function = Aggregation(found.key_types(), found.accumulators, found.output_types, mode, None)
    return planned(found, found.keys, function, mode, name)


def by_window(found: Aggregated, length_us: int, definition: str, mode: Mode, name: str) -> DataFrame:
    """Define ``groupBy(…).window(…).agg(…)``.

    Raises
    ------
    InvalidArgumentError
        The mode is append and there is no watermark, or a setting is wrong.
    """
    if mode == "append" and found.df.isStreaming and not found.has_watermark:
        raise InvalidArgumentError(
            "append mode shows windows once they are over, which takes a watermark on their time column: "
            "df.withWatermark('at', '10 seconds'); or use outputMode='update'"
        )
    start = found.df.schema[WINDOW_START]
    column = found.output.fields[len(found.keys)].name
    window = Window(column, length_us, definition, found.has_watermark and found.df.isStreaming)
    emits: Mode = mode if found.df.isStreaming else "update"
    function = Aggregation(found.key_types(WINDOW_START), found.accumulators, found.output_types, emits, window)
    keys = [*found.keys, Key(start, quoted(WINDOW_START), WINDOW_START)]
    return planned(found, keys, function, mode, name)


def by_session(found: Aggregated, name: str) -> DataFrame:
    """Define ``groupBy(…).session(…).agg(…)``.

    Raises
    ------
    InvalidArgumentError
        There is no watermark, or a setting is wrong.
    """
    if found.df.isStreaming and not found.has_watermark:
        raise InvalidArgumentError(
            "sessions are shown once they are over, which takes a watermark on their time column: "
            "df.withWatermark('at', '10 seconds')"
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
    return planned(found, found.keys, function, "append", name)


def planned(found: Aggregated, keys: list[Key], function: ShardFunction, mode: Mode, name: str) -> DataFrame:
    """Return the DataFrame of an aggregation's output."""
    settings = checked_settings(found.df, stacklevel=4)
    is_timed = found.has_watermark and found.df.isStreaming
    return Definition(
        rows=KeyedRows(found.df, keys, function),
        name=operator_name(None, name),
        output=output_of_tables(without_watermark(found.output), rows_each(found.df), settings.transport),
        host=GroupStateHost(mode, "EventTimeTimeout" if is_timed else "NoTimeout"),
        # Where Spark drops late rows, one by one, every event time would need a blob of its own.
        transport=None if is_timed else "packed",
        settings=settings,
    ).plan()
