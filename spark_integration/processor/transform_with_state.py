"""``transformWithState``: calls a `StatefulProcessor` key by key, with state fetched per slab of keys.

::

    init ─▶ rows ─▶ slabs of keys ─▶ for each key: handleInputRows(key, rows, times) ─────────────▶ output
                      ▲       │
         states, ─────┘       └──▶ states, timers             one lookup and one write per slab and variable
         timers                          │
                    due timers ◀─────────┘ ─▶ handleExpiredTimer(key, times, timer), earliest first ─▶ output
                                                                     │
                                                 close ◀─────────────┘ ─▶ evict expired state

Keys are called in ascending order, null first and NaN last. The set of timers that fire is fixed after the last row:
timers registered while timers fire wait for the next micro-batch.

`AttributeWatch` warns if a processor keeps state in its attributes, which are lost when the shard's call ends.

At a restart, variables and their value columns may be added and removed; they are matched by name. Errors include
Spark's error class. Like Spark, holdfast checks them in a run's first micro-batch, because a definition's query, and
thus its state, is unknown before.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from pyspark.sql.types import StructType

from holdfast.backends.arrow.rows import IntArray, inverse, order_rows
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.evolution import key_changes, value_changes
from holdfast.backends.run import Keys, TableSchema
from holdfast.backends.schema import NEW_QUERY
from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.mvcc import Transaction
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.keyed.frame_templates import by_templates
from holdfast.spark_integration.keyed.frames import finished, note_key
from holdfast.spark_integration.keyed.python_values import RowValues, StateValueError, struct_maker
from holdfast.spark_integration.keyed.slabs import KeyOrder, at_once_of
from holdfast.spark_integration.processor.exchange import Exchange, KeyTuple
from holdfast.spark_integration.processor.handle import (
    CREATED,
    DATA_PROCESSED,
    INITIALIZED,
    TIMER_PROCESSED,
    Declaration,
    PickledProcessor,
    ProcessorHandle,
)
from holdfast.spark_integration.processor.state.slab import CalledSlab
from holdfast.spark_integration.processor.state.states import ProcessorStates
from holdfast.spark_integration.processor.state.timers import ProcessorTimers, timer_tables
from holdfast.spark_integration.processor.state.variable_tables import KINDS, table_of
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.shard.operator import BatchTimes, ShardInput
from holdfast.spark_integration.shard.timeout import TimeMode
from holdfast.spark_integration.tables.entry_rows import EntryRows
from holdfast.spark_integration.tables.restarting import described, misread_columns, require_same_api
from holdfast.spark_integration.timers import TIMERS, DueTimers, KeysAtOnce, timers_schema
from holdfast.spark_integration.transport.python_stage import rare_full_collections
from holdfast.spark_integration.ttl.expiry import index_of

_CONTAINERS = (dict, list, set, bytearray)
_ABSENT = object()
#: Classes that this process has warned about.
_warned: set[str] = set()
_NO_TIME = -1


def require_same_grouping(stored: StoredTables, grouping: pa.Schema) -> None:
    """Check the grouping columns of stored state. Raises `SchemaMismatchError` if they differ."""
    for name, table in stored.held.items():
        own = 1 if name.startswith("l.") or name == TIMERS else 0
        width = len(grouping) if name.startswith("m.") else len(table.key) - own
        before = pa.schema(list(table.key)[:width])
        if not before.equals(grouping):
            _refuse(
                "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
                f"the state was grouped by different columns: group by the stored columns, {NEW_QUERY}",
                stored=described(before),
                declared=described(grouping),
            )


def require_same_kind(variable: StateVariable, stored: StoredTables) -> None:
    """Raise `SchemaMismatchError` if a variable of this name but a different kind has stored values."""
    for kind in KINDS:
        table = table_of(kind, variable.name)
        if kind != variable.kind and table in stored.held and not _is_index(table, stored):
            _refuse(
                "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE",
                f"{variable.name!r} was a {kind} state, and its values are still stored: give the new variable "
                f"a different name, {NEW_QUERY}",
                stored=kind,
                declared=variable.kind,
            )
    index = index_of(variable.table)
    if _is_index(variable.table, stored) or (variable.ttl_ms and index in stored.held and not _is_index(index, stored)):
        _refuse(
            "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE",
            f"{variable.what} shares a table with an earlier variable: with a TTL, a variable's index is named after "
            f"the variable, with '.expiring'. Give the new variable a different name, {NEW_QUERY}",
            tables=[variable.table, *([index] if variable.ttl_ms else [])],
        )


def require_readable_values(variable: StateVariable, declared: TableSchema, stored: StoredTables) -> None:
    """Check that a variable's stored values fit its new declaration. Raises `SchemaMismatchError`."""
    if declared.name not in stored.held:
        return
    live = stored.live[declared.name]
    if key_changes(live, declared):
        _refuse(
            "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
            f"the key of {variable.what} has different columns or types than its stored entries: declare the stored "
            f"columns, give the variable a different name, {NEW_QUERY}",
            stored=described(live.key),
            declared=described(declared.key),
        )
    # Spark accepts the declaration if no new column can be a renamed column.
    has_ttl = variable.ttl_ms is not None
    why = value_changes(live, declared)
    why += misread_columns(stored, declared, variable.name, has_ttl=has_ttl, only_fitting=True)
    if why:
        _refuse(
            "STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION",
            f"Schema evolution is not possible: stored values of {variable.what} cannot be read as newly declared "
            f"({'; '.join(why)}): only adding nullable columns, removing columns and widening numbers is allowed. "
            f"Declare the stored columns, give the variable a different name, {NEW_QUERY}",
            stored=described(stored.latest[declared.name].value),
            declared=described(declared.value),
        )


def _is_index(table: str, stored: StoredTables) -> bool:
    """Return whether a table is an expiry index, not a variable of that name."""
    held = stored.held.get(table)
    return held is not None and held.value.equals(timers_schema(table, held.key).value)


def _refuse(condition: str, message: str, **facts: object) -> NoReturn:
    raise SchemaMismatchError(f"[{condition}] {message}", **facts)


class AttributeWatch:
    """Compares a processor's attributes before and after its calls.

    A cache created by ``init`` may grow. A container that was pickled with the processor may not grow, because its
    author seems to expect it to persist.
    """

    def __init__(self, processor: StatefulProcessor) -> None:
        self._processor = processor
        self._pickled = self._attributes()
        self._before: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}

    def begin(self) -> None:
        """Record the attributes after ``init``."""
        self._before = self._attributes()
        self._sizes = {
            name: len(value)
            for name, value in self._before.items()
            if value is self._pickled.get(name) and isinstance(value, _CONTAINERS)
        }

    def warn_of_changes(self) -> None:
        """Warn of changed attributes, once per process and processor class."""
        owner, changed = type(self._processor), self._changed()
        name = f"{owner.__module__}.{owner.__qualname__}"
        if not changed or name in _warned:
            return
        _warned.add(name)
        warnings.warn(
            f"{owner.__name__} has changed its attributes while it handled rows or timers: {', '.join(changed)}. The "
            "changes will be lost after this micro-batch: use a state variable, or, for a cache, create the attribute "
            "in init",
            stacklevel=2,
        )

    def _changed(self) -> list[str]:
        after = self._attributes()
        rebound = [
            name
            for name in {**self._before, **after}
            if after.get(name, _ABSENT) is not self._before.get(name, _ABSENT)
            and not isinstance(getattr(type(self._processor), name, None), cached_property)
        ]
        grown = [name for name, size in self._sizes.items() if name not in rebound and len(after[name]) != size]
        return rebound + grown

    def _attributes(self) -> dict[str, Any]:
        return dict(vars(self._processor))


@dataclass(frozen=True)
class TransformWithState:
    """The `ShardFunction` of ``transformWithState``."""

    processor: PickledProcessor
    declared: Declaration  #: The declarations of its ``init``
    key_types: pa.Schema  #: Grouping keys in the types that Spark exchanges with Python
    key_schema: StructType  #: Grouping keys in Spark's types
    given_keys: list[int]  #: The key column of each value in a key's tuple; may repeat a column
    shown_columns: list[str]  #: The columns that the processor sees
    exchange: Exchange
    time_mode: TimeMode
    output_mode: str
    is_streaming: bool  #: False in a batch query, which keeps no state
    state_changes: Mapping[str, ColumnChanges] = field(default_factory=dict)  #: Column changes by table
    first_exchange: Exchange | None = None  #: For the first micro-batch with an initial state
    frame_templates: bool = True  #: Whether the processor's frames are built from templates

    def tables(self) -> Mapping[str, TableSchema]:
        tables: dict[str, TableSchema] = {}
        for variable in self.declared.variables:
            own = variable.tables(self.key_types)
            if tables.keys() & own.keys():
                raise InvalidArgumentError(
                    f"{variable.what} shares a table with another variable's index by TTL: rename one of them"
                )
            tables |= own
        if self.time_mode != "None":
            tables |= timer_tables(self.key_types, self.time_mode)
        return tables

    def changes(self) -> Mapping[str, ColumnChanges]:
        return self.state_changes

    def configuration(self) -> Mapping[str, str]:
        return {"timeMode": self.time_mode, "outputMode": self.output_mode}

    def require_restartable(self, stored: StoredTables, configuration: Mapping[str, str]) -> None:
        tables = self.tables()
        require_same_api(configuration, self.configuration())
        for name, value in self.configuration().items():
            if configuration.get(name) != value:
                _refuse(
                    "STATE_STORE_INVALID_CONFIG_AFTER_RESTART",
                    f"the query started with a different {name}: set it back, {NEW_QUERY}",
                    stored=configuration.get(name),
                    declared=value,
                )
        require_same_grouping(stored, self.grouping.key)
        for variable in self.declared.variables:
            require_same_kind(variable, stored)
            require_readable_values(variable, tables[variable.table], stored)

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        steps = self._run(batch, transaction)
        return by_templates(steps) if self.frame_templates else steps

    def _run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        calls = _Calls(self, batch, transaction)
        with rare_full_collections():
            for keys, shown, pieces in self.slabs(batch, calls.at_once):
                yield from calls.with_rows(keys, shown, pieces)
            yield from calls.expired_timers()
            yield from calls.finish()
        return calls.close()

    def slabs(
        self, batch: ShardInput, at_once: KeysAtOnce
    ) -> Iterator[tuple[Keys, list[KeyTuple], Iterable[Iterator[Any]]]]:
        """Yield slabs of ascending keys: the keys, their form for the processor, and each key's rows."""
        keys = batch.keys(self.grouping)
        order = KeyOrder.of(keys)
        is_first = batch.batch_id == 0 or not self.is_streaming
        exchange = self.first_exchange if is_first and self.first_exchange is not None else self.exchange
        slabs = exchange.slabs(batch.rows.select(self.shown_columns), order)
        for slab in slabs.slabs(at_once):
            first_rows = order.first_rows(slab.first_key, slab.keys)
            shown = batch.keys_shown_at(first_rows).select(self.given_keys)
            yield keys.take(first_rows), exchange.keys(shown), slab

    @property
    def grouping(self) -> TableSchema:
        """The schema of grouping keys."""
        return TableSchema.of("grouping keys", self.key_types, pa.schema([]))


@dataclass(frozen=True)
class InitialState(TransformWithState):
    """The `ShardFunction` of the initial state: ``handleInitialState`` for each row or frame."""

    @classmethod
    def of(cls, step: TransformWithState) -> InitialState:
        """Return the function of a step that was defined for the initial rows."""
        return cls(**vars(step))

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        calls = _Calls(self, batch, transaction)
        for keys, shown, pieces in self.slabs(batch, calls.at_once):
            calls.with_initial_state(keys, shown, pieces)
        yield from ()  # Spark, too, drops what handleInitialState returns
        return calls.close()


class _Calls:
    """Calls the processor for each key during one call of a shard."""

    def __init__(self, step: TransformWithState, batch: ShardInput, transaction: Transaction) -> None:
        self._step = step
        self._operator = batch.operator
        self._counts = batch.counts
        self._times, self._due_ms = _times_of(step, batch.times)
        self._transaction = transaction
        variables = step.declared.variables
        has_entries = any(variable.kind != "value" for variable in variables)
        schemas = [variable.schema for variable in variables]
        self.at_once = at_once_of(batch.operator, *schemas, has_entries=has_entries)
        self._slab = CalledSlab()
        self._timers: ProcessorTimers | None = None
        if step.time_mode != "None":
            schema = timer_tables(step.key_types, step.time_mode)[TIMERS]
            entries = EntryRows(transaction, schema, len(step.key_types), None)
            self._timers = ProcessorTimers(transaction, entries, self._slab, batch.times.earliest_timer_ms)
        self._states = ProcessorStates(transaction, step.tables(), len(step.key_types), self._slab, batch.times)
        self._output = step.exchange.output()
        self._handle = ProcessorHandle(step.time_mode, step.declared.schemas, self._states, self._timers, CREATED)
        self._processor = step.processor.unpickled()
        self._attributes = AttributeWatch(self._processor)
        self._processor.init(self._handle)
        self._attributes.begin()
        if self._handle.variables != {variable.name: variable for variable in step.declared.variables}:
            raise InvalidArgumentError(
                "init declares different state variables in this task than at the operator's definition: it must "
                "always declare the same variables",
                operator=self._operator,
                here=list(self._handle.variables),
                defined=[variable.name for variable in step.declared.variables],
            )
        self._states.drop_deleted()
        self._in_phase(INITIALIZED)

    def with_rows(self, keys: Keys, shown: list[KeyTuple], pieces: Iterable[Iterator[Any]]) -> Iterator[pa.RecordBatch]:
        call, times, add_all, slab = self._processor.handleInputRows, self._times, self._output.add_all, self._slab
        self._begin(keys)
        self._counts.keys += len(shown)
        for at, (key, rows) in enumerate(zip(shown, pieces, strict=True)):
            slab.enter(at)
            try:
                yield from add_all(call(key, rows, times), key)
            except Exception as exc:
                note_key(exc, self._operator, self._output.failed_key or key)
                raise
        self._flush(shown)

    def with_initial_state(self, keys: Keys, shown: list[KeyTuple], pieces: Iterable[Iterator[Any]]) -> None:
        self._begin(keys)
        for at, (key, rows) in enumerate(zip(shown, pieces, strict=True)):
            self._slab.enter(at)
            try:
                for row in rows:
                    self._processor.handleInitialState(key, row, self._times)
            except Exception as exc:
                note_key(exc, self._operator, key)
                raise
        self._flush(shown)

    def expired_timers(self) -> Iterator[pa.RecordBatch]:
        """Call the processor for due timers, earliest first."""
        self._in_phase(DATA_PROCESSED)
        timers = self._timers
        if timers is None:
            return
        given, schema = self._step.given_keys, self._step.key_schema
        key_rows, make_key = RowValues(schema, "the keys"), struct_maker(*[schema.names[at] for at in given])
        for due in chain.from_iterable(some.pieces(self.at_once) for some in timers.due(self._due_ms)):
            keys, places = _distinct(due)
            columns = key_rows.to_columns(keys.columns)
            shown: list[KeyTuple] = list(map(make_key, zip(*[columns[at] for at in given], strict=True)))
            self._begin(keys)
            self._counts.keys += len(shown)
            self._counts.timers_due += len(due)
            for at, due_ms in zip(places.tolist(), due.due_ms.tolist(), strict=True):
                self._slab.enter(at)
                try:
                    # By keyword, as in Spark: a method with different parameter names fails in Spark too.
                    returned = self._processor.handleExpiredTimer(
                        key=shown[at], timerValues=self._times, expiredTimerInfo=ExpiredTimerInfo(due_ms)
                    )
                    yield from self._output.add_all(returned, shown[at])
                    timers.delete(due_ms)
                except Exception as exc:
                    note_key(exc, self._operator, self._output.failed_key or shown[at])
                    raise
            self._flush(shown)

    def _begin(self, keys: Keys) -> None:
        self._moved_bytes = self._transaction.measures.moved_bytes
        self._slab.begin(keys)
        self._states.begin()
        if self._timers is not None:
            self._timers.begin()

    def _flush(self, shown: list[KeyTuple]) -> None:
        self._slab.leave()
        try:
            self._states.flush()
        except StateValueError as exc:
            note_key(exc, self._operator, shown[exc.row])
            raise
        if self._timers is not None:
            self._timers.flush()
        self.at_once.learn(len(shown), self._transaction.measures.moved_bytes - self._moved_bytes)

    def finish(self) -> Iterator[pa.RecordBatch]:
        return finished(self._output, self._operator)

    def close(self) -> int | None:
        """Close the processor, remove expired state, and return the time by which the shard must be called again."""
        self._in_phase(TIMER_PROCESSED)
        if self._step.is_streaming:
            self._attributes.warn_of_changes()
        self._processor.close()
        self._states.evict()
        due_ms = None if self._timers is None else self._timers.earliest()
        found = [None if due_ms is None else max(0, due_ms), self._states.next_expiry_ms()]
        return min((at for at in found if at is not None), default=None)

    def _in_phase(self, phase: str) -> None:
        self._handle.phase = self._slab.phase = phase


def _times_of(step: TransformWithState, times: BatchTimes) -> tuple[TimerValues, int]:
    """Return the times that a processor sees, and the last time at which timers are due."""
    if step.time_mode == "None":
        return TimerValues(_NO_TIME, _NO_TIME), _NO_TIME
    watermark_ms = (times.watermark_ms or 0) if step.is_streaming else _NO_TIME
    due_ms = times.processing_ms if step.time_mode == "ProcessingTime" else watermark_ms
    return TimerValues(times.processing_ms, watermark_ms), due_ms


def _distinct(due: DueTimers) -> tuple[Keys, IntArray]:
    """Return the timers' distinct keys, in the order of their first timers, and the index of each timer's key."""
    order = order_rows(due.keys.hashes, due.keys.columns)
    first_timers = order.rows[order.first]
    ascending = np.argsort(first_timers)
    return due.keys.take(first_timers[ascending]), inverse(ascending)[order.key_of_row]
