"""Map state of a processor: a row for each entry.

An entry is looked up in the maps of many keys at once (`AskedEntries`), as a processor may ask each key's map for the
same few. If it iterates over maps, or asks for many entries, the maps of many keys are fetched whole. A map too large
for that is read entry by entry, and iterated over piece by piece; what was looked up in it is remembered until the slab
ends. Writes need no read.

The first time that a processor asks for an entry, it is looked up for a few keys, from the one in hand on; then for
more. So one of twenty entries costs one row a key, not twenty. Entries that differ from key to key are looked up in
vain: after a few of them, or once a map was iterated over, whole maps are fetched until the shard's call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import MapState
from pyspark.sql.types import Row

from holdfast.backends.arrow.rows import take
from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.keyed.shown_values import row_maker
from holdfast.spark_integration.processor.state.slab import MissingSlab, Slab
from holdfast.spark_integration.processor.state.slab_entries import SlabEntries
from holdfast.spark_integration.processor.state.state_rows import State, StateRows, UserKeys
from holdfast.spark_integration.tables.entry_rows import EntryRows

_ENTRIES_MAX = 4
_FIRST_KEYS, _GROWTH = 16, 8


@dataclass(frozen=True)
class Asked:
    """An entry's values in the maps of consecutive keys of a slab; None if it is absent."""

    first: int
    values: list[State | None]

    @property
    def end(self) -> int:
        """The key after the last one."""
        return self.first + len(self.values)

    def value(self, at: int) -> State | None:
        """Return the value in the map of key `at`."""
        return self.values[at - self.first]


class AskedEntries:
    """The entries looked up in the maps of a slab.

    `look_up` takes the first key, how many at most, and a user key; it returns the entry's value in the map of each.
    """

    def __init__(self, look_up: Callable[[int, int, State], list[State | None]]) -> None:
        self._look_up = look_up
        self._takes_more = True
        self._count = _FIRST_KEYS
        self.begin()

    def begin(self) -> None:
        """Forget the last slab."""
        self._asked: dict[State, Asked] = {}

    def end(self) -> None:
        """Stop looking up in this call of the shard."""
        self._takes_more = False

    def of(self, at: int, user_key: State) -> Asked | None:
        """Return an entry that covers key `at`, looked up if that may pay; None if whole maps should be fetched."""
        asked = self._asked.get(user_key)
        if asked is not None and asked.first <= at < asked.end:
            return asked
        if asked is None and len(self._asked) == _ENTRIES_MAX:
            self.end()
        # A key before the first one is called again, by a timer.
        if not self._takes_more or (asked is not None and at < asked.first):
            return None
        if asked is not None:
            self._count = max(self._count, _GROWTH * len(asked.values))
        asked = self._asked[user_key] = Asked(at, self._look_up(at, self._count, user_key))
        return asked


@dataclass(frozen=True)
class _Window:
    """The maps of consecutive keys of a slab; what belongs to the entries of all maps stands one after the other."""

    first: int  #: The first key
    bounds: list[int]  #: Where the entries of each key begin, and where those of the last one end
    #: User keys as they are compared, and as a processor sees them
    user_keys: list[State]
    shown_keys: list[State]
    values: list[list[Any]]  #: Columns: few of the entries are looked at

    @property
    def end(self) -> int:
        """The key after the last one."""
        return self.first + len(self.bounds) - 1


class _FetchedMap:
    """The map of key `at` of a slab in a window."""

    def __init__(self, window: _Window, at: int) -> None:
        self._window = window
        self._start, self._end = window.bounds[at - window.first], window.bounds[at - window.first + 1]
        self._was_searched = False
        self._places: dict[State, int] | None = None

    def get(self, user_key: State) -> State | None:
        """Return the value of an entry. The first one is searched for, which costs less than a dict of all."""
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
        """Iterate over all user keys, as they are compared and as they are shown, and values."""
        window, of_key = self._window, slice(self._start, self._end)
        values = zip(*(column[of_key] for column in window.values), strict=True)
        return zip(window.user_keys[of_key], window.shown_keys[of_key], values, strict=True)


class ProcessorMapState(MapState):
    """One variable in one call of a shard; methods as Spark documents them.

    `rows`: of the values; `value_names`: columns of the values.
    """

    def __init__(
        self,
        name: str,
        entries: EntryRows,
        user_keys: UserKeys,
        rows: StateRows,
        slab: Slab,
        value_names: list[str],
    ) -> None:
        # Not Spark's __init__, which takes a client of Spark's state server.
        self._name = name
        self._entries = entries
        self._user_keys = user_keys
        self._rows = rows
        self._slab: Slab = slab
        self._make_row = row_maker(*value_names)
        self._windows = SlabEntries(entries, slab)
        self._asked = AskedEntries(self._look_up)
        self.begin()

    def begin(self) -> None:
        """Forget the last slab; its changes were written."""
        self._changed: dict[int, dict[State, State | None]] = {}
        self._cleared: set[int] = set()
        # Of a map that is not fetched: what was looked up, with None for an absent entry.
        self._looked_up: dict[int, dict[State, State | None]] = {}
        self._window: _Window | None = None
        self._fetched: dict[int, _FetchedMap] = {}
        self._windows.begin()
        self._asked.begin()

    def drop(self, name: str) -> None:
        """Refuse all use from now on: the variable of this name was deleted after it was declared."""
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
        return self._snapshot()

    def keys(self) -> Iterator[State]:
        return (key for key, _ in self._snapshot())

    def values(self) -> Iterator[State]:
        return (value for _, value in self._snapshot())

    def _value(self, key: Any, doing: str) -> State | None:
        at = self._slab.current(doing)
        user_key = self._user_keys.of(key, doing)
        changed = self._changed.get(at)
        if changed is not None and user_key in changed:
            written = changed[user_key]
            return None if written is None else self._rows.as_read(written)
        if at in self._cleared:
            return None
        asked = self._asked.of(at, user_key)
        if asked is not None:
            return asked.value(at)
        stored = self._stored_of(at)
        if isinstance(stored, _FetchedMap):
            return stored.get(user_key)
        if user_key not in stored:
            stored[user_key] = self._look_up(at, 1, user_key)[0]
        return stored[user_key]

    def _snapshot(self) -> Iterator[tuple[State, State]]:
        self._slab.current("getting map state")
        return self._now(self._slab.call)

    def _now(self, call: int) -> Iterator[tuple[State, State]]:
        """Iterate over what the map holds at the first step."""
        if self._slab.call != call:
            raise InvalidArgumentError(
                "a map's iterator was kept beyond its key's call: read it during the call", state=self._name
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
            # Most keys are called one after the other: the last window is done with.
            self._window, self._fetched = found, {}
        return self._fetched.setdefault(at, _FetchedMap(self._window, at))

    def _fetch(self, at: int) -> _Window | None:
        self._asked.end()
        found = self._windows.fetch_once(at)
        if found is None:
            return None
        user_keys, values = (
            self._user_keys_of(found.entries.own_keys),
            self._rows.values.to_columns(found.entries.values),
        )
        return _Window(found.first, found.bounds, *user_keys, values)

    def _user_keys_of(self, own_keys: pa.RecordBatch) -> tuple[list[State], list[State]]:
        """Return user keys as they are compared, and as they are shown."""
        shown = self._user_keys.rows.values.to_tuples(own_keys)
        return self._user_keys.of_stored(shown), shown

    def _look_up(self, at: int, count: int, user_key: State) -> list[State | None]:
        """Return an entry's value in the maps of so many keys from this one on."""
        places = np.arange(at, min(at + count, len(self._slab.keys)))
        with self._rows.placed([at]):
            own = self._user_keys.to_arrow([user_key])
        own = take(own.rename_columns(self._entries.own_key_types.names), np.zeros(len(places), np.int64))
        found = self._entries.at(self._entries.keys_of(self._slab.keys.take(places), own)).get()
        values = self._rows.values.to_tuples(found.values)
        return [value if exists else None for value, exists in zip(values, found.exists.tolist(), strict=True)]

    def _keys_of(self, places: Sequence[int], user_keys: Sequence[State]) -> Keys:
        with self._rows.placed(places):
            own = self._user_keys.to_arrow(user_keys)
        own = own.rename_columns(self._entries.own_key_types.names)
        return self._entries.keys_of(self._slab.keys.take(np.array(places, np.int64)), own)

    def flush(self) -> None:
        """Write the slab's changes.

        Raises `StateValueError` if a key or a value does not fit its column; ``row`` is the place of its key in the
        slab.
        """
        self._entries.delete_all(self._slab.keys.take(np.array(list(self._cleared), np.int64)))
        gone: list[tuple[int, State]] = []
        put: list[tuple[int, State]] = []
        values: list[State] = []
        for at, changed in self._changed.items():
            for user_key, value in changed.items():
                if value is None:
                    gone.append((at, user_key))
                else:
                    put.append((at, user_key))
                    values.append(value)
        if gone:
            self._entries.at(self._keys_of(*zip(*gone, strict=True))).delete()
        if put:
            places, user_keys = zip(*put, strict=True)
            keys = self._keys_of(places, user_keys)
            with self._rows.placed(places):
                columns = self._rows.values.to_arrow(values)
            self._entries.at(keys).put(columns)
