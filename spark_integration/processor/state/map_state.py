"""Map state of a processor: a row for each entry.

At the first read of a slab the maps of many keys are fetched whole. A map too large for that is read entry by entry,
and iterated over piece by piece; what was looked up in it is remembered until the slab ends. Writes need no read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import MapState
from pyspark.sql.types import Row

from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.processor.state.slab import MissingSlab, Slab
from holdfast.spark_integration.processor.state.slab_entries import SlabEntries
from holdfast.spark_integration.processor.state.state_rows import State, StateRows, UserKeys
from holdfast.spark_integration.tables.entry_rows import EntryRows


@dataclass(frozen=True)
class _Window:
    """The maps of consecutive keys of a slab; keys and values of all entries stand one after the other.

    Attributes
    ----------
    first : int
        The first key.
    bounds : list of int
        Where the entries of each key begin, and where those of the last one end.
    user_keys, shown_keys, values : list of tuple
        User keys as they are compared, and as a processor sees them.
    """

    first: int
    bounds: list[int]
    user_keys: list[State]
    shown_keys: list[State]
    values: list[State]

    def map_of(self, at: int) -> _Fetched:
        """Return the map of one key."""
        of_key = slice(self.bounds[at - self.first], self.bounds[at - self.first + 1])
        values: dict[State, State | None] = dict(zip(self.user_keys[of_key], self.values[of_key], strict=True))
        return _Fetched(values, self.shown_keys[of_key], is_whole=True)


class _Fetched:
    """The entries of one key's map; of a large map, those that were looked up, with None for an absent one."""

    def __init__(self, values: dict[State, State | None], shown_keys: list[State], *, is_whole: bool) -> None:
        self.values = values
        self.shown_keys = shown_keys
        self.is_whole = is_whole


class ProcessorMapState(MapState):
    """One variable in one call of a shard; methods as Spark documents them.

    Parameters
    ----------
    name : str
    entries : EntryRows
    user_keys : UserKeys
    rows : StateRows
        Of the values.
    slab : Slab
    value_names : list of str
        Columns of the values.
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
        self._make_row = Row(*value_names)
        self._windows = SlabEntries(entries, slab)
        self.begin()

    def begin(self) -> None:
        """Forget the last slab; its changes were written."""
        self._changed: dict[int, dict[State, State | None]] = {}
        self._cleared: set[int] = set()
        self._stored: dict[int, _Fetched] = {}
        self._fetched: list[_Window] = []

    def drop(self, name: str) -> None:
        """Refuse all use from now on: the variable of this name was deleted after it was declared."""
        self._slab = MissingSlab(name)

    def exists(self) -> bool:
        self._slab.current("checking map state exists")
        return next(self._now(self._slab.call), None) is not None

    def getValue(self, key: Any) -> Row | None:
        value = self._value(key, "getting value")
        return None if value is None else self._make_row(*self._rows.copy(value))

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
        stored = self._stored_of(at)
        if not stored.is_whole and user_key not in stored.values:
            stored.values[user_key] = self._look_up(at, user_key)
        return stored.values.get(user_key)

    def _snapshot(self) -> Iterator[tuple[State, State]]:
        self._slab.current("getting map state")
        return self._now(self._slab.call)

    def _now(self, call: int) -> Iterator[tuple[State, State]]:
        """Iterate over what the map holds at the first step."""
        if self._slab.call != call:
            raise InvalidArgumentError(
                "an iterator over a map was kept beyond the call of its key: read it while that runs", state=self._name
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
        if stored.is_whole:
            for (user_key, value), shown_key in zip(stored.values.items(), stored.shown_keys, strict=True):
                assert value is not None
                yield user_key, shown_key, value
            return
        for part in self._entries.scan(self._slab.keys.take(np.array([at]))):
            yield from zip(*self._python(part.own_keys, part.values), strict=True)

    def _stored_of(self, at: int) -> _Fetched:
        if at not in self._stored:
            self._stored[at] = self._fetch(at)
        return self._stored[at]

    def _fetch(self, at: int) -> _Fetched:
        for window in self._fetched:
            if window.first <= at < window.first + len(window.bounds) - 1:
                return window.map_of(at)
        found = self._windows.fetch(at)
        if found is None:
            return _Fetched({}, [], is_whole=False)
        entries = self._python(found.entries.own_keys, found.entries.values)
        self._fetched.append(_Window(found.first, found.bounds, *entries))
        return self._fetched[-1].map_of(at)

    def _python(self, own_keys: pa.RecordBatch, values: pa.RecordBatch) -> tuple[list[State], list[State], list[State]]:
        """Return user keys as they are compared and as they are shown, and values."""
        shown = self._user_keys.rows.values.to_tuples(own_keys)
        return self._user_keys.of_stored(shown), shown, self._rows.values.to_tuples(values)

    def _look_up(self, at: int, user_key: State) -> State | None:
        found = self._entries.at(self._keys_of([at], [user_key])).get()
        return self._rows.values.to_tuples(found.values)[0] if found.exists[0] else None

    def _keys_of(self, places: list[int], user_keys: list[State]) -> Keys:
        with self._rows.placed(places):
            own = self._user_keys.rows.values.to_arrow(user_keys)
        own = own.rename_columns(self._entries.own_key_types.names)
        return self._entries.keys_of(self._slab.keys.take(np.array(places, np.int64)), own)

    def flush(self) -> None:
        """Write the slab's changes.

        Raises
        ------
        StateValueError
            A key or a value does not fit its column; ``row`` is the place of its key in the slab.
        """
        self._entries.delete_all(self._slab.keys.take(np.array(list(self._cleared), np.int64)))
        changes = [(at, key, value) for at, some in self._changed.items() for key, value in some.items()]
        gone = [(at, key) for at, key, value in changes if value is None]
        if gone:
            self._entries.at(self._keys_of([at for at, _ in gone], [key for _, key in gone])).delete()
        put = [(at, key, value) for at, key, value in changes if value is not None]
        if put:
            places = [at for at, _, _ in put]
            keys = self._keys_of(places, [key for _, key, _ in put])
            with self._rows.placed(places):
                values = self._rows.values.to_arrow([value for _, _, value in put])
            self._entries.at(keys).put(values)
