"""The state variables of a processor during one call of a shard: values, lists, maps.

A **value** is one row per key, fetched at the first read in a slab and written at the slab's end.

A **list** has a row per element, ordered by number (`holdfast.spark_integration.tables.entry_rows`). Appended elements
are kept in memory until the slab ends; reading a list also fetches the lists of the keys after it.

A **map** has a row per entry. When a processor first reads an entry, it is looked up for a few keys (`EntryLookups`),
starting at the current key; later lookups cover more keys. So reading one of twenty entries costs one row per key, not
twenty. If keys read different entries, such lookups are useless: after a few entries, or after an iteration over a map,
whole maps are fetched until the shard's call ends. A map that is too large is read entry by entry and iterated over in
pieces; its looked-up entries are cached until the slab ends. Writes need no read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState
from pyspark.sql.types import Row

from holdfast.backends.arrow.rows import IntArray, take
from holdfast.backends.run import Keys, TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.mvcc import Transaction
from holdfast.spark_integration.keyed.python_values import struct_maker
from holdfast.spark_integration.processor.state.slab import CalledSlab, MissingSlab, SlabEntries, state_error
from holdfast.spark_integration.processor.state.state_rows import State, StateRows, UserKeys
from holdfast.spark_integration.processor.state.variable_tables import KINDS, table_of
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.shard.operator import BatchTimes
from holdfast.spark_integration.tables.entry_rows import EntryRows, first_number
from holdfast.spark_integration.timers import is_by_time
from holdfast.spark_integration.ttl.expiry import Expiry, KeyRows, expiry_of, index_of, open_rows

_ENTRIES_MAX = 4
_FIRST_KEYS, _GROWTH = 16, 8
#: Elements per read of an unfetched list.
_READ_AT_ONCE = 10_000


@dataclass(frozen=True)
class EntryWindow:
    """An entry's values in the maps of consecutive keys of a slab; None if a map lacks the entry."""

    first: int
    values: list[State | None]

    @property
    def end(self) -> int:
        """The index after the last key."""
        return self.first + len(self.values)

    def value(self, at: int) -> State | None:
        """Return the value in the map of key `at`."""
        return self.values[at - self.first]


class EntryLookups:
    """Looked-up map entries of a slab; `look_up` takes the first key, the largest number of keys, and a user key."""

    def __init__(self, look_up: Callable[[int, int, State], list[State | None]]) -> None:
        self._look_up = look_up
        self._takes_more = True
        self._count = _FIRST_KEYS
        self.begin()

    def begin(self) -> None:
        self._windows: dict[State, EntryWindow] = {}

    def end(self) -> None:
        """Stop lookups for the rest of the shard's call."""
        self._takes_more = False

    def of(self, at: int, user_key: State) -> EntryWindow | None:
        """Return an entry's values for key `at` and others, after a lookup if needed; None to fetch whole maps."""
        window = self._windows.get(user_key)
        if window is not None and window.first <= at < window.end:
            return window
        if window is None and len(self._windows) == _ENTRIES_MAX:
            self.end()
        # Only a timer calls a key again that is before the first looked-up key.
        if not self._takes_more or (window is not None and at < window.first):
            return None
        if window is not None:
            self._count = max(self._count, _GROWTH * len(window.values))
        window = self._windows[user_key] = EntryWindow(at, self._look_up(at, self._count, user_key))
        return window


@dataclass(frozen=True)
class _Window:
    """The maps of consecutive keys of a slab, with the entries of all maps concatenated."""

    first: int  #: The first key
    bounds: list[int]  #: The start of each key's entries, and the end of the last key's
    #: User keys in their form for comparisons, and as the processor sees them
    user_keys: list[State]
    shown_keys: list[State]
    values: list[list[Any]]  #: By column, since few entries are read

    @property
    def end(self) -> int:
        """The index after the last key."""
        return self.first + len(self.bounds) - 1


class _FetchedMap:
    """The map of key `at` of a slab in a window."""

    def __init__(self, window: _Window, at: int) -> None:
        self._window = window
        self._start, self._end = window.bounds[at - window.first], window.bounds[at - window.first + 1]
        self._was_searched = False
        self._places: dict[State, int] | None = None

    def get(self, user_key: State) -> State | None:
        """Return an entry's value. The first lookup scans the keys, which costs less than building a dict."""
        if self._places is None:
            if not self._was_searched:
                self._was_searched = True
                return self._search(user_key)
            places = range(self._start, self._end)
            self._places = dict(zip(self._window.user_keys[self._start : self._end], places, strict=True))
        place = self._places.get(user_key)
        return None if place is None else self._value(place)

    def _search(self, user_key: State) -> State | None:
        try:
            return self._value(self._window.user_keys.index(user_key, self._start, self._end))
        except ValueError:
            return None

    def _value(self, place: int) -> State:
        return tuple([column[place] for column in self._window.values])

    def entries(self) -> Iterator[tuple[State, State, State]]:
        """Yield user keys, in their form for comparisons and as the processor sees them, with their values."""
        window, of_key = self._window, slice(self._start, self._end)
        values = zip(*(column[of_key] for column in window.values), strict=True)
        return zip(window.user_keys[of_key], window.shown_keys[of_key], values, strict=True)


class ProcessorMapState(MapState):
    """A map variable in one call of a shard; methods as Spark documents them."""

    def __init__(
        self,
        name: str,
        entries: EntryRows,
        user_keys: UserKeys,
        rows: StateRows,
        slab: CalledSlab,
        value_names: list[str],
    ) -> None:
        # Spark's __init__ is not called: it takes a client of Spark's state server.
        self._name = name
        self._entries = entries
        self._user_keys = user_keys
        self._rows = rows
        self._slab: CalledSlab = slab
        self._make_row = struct_maker(*value_names)
        self._windows = SlabEntries(entries, slab)
        self._lookups = EntryLookups(self._look_up)
        self.begin()

    def begin(self) -> None:
        self._changed: dict[int, dict[State, State | None]] = {}
        self._cleared: set[int] = set()
        # Looked-up entries of maps that are not fetched; None if absent.
        self._looked_up: dict[int, dict[State, State | None]] = {}
        self._window: _Window | None = None
        self._fetched: dict[int, _FetchedMap] = {}
        self._windows.begin()
        self._lookups.begin()

    def drop(self, name: str) -> None:
        self._slab = MissingSlab(name)

    def exists(self) -> bool:
        self._slab.current("checking map state exists")
        return next(self._now(self._slab.call), None) is not None

    def getValue(self, key: Any) -> Row | None:
        value = self._value(key, "getting value")
        return None if value is None else self._make_row(self._rows.copy(value))

    def containsKey(self, key: Any) -> bool:
        return self._value(key, "checking if map state contains key") is not None

    def updateValue(self, key: Any, value: Any) -> None:
        at = self._slab.current("updating map state value")
        user_key = self._user_keys.of(key, "updating map state value")
        self._changed.setdefault(at, {})[user_key] = self._rows.given(value, "updating map state value")

    def removeKey(self, key: Any) -> None:
        at = self._slab.current("removing key from map state")
        self._changed.setdefault(at, {})[self._user_keys.of(key, "removing key from map state")] = None

    def clear(self) -> None:
        at = self._slab.current("clearing map state")
        self._changed.pop(at, None)
        self._cleared.add(at)

    def iterator(self) -> Iterator[tuple[State, State]]:
        self._slab.current("getting map state")
        return self._now(self._slab.call)

    def keys(self) -> Iterator[State]:
        return (key for key, _ in self.iterator())

    def values(self) -> Iterator[State]:
        return (value for _, value in self.iterator())

    def _value(self, key: Any, doing: str) -> State | None:
        at = self._slab.current(doing)
        user_key = self._user_keys.of(key, doing)
        changed = self._changed.get(at)
        if changed is not None and user_key in changed:
            written = changed[user_key]
            return None if written is None else self._rows.as_read(written)
        if at in self._cleared:
            return None
        window = self._lookups.of(at, user_key)
        if window is not None:
            return window.value(at)
        stored = self._stored_of(at)
        if isinstance(stored, _FetchedMap):
            return stored.get(user_key)
        if user_key not in stored:
            stored[user_key] = self._look_up(at, 1, user_key)[0]
        return stored[user_key]

    def _now(self, call: int) -> Iterator[tuple[State, State]]:
        """Iterate over the map's content at the time of the first step."""
        if self._slab.call != call:
            raise InvalidArgumentError(
                "a map's iterator was used after its key's call: use it only during the call", state=self._name
            )
        at = self._slab.current("getting map state")
        changed = dict(self._changed.get(at, {}))
        shown = self._user_keys.rows.each_as_read(list(changed))
        written = [
            (key, self._rows.as_read(value))
            for key, value in zip(shown, changed.values(), strict=True)
            if value is not None
        ]
        if at not in self._cleared:
            for user_key, shown_key, value in self._stored_entries(at):
                if user_key not in changed:
                    yield self._user_keys.rows.copy(shown_key), self._rows.copy(value)
        yield from written

    def _stored_entries(self, at: int) -> Iterator[tuple[State, State, State]]:
        stored = self._stored_of(at)
        if isinstance(stored, _FetchedMap):
            yield from stored.entries()
            return
        for part in self._entries.scan(self._slab.keys.take(np.array([at]))):
            yield from zip(*self._user_keys_of(part.own_keys), self._rows.values.to_tuples(part.values), strict=True)

    def _stored_of(self, at: int) -> _FetchedMap | dict[State, State | None]:
        if at in self._fetched:
            return self._fetched[at]
        if at in self._looked_up:
            return self._looked_up[at]
        if self._window is None or not self._window.first <= at < self._window.end:
            found = self._fetch(at)
            if found is None:
                return self._looked_up.setdefault(at, {})
            # Most keys are called in order: the previous window is no longer needed.
            self._window, self._fetched = found, {}
        return self._fetched.setdefault(at, _FetchedMap(self._window, at))

    def _fetch(self, at: int) -> _Window | None:
        self._lookups.end()
        found = self._windows.fetch_once(at)
        if found is None:
            return None
        user_keys = self._user_keys_of(found.entries.own_keys)
        return _Window(found.first, found.bounds, *user_keys, self._rows.values.to_columns(found.entries.values))

    def _user_keys_of(self, own_keys: pa.RecordBatch) -> tuple[list[State], list[State]]:
        """Return user keys in their form for comparisons and as the processor sees them."""
        shown = self._user_keys.rows.values.to_tuples(own_keys)
        return self._user_keys.of_stored(shown), shown

    def _look_up(self, at: int, count: int, user_key: State) -> list[State | None]:
        """Return an entry's value in the maps of this key and of several keys after it."""
        places = np.arange(at, min(at + count, len(self._slab.keys)))
        with self._rows.placed([at]):
            own = self._user_keys.to_arrow([user_key])
        own = take(own.rename_columns(self._entries.own_key_types.names), np.zeros(len(places), np.int64))
        found = self._entries.at(self._entries.keys_of(self._slab.keys.take(places), own)).get()
        return self._rows.values.of_found(found)

    def _keys_of(self, places: Sequence[int], user_keys: Sequence[State]) -> Keys:
        with self._rows.placed(places):
            own = self._user_keys.to_arrow(user_keys)
        own = own.rename_columns(self._entries.own_key_types.names)
        return self._entries.keys_of(self._slab.keys.take(np.array(places, np.int64)), own)

    def flush(self) -> None:
        """Write the slab's changes. Raises `StateValueError`, with the key's index in the slab as ``row``."""
        self._entries.delete_all(self._slab.keys.take(np.array(list(self._cleared), np.int64)))
        changes = [(at, key, value) for at, changed in self._changed.items() for key, value in changed.items()]
        if gone := [(at, key) for at, key, value in changes if value is None]:
            self._entries.at(self._keys_of(*zip(*gone, strict=True))).delete()
        if put := [(at, key, value) for at, key, value in changes if value is not None]:
            places, user_keys, values = zip(*put, strict=True)
            keys = self._keys_of(places, user_keys)
            with self._rows.placed(places):
                columns = self._rows.values.to_arrow(values)
            self._entries.at(keys).put(columns)


class ProcessorListState(ListState):
    """A list variable in one call of a shard; methods as Spark documents them."""

    def __init__(self, name: str, entries: EntryRows, rows: StateRows, slab: CalledSlab, version: int) -> None:
        # Spark's __init__ is not called: it takes a client of Spark's state server.
        self._name = name
        self._entries = entries
        self._rows = rows
        self._slab: CalledSlab = slab
        self._windows = SlabEntries(entries, slab)
        self._numbers = count(first_number(version))
        self.begin()

    def begin(self) -> None:
        self._appended: dict[int, list[State]] = {}
        self._replaced: set[int] = set()
        self._stored: dict[int, list[State] | None] = {}
        self._empty: set[int] = set()
        self._windows.begin()

    def drop(self, name: str) -> None:
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
        """Iterate over the list's content at the time of the first step."""
        if self._slab.call != call:
            raise InvalidArgumentError(
                "a list's iterator was used after its key's call: use it only during the call", state=self._name
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
        self._stored = {}  # most keys are called in order: the previous window is no longer needed
        numbers = window.entries.own_keys.column(0).to_numpy()
        found = window.entries.take(np.lexsort((numbers, window.entries.places)))
        elements = self._rows.values.to_tuples(found.values)
        for i in range(window.end - window.first):
            self._stored[window.first + i] = elements[window.bounds[i] : window.bounds[i + 1]]
        self._empty.update(at for at, stored in self._stored.items() if not stored)

    def _in_pieces(self, at: int) -> Iterator[State]:
        """Iterate over an unfetched list: read all numbers, then the elements by ascending number."""
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
        """Write the slab's changes. Raises `StateValueError`, with the key's index in the slab as ``row``."""
        keys = self._slab.keys
        going = [at for at in self._replaced if at not in self._empty]
        self._entries.delete_all(keys.take(np.array(going, np.int64)))
        elements = list(chain.from_iterable(self._appended.values()))
        if elements:
            places = np.repeat(list(self._appended), [len(some) for some in self._appended.values()])
            with self._rows.placed(places.tolist()):
                values = self._rows.values.to_arrow(elements)
            numbers = np.fromiter(self._numbers, np.int64, len(elements))
            self._entries.at(self._keys_of(keys.take(places), numbers)).put(values)


class ProcessorValueState(ValueState):
    """A value variable in one call of a shard; `expiry` is None without a TTL."""

    def __init__(
        self, transaction: Transaction, table: str, expiry: Expiry | None, rows: StateRows, slab: CalledSlab
    ) -> None:
        # Spark's __init__ is not called: it takes a client of Spark's state server.
        self._transaction = transaction
        self._table = table
        self._expiry = expiry
        self._rows = rows
        self._slab: CalledSlab = slab
        self.begin()

    def begin(self) -> None:
        self._changed: dict[int, State | None] = {}
        self._opened: KeyRows | None = None
        self._stored: list[State | None] | None = None

    def drop(self, name: str) -> None:
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
            self._stored = self._rows.values.of_found(self._opened.get())
        return self._stored[at]

    def _open(self) -> KeyRows:
        return open_rows(self._transaction, self._table, self._expiry, self._slab.keys)

    def flush(self) -> None:
        """Write the slab's changes. Raises `StateValueError`, with the key's index in the slab as ``row``."""
        if not self._changed:
            return
        put = {at: value for at, value in self._changed.items() if value is not None}
        stored = self._stored
        gone = [at for at, new in self._changed.items() if new is None and (stored is None or stored[at] is not None)]
        # Fetched rows hold the stored expiry times, which the index needs.
        rows = self._open() if self._opened is None else self._opened
        if put:
            with self._rows.placed(list(put)):
                values = self._rows.values.to_arrow(list(put.values()))
            rows.put(values, np.array(list(put), np.int64))
        if gone:
            rows.delete(np.array(gone, np.int64))


_AnyState = ProcessorValueState | ProcessorListState | ProcessorMapState


class ProcessorStates:
    """Opens declared variables, writes their changes and evicts expired values."""

    def __init__(
        self,
        transaction: Transaction,
        tables: Mapping[str, TableSchema],
        grouping: int,
        slab: CalledSlab,
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
        expiry = expiry_of(self._transaction, variable.table, variable.ttl_ms, self._times)
        if expiry is not None:
            self._expiries.append(expiry)
        state = self._opened[variable.name] = self._state(variable, expiry)
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
        """Schedule the deletion of a variable's values; if the variable is open, make its state unusable."""
        self._deleted.append(name)
        if name in self._opened:
            self._opened.pop(name).drop(name)

    def drop_deleted(self) -> None:
        """Delete all values of the variables passed to ``deleteIfExists``."""
        tables = self._transaction.tables
        for table in [table_of(kind, name) for kind in KINDS for name in self._deleted]:
            for part, is_index in ((table, False), (index_of(table), True)):
                # A variable may have the same name as another variable's index.
                if part in tables and is_by_time(tables[part]) == is_index:
                    for run in self._transaction.scan(part):
                        self._transaction.delete(part, Keys(run.hashes, run.keys))

    def begin(self) -> None:
        for state in self._opened.values():
            state.begin()

    def flush(self) -> None:
        """Write a slab's changes. Raises the errors of a variable's `flush`."""
        for state in self._opened.values():
            state.flush()

    def evict(self) -> None:
        for expiry in self._expiries:
            expiry.evict(self._transaction)

    def next_expiry_ms(self) -> int | None:
        """Return the earliest expiry time after `evict`, or None if no value expires."""
        found = (expiry.earliest(self._transaction) for expiry in self._expiries)
        return min((at for at in found if at is not None), default=None)
