"""Tests a `StatefulProcessor` without Spark, with the methods of Spark's own ``TwsTester``.

A call works as in a query, with a new copy of the processor, typed and versioned state, ordered timers and TTL, but
without Spark or files.

If a test declares no types, `GivenExchange` passes rows through unconverted, and the first key determines the types of
the grouping columns (`GroupingColumns`).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import IllegalArgumentException, PySparkAssertionError, PySparkValueError
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from holdfast.backends.arrow.rows import IntArray
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.keyed.frames import FrameFormat, note_key
from holdfast.spark_integration.keyed.python_values import StateValueError
from holdfast.spark_integration.keyed.slabs import KeyOrder, KeySlabs
from holdfast.spark_integration.plan.arguments import output_mode_of
from holdfast.spark_integration.processor.exchange import (
    Exchange,
    FrameExchange,
    KeyTuple,
    ProcessorOutput,
    RowExchange,
    frames_of,
    named_values,
)
from holdfast.spark_integration.processor.handle import PickledProcessor, declaration_of
from holdfast.spark_integration.processor.state.slab import CalledSlab
from holdfast.spark_integration.processor.state.states import ProcessorStates
from holdfast.spark_integration.processor.state.variable_tables import Kind
from holdfast.spark_integration.processor.transform_with_state import InitialState, TransformWithState
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.shard.timeout import TIME_MODES, TimeMode
from holdfast.spark_integration.spark_types import arrow_schema, parse_struct, require_key_types, sent_schema
from holdfast.testing.ddl import parse_schema
from holdfast.testing.embedded_shard import EmbeddedShard

# A bool is an int and a datetime is a date, so these come first.
_TYPES: Sequence[tuple[tuple[type, ...], T.DataType]] = (
    ((bool, np.bool_), T.BooleanType()),
    ((int, np.integer), T.LongType()),
    ((float, np.floating), T.DoubleType()),
    ((str, type(None)), T.StringType()),
    ((bytes, bytearray), T.BinaryType()),
    ((dt.datetime,), T.TimestampType()),
    ((dt.date,), T.DateType()),
    ((Decimal,), T.DecimalType(38, 18)),
)
_NO_COLUMNS = T.StructType([])
_ANY_KEY = pa.schema([("key", pa.string())])


class GroupingColumns:
    """The grouping columns of a test. Raises `InvalidArgumentError` if a query cannot group by a type."""

    def __init__(self, schema: T.StructType) -> None:
        require_key_types(schema.fields)
        self.schema = schema
        self.types = arrow_schema(schema, "the keys")

    @classmethod
    def of_key(cls, key: Any) -> GroupingColumns:
        """Infer the columns from a key; None counts as a string. Raises `InvalidArgumentError`."""
        return cls(T.StructType([T.StructField(f"_{at}", _type_of(value)) for at, value in enumerate(_values(key), 1)]))

    def rows(self, key: Any, n: int) -> pa.Table:
        """Return `n` rows with this key. Raises `InvalidArgumentError` if it does not fit the columns."""
        values = _values(key)
        facts = {"key": repr(key), "columns": self.schema.simpleString()}
        if len(values) != len(self.schema):
            raise InvalidArgumentError("a key needs one value for each grouping column", **facts)
        try:
            row = spark_versions.rows_to_arrow([values], self.schema).cast(self.types)
        except (TypeError, ValueError, ArithmeticError, AssertionError) as exc:  # from Arrow or Spark
            raise InvalidArgumentError(
                f"the key does not fit the grouping columns, whose types the first key or keyStructType sets: {exc}",
                **facts,
            ) from exc
        return row.take(pa.array([0] * n, pa.int64()))


def _values(key: Any) -> tuple[Any, ...]:
    return tuple(key) if isinstance(key, tuple) else (key,)


def _type_of(value: Any) -> T.DataType:
    for types, data_type in _TYPES:
        if isinstance(value, types):
            return data_type
    raise InvalidArgumentError(
        "cannot infer the type of a grouping column from its value: pass keyStructType", given=type(value).__name__
    )


@dataclass(frozen=True)
class GivenExchange:
    """An `Exchange` that takes the test's pieces, and keeps the processor's output."""

    typed: Exchange  #: For keys, and for declared input or output
    pieces: Sequence[Any] | None  #: For ``handleInputRows``, one for each row; None if rows are typed
    kept: KeptOutput | None  #: None if output is typed

    def slabs(self, rows: pa.Table, order: KeyOrder) -> KeySlabs[Any]:
        if self.pieces is None:
            return self.typed.slabs(rows, order)
        return _GivenPieces(rows, order.rows, order.starts, self.pieces)

    def keys(self, shown: pa.Table) -> list[KeyTuple]:
        return self.typed.keys(shown)

    def output(self) -> ProcessorOutput:
        return self.typed.output() if self.kept is None else self.kept


class KeptOutput:
    """Keeps what a processor returned; the shard outputs nothing. `checked` raises what a query would."""

    failed_key: KeyTuple | None = None

    def __init__(self, checked: Callable[[Any], Iterable[Any]]) -> None:
        self._checked = checked
        self.elements: list[Any] = []

    def add_all(self, returned: Any, key: KeyTuple) -> Iterator[pa.RecordBatch]:
        self.elements.extend(self._checked(returned))
        yield from ()

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield from ()


def _rows_of(returned: Any) -> Iterator[T.Row]:
    for row in returned:
        named_values(row)  # as in a query, a tuple or a `Row` without names fails
        yield row


def concatenated(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate frames; the result has no columns if there are none."""
    full = [frame for frame in frames if len(frame)]
    if not full:
        return frames[0] if frames else pd.DataFrame()
    return pd.concat(full, ignore_index=True)


class _GivenPieces(KeySlabs[Any]):
    """The test's pieces by key; the micro-batch's rows are their numbers."""

    def __init__(self, rows: pa.Table, order: IntArray, starts: IntArray, pieces: Sequence[Any]) -> None:
        super().__init__(rows, order, starts, max(1, len(pieces)))
        self._pieces = pieces

    def cut(self, rows: pa.Table, bounds: IntArray) -> Iterator[Iterator[Any]]:
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            yield self.convert(rows.slice(start, end - start))

    def convert(self, rows: pa.Table) -> Iterator[Any]:
        return iter([self._pieces[at] for at in rows.column(0).to_pylist()])


class TwsTester:
    """Runs a `StatefulProcessor` key by key, in this process.

    A test that was written for Spark's ``pyspark.sql.streaming.TwsTester`` runs with its import changed, unless it uses
    ``tester.handle``, calls a key without rows, passes a tuple as one value, or counts calls of
    ``init``: docs/testing.md.

    Parameters
    ----------
    processor : pyspark.sql.streaming.StatefulProcessor
        ``init`` runs at once, to learn which state it declares, and then in each call, on a new copy.
    initialStateRow : list of (key, Row), optional
        ``handleInitialState`` is called for each.
    initialStatePandas : list of (key, pandas.DataFrame), optional
        The same for a processor of frames.
    timeMode : {"None", "ProcessingTime", "EventTime"}
        In upper or lower case.
    outputMode : {"Append", "Update", "Complete"}
        In upper or lower case; has no effect on the tester.
    eventTimeExtractor : callable, optional
        Returns the event time of a row in ms since 1970. "EventTime" needs it.
    keyStructType : StructType or str, optional
        The grouping columns. By default the first key determines their types, and their names are ``_1``, ``_2``.
    inputStructType : StructType or str, optional
        Columns of the input: then rows have the types that a query gives them. By default they are passed as given.
    outputStructType : StructType or str, optional
        Columns of the output, which is then checked and converted as in a query. By default it is returned unchanged.
    timezone : str, default "UTC"
        The session's time zone.
    rowsEach : int, default 10000
        The largest number of rows in a frame of a typed input, as ``spark.sql.execution.arrow.maxRecordsPerBatch``.

    Raises
    ------
    InvalidArgumentError, PySparkRuntimeError
        The processor cannot be pickled, or its declarations are invalid, as in a query.
    AssertionError
        `timeMode` is invalid, or initial state is given both by row and in pandas.
    PySparkValueError
        "EventTime" without `eventTimeExtractor`.

    Notes
    -----
    A key is a value or, for several grouping columns, a tuple. Each call is one micro-batch: if the processor fails in
    it, nothing changes. Schemas given as text are parsed here, without Spark. Threads: one.

    Examples
    --------
    >>> tester = TwsTester(Visits(), timeMode="ProcessingTime")
    >>> tester.test("ann", [Row(page="/")])
    [Row(user='ann', n=1)]
    >>> tester.peekValueState("count", "ann")
    (1,)
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        initialStateRow: list[tuple[Any, T.Row]] | None = None,
        initialStatePandas: list[tuple[Any, pd.DataFrame]] | None = None,
        timeMode: str = "None",
        outputMode: str = "Append",
        eventTimeExtractor: Callable[[Any], int] | None = None,
        *,
        keyStructType: T.StructType | str | None = None,
        inputStructType: T.StructType | str | None = None,
        outputStructType: T.StructType | str | None = None,
        timezone: str = "UTC",
        rowsEach: int = 10_000,
    ) -> None:
        assert str(timeMode).lower() in TIME_MODES, f"timeMode must be one of {get_args(TimeMode)}"
        assert initialStateRow is None or initialStatePandas is None, "initial state by row or in pandas, not both"
        self._time_mode = TIME_MODES[str(timeMode).lower()]
        if self._time_mode == "EventTime" and eventTimeExtractor is None:
            raise PySparkValueError(
                errorClass="ARGUMENT_REQUIRED",
                messageParameters={"arg_name": "eventTimeExtractor", "condition": "timeMode is EventTime"},
            )
        output_mode_of(outputMode)
        self._event_time = eventTimeExtractor
        self._input = None if inputStructType is None else parse_schema(inputStructType)
        self._output = None if outputStructType is None else parse_schema(outputStructType)
        returned = self._output or _NO_COLUMNS
        self._by_row = RowExchange(returned, timezone, rowsEach)
        self._by_frame = FrameExchange(returned, FrameFormat(timezone), rowsEach)
        self._name = type(processor).__name__
        self._processor = PickledProcessor(processor)
        self._declared = declaration_of(self._processor, self._time_mode, _parsed)
        for variable in self._declared.variables:
            variable.tables(_ANY_KEY)  # fails if its columns cannot be stored
        self._now_ms = 0
        self._in_pandas = initialStatePandas is not None
        self._columns: GroupingColumns | None = None
        if keyStructType is not None:
            self._columns = GroupingColumns(parse_schema(keyStructType))
        self._shard: EmbeddedShard | None = None
        for key, given in initialStatePandas or initialStateRow or []:
            self._run(self._keys(key, 1), _numbers(1), [given], InitialState.of)

    def test(self, key: Any, input: list[T.Row]) -> list[T.Row]:  # noqa: A002
        """Run a micro-batch of one key's rows, and then the timers that it makes due.

        Parameters
        ----------
        key : value or tuple
        input : list of Row
            With "EventTime", late rows (not after the watermark) are dropped. A key without rows is not called.

        Returns
        -------
        list of Row
        """
        self._in_pandas = False
        rows = [row for row in input if not self._is_late(row)]
        typed = spark_versions.rows_to_arrow(rows, self._input) if self._input is not None and rows else None
        return self._run_key(key, rows, typed)

    def testInPandas(self, key: Any, input: pd.DataFrame) -> pd.DataFrame:  # noqa: A002
        """Run a micro-batch like `test`, with pandas frames."""
        self._in_pandas = True
        on_time = [not self._is_late(row) for _, row in input.iterrows()] if self._event_time else [True] * len(input)
        frame = input.loc[on_time].reset_index(drop=True)
        if self._input is None:
            return self._run_key(key, [frame] if len(frame) else [], None)
        columns = [frame[name] for name in self._input.names]
        rows = spark_versions.pandas_to_arrow(columns, self._input, self._by_frame.frame_format.timezone)
        return self._run_key(key, [], pa.Table.from_batches([rows]))

    def _run_key(self, key: Any, pieces: list[Any], typed: pa.Table | None) -> Any:
        """Run a micro-batch of a key, on typed rows or on the test's pieces."""
        if typed is None or self._input is None:
            return self._returned(self._run(self._keys(key, len(pieces)), _numbers(len(pieces)), pieces))
        rows = typed.cast(sent_schema(self._input, "the input"))
        return self._returned(self._run(self._keys(key, len(rows)), rows, None))

    def setProcessingTime(self, currentTimeMs: int) -> list[T.Row] | pd.DataFrame:
        """Advance the processing time, and run a micro-batch of the timers that are due by then, earliest first.

        Returns
        -------
        list of Row or pandas.DataFrame
            The output, in the form of the last call's.

        Raises
        ------
        PySparkValueError
            `timeMode` is different.
        IllegalArgumentException
            Time would not move forward.
        """
        return self._advance("ProcessingTime", "setProcessingTime", "Processing time", currentTimeMs)

    def setWatermark(self, currentWatermarkMs: int) -> list[T.Row] | pd.DataFrame:
        """Advance the watermark as `setProcessingTime` advances the processing time."""
        return self._advance("EventTime", "setWatermark", "Watermark", currentWatermarkMs)

    def updateValueState(self, stateName: str, key: Any, value: tuple[Any, ...]) -> None:
        """Set the value of a key and restart its time to live.

        Raises
        ------
        AssertionError
            There is no such variable.
        SchemaMismatchError
            The value does not fit its columns.
        """
        with self._state("value", stateName, key) as state:
            state.update(value)

    def peekValueState(self, stateName: str, key: Any) -> tuple[Any, ...] | None:
        """Return the value of a key; None if it has none."""
        with self._state("value", stateName, key) as state:
            value: tuple[Any, ...] | None = state.get()
            return value

    def updateListState(self, stateName: str, key: Any, value: list[tuple[Any, ...]]) -> None:
        """Set the list of a key, as `updateValueState` sets a value."""
        with self._state("list", stateName, key) as state:
            state.clear()
            if value:
                state.put(value)

    def peekListState(self, stateName: str, key: Any) -> list[tuple[Any, ...]]:
        """Return the list of a key; empty if it has none."""
        with self._state("list", stateName, key) as state:
            return list(state.get())

    def updateMapState(self, stateName: str, key: Any, value: dict[Any, Any]) -> None:
        """Set the map of a key, as `updateValueState` sets a value."""
        with self._state("map", stateName, key) as state:
            state.clear()
            for user_key, user_value in value.items():
                state.updateValue(user_key, user_value)

    def peekMapState(self, stateName: str, key: Any) -> dict[Any, Any]:
        """Return the map of a key; empty if it has none."""
        with self._state("map", stateName, key) as state:
            return dict(state.iterator())

    def deleteState(self, stateName: str, key: Any) -> None:
        """Remove what a variable of any kind holds for a key.

        Raises
        ------
        PySparkAssertionError
            There is no such variable.
        """
        kinds: dict[str, Kind] = {variable.name: variable.kind for variable in self._declared.variables}
        if stateName not in kinds:
            raise PySparkAssertionError(errorClass="STATE_NOT_EXISTS", messageParameters={})
        with self._state(kinds[stateName], stateName, key) as state:
            state.clear()

    def _advance(self, mode: TimeMode, method: str, what: str, now_ms: int) -> list[T.Row] | pd.DataFrame:
        if self._time_mode != mode:
            raise PySparkValueError(
                errorClass="UNSUPPORTED_OPERATION",
                messageParameters={"operation": f"{method} with timeMode {self._time_mode}, which is not {mode}"},
            )
        if now_ms <= self._now_ms:
            raise IllegalArgumentException(f"{what} moves forward only: it is {self._now_ms} ms, given {now_ms} ms")
        before_ms, self._now_ms = self._now_ms, now_ms
        if self._shard is None or self._columns is None:  # no key was ever called
            return self._returned([])
        try:
            return self._returned(self._run(self._columns.types.empty_table(), _numbers(0), []))
        except BaseException:
            self._now_ms = before_ms
            raise

    def _is_late(self, row: Any) -> bool:
        return self._time_mode == "EventTime" and self._event_time is not None and self._event_time(row) <= self._now_ms

    def _times(self) -> tuple[int, int | None]:
        """Return the processing time and the watermark."""
        return (0, self._now_ms) if self._time_mode == "EventTime" else (self._now_ms, None)

    def _keys(self, key: Any, n: int) -> pa.Table:
        """Return `n` rows of a key; the first call opens the shard."""
        if self._columns is None:
            self._columns = GroupingColumns.of_key(key)
        if self._shard is None:
            self._step = TransformWithState(
                processor=self._processor,
                declared=self._declared,
                key_types=self._columns.types,
                key_schema=self._columns.schema,
                given_keys=list(range(len(self._columns.types))),
                shown_columns=[],
                exchange=self._by_row,
                time_mode=self._time_mode,
                output_mode="append",
                is_streaming=True,
            )
            self._shard = EmbeddedShard(self._name, self._step, self._columns.types)
        return self._columns.rows(key, n)

    def _run(
        self,
        shown_keys: pa.Table,
        rows: pa.Table,
        pieces: list[Any] | None,
        function_of: Callable[[TransformWithState], ShardFunction] = lambda step: step,
    ) -> list[Any]:
        assert self._shard is not None
        kept = None
        if self._output is None:
            kept = KeptOutput(frames_of if self._in_pandas else _rows_of)
        typed = self._by_frame if self._in_pandas else self._by_row
        step = replace(self._step, exchange=GivenExchange(typed, pieces, kept), shown_columns=rows.column_names)
        batches = self._shard.run(function_of(step), rows, shown_keys, *self._times())
        if kept is not None:
            return kept.elements
        assert self._output is not None
        table = pa.Table.from_batches(batches, arrow_schema(self._output, "outputStructType", keep_not_null=True))
        if self._in_pandas:
            return [self._by_frame.frame_format.to_frame(table)]
        return spark_versions.arrow_to_rows(table, self._output)

    def _returned(self, elements: list[Any]) -> Any:
        return concatenated(elements) if self._in_pandas else elements

    @contextmanager
    def _state(self, kind: Kind, name: str, key: Any) -> Iterator[Any]:
        """Yield a variable's state for one key, and write the changes."""
        found = [variable for variable in self._declared.variables if (variable.kind, variable.name) == (kind, name)]
        assert found, f"there is no {kind} state {name!r}: init does not declare it"
        shown = self._keys(key, 1)
        assert self._shard is not None
        slab = CalledSlab()
        with self._shard.begin() as transaction:
            times = self._shard.times(*self._times())
            states = ProcessorStates(transaction, self._shard.tables, shown.num_columns, slab, times)
            state = states.open(found[0])
            slab.begin(self._shard.keys_of(shown))
            slab.enter(0)
            yield state
            slab.leave()
            try:
                states.flush()
            except StateValueError as exc:
                note_key(exc, self._name, tuple(shown.to_pylist()[0].values()))
                raise
            transaction.commit()


def _parsed(text: str, what: str) -> T.StructType:
    return parse_struct(parse_schema(text), what)


def _numbers(n: int) -> pa.Table:
    """Return rows that number the test's pieces."""
    return pa.table({"piece": pa.array(range(n), pa.int64())})
