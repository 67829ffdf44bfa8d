"""``groupBy(…).agg(…)`` and ``groupBy(…).window(…).agg(…)``: aggregates by key or by key and window.

::

    rows ─partial.py─▶ states ─▶ grouped by key ─┐
                                                 ├─▶ reduced ─▶ state ─▶ update: the keys that had rows
    their state ─────────────────────────────────┘                │
                                                                  └─▶ closed windows ─▶ append: these

At definition, Spark resolves the aggregation as its own, which gives the output's schema. Spark computes keys, panes
and arguments before the shuffle; a pane is the window itself unless windows overlap (`panes.py`)::

    df ─▶ keys, start and end of the pane, arguments ─▶ shards ─▶ keys, window, aggregates
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField, StructType

from holdfast.backends.arrow.rows import IntArray, one_chunk, take
from holdfast.backends.run import Keys, TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.mvcc import Transaction
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.operators.accumulators import (
    Accumulator,
    reduced,
    require_same_aggregates,
    results,
    state_types,
)
from holdfast.spark_integration.operators.aggregates import Aggregate
from holdfast.spark_integration.operators.panes import WindowPlaces
from holdfast.spark_integration.operators.partial import PartialAggregation, received_states
from holdfast.spark_integration.plan.arguments import Mode, checked_mode, has_no_result
from holdfast.spark_integration.plan.definition import BEHIND_ANOTHER, KeyedRows, operator_plan
from holdfast.spark_integration.plan.event_time import time_column_of
from holdfast.spark_integration.plan.grouping_keys import Grouping, Key
from holdfast.spark_integration.shard.operator import STATE_TABLE, ShardInput
from holdfast.spark_integration.spark_types import Watermark, arrow_schema, conform_output, types_of_keys
from holdfast.spark_integration.tables.restarting import OperatorFunction
from holdfast.spark_integration.transport.packed import quoted
from holdfast.spark_integration.ttl.ends import Ends, microseconds, timestamps
from holdfast.spark_integration.vectorised.arrays import shown_keys

#: The key column with a window's start, and the row column with its end.
WINDOW_START, WINDOW_END = "window_start", "__holdfast_end"


@dataclass(frozen=True)
class Window:
    column: str  #: The output column, a struct of start and end
    places: WindowPlaces
    is_watched: bool  #: Whether a watermark closes the windows


@dataclass(frozen=True)
class Aggregation(OperatorFunction):
    """The `ShardFunction` of aggregates by key."""

    key_types: pa.Schema  #: In the output's types; includes a window's start
    accumulators: tuple[Accumulator, ...]
    output_types: pa.Schema
    emits: Literal["append", "update"]  #: "append": closed windows; "update": changed keys
    window: Window | None

    @cached_property
    def _state(self) -> TableSchema:
        return TableSchema.of(STATE_TABLE, self.key_types, state_types(self.accumulators))

    @property
    def before_shuffle(self) -> PartialAggregation:
        places = self.window.places if self.window is not None and self.window.places.overlap else None
        return PartialAggregation(self.accumulators, self._state, WINDOW_END if self._has_ends else None, places)

    @property
    def _has_ends(self) -> bool:
        return self.window is not None and self.window.is_watched

    def tables(self) -> Mapping[str, TableSchema]:
        return {STATE_TABLE: self._state, **(Ends.tables(self.key_types) if self._has_ends else {})}

    def configuration(self) -> Mapping[str, str]:
        if self.window is None:
            return {"operator": "agg"}
        return {"operator": "window", "window": self.window.places.definition}

    def require_same_columns(self, stored: StoredTables) -> None:
        require_same_aggregates(stored, self.tables())

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        ends = Ends(transaction, batch.times) if self._has_ends else None
        if batch.rows.num_rows:
            keys, states = self._with_rows(batch, transaction, ends)
            batch.counts.keys += len(keys)
            if self.emits == "update":
                yield self._shown(keys, states, batch.operator)
        if ends is None:
            return None
        yield from self._over(ends, batch, transaction)
        return ends.earliest_ms()

    def _with_rows(self, batch: ShardInput, transaction: Transaction, ends: Ends | None) -> tuple[Keys, pa.Table]:
        """Merge the rows into the state of their keys; return the keys and their states."""
        keys, order = batch.distinct_keys(self._state)
        found = transaction.get(STATE_TABLE, keys)
        stored = pa.Table.from_batches([take(found.values, np.flatnonzero(found.exists))])
        parts = pa.concat_tables([received_states(self._state.value, batch.rows), stored])
        states = reduced(self.accumulators, parts, order.with_stored(found.exists))
        transaction.put(STATE_TABLE, keys, states)
        if ends is not None:
            new = keys.take(np.flatnonzero(~found.exists))
            ends.add(new, self._ends_of(new))
        return keys, states

    def _over(self, ends: Ends, batch: ShardInput, transaction: Transaction) -> Iterator[pa.RecordBatch]:
        """Remove closed windows; in append mode, yield their results."""
        with transaction.deleting() as delete:
            for keys in ends.over(batch.counts):
                delete(STATE_TABLE, keys)
                if self.emits == "append":
                    states = pa.Table.from_batches([transaction.get(STATE_TABLE, keys).values])
                    yield self._shown(keys, states, batch.operator)

    def _ends_of(self, keys: Keys) -> IntArray:
        assert self.window is not None
        return microseconds(keys.columns.column(WINDOW_START)) + self.window.places.length_us

    def _shown(self, keys: Keys, states: pa.Table, operator: str) -> pa.RecordBatch:
        columns = shown_keys(keys, self.key_types)
        if self.window is not None:
            into_window(columns, self.window.column, self._ends_of(keys))
        columns |= results(self.accumulators, states)
        return conform_output(pa.table(columns), self.output_types, operator)


def into_window(columns: dict[str, pa.Array], name: str, end_us: IntArray) -> None:
    """Replace the last column, the windows' starts, by Spark's windows: structs of start and end."""
    start = one_chunk(columns.popitem()[1])
    columns[name] = pa.StructArray.from_arrays([start, timestamps(end_us, start.type)], ["start", "end"])


_ARGUMENT, _WINDOW = "__holdfast_argument_", "__holdfast_window"
#: Spark's mark on a column made by `window` or `session_window`.
_WINDOW_MARKS = ("spark.timeWindow", "spark.sessionWindow")


@dataclass(frozen=True)
class Aggregated:
    """The input of an aggregation, resolved by Spark."""

    df: DataFrame  #: Keys, a window's start and end, and arguments
    keys: list[Key]  #: Columns of `df`
    accumulators: tuple[Accumulator, ...]
    output: StructType  #: The output of Spark's own aggregation

    @cached_property
    def is_timed(self) -> bool:
        """Whether a watermark closes windows."""
        return self.df.isStreaming and time_column_of(self.df) is not None

    def key_types(self, *more: str) -> pa.Schema:
        """Return the types of the keys, followed by those of other columns of `df`."""
        return types_of_keys([*(key.field for key in self.keys), *(self.df.schema[name] for name in more)])

    @property
    def output_types(self) -> pa.Schema:
        """The output's schema in the types that the workers return."""
        return arrow_schema(self.output, "the output", keep_not_null=True)


def aggregated(
    df: DataFrame,
    grouping: Grouping,
    window: Column | None,
    positional: Sequence[Aggregate],
    named: Mapping[str, Aggregate],
    pane: Column | None = None,
) -> Aggregated:
    """Resolve an aggregation. Raises Spark's errors, or `InvalidArgumentError` if holdfast lacks an aggregate.

    `pane` replaces the window of each row if windows may overlap.
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
        require_free(key.field.name, *([] if window is None else [WINDOW_START]))
    keys = [key.expression.alias(key.field.name) for key in grouping.keys]
    aggregates = [*positional, *(aggregate.alias(name) for name, aggregate in named.items())]
    by = keys if window is None else [*keys, window]
    output = df.groupBy(*by).agg(*[aggregate.spark for aggregate in aggregates]).schema
    carried, columns = _carried(df, keys, window if pane is None else pane, aggregates)
    fields = zip(aggregates, columns, output.fields[len(by) :], strict=True)
    accumulators = tuple(
        aggregate.accumulator(field.name, column or "", carried.schema[column or 0].dataType, field.dataType)
        for aggregate, column, field in fields
    )
    by_name = [Key(carried.schema[key.field.name], quoted(key.field.name), key.field.name) for key in grouping.keys]
    return Aggregated(_hashed(carried, aggregates, columns), by_name, accumulators, output)


def _require_plain(field: StructField) -> None:
    metadata = field.metadata or {}
    if any(mark in metadata for mark in _WINDOW_MARKS) or Watermark.of(field) is not None:
        raise InvalidArgumentError(
            "state grouped by event time would never expire: use groupBy(…).window('at', '1 hour').agg(…) or "
            "groupBy(…).session('at', '5 minutes').agg(…)",
            key=field.name,
        )


def require_free(key: str, *taken: str) -> None:
    """Refuse a key named like a column that holdfast adds."""
    if key in taken or key.startswith("__holdfast_"):
        raise InvalidArgumentError(
            "a key is named like a column that holdfast adds: rename it, as in groupBy(F.col('a').alias('b'))",
            key=key,
        )


def _carried(
    df: DataFrame, keys: Sequence[Column], window: Column | None, aggregates: Sequence[Aggregate]
) -> tuple[DataFrame, list[str | None]]:
    """Return the columns to send to the shards, and the name of each aggregate's input column."""
    arguments: dict[str, Column] = {}
    taken: list[str | None] = []
    of_name: dict[tuple[str, bool], str] = {}
    for aggregate in aggregates:
        given = aggregate.argument
        if given is None:
            taken.append(None)
            continue
        if isinstance(given, str) and (given, aggregate.takes_hashes) in of_name:
            taken.append(of_name[given, aggregate.takes_hashes])
            continue
        name = f"{_ARGUMENT}{len(arguments)}"
        # Wrapped in an expression, so that the column does not carry a watermark's mark.
        arguments[name] = F.coalesce(F.col(given) if isinstance(given, str) else given).alias(name)
        taken.append(name)
        if isinstance(given, str):
            of_name[given, aggregate.takes_hashes] = name
    if window is None:
        return df.select(*keys, *arguments.values()), taken
    made = df.select(*keys, *arguments.values(), window.alias(_WINDOW))
    watermark = Watermark.of(made.schema[_WINDOW])
    mark: dict[str, Any] = {} if watermark is None else {**watermark.metadata}
    others = [quoted(name) for name in made.columns[:-1]]
    start, end = (F.col(_WINDOW).getField(part) for part in ("start", "end"))
    return made.select(*others, start.alias(WINDOW_START), end.alias(WINDOW_END, metadata=mark)), taken


def _hashed(df: DataFrame, aggregates: Sequence[Aggregate], columns: Sequence[str | None]) -> DataFrame:
    """Replace arguments sent as hashes by Spark's hashes; nulls stay null."""
    hashed = {name for aggregate, name in zip(aggregates, columns, strict=True) if name and aggregate.takes_hashes}
    for name in sorted(hashed):
        df = df.withColumn(name, F.when(F.col(name).isNotNull(), F.xxhash64(name)))
    return df


def by_key(found: Aggregated, mode: Mode, name: str) -> DataFrame:
    """Define ``groupBy(…).agg(…)``. Raises `InvalidArgumentError` for append mode or an invalid setting."""
    if mode == "append":
        raise InvalidArgumentError(
            "append mode shows a result once it is final, and without a window no result is ever final: use "
            "outputMode='update', or groupBy(…).window(…)"
        )
    function = Aggregation(found.key_types(), found.accumulators, found.output_types, mode, None)
    rows = KeyedRows(found.df, found.keys, function, combiner=function.before_shuffle)
    return operator_plan(rows, found.output, mode, name, is_timed=False)


def by_window(found: Aggregated, places: WindowPlaces, mode: Mode, name: str) -> DataFrame:
    """Define ``groupBy(…).window(…).agg(…)``. Raises `InvalidArgumentError`; append mode needs a watermark."""
    if mode == "append" and found.df.isStreaming and not found.is_timed:
        raise InvalidArgumentError(
            "append mode shows windows once they close, which needs a watermark on their time column: "
            f"df.withWatermark('at', '10 seconds'); or use outputMode='update'{BEHIND_ANOTHER}"
        )
    start = found.df.schema[WINDOW_START]
    column = found.output.fields[len(found.keys)].name
    window = Window(column, places, found.is_timed)
    emits: Mode = mode if found.df.isStreaming else "update"
    function = Aggregation(found.key_types(WINDOW_START), found.accumulators, found.output_types, emits, window)
    keys = [*found.keys, Key(start, quoted(WINDOW_START), WINDOW_START)]
    rows = KeyedRows(found.df, keys, function, combiner=function.before_shuffle)
    return operator_plan(rows, found.output, mode, name, is_timed=found.is_timed)


@dataclass(frozen=True)
class WindowedStream:
    """A DataFrame grouped by key and time window; see `GroupedStream.window`."""

    df: DataFrame
    grouping: Grouping
    window: Column
    pane: Column
    places: WindowPlaces

    if not TYPE_CHECKING:  # type checkers report it themselves

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that names the missing ``agg``."""
            raise has_no_result(self, name, "groupBy(…).window(…).agg(n=holdfast.count())")

    def agg(
        self,
        *aggregates: Aggregate,
        outputMode: str = "append",
        name: str = "window",
        **named: Aggregate,
    ) -> DataFrame:
        """Aggregate each key's rows per window, as ``groupBy(…, F.window(…)).agg(…)`` does.

        Parameters
        ----------
        *aggregates : Aggregate
            Named as in Spark, such as ``max(delay)``, or by `Aggregate.alias`.
        outputMode : {"append", "update"}
            Emit a window once, after the watermark passes its end, or whenever it changes. Start the query in the same
            mode.
        name : str
            The operator's name, unique in the query; identifies its state permanently.
        **named : Aggregate
            Aggregates by output column.

        Returns
        -------
        pyspark.sql.DataFrame
            The keys, ``window`` with ``start`` and ``end``, and the aggregates, in Spark's types.

        Raises
        ------
        AnalysisException
            As in Spark: no such column, or a column of the wrong type.
        InvalidArgumentError
            No aggregate or, in append mode, no watermark; or an invalid name, mode or setting.
        """
        mode = checked_mode(outputMode)
        found = aggregated(self.df, self.grouping, self.window, aggregates, named, self.pane)
        return by_window(found, self.places, mode, name)


def windowed(
    df: DataFrame,
    grouping: Grouping,
    timeColumn: str | Column,
    windowDuration: str,
    slideDuration: str | None,
    startTime: str | None,
) -> WindowedStream:
    """Group by windows; takes the parameters and raises the errors of Spark's `window`."""
    window = F.window(timeColumn, windowDuration, slideDuration, startTime)
    places = WindowPlaces.of(df.sparkSession, windowDuration, slideDuration, startTime)
    return WindowedStream(df, grouping, window, places.pane(timeColumn), places)
