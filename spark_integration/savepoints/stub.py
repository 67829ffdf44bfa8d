"""Creates state that only Spark can write, by running a stub of the query.

The stub is a query of one micro-batch. It has the same stateful operators, state stores and settings as the new query,
but its operators only store the pointers that they get as input::

    one row per shard      ──▶ … ──▶ operator 1 ──▶ operator 0 ──▶ nowhere
                                     puts its rows,  puts its rows
                                     passes others on

Micro-batch 0 leaves version 1 of the state. Everything else in the stub's location is discarded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from holdfast.errors import UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.hosts.host import POINTER_SCHEMA, StateOfGroup, ValueOfGroup
from holdfast.spark_integration.savepoints.new_query import FirstState, NewQuery, state_of_stub
from holdfast.spark_integration.shard.pointer_row import POINTER_STATE, POINTER_VARIABLE, PointerRow
from holdfast.spark_integration.spark_state.pointers import PointerOperator
from holdfast.spark_integration.spark_state.query_location import NAMED_SOURCES_SETTING
from holdfast.spark_integration.spark_versions import is_classic, is_on
from holdfast.spark_integration.transport.routes import ROUTE, route_of_hash

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OPERATOR, _ROW, _AT = "operator", "row", "at"
_COLUMNS = [ROUTE, _OPERATOR, _ROW, _AT]
_SCHEMA = f"{ROUTE} int, {_OPERATOR} int, {_ROW} string, {_AT} timestamp"
# Later than a query's initial watermark, or the rows would be late.
_ON_TIME = datetime(2000, 1, 1, tzinfo=UTC)
_ARROW = pa.schema(
    [(ROUTE, pa.int32()), (_OPERATOR, pa.int32()), (_ROW, pa.string()), (_AT, pa.timestamp("us", tz="UTC"))]
)
# On Spark Connect, stubs change the settings of the user's session.
_ONE_AT_A_TIME = threading.Lock()


def state_by_stub(
    spark: SparkSession, conf: Mapping[str, str], new: NewQuery, operators: Sequence[PointerOperator]
) -> FirstState:
    """Make a new query's state with a stub query, whose location is deleted on return."""
    try:
        with session_of_stub(spark, conf) as own:
            run_stub(own, operators, new.stub_url)
        new.require()  # running the stub may have taken long
        with open_storage(new.stub_url, new.options) as stub:
            return state_of_stub(stub, new.location, conf)
    finally:
        new.remove_stub()


def run_stub(spark: SparkSession, operators: Sequence[PointerOperator], location: str) -> None:
    """Run the stub in a new location; operators are in Spark's order. Raises `UnavailableError` if Spark fails."""
    rows = [
        {ROUTE: route_of_hash(row.shard), _OPERATOR: number, _ROW: row.columns()[0].decode(), _AT: _ON_TIME}
        for number, operator in enumerate(operators)
        for row in operator.pointers
    ]
    frame = _source(spark, rows)
    for number, operator in reversed(list(enumerate(operators))):  # Spark numbers them from the end of the plan
        frame = _step(frame, number, operator)
    modes = {operator.output_mode for operator in operators}
    writer = frame.writeStream.format("noop").outputMode("update" if "update" in modes else "append")
    try:
        writer.option("checkpointLocation", location).trigger(availableNow=True).start().awaitTermination()
    except PySparkException as exc:
        raise UnavailableError(f"Spark could not write the query's state: {exc}") from exc


@contextmanager
def session_of_stub(spark: SparkSession, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Yield a session with the saved query's settings: a new one or, on Connect, the user's, which has its packages."""
    wanted = {
        **conf,
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.unsupportedOperationCheck": "false",
    }
    if is_classic(spark):
        own = spark.newSession()
        for name, value in {**dict(spark.conf.getAll), **wanted}.items():
            if name in wanted or (own.conf.isModifiable(name) and own.conf.get(name, None) != value):
                own.conf.set(name, value)
        yield own
        return
    with _ONE_AT_A_TIME:
        before: dict[str, str | None] = {name: spark.conf.get(name, None) for name in wanted}
        try:
            for name, value in wanted.items():
                spark.conf.set(name, value)
            yield spark
        finally:
            for name, old in before.items():
                if old is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, old)


def _source(spark: SparkSession, rows: list[dict[str, Any]]) -> DataFrame:
    """Return the rows as a stream of one micro-batch."""
    reader = spark.readStream
    if is_on(spark, NAMED_SOURCES_SETTING, "false"):
        reader = reader.name("stub")  # then Spark requires a name for each source
    ticks = reader.format("rate-micro-batch").option("rowsPerBatch", max(1, len(rows))).load()

    def numbered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            wanted = [rows[number] for number in batch.column("value").to_pylist() if number < len(rows)]
            yield pa.RecordBatch.from_pylist(wanted, schema=_ARROW)

    return ticks.mapInArrow(numbered, _SCHEMA).withWatermark(_AT, "0 seconds")


def _step(frame: DataFrame, number: int, operator: PointerOperator) -> DataFrame:
    if operator.host == "applyInPandasWithState":
        timeout_conf = operator.timeout_conf

        def put(_key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
            for row, others in _split(chunks, number):
                if row is not None:
                    StateOfGroup(state, timeout_conf).remember(row)
                if len(others):
                    yield others

        grouped = frame.groupBy(ROUTE)
        return _detach(grouped.applyInPandasWithState(put, _SCHEMA, POINTER_STATE, operator.output_mode, timeout_conf))
    return _detach(
        frame.groupBy(ROUTE).transformWithStateInPandas(
            _PutPointers(number), _SCHEMA, operator.output_mode, operator.time_mode
        )
    )


def _detach(frame: DataFrame) -> DataFrame:
    # Compute a column that no optimizer removes between two operators: otherwise Spark passes the first operator's
    # columnar rows to the second.
    return frame.withColumn(ROUTE, F.when(F.col(_OPERATOR) >= 0, F.col(ROUTE)))


class _PutPointers(StatefulProcessor):
    def __init__(self, number: int) -> None:
        self._number = number

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._pointer = handle.getValueState(POINTER_VARIABLE, POINTER_SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[pd.DataFrame]:
        for row, others in _split(rows, self._number):
            if row is not None:
                ValueOfGroup(self._pointer, self._handle, timerValues, row.batch_ms).remember(row)
            if len(others):
                yield others

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[pd.DataFrame]:
        # An overdue timer fires in the stub, but must fire in the query, too: store its pointer again.
        firing_ms = expiredTimerInfo.getExpiryTimeInMs()
        group = ValueOfGroup(self._pointer, self._handle, timerValues, firing_ms, firing_ms)
        row = group.remembered()
        if row is not None:
            group.remember(row)
        return iter(())


def _split(chunks: Iterable[pd.DataFrame], number: int) -> Iterator[tuple[PointerRow | None, pd.DataFrame]]:
    """Yield the operator's pointer row in each chunk, if any, and the other operators' rows."""
    for chunk in chunks:
        frame = chunk.set_axis(_COLUMNS, axis="columns")
        mine = frame[_OPERATOR] == number
        found = frame.loc[mine, _ROW].tolist()
        yield PointerRow.read((found[0].encode(),)) if found else None, frame.loc[~mine]
