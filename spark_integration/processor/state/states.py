"""The state variables of a processor during one call of a shard.

Value state of a processor: one row for each key, fetched at the first read of a slab and written at its end.

List state of a processor: a row for each element, in the order of its number.

Elements that were appended are kept until the slab ends; a list that is read is fetched with those of the keys after
it. Numbers: `holdfast.spark_integration.tables.entry_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, count
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ListState, ValueState

from holdfast.backends.arrow.rows import IntArray
from holdfast.backends.run import Keys, TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.mvcc import Transaction
from holdfast.spark_integration.processor.state.map_state import ProcessorMapState
from holdfast.spark_integration.processor.state.slab import MissingSlab, Slab
from holdfast.spark_integration.processor.state.slab_entries import SlabEntries
from holdfast.spark_integration.processor.state.spark_errors import state_error
from holdfast.spark_integration.processor.state.state_rows import State, StateRows, UserKeys
from holdfast.spark_integration.processor.state.variable_tables import KINDS, table_of
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.shard.operator import BatchTimes
from holdfast.spark_integration.tables.entry_rows import EntryRows, first_number
from holdfast.spark_integration.tables.key_rows import ExpiringKeyRows, Expiry, KeyRows, expiry_of, index_of, open_rows
from holdfast.spark_integration.tables.timers import is_by_time

#: How many elements of a list that is too large to fetch are read at once.
_READ_AT_ONCE = 10_000


class ProcessorListState(ListState):
    """One variable in one call of a shard; methods as Spark documents them.

    `rows`: of the elements; `version`: what the micro-batch commits.
    """

    def __init__(self, name: str, entries: EntryRows, rows: StateRows, slab: Slab, version: int) -> None:
        # Not Spark's __init__, which takes a client of Spark's state server.
        self._name = name
        self._entries = entries
        self._rows = rows
        self._slab: Slab = slab
        self._windows = SlabEntries(entries, slab)
        self._numbers = count(first_number(version))
        self.begin()

    def begin(self) -> None:
        """Forget the last slab; its changes were written."""
        self._appended: dict[int, list[State]] = {}
        self._replaced: set[int] = set()
        self._stored: dict[int, list[State] | None] = {}
        self._empty: set[int] = set()
        self._windows.begin()

    def drop(self, name: str) -> None:
        """Refuse all use from now on: the variable of this name was deleted after it was declared."""
        self._slab = MissingSlab(name)

    def exists(self) -> bool:
        at = self._slab.current("checking list state exists")
        if self._appended.get(at):
            return True
        return at not in self._replaced and next(iter(self._stored_of(at)), None) is not None

    def get(self) -> Iterator[State]:
        self._slab.current("getting list state")
        return self._elements(self._slab.call)

    def put(self, newState: Any) -> None:
        at = self._slab.current("updating value state")
        self._appended[at] = self._given(newState)
        self._replaced.add(at)

    def appendValue(self, newState: Any) -> None:
        at = self._slab.current("updating value state")
        self._appended.setdefault(at, []).append(self._rows.given(newState))

    def appendList(self, newState: Any) -> None:
        at = self._slab.current("updating value state")
        self._appended.setdefault(at, []).extend(self._given(newState))

    def clear(self) -> None:
        at = self._slab.current("clearing value state")
        self._appended.pop(at, None)
        self._replaced.add(at)

    def _given(self, rows: Any) -> list[State]:
        given = self._rows.each_given(rows)
        if not given:
            raise state_error(
                "updating value state",
                "ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE",
                f"Illegal value provided to the State Store: Cannot write empty list values to State Store for "
                f"StateName {self._name}.",
            )
        return given

    def _elements(self, call: int) -> Iterator[State]:
        """Iterate over what the list holds at the first step."""
        if self._slab.call != call:
            raise InvalidArgumentError(
                "a list's iterator was kept beyond its key's call: read it during the call",
                state=self._name,
            )
        at = self._slab.current("getting list state")
        appended = self._rows.each_as_read(self._appended.get(at, []))
        stored = () if at in self._replaced else self._stored_of(at)
        yield from map(self._rows.copy, chain(stored, appended))

    def _stored_of(self, at: int) -> list[State] | Iterator[State]:
        if at not in self._stored:
            self._fetch(at)
        stored = self._stored[at]
        return self._in_pieces(at) if stored is None else stored

    def _fetch(self, at: int) -> None:
        window = self._windows.fetch_once(at)
        if window is None:
            self._stored[at] = None
            return
        self._stored = {}  # most keys are called one after the other: the last window is done with
        numbers = window.entries.own_keys.column(0).to_numpy()
        found = window.entries.take(np.lexsort((numbers, window.entries.places)))
        elements = self._rows.values.to_tuples(found.values)
        for i in range(window.end - window.first):
            self._stored[window.first + i] = elements[window.bounds[i] : window.bounds[i + 1]]
        self._empty.update(at for at, stored in self._stored.items() if not stored)

    def _in_pieces(self, at: int) -> Iterator[State]:
        """Iterate over a list that is not fetched: its numbers first, then its elements in their order."""
        key = self._slab.keys.take(np.array([at]))
        parts = (part.own_keys.column(0).to_numpy() for part in self._entries.scan(key))
        numbers = np.concatenate([np.empty(0, np.int64), *parts])
        numbers.sort()
        for start in range(0, len(numbers), _READ_AT_ONCE):
            some = numbers[start : start + _READ_AT_ONCE]
            found = self._entries.at(self._keys_of(key.take(np.zeros(len(some), np.int64)), some)).get()
            yield from self._rows.values.to_tuples(found.values)

    def _keys_of(self, keys: Any, numbers: IntArray) -> Any:
        own = pa.RecordBatch.from_arrays([pa.array(numbers)], schema=self._entries.own_key_types)
        return self._entries.keys_of(keys, own)

    def flush(self) -> None:
        """Write the slab's changes.

        Raises `StateValueError` if an element does not fit its column; ``row`` is the place of its key in the slab.
        """
        keys = self._slab.keys
        going = [at for at in self._replaced if at not in self._empty]
        self._entries.delete_all(keys.take(np.array(going, np.int64)))
        elements = list(chain.from_iterable(self._appended.values()))
        if elements:
            places = np.repeat(list(self._appended), [len(some) for some in self._appended.values()])
            with self._rows.placed(places.tolist()):
                values = self._rows.values.to_arrow(elements)
            numbers = np.fromiter(self._numbers, np.int64, len(elements))
            rows = self._entries.at(self._keys_of(keys.take(places), numbers))
            rows.put(values)


class ProcessorValueState(ValueState):
    """One variable in one call of a shard; methods as Spark documents them.

    `expiry`: None if values stay until they are cleared.
    """

    def __init__(
        self, transaction: Transaction, table: str, expiry: Expiry | None, rows: StateRows, slab: Slab
    ) -> None:
        # Not Spark's __init__, which takes a client of Spark's state server.
        self._transaction = transaction
        self._table = table
        self._expiry = expiry
        self._rows = rows
        self._slab: Slab = slab
        self.begin()

    def begin(self) -> None:
        """Forget the last slab; its changes were written."""
        self._changed: dict[int, State | None] = {}
        self._opened: KeyRows | ExpiringKeyRows | None = None
        self._stored: list[State | None] | None = None

    def drop(self, name: str) -> None:
        """Refuse all use from now on: the variable of this name was deleted after it was declared."""
        self._slab = MissingSlab(name)

    def exists(self) -> bool:
        return self._get("checking value state exists") is not None

    def get(self) -> State | None:
        value = self._get("getting value state")
        return None if value is None else self._rows.copy(value)

    def update(self, newValue: Any) -> None:
        at = self._slab.current("updating value state")
        self._changed[at] = self._rows.given(newValue)

    def clear(self) -> None:
        self._changed[self._slab.current("clearing value state")] = None

    def _get(self, doing: str) -> State | None:
        at = self._slab.current(doing)
        if at in self._changed:
            written = self._changed[at]
            return None if written is None else self._rows.as_read(written)
        if self._stored is None:
            self._opened = self._open()
            found = self._opened.get()
            values = self._rows.values.to_tuples(found.values)
            self._stored = [
                value if exists else None for value, exists in zip(values, found.exists.tolist(), strict=True)
            ]
        return self._stored[at]

    def _open(self) -> KeyRows | ExpiringKeyRows:
        return open_rows(self._transaction, self._table, self._expiry, self._slab.keys)

    def flush(self) -> None:
        """Write the slab's changes.

        Raises `StateValueError` if a value does not fit its column; ``row`` is the place of its key in the slab.
        """
        if not self._changed:
            return
        put = {at: value for at, value in self._changed.items() if value is not None}
        gone = [at for at, value in self._changed.items() if value is None and self._may_exist(at)]
        # What was fetched knows the index of what expires.
        rows = self._open() if self._opened is None else self._opened
        if put:
            with self._rows.placed(list(put)):
                values = self._rows.values.to_arrow(list(put.values()))
            rows.put(values, np.array(list(put), np.int64))
        if gone:
            rows.delete(np.array(gone, np.int64))

    def _may_exist(self, at: int) -> bool:
        return self._stored is None or self._stored[at] is not None


_AnyState = ProcessorValueState | ProcessorListState | ProcessorMapState


class ProcessorStates:
    """Opens variables as they are declared, and writes and evicts all of them.

    `tables`: the operator's; `grouping`: number of columns of the grouping key.
    """

    def __init__(
        self,
        transaction: Transaction,
        tables: Mapping[str, TableSchema],
        grouping: int,
        slab: Slab,
        times: BatchTimes,
    ) -> None:
        self._transaction = transaction
        self._tables = tables
        self._grouping = grouping
        self._slab = slab
        self._times = times
        self._opened: dict[str, _AnyState] = {}
        self._expiries: list[Expiry] = []
        self._deleted: list[str] = []

    def open(self, variable: StateVariable) -> _AnyState:
        """Return the state of a variable."""
        expiry = expiry_of(self._transaction, variable.table, variable.ttl_ms, self._times)
        if expiry is not None:
            self._expiries.append(expiry)
        state = self._state(variable, expiry)
        self._opened[variable.name] = state
        return state

    def _state(self, variable: StateVariable, expiry: Expiry | None) -> _AnyState:
        rows = StateRows(variable.schema, variable.what)
        if variable.kind == "value":
            return ProcessorValueState(self._transaction, variable.table, expiry, rows, self._slab)
        entries = EntryRows(self._transaction, self._tables[variable.table], self._grouping, expiry)
        if variable.user_key is None:
            return ProcessorListState(variable.name, entries, rows, self._slab, self._transaction.version)
        user_keys = UserKeys(variable.user_key, f"the key of {variable.what}")
        return ProcessorMapState(variable.name, entries, user_keys, rows, self._slab, variable.schema.names)

    def drop(self, name: str) -> None:
        """Remember to remove all values of a variable; if it was opened, its state cannot be used any more."""
        self._deleted.append(name)
        if name in self._opened:
            self._opened.pop(name).drop(name)

    def drop_deleted(self) -> None:
        """Remove all values of the variables that ``deleteIfExists`` named."""
        tables = self._transaction.tables
        for table in [table_of(kind, name) for kind in KINDS for name in self._deleted]:
            for part, is_index in ((table, False), (index_of(table), True)):
                # A variable's name may be that of another's index.
                if part in tables and is_by_time(tables[part]) == is_index:
                    for run in self._transaction.scan(part):
                        self._transaction.delete(part, Keys(run.hashes, run.keys))

    def begin(self) -> None:
        """Begin a slab."""
        for state in self._opened.values():
            state.begin()

    def flush(self) -> None:
        """Write what a slab has changed.

        Raises `StateValueError` if a value does not fit its column; ``row`` is the place of its key in the slab.
        """
        for state in self._opened.values():
            state.flush()

    def evict(self) -> None:
        """Remove what has expired."""
        for expiry in self._expiries:
            expiry.evict(self._transaction)

    def next_expiry_ms(self) -> int | None:
        """Return when the next values expire, once `evict` has run; None if none ever do."""
        found = (expiry.earliest(self._transaction) for expiry in self._expiries)
        return min((at for at in found if at is not None), default=None)
