"""Turns the definition of a stateful step into a Spark plan, for all APIs alike.

::

    df ─▶ keys, hash ─▶ blobs ═shuffle by shard═▶ host: call_shard ─▶ output ─▶ rows

An executor looks up the state already stored for the operator.

For a one-line operator, Spark's state store decides which operator is the host::

    events ─▶ dropDuplicates ─▶ join ─▶ window       RocksDB state store: the watermark goes on, several in a query
    events ─▶ window                                 any state store: one in a query, cheaper by a small micro-batch

Spark's ``transformWithState`` hands the watermark on, but needs Spark's RocksDB state store, and takes longer for a
small micro-batch than ``applyInPandasWithState``. Spark keeps a query's first state store, so this is decided once per
query.

A second operator of one name in a stream's lineage is refused when it is defined. Each operator of a stream aliases its
input with its name, which Spark keeps only in downstream plans: it pins no alias with a query. Operators of other
queries and of batches are in no such plan. An operator behind two parallel ones sees both; without one, their first
micro-batch refuses them. Plans are private to PySpark, and read here only: `tests/spark/queries/test_refused.py` and
`connect_query.py` fail where they are gone. Then the check moves to the first micro-batch.
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
# A line of the plan: Spark's own has the alias as it is, Connect's as one of the node's arguments.
_MARKED = re.compile(rf"^\W*SubqueryAlias .*{_MARK}:([\w.-]+):(\w+)\W*$", re.MULTILINE)
_FOUND = pa.schema([("shards", pa.int32()), ("query", pa.string()), ("problem", pa.string())])
#: How an error ends that asks for a watermark.
BEHIND_ANOTHER = (
    ". Behind another operator, keep the column of the time, and set spark.sql.streaming.stateStore.providerClass to "
    "Spark's RocksDB state store, with which operators hand the watermark on"
)


@dataclass(frozen=True)
class StoredState:
    """The state under an operator's name."""

    shards: int | None = None  #: How many it was written with; None if there is none, or it cannot be read
    query: str | None = None  #: The id of the query that it is of
    problem: str | None = None  #: Why the operator cannot go on with it


def stored_state(session: SparkSession, settings: Settings, operator: str, function: ShardFunction) -> StoredState:
    """Return the stored state of an operator's name; none if the storage cannot be read.

    Runs a job of one task: only executors are sure to have the storage's credentials and network.
    """

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            found = StoredState()
            try:
                found = _look(settings, operator, function)
            except HoldfastError as exc:
                _log.warning("the stored state of %r cannot be read: %s", operator, exc)
            yield pa.RecordBatch.from_pylist([vars(found)], schema=_FOUND)

    found = session.range(1, numPartitions=1).mapInArrow(look, _COLUMNS)
    try:
        (row,) = found.collect()
    except Exception as exc:
        if not is_transient(exc):  # Spark repeats no task of a local master
            raise
        _log.warning("reading the stored state of %r failed, and is retried: %s", operator, exc)
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
        _log.warning("the tables of %r cannot be read: %s", operator, exc)
    return StoredState(record.shards, record.query_id, problem)


@dataclass(frozen=True)
class KeyedRows:
    """Rows with their keys, and what shards do with them."""

    df: DataFrame
    keys: list[Key]
    function: ShardFunction
    first_version: int = 1
    combiner: Combiner | None = None  #: Of rows that the function takes in its form

    @property
    def columns(self) -> dict[str, StructField]:
        """The columns by name: a column selected twice travels once."""
        return {field.name: field for field in self.df.schema}

    @property
    def expressions(self) -> list[Key]:
        """The keys that travel in columns of their own."""
        return [key for key in self.keys if key.is_expression]


@dataclass(frozen=True)
class Definition:
    """One stateful step, as defined on the driver; `initial` describes the initial state, whose keys match."""

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
                "stateChanges are remembered with the state: set spark.holdfast.state.dir, or leave them out",
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
            # Only its query's checkpoint location will tell which state it continues.
            warnings.warn(
                f"this definition of {self.name!r} cannot continue the state of query {stored.query}, which would "
                f"fail in its first micro-batch: {stored.problem}",
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
            output = output.among(shards)
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
            # Initial rows may name their keys differently.
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
        # Of a stream Spark hands over batches of so many rows.
        bounded = rows_each(rows.df) if self._is_streaming and not is_initial else None
        time, event_time = time_column_of(rows.df), None
        if time is not None and rows.df.isStreaming:
            event_time = EventTime(time.field.name, time.watermark, self.host.drops_late_rows)
        received = types if rows.combiner is None else rows.combiner.received(types)
        return PackedTransport(shards, received, event_time, bounded, rows.combiner)


def _require_new_name(df: DataFrame, operator: str) -> None:
    """Refuse an operator with a name used upstream, or two upstream of one name. Raises `InvalidArgumentError`."""
    frame: Any = df
    try:
        # One that is used twice is in the plan twice.
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
    """Return the DataFrame of an operator's output; call it one level below the user's call.

    `is_timed`: whether it drops late rows and expires state. Raises `InvalidArgumentError` for a name, setting or
    column.
    """
    settings = checked_settings(rows.df, stacklevel=4)
    hands_on = can_host_processors(rows.df.sparkSession)
    # In update mode no operator in event time can follow it.
    shown = output if hands_on and mode == "append" else without_watermark(output)
    host: Host
    if hands_on:
        # Spark lets no restart change this mode, which changes nothing: the operator's own mode may change.
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
