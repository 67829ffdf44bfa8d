"""Test an ``applyInPandasWithState`` function without Spark: rows in, rows out, time advanced by hand.

It runs a query's own loop over keys, with the same frames, states and timeouts, but without Spark or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import Row, StructType

from holdfast.backends.options import did_you_mean
from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError
from holdfast.settings import TimeoutRule
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.keyed.frames import FrameFormat
from holdfast.spark_integration.keyed.pandas_with_state import PandasFunction, PandasWithState
from holdfast.spark_integration.keyed.python_values import RowValues
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.shard.timeout import TimeoutConf
from holdfast.spark_integration.spark_types import arrow_schema, require_key_types, sent_schema
from holdfast.spark_integration.timers import NO_TIMER, KeyTimers
from holdfast.spark_integration.transport.packed import moments_of
from holdfast.testing.ddl import parse_schema
from holdfast.testing.embedded_shard import EmbeddedShard


class PandasWithStateTester:
    """Runs an ``applyInPandasWithState`` function micro-batch by micro-batch, in this process.

    Method names are those of Spark's ``TwsTester``, which tests functions of ``transformWithState``.

    Parameters
    ----------
    func : callable
    groupBy : str or sequence of str
        Names of the key columns; a name given twice appears twice in the function's key.
    inputStructType, outputStructType, stateStructType : StructType or str
        Columns of the input, of the frames that `func` returns, and of each key's state.
    timeoutConf : {"NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"}
    eventTime : str, optional
        The input's column that carries the watermark, a timestamp or a window; without it there is no watermark.
    timezone : str, default "UTC"
        The session's time zone.
    rowsEach : int, default 10000
        The largest number of rows in a frame, as ``spark.sql.execution.arrow.maxRecordsPerBatch``.
    timeouts : {"documented", "spark"}, default "documented"
        As ``spark.holdfast.timeouts``.

    Raises
    ------
    InvalidArgumentError
        A column, a type or a schema is invalid.
    AssertionError
        `timeoutConf` is not one of Spark's.

    Notes
    -----
    A failed micro-batch changes nothing, as in a query. Threads: one.

    Examples
    --------
    >>> tester = PandasWithStateTester(count, "user", "user string, v long", "user string, n long", "n long")
    >>> tester.test([("ann", 1), ("ann", 2)])
    [Row(user='ann', n=2)]
    >>> tester.peekState("ann")
    (2,)
    """

    def __init__(
        self,
        func: PandasFunction,
        groupBy: str | Sequence[str],
        inputStructType: StructType | str,
        outputStructType: StructType | str,
        stateStructType: StructType | str,
        timeoutConf: TimeoutConf = "NoTimeout",
        *,
        eventTime: str | None = None,
        timezone: str = "UTC",
        rowsEach: int = 10_000,
        timeouts: TimeoutRule = "documented",
    ) -> None:
        assert timeoutConf in get_args(TimeoutConf), f"timeoutConf must be one of {get_args(TimeoutConf)}"
        names = [groupBy] if isinstance(groupBy, str) else list(groupBy)
        self._input, self._output = parse_schema(inputStructType), parse_schema(outputStructType)
        for name in [*names, *([eventTime] if eventTime is not None else [])]:
            self._require_column(name)
        if timeoutConf == "EventTimeTimeout" and eventTime is None:
            raise InvalidArgumentError("EventTimeTimeout needs a watermark: name its column in eventTime")
        distinct = list(dict.fromkeys(names))
        self._key = StructType([self._input[name] for name in distinct])
        require_key_types(self._key.fields)
        self._event_time = eventTime
        self._timezone = timezone
        self._step = PandasWithState(
            function=func,
            key_types=arrow_schema(self._key, "the keys"),
            state=parse_schema(stateStructType),
            output=self._output,
            timeout_conf=timeoutConf,
            timeout_rule=timeouts,
            frame_format=FrameFormat(timezone),
            rows_each=rowsEach,
            shown_keys=[distinct.index(name) for name in names],
            shown_columns=self._input.names,
        )
        self._values = RowValues(self._step.state)
        self._processing_ms = 0
        self._watermark_ms = 0
        name = getattr(func, "__name__", type(func).__name__)
        self._shard = EmbeddedShard(name, self._step, self._step.key_types)

    def test(self, input: Sequence[Row | tuple[Any, ...] | Mapping[str, Any]]) -> list[Row]:  # noqa: A002
        """Run one micro-batch of rows; due timeouts fire after them.

        Parameters
        ----------
        input : sequence of Row, tuple or dict
            In any order, with any keys. Late rows are dropped as in a query: with ``EventTimeTimeout``, if their event
            time is not after the watermark.

        Returns
        -------
        list of Row
        """
        for row in input:
            for name in row if isinstance(row, Mapping) else getattr(row, "__fields__", ()):
                self._require_column(name)
        rows = spark_versions.rows_to_arrow(list(input), self._input) if input else self._no_rows()
        return self._as_rows(self._run(rows))

    def _require_column(self, name: str) -> None:
        """Raise `InvalidArgumentError` if the input lacks a column, which would be ignored in rows."""
        if name not in self._input.names:
            near = did_you_mean(name, self._input.names)
            raise InvalidArgumentError(f"the input has no column {name!r}{near}", columns=self._input.names)

    def testInPandas(self, input: pd.DataFrame) -> pd.DataFrame:  # noqa: A002
        """Run one micro-batch like `test`, with pandas frames."""
        columns = [input[name] for name in self._input.names]
        rows = spark_versions.pandas_to_arrow(columns, self._input, self._timezone)
        return self._step.frame_format.to_frame(self._run(pa.Table.from_batches([rows])))

    def setProcessingTime(self, currentTimeMs: int) -> list[Row]:
        """Advance the processing time, and return the output of timeouts due by then.

        Raises
        ------
        InvalidArgumentError
            Time would go back.
        """
        if currentTimeMs <= self._processing_ms:
            raise InvalidArgumentError("processing time moves forward only", now_ms=self._processing_ms)
        self._processing_ms = currentTimeMs
        return self._as_rows(self._run(self._no_rows()))

    def setWatermark(self, currentWatermarkMs: int) -> list[Row]:
        """Advance the watermark, and return the output of timeouts due by then.

        Raises
        ------
        InvalidArgumentError
            The watermark would go back, or there is no `eventTime`.
        """
        if self._event_time is None:
            raise InvalidArgumentError("there is no watermark: name its column in eventTime")
        if currentWatermarkMs <= self._watermark_ms:
            raise InvalidArgumentError("the watermark moves forward only", now_ms=self._watermark_ms)
        self._watermark_ms = currentWatermarkMs
        return self._as_rows(self._run(self._no_rows()))

    def peekState(self, key: Any) -> tuple[Any, ...] | None:
        """Return the state of a key, which is a value or, for several columns, a tuple; None if it has no state."""
        with self._shard.begin() as transaction:
            return self._values.of_found(transaction.get(STATE_TABLE, self._keys_of(key)))[0]

    def peekTimeout(self, key: Any) -> int | None:
        """Return the due time of a key's timeout in ms since 1970, or None."""
        with self._shard.begin() as transaction:
            timers = KeyTimers(transaction, self._step.timeout_conf, self._shard.earliest_timer_ms)
            due_ms = int(timers.get(self._keys_of(key))[0])
            return None if due_ms == NO_TIMER else due_ms

    def updateState(self, key: Any, value: tuple[Any, ...]) -> None:
        """Set the state of a key; its timeout stays.

        Raises
        ------
        StateValueError
            The value does not fit the state's columns.
        """
        with self._shard.begin() as transaction:
            transaction.put(STATE_TABLE, self._keys_of(key), self._values.to_arrow([value]))
            transaction.commit()

    def deleteState(self, key: Any) -> None:
        """Remove the state of a key; its timeout stays."""
        with self._shard.begin() as transaction:
            transaction.delete(STATE_TABLE, self._keys_of(key))
            transaction.commit()

    def _keys_of(self, key: Any) -> Keys:
        given, places = key if isinstance(key, tuple) else (key,), self._step.shown_keys
        if len(given) != len(places):
            raise InvalidArgumentError(
                "a key needs one value for each key column", values=len(given), columns=len(places)
            )
        distinct = tuple(dict(zip(places, given, strict=True)).values())
        return self._shard.keys_of(spark_versions.rows_to_arrow([distinct], self._key).cast(self._step.key_types))

    def _no_rows(self) -> pa.Table:
        return sent_schema(self._input, "the input").empty_table()

    def _run(self, rows: pa.Table) -> pa.Table:
        rows = self._without_late(rows.cast(sent_schema(self._input, "the input")))
        shown = rows.select(self._key.names).cast(self._step.key_types).combine_chunks()
        watermark_ms = None if self._event_time is None else self._watermark_ms
        output = self._shard.run(self._step, rows, shown, self._processing_ms, watermark_ms)
        schema = arrow_schema(self._output, "outputStructType", keep_not_null=True)
        return pa.Table.from_batches(output, schema=schema)

    def _without_late(self, rows: pa.Table) -> pa.Table:
        if self._step.timeout_conf != "EventTimeTimeout":
            return rows
        is_late = pc.less_equal(moments_of(rows.column(self._event_time)).cast(pa.int64()), self._watermark_ms * 1000)
        return rows.filter(pc.invert(pc.fill_null(is_late, False)))

    def _as_rows(self, output: pa.Table) -> list[Row]:
        return spark_versions.arrow_to_rows(output, self._output)
