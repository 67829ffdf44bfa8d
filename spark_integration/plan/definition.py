"""Builds the Spark plan of a stateful step from its definition, for all APIs.

::

    df ─▶ keys, hash ─▶ blobs ═shuffle by shard═▶ host: call_shard ─▶ output ─▶ rows

Before that, a task on an executor looks up the operator's stored state.

For a one-line operator, Spark's state store determines the host::

    events ─▶ dropDuplicates ─▶ join ─▶ window       RocksDB: operators pass on the watermark, several per query
    events ─▶ window                                 any state store: one per query, cheaper for small micro-batches

Spark's ``transformWithState`` passes on the watermark, but needs Spark's RocksDB state store, and takes longer for a
small micro-batch than ``applyInPandasWithState``. A query keeps its first state store, so its host never changes.

A second operator with the same name in a stream's lineage is rejected when it is defined. Each operator of a stream
aliases its input with its name. The alias appears only in downstream plans, and Spark does not store it with the query.
Operators of other queries and of batches are in no such plan. Two parallel operators meet only in the plan of an
operator downstream of both; without such an operator, their first micro-batch rejects them. PySpark's plans are
private, and only this module reads them: `tests/spark/queries/test_refused.py` and `connect_query.py` fail if PySpark
removes them. The check then happens in the first micro-batch.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, StructField, StructType

from holdfast import clock
from holdfast.errors import HoldfastError, InvalidArgumentError, SchemaMismatchError
from holdfast.settings import MOST_SHARDS, Settings
from holdfast.snapshotter.ownership.operator_record import SAME_NAME, find_operator
from holdfast.snapshotter.ownership.stored_tables import stored_tables
from holdfast.spark_integration.failures import is_transient
from holdfast.spark_integration.hosts.host import GroupStateHost, Host, SentRows, StatefulProcessorHost, run_batch
from holdfast.spark_integration.plan.arguments import Mode, can_host_processors, operator_name
from holdfast.spark_integration.plan.event_time import time_column_of, without_watermark
from holdfast.spark_integration.plan.grouping_keys import Key
from holdfast.spark_integration.plan.session import checked_settings, rows_each, shuffle_partitions, warn_of_partitions
from holdfast.spark_integration.shard.operator import Operator, ShardFunction
from holdfast.spark_integration.shard.task import noted, state_storage
from holdfast.spark_integration.shard_call.call import ShardStep
from holdfast.spark_integration.spark_types import sent_schema
from holdfast.spark_integration.spark_versions import is_classic
from holdfast.spark_integration.transport.output import OBSERVATION, ObservedOutput, Output, PackedOutput
from holdfast.spark_integration.transport.packed import HASH, Combiner, EventTime, PackedTransport, quoted

_log = logging.getLogger(__name__)
_COLUMNS = "shards int, query string, problem string"
_MARK = "holdfast-operator"
# A line of a plan: classic Spark prints the alias itself, Connect prints it as an argument of the node.
_MARKED = re.compile(rf"^\W*SubqueryAlias .*{_MARK}:([\w.-]+):(\w+)\W*$", re.MULTILINE)
_FOUND = pa.schema([("shards", pa.int32()), ("query", pa.string()), ("problem", pa.string())])
#: The end of an error about a missing watermark.
BEHIND_ANOTHER = (
    ". Downstream of an operator, keep the event-time column and set spark.sql.streaming.stateStore.providerClass to "
    "Spark's RocksDB state store, with which operators pass on the watermark"
)


@dataclass(frozen=True)
class StoredState:
    shards: int | None = None  #: Number of shards; None without readable state
    query: str | None = None  #: The id of the query that owns the state
    problem: str | None = None  #: Why the operator cannot continue from the state


def stored_state(session: SparkSession, settings: Settings, operator: str, function: ShardFunction) -> StoredState:
    """Look up an operator's stored state; return an empty result if the storage cannot be read.

    This runs a job with one task, because only executors are sure to have the storage's credentials and network.
    """

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            found = StoredState()
            try:
                found = _look(settings, operator, function)
            except HoldfastError as exc:
                _log.warning("cannot read the stored state of %r: %s", operator, exc)
            yield pa.RecordBatch.from_pylist([vars(found)], schema=_FOUND)

    found = session.range(1, numPartitions=1).mapInArrow(look, _COLUMNS)
    try:
        (row,) = found.collect()
    except Exception as exc:
        if not is_transient(exc):  # Spark does not retry tasks of a local master
            raise
        _log.warning("cannot read the stored state of %r; retrying: %s", operator, exc)
        (row,) = found.collect()
    return StoredState(row["shards"], row["query"], row["problem"])


def _look(settings: Settings, operator: str, function: ShardFunction) -> StoredState:
    storage = state_storage(settings)
    record = None if storage is None else find_operator(storage, operator)
    if storage is None or record is None:
        return StoredState()
    problem = None
    try:
        tables = stored_tables(storage, record).with_changes(function.changes())
        function.require_restartable(tables, record.configuration)
    except SchemaMismatchError as exc:
        problem = str(exc)
    except HoldfastError as exc:
        _log.warning("cannot read the tables of %r: %s", operator, exc)
    return StoredState(record.shards, record.query_id, problem)


@dataclass(frozen=True)
class KeyedRows:
    """Rows, their keys, and the function that shards run on the rows."""

    df: DataFrame
    keys: list[Key]
    function: ShardFunction
    first_version: int = 1
    combiner: Combiner | None = None  #: If set, combines rows before the shuffle

    @property
    def columns(self) -> dict[str, StructField]:
        """The columns by name; a column selected twice is sent once."""
        return {field.name: field for field in self.df.schema}

    @property
    def expressions(self) -> list[Key]:
        """The keys that need an additional column."""
        return [key for key in self.keys if key.is_expression]


@dataclass(frozen=True)
class Definition:
    """A stateful step as defined on the driver; `initial` is the initial state, which has the same keys."""

    rows: KeyedRows
    name: str
    output: Output
    host: Host
    settings: Settings
    initial: KeyedRows | None = None

    def plan(self) -> DataFrame:
        """Return the DataFrame of the step's output. Raises `InvalidArgumentError`."""
        self.rows.function.tables()
        if self._is_streaming and self.settings.state_dir is None and self.rows.function.changes():
            raise InvalidArgumentError(
                "stateChanges are stored with the state: set spark.holdfast.state.dir, or omit stateChanges",
                operator=self.name,
            )
        if self._is_streaming:
            _require_new_name(self.rows.df, self.name)
        session, stored = self.rows.df.sparkSession, StoredState()
        if self.settings.state_dir is not None and self._is_streaming:
            stored = stored_state(session, self.settings, self.name, self.rows.function)
        kept = None if self.settings.shards is not None else stored.shards
        if kept is None and self._is_streaming:
            warn_of_partitions(session, stacklevel=3)
        if stored.problem is not None:
            # Only the query's checkpoint location determines which state it continues.
            warnings.warn(
                f"this definition of {self.name!r} cannot continue the state of query {stored.query}, and would fail "
                f"in that query's first micro-batch: {stored.problem}",
                stacklevel=3,
            )
        shards = self.settings.shards or kept or shuffle_partitions(session)
        if shards > MOST_SHARDS:
            raise InvalidArgumentError(
                f"an operator has at most {MOST_SHARDS} shards, by default one for each shuffle partition: set "
                "spark.sql.shuffle.partitions to the number of task slots, or spark.holdfast.shards",
                operator=self.name,
                shards=shards,
            )
        definition_id = clock.new_id()
        rows = self._sent(self.rows, shards, definition_id)
        initial = None if self.initial is None else self._sent(self.initial, shards, definition_id)
        if not self._is_streaming:
            return self.output.receive(run_batch(rows, initial))
        rows = replace(rows, frame=rows.frame.alias(f"{_MARK}:{self.name}:{definition_id}"))
        return rows.step.output.receive(self.host.run(rows, initial))

    @property
    def _is_streaming(self) -> bool:
        return self.rows.df.isStreaming

    def _sent(self, rows: KeyedRows, shards: int, definition_id: str) -> SentRows:
        carried = rows.df.select(
            *[key.expression.alias(key.column) for key in rows.expressions], *[quoted(name) for name in rows.columns]
        )
        hashed = F.xxhash64(*[quoted(key.column) for key in rows.keys])
        transport, output = self._transport(rows, shards), self.output
        if self._is_streaming:
            output = output.for_shards(shards)
        if self._is_streaming and self.settings.metrics_in_progress:
            output = ObservedOutput.of(output, OBSERVATION + self.name)
        row_columns = transport.arrow_schema.names if rows.combiner is not None else list(rows.columns)
        step = ShardStep(self._operator(rows, row_columns, shards, definition_id), transport, output)
        return SentRows(transport.send(carried, hashed, partial(noted, self.name, "before the shuffle")), step)

    def _operator(self, rows: KeyedRows, row_columns: list[str], shards: int, definition_id: str) -> Operator:
        time = time_column_of(self.rows.df)
        return Operator(
            name=self.name,
            definition_id=definition_id,
            function=rows.function,
            shards=shards,
            key_columns=[key.column for key in rows.keys],
            row_columns=row_columns,
            # The keys of initial rows may have different names.
            key_names=[key.field.name for key in self.rows.keys],
            watermark=None if time is None else time.watermark,
            settings=self.settings,
            first_version=rows.first_version,
            fires_by_watermark=self.host.drops_late_rows,
        )

    def _transport(self, rows: KeyedRows, shards: int) -> PackedTransport:
        expressions = [StructField(key.column, key.field.dataType) for key in rows.expressions]
        schema = StructType([*expressions, *rows.columns.values(), StructField(HASH, LongType(), False)])
        is_initial = rows is not self.rows
        types = sent_schema(schema, "the initial state" if is_initial else "the input")
        # Only in a stream does Spark pass batches of this many rows.
        bounded = rows_each(rows.df) if self._is_streaming and not is_initial else None
        time, event_time = time_column_of(rows.df), None
        if time is not None and rows.df.isStreaming:
            event_time = EventTime(time.field.name, time.watermark, self.host.drops_late_rows)
        received = types if rows.combiner is None else rows.combiner.received(types)
        return PackedTransport(shards, received, event_time, bounded, rows.combiner)


def _require_new_name(df: DataFrame, operator: str) -> None:
    """Reject a name that occurs twice among an operator and its upstream operators. Raises `InvalidArgumentError`."""
    frame: Any = df
    try:
        # An operator whose output is used twice is in the plan twice.
        if is_classic(df.sparkSession):
            plan = str(frame._jdf.queryExecution().analyzed().toString())  # noqa: SLF001
        else:
            plan = str(frame._plan.print())  # noqa: SLF001
    except (Py4JError, AttributeError):
        return
    names = [name for name, _ in sorted(set(_MARKED.findall(plan)))] + [operator]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(SAME_NAME, operator=name)


def operator_plan(rows: KeyedRows, output: StructType, mode: Mode, name: str, *, is_timed: bool) -> DataFrame:
    """Return the DataFrame of an operator's output; warnings refer to the caller's caller.

    `is_timed` says whether the operator drops late rows and expires state. Raises `InvalidArgumentError` for an invalid
    name, setting or column.
    """
    settings = checked_settings(rows.df, stacklevel=4)
    passes_watermark = can_host_processors(rows.df.sparkSession)
    # In update mode, no event-time operator can follow.
    shown = output if passes_watermark and mode == "append" else without_watermark(output)
    host: Host
    if passes_watermark:
        # Spark pins this mode, which has no effect, so the operator's own mode may change at a restart.
        host = StatefulProcessorHost("append", "EventTime" if is_timed else "None", "")
    else:
        host = GroupStateHost(mode, "EventTimeTimeout" if is_timed else "NoTimeout")
    return Definition(
        rows=rows,
        name=operator_name(None, name),
        output=PackedOutput(shown, rows_each(rows.df)),
        host=host,
        settings=settings,
    ).plan()
