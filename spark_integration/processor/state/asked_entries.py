"""Looks up an entry in the maps of many keys at once: a processor may ask each key's map for the same few.

The first time that it asks for an entry, this is looked up for a few keys, from the one in hand on; then for more. So
one of twenty entries costs one row a key, not twenty. Entries that differ from key to key are looked up in vain: after
a few of them, or once a map was iterated over, whole maps are fetched until the shard's call ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.spark_integration.processor.state.state_rows import State

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

    Parameters
    ----------
    look_up : callable
        Takes the first key, how many at most, and a user key; returns the entry's value in the map of each.
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
