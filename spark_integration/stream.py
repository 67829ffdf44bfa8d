"""The public API: ``holdfast.stream(df).groupBy("user").applyInPandasWithState(…)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NoReturn

import pyarrow as pa
from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from holdfast.distribution import require_no_namesake
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.hosts.host import GroupStateHost, StatefulProcessorHost
from holdfast.spark_integration.keyed.frames import FrameFormat
from holdfast.spark_integration.keyed.pandas_with_state import PandasFunction, PandasWithState
from holdfast.spark_integration.operators.aggregates import Aggregate
from holdfast.spark_integration.operators.aggregation import WindowedStream, aggregated, by_key, windowed
from holdfast.spark_integration.operators.deduplication import deduplicated, deduplicated_within_watermark
from holdfast.spark_integration.operators.joining import JoinableStream
from holdfast.spark_integration.operators.sessions import SessionStream, by_sessions
from holdfast.spark_integration.operators.top import latest_rows, top_rows
from holdfast.spark_integration.plan.arguments import (
    StateChanges,
    changes_of_tables,
    changes_of_variables,
    checked_mode,
    declared_struct,
    duration_us,
    has_no_result,
    operator_name,
    processor_host,
    require_accepted_by_spark,
    require_takes_batch,
)
from holdfast.spark_integration.plan.definition import Definition, KeyedRows
from holdfast.spark_integration.plan.event_time import (
    NEEDS_WATERMARK,
    marked_as_delivered,
    time_column_of,
    without_watermark,
)
from holdfast.spark_integration.plan.grouping_keys import Grouping, initial_rows, resolve_keys
from holdfast.spark_integration.plan.session import checked_settings, require_session, rows_each
from holdfast.spark_integration.processor.exchange import FrameExchange, RowExchange
from holdfast.spark_integration.processor.handle import PickledProcessor, declaration_of
from holdfast.spark_integration.processor.transform_with_state import InitialState, TransformWithState
from holdfast.spark_integration.shard.operator import INITIAL_VERSION, STATE_TABLE
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode, TimeoutConf
from holdfast.spark_integration.spark_types import arrow_schema, parse_struct, types_of_keys
from holdfast.spark_integration.transport.output import OneByOneOutput, PackedOutput, RowsOutput
from holdfast.spark_integration.vectorised.arrow_with_state import (
    ArrowFunction,
    ArrowWithState,
    Declared,
    declared_states,
)


def stream(df: DataFrame) -> StatefulStream:
    """Start defining a stateful operator on a DataFrame.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Streaming or batch; in a batch query, state starts empty and is not kept.

    Returns
    -------
    StatefulStream

    Raises
    ------
    InvalidArgumentError
        `df` is not a DataFrame, or its session was stopped.
    ConflictError
        A different project's package named ``holdfast`` is installed over this one.

    Examples
    --------
    >>> totals = (
    ...     holdfast.stream(events)
    ...     .groupBy("user")
    ...     .applyInArrowWithState(add_up, "user string, n long", "n long", "update", name="totals")
    ... )
    """
    require_no_namesake()
    if not isinstance(df, DataFrame):
        raise InvalidArgumentError(
            "holdfast.stream takes a Spark DataFrame, such as one from spark.readStream", given=type(df).__name__
        )
    require_session(df.sparkSession)
    return StatefulStream(df)


#: Methods of Spark's `GroupedData` that holdfast has as functions for ``agg``.
_SPARKS_AGGREGATES = ("count", "sum", "avg", "mean", "min", "max")


@dataclass(frozen=True)
class StatefulStream(JoinableStream):
    """A DataFrame on which to define a stateful operator; see `stream`."""

    df: DataFrame

    def groupBy(self, *keys: str | int | Column | Sequence[str | int | Column]) -> GroupedStream:
        """Group by columns, as ``DataFrame.groupBy`` does.

        Parameters
        ----------
        *keys : str, int or Column
            Column names, ordinals counted from 1, or expressions; or one sequence of them. Null is a key like any
            other.

        Raises
        ------
        AnalysisException, PySparkTypeError, PySparkIndexError, IndexError
            As in Spark: no such column, or an argument is not a column.
        InvalidArgumentError
            There is no key, two different keys share a name, or a key's type cannot be grouped by.
        """
        return GroupedStream(self.df, resolve_keys(self.df, keys))

    def window(
        self,
        timeColumn: str | Column,
        windowDuration: str,
        slideDuration: str | None = None,
        startTime: str | None = None,
    ) -> WindowedStream:
        """Group by time windows only; see `GroupedStream.window`."""
        return windowed(self.df, Grouping([], []), timeColumn, windowDuration, slideDuration, startTime)

    def dropDuplicates(
        self, subset: Sequence[str] | None = None, ttl: str | None = None, name: str = "dropDuplicates"
    ) -> DataFrame:
        """Keep the first row of each key, as ``DataFrame.dropDuplicates`` does, and remember the key for `ttl`.

        Parameters
        ----------
        subset : list of str, optional
            Columns that identify a duplicate; by default all.
        ttl : str, optional
            How long to remember a key after its first row, such as ``"1 day"``: in event time if the input has a
            watermark, else in processing time. By default forever, as in Spark, unless `subset` contains the
            watermark column.
        name : str
            The operator's name, unique in the query; identifies its state permanently.

        Returns
        -------
        pyspark.sql.DataFrame
            The input's columns. Start the query in append mode.

        Raises
        ------
        AnalysisException, PySparkTypeError
            As in Spark: no such column, or `subset` is not a list of names.
        InvalidArgumentError
            A column's type cannot be grouped by, or a name or setting is invalid. Raised before anything runs.

        Examples
        --------
        >>> holdfast.stream(orders).dropDuplicates(["id"], ttl="1 day")
        """
        return deduplicated(self.df, subset, ttl, name)

    def dropDuplicatesWithinWatermark(
        self, subset: Sequence[str] | None = None, name: str = "dropDuplicatesWithinWatermark"
    ) -> DataFrame:
        """Keep the first row of each key, as Spark's method of this name does.

        Parameters
        ----------
        subset, name
            As in `dropDuplicates`, which also documents the result and the errors.

        Raises
        ------
        InvalidArgumentError
            The input is not a stream with a watermark.
        """
        return deduplicated_within_watermark(self.df, subset, name)

    if not TYPE_CHECKING:  # type checkers report it themselves

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an AttributeError that names the call to make instead."""
            if hasattr(GroupedStream, name):
                raise AttributeError(f"group first: holdfast.stream(df).groupBy(…).{name}(…)", name=name)
            if name == "writeStream":
                raise has_no_result(self, name, "holdfast.stream(df).groupBy(…).<operator>(…)")
            spelt = name.replace("_", "").lower()  # as Spark's aliases are: groupby, drop_duplicates
            if own := next((one for one in vars(StatefulStream) if one.lower() == spelt), None):
                raise AttributeError(f"did you mean {own}? holdfast.stream(df).{own}(…)", name=name)
            if hasattr(DataFrame, name):
                raise AttributeError(
                    f"call {name} on the DataFrame: holdfast.stream(df.{name}(…)).groupBy(…)", name=name
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)


@dataclass(frozen=True)
class GroupedStream:
    """A DataFrame grouped by key; see `StatefulStream.groupBy`."""

    df: DataFrame
    grouping: Grouping

    if not TYPE_CHECKING:  # type checkers report it themselves

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an AttributeError that names the call to make instead."""
            if name in _SPARKS_AGGREGATES:
                of = "" if name == "count" else "'column'"
                raise AttributeError(f"call {name} in agg: groupBy(…).agg(n=holdfast.{name}({of}))", name=name)
            if hasattr(GroupedData, name) and not name.startswith("_"):
                raise AttributeError(
                    f"{name} is Spark's, with Spark's state: df.groupBy(…).{name}(…). holdfast has agg, window, "
                    "session, top, latest, applyInArrowWithState, applyInPandasWithState, transformWithState and "
                    "transformWithStateInPandas",
                    name=name,
                )
            raise has_no_result(self, name, "holdfast.stream(df).groupBy(…).<operator>(…)")

    def agg(
        self, *aggregates: Aggregate, outputMode: str = "update", name: str = "agg", **named: Aggregate
    ) -> DataFrame:
        """Aggregate each key's rows, as ``DataFrame.groupBy(…).agg(…)`` does.

        Parameters
        ----------
        *aggregates : Aggregate
            Named as in Spark, such as ``max(delay)``, or by `Aggregate.alias`.
        outputMode : {"update"}
            Start the query in this mode: each micro-batch emits the keys that had rows.
        name : str
            The operator's name, unique in the query; identifies its state permanently.
        **named : Aggregate
            Aggregates by output column.

        Returns
        -------
        pyspark.sql.DataFrame
            The keys and the aggregates, in Spark's types.

        Raises
        ------
        AnalysisException
            As in Spark: no such column, or a column of the wrong type.
        InvalidArgumentError
            No aggregate, or an invalid name, mode or setting. Raised before anything runs.

        Examples
        --------
        >>> flights = holdfast.stream(df).groupBy("aircraft")
        >>> flights.agg(n=holdfast.count(), worst=holdfast.max("delay"))
        """
        mode = checked_mode(outputMode)
        return by_key(aggregated(self.df, self.grouping, None, aggregates, named), mode, name)

    def window(
        self,
        timeColumn: str | Column,
        windowDuration: str,
        slideDuration: str | None = None,
        startTime: str | None = None,
    ) -> WindowedStream:
        """Group by time windows as well, as Spark's ``F.window`` does; then call `WindowedStream.agg`.

        Parameters
        ----------
        timeColumn : str or Column
            Timestamps; a row with a null timestamp is in no window.
        windowDuration, slideDuration, startTime : str
            As in Spark's ``F.window``: window length, slide interval, and offset from the start of 1970 UTC.

        Returns
        -------
        WindowedStream

        Raises
        ------
        AnalysisException, IllegalArgumentException
            As in Spark, for an invalid duration. `WindowedStream.agg` reports an invalid column.

        Examples
        --------
        >>> hours = holdfast.stream(df.withWatermark("at", "10 minutes")).groupBy("user").window("at", "1 hour")
        >>> hours.agg(n=holdfast.count())
        """
        return windowed(self.df, self.grouping, timeColumn, windowDuration, slideDuration, startTime)

    def session(self, timeColumn: str | Column, gap: str | Column) -> SessionStream:
        """Group by sessions as well, as Spark's ``F.session_window`` does; then call `SessionStream.agg`.

        Parameters
        ----------
        timeColumn : str or Column
            Timestamps; a row with a null timestamp is in no session.
        gap : str or Column
            A session ends when this much time has passed since its last row.

        Returns
        -------
        SessionStream

        Raises
        ------
        InvalidArgumentError
            The gap is not a positive duration.

        Examples
        --------
        >>> visits = holdfast.stream(df.withWatermark("at", "10 minutes")).groupBy("user").session("at", "30 minutes")
        >>> visits.agg(n=holdfast.count(), first=holdfast.min("at"))
        """
        return by_sessions(self.df, self.grouping, timeColumn, gap)

    def top(
        self,
        n: int,
        by: str | Sequence[str],
        ascending: bool | Sequence[bool] = False,
        emit: Literal["list", "changes"] = "list",
        ttl: str | None = None,
        outputMode: str = "update",
        name: str = "top",
    ) -> DataFrame:
        """Keep each key's first `n` rows, ordered by the given columns, largest values first by default.

        Parameters
        ----------
        n : int
            Rows per key.
        by : str or list of str
            Columns to sort by, as ``DataFrame.sort`` does: null sorts below all values, NaN above all numbers.
            Among equal rows, the first to arrive stays.
        ascending : bool or list of bool
            Whether the smallest values come first; for all columns, or per column.
        emit : {"list", "changes"}
            Emit a key's whole list when it has changed, with each row's ``place``, counted from 1; or only the rows
            that left and entered it, with ``change_type`` "delete" and "insert".
        ttl : str, optional
            How long to remember a key after the newest row in its list, such as ``"7 days"``: in event time if the
            input has a watermark, and late rows are then dropped; else in processing time. By default forever.
        outputMode : {"append", "update"}
            Start the query in the same mode.
        name : str
            The operator's name, unique in the query; identifies its state permanently.

        Returns
        -------
        pyspark.sql.DataFrame
            The keys, ``place`` or ``change_type``, and the other columns of the input.

        Raises
        ------
        AnalysisException
            No such column.
        InvalidArgumentError
            A column cannot be stored or sorted by, or an argument or setting is invalid. Raised before anything runs.

        Examples
        --------
        >>> holdfast.stream(bids).groupBy("item").top(3, by="price")
        """
        return top_rows(self.df, self.grouping, n, by, ascending, emit, ttl, outputMode, name)

    def latest(
        self, by: str | Sequence[str], ttl: str | None = None, outputMode: str = "update", name: str = "latest"
    ) -> DataFrame:
        """Keep the newest row of each key; a row that arrives after a newer one is ignored.

        Parameters
        ----------
        by : str or list of str
            Columns in which the newest row has the largest values, as ``DataFrame.sort`` orders them. Among equal
            rows, the first to arrive stays.
        ttl, outputMode, name
            As in `top`, which also documents the errors.

        Returns
        -------
        pyspark.sql.DataFrame
            A row for each key whose newest row changed: the key columns, then the other columns of the input.

        Examples
        --------
        >>> holdfast.stream(changes).groupBy("order").latest(by="at")
        """
        return latest_rows(self.df, self.grouping, by, ttl, outputMode, name)

    def applyInArrowWithState(
        self,
        func: ArrowFunction,
        outputStructType: StructType | str,
        stateStructType: Declared | Mapping[str, Declared],
        outputMode: str,
        name: str | None = None,
        timeMode: TimeMode = "None",
        stateChanges: StateChanges | None = None,
    ) -> DataFrame:
        """Call a vectorised function once per shard and micro-batch, and keep its state between calls.

        Parameters
        ----------
        func : callable
            Takes a `ShardBatch`: the rows grouped by key, and their state. Returns the output columns as a
            `pyarrow.Table` or a dict, or None; output with one row per key may omit the key columns. After a failure
            it may run again for the same micro-batch, with the same state.
        outputStructType : StructType or str
            Columns that `func` returns.
        stateStructType : StructType, str, StateTable, or mapping of str to one of these
            Columns of each key's state, in ``batch.state``; or several tables by name, in ``batch.states``.
        outputMode : {"append", "update"}
            As in ``applyInPandasWithState``; start the query in the same mode.
        name : str, optional
            The operator's name, unique in the query; identifies its state permanently. By default the function's
            name.
        timeMode : {"None", "ProcessingTime", "EventTime"}
            The clock of ``batch.timers``, as in Spark's ``transformWithState``; "None" for no timers. "EventTime" also
            drops late rows: those not newer than the previous micro-batch's watermark.
        stateChanges : mapping, optional
            Columns of stored state to drop and to rename: ``{"drop": ["m"], "rename": {"old": "new"}}``; by table if
            there are several. It may stay in the code afterwards: docs/state-schema.md.

        Returns
        -------
        pyspark.sql.DataFrame
            The result has no watermark: if an operator with a watermark follows, use `transformWithState`.

        Raises
        ------
        InvalidArgumentError
            A schema, the mode, the name or a setting is invalid. Raised before anything runs.

        Notes
        -----
        Exactly once: state is kept if and only if Spark commits the micro-batch. Spark allows one such
        operator per query unless ``spark.sql.streaming.unsupportedOperationCheck`` is false.
        """
        time = time_column_of(self.df)
        require_takes_batch(func)
        mode = checked_mode(outputMode)
        if timeMode not in TIMEOUT_CONF:
            raise InvalidArgumentError(
                f"timeMode must be one of {', '.join(map(repr, TIMEOUT_CONF))}, not {timeMode!r}"
            )
        if timeMode == "EventTime" and self.df.isStreaming and time is None:
            raise InvalidArgumentError(f"timeMode 'EventTime' {NEEDS_WATERMARK}")
        settings = checked_settings(self.df, stacklevel=2)
        output = parse_struct(outputStructType, "outputStructType")
        states = declared_states(stateStructType, timeMode, lambda given: duration_us(self.df, given))
        function = ArrowWithState(
            function=func,
            key_types=self._key_types(),
            output_types=arrow_schema(output, "outputStructType", keep_not_null=True),
            states=states,
            time_mode=timeMode,
            state_changes=changes_of_tables(stateChanges, {name: t.types.names for name, t in states.items()}),
            event_time=time.field.name if time is not None and timeMode == "EventTime" else None,
        )
        return Definition(
            rows=KeyedRows(self.df, self.grouping.keys, function),
            name=operator_name(func, name),
            output=PackedOutput(without_watermark(output), rows_each(self.df)),
            host=GroupStateHost(mode, TIMEOUT_CONF[timeMode]),
            settings=settings,
        ).plan()

    def applyInPandasWithState(
        self,
        func: PandasFunction,
        outputStructType: StructType | str,
        stateStructType: StructType | str,
        outputMode: str,
        timeoutConf: TimeoutConf,
        name: str | None = None,
        stateChanges: StateChanges | None = None,
    ) -> DataFrame:
        """Call a function once per key and micro-batch, with state and timeouts, as Spark's method of this name does.

        Parameters
        ----------
        func : callable
            As in Spark's ``applyInPandasWithState``: takes the key as a tuple, an iterator of the key's rows as pandas
            frames, and the key's `GroupState`; returns an iterable of frames.
        outputStructType, stateStructType : StructType or str
            Columns of the frames that `func` returns, and of each key's state.
        outputMode : {"append", "update"}
            Start the query in the same mode.
        timeoutConf : {"NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"}
        name : str, optional
            The operator's name, unique in the query; identifies its state permanently. By default the function's
            name.
        stateChanges : mapping, optional
            Columns of stored state to drop and to rename: ``{"drop": ["m"], "rename": {"old": "new"}}``. It may stay
            in the code afterwards: docs/state-schema.md.

        Returns
        -------
        pyspark.sql.DataFrame

        Raises
        ------
        InvalidArgumentError
            The name, a type or a setting is invalid. Raised before anything runs.
        AssertionError, PySparkException
            As in Spark.

        Notes
        -----
        Exactly once: state is kept if and only if Spark commits the micro-batch. After a failure `func` may be called
        again, with the same state. The keys of a shard are called in ascending order.
        """
        state = declared_struct(stateStructType, "stateStructType")
        require_accepted_by_spark(self.df, func, outputStructType, state, outputMode, timeoutConf)
        settings = checked_settings(self.df, stacklevel=2)
        output = declared_struct(outputStructType, "outputStructType")
        function = PandasWithState(
            function=func,
            key_types=self._key_types(),
            state=state,
            output=output,
            timeout_conf=timeoutConf,
            timeout_rule=settings.timeouts,
            frame_format=FrameFormat.of_session(self.df.sparkSession),
            rows_each=rows_each(self.df),
            shown_keys=self.grouping.given,
            shown_columns=self.df.columns,
            state_changes=changes_of_tables(stateChanges, {STATE_TABLE: state.names}),
            frame_templates=settings.frame_templates,
        )
        return Definition(
            rows=KeyedRows(self.df, self.grouping.keys, function),
            name=operator_name(func, name),
            output=RowsOutput(without_watermark(output)),
            host=GroupStateHost(outputMode, timeoutConf),
            settings=settings,
        ).plan()

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: GroupedData | None = None,
        eventTimeColumnName: str = "",
        name: str | None = None,
        stateChanges: StateChanges | None = None,
    ) -> DataFrame:
        """Call a processor once per key and micro-batch, with state, timers and TTL, as Spark's method does.

        Parameters
        ----------
        statefulProcessor : pyspark.sql.streaming.StatefulProcessor
            Takes and returns `Row` objects. ``init`` runs once here, to collect the declared state, and then in each
            call for a shard, on a fresh copy.
        outputStructType : StructType or str
            Columns of the rows that the processor returns.
        outputMode : {"append", "update", "complete"}
            Has no effect, but a restart must pass the same mode; start the query in append or update mode.
        timeMode : {"None", "ProcessingTime", "EventTime"}
            The clock of the processor's timers. TTL needs "ProcessingTime". "EventTime" also drops late rows.
        initialState : GroupedData, optional
            A batch DataFrame of this session, grouped by columns of the same types. In a new query,
            ``handleInitialState`` receives each row before the first micro-batch; a restart ignores it.
        eventTimeColumnName : str, optional
            A timestamp column of the output that carries the watermark to stateful operators downstream.
        name : str, optional
            The operator's name, unique in the query; identifies its state permanently. By default the name of the
            processor's class, without leading underscores.
        stateChanges : mapping, optional
            By variable, columns of stored state to drop and to rename: ``{"total": {"drop": ["m"], "rename": {"old":
            "new"}}}``. It may stay in the code afterwards: docs/state-schema.md.

        Returns
        -------
        pyspark.sql.DataFrame

        Raises
        ------
        InvalidArgumentError
            An argument, type or setting is invalid, or the processor cannot be pickled. Raised before anything runs.
        IllegalArgumentException, PySparkRuntimeError
            As in Spark, here or in the first micro-batch: for an unknown mode or an invalid declaration.

        Notes
        -----
        Exactly once: state is kept if and only if Spark commits the micro-batch. docs/transform-with-state.md
        lists the intended differences from Spark.
        """
        output = declared_struct(outputStructType, "outputStructType")
        timezone = str(self.df.sparkSession.conf.get("spark.sql.session.timeZone"))
        exchange = RowExchange(output, timezone, rows_each(self.df))
        host = processor_host(outputMode, timeMode, eventTimeColumnName, output, self.df)
        return self._with_processor(statefulProcessor, exchange, host, initialState, name, stateChanges)

    def transformWithStateInPandas(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: GroupedData | None = None,
        eventTimeColumnName: str = "",
        name: str | None = None,
        stateChanges: StateChanges | None = None,
    ) -> DataFrame:
        """Like `transformWithState`, for a processor that takes and returns pandas frames."""
        output = declared_struct(outputStructType, "outputStructType")
        exchange = FrameExchange(output, FrameFormat.of_session(self.df.sparkSession), rows_each(self.df))
        host = processor_host(outputMode, timeMode, eventTimeColumnName, output, self.df)
        return self._with_processor(statefulProcessor, exchange, host, initialState, name, stateChanges)

    def _with_processor(
        self,
        given: StatefulProcessor,
        exchange: RowExchange | FrameExchange,
        host: StatefulProcessorHost,
        initial_state: GroupedData | None,
        name: str | None,
        state_changes: StateChanges | None,
    ) -> DataFrame:
        settings = checked_settings(self.df, stacklevel=3)
        processor = PickledProcessor(given)
        operator = operator_name(type(given), name)
        try:
            declared = declaration_of(processor, host.time_mode)
        except Exception as exc:
            exc.add_note(f"raised in operator {operator!r}, when it was defined")  # `holdfast.explain` parses this
            raise
        function = TransformWithState(
            processor=processor,
            declared=declared,
            key_types=self._key_types(),
            key_schema=StructType([key.field for key in self.grouping.keys]),
            given_keys=self.grouping.given,
            shown_columns=self.df.columns,
            exchange=exchange,
            time_mode=host.time_mode,
            output_mode=host.output_mode,
            is_streaming=self.df.isStreaming,
            state_changes=changes_of_variables(state_changes, declared.variables),
            frame_templates=settings.frame_templates and isinstance(exchange, FrameExchange),
        )
        initial = None
        if initial_state is not None:
            frame, grouping = initial_rows(initial_state, self.df, self.grouping)
            first = exchange.beside_initial_state()
            begin = InitialState.of(replace(function, exchange=first, shown_columns=frame.columns))
            function = replace(function, first_exchange=first)
            initial = KeyedRows(frame, grouping.keys, begin, INITIAL_VERSION)
        return Definition(
            rows=KeyedRows(self.df, self.grouping.keys, function),
            name=operator,
            output=OneByOneOutput(marked_as_delivered(exchange.output_schema, host.time_mode)),
            host=host,
            settings=settings,
            initial=initial,
        ).plan()

    def _key_types(self) -> pa.Schema:
        return types_of_keys([key.field for key in self.grouping.keys])
