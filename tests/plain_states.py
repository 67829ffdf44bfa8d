"""State and timers of one key as Spark documents them, over dicts: what a processor's state is compared with.

It knows nothing of slabs, tables, commits or indexes, so it shares no fault with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

#: When a value expires that has no TTL.
NEVER = 1 << 62


class Plain:
    """A variable: rows in order of writing, each with the time when it expires."""

    def __init__(self, key: PlainKey, ttl_ms: int | None) -> None:
        self._key = key
        self.ttl_ms = ttl_ms
        self.rows: dict[Any, tuple[Any, int]] = {}
        self.expired = 0

    def live(self) -> dict[Any, Any]:
        """Return what has not expired."""
        for entry in [entry for entry, (_, expires_ms) in self.rows.items() if expires_ms <= self._key.now_ms]:
            del self.rows[entry]
            self.expired += 1
        return {entry: row for entry, (row, _) in self.rows.items()}

    def _set(self, entry: Any, row: Any) -> None:
        self.live()
        self.rows[entry] = (row, self._key.now_ms + self.ttl_ms if self.ttl_ms else NEVER)

    def exists(self) -> bool:
        return bool(self.live())

    def clear(self) -> None:
        self.rows.clear()


class PlainValue(Plain):
    """A value: a row under one name."""

    def get(self) -> Any:
        return self.live().get("")

    def update(self, row: Any) -> None:
        self._set("", row)


class PlainList(Plain):
    """A list: rows under numbers."""

    _next = 0

    def get(self) -> Iterator[Any]:
        """Iterate over what is there at the first `next`."""
        yield from list(self.live().values())

    def appendValue(self, row: Any) -> None:
        self._next += 1
        self._set(self._next, row)

    def appendList(self, rows: Iterable[Any]) -> None:
        for row in rows:
            self.appendValue(row)

    def put(self, rows: Iterable[Any]) -> None:
        self.clear()
        self.appendList(rows)


class PlainMap(Plain):
    """A map: rows under keys."""

    def getValue(self, key: Any) -> Any:
        return self.live().get(key)

    def containsKey(self, key: Any) -> bool:
        return key in self.live()

    def updateValue(self, key: Any, row: Any) -> None:
        self._set(key, row)

    def removeKey(self, key: Any) -> None:
        self.rows.pop(key, None)

    def keys(self) -> Iterator[Any]:
        yield from self.live()

    def values(self) -> Iterator[Any]:
        yield from list(self.live().values())

    def iterator(self) -> Iterator[Any]:
        yield from list(self.live().items())


class PlainKey:
    """The state and the timers of one key; also the handle that declares them."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.variables: dict[str, Plain] = {}
        self.due: set[int] = set()

    def getValueState(self, name: str, schema: Any, ttl_ms: int | None = None) -> Any:
        return self._declared(name, PlainValue(self, ttl_ms))

    def getListState(self, name: str, schema: Any, ttl_ms: int | None = None) -> Any:
        return self._declared(name, PlainList(self, ttl_ms))

    def getMapState(self, name: str, user_key: Any, schema: Any, ttl_ms: int | None = None) -> Any:
        return self._declared(name, PlainMap(self, ttl_ms))

    def _declared(self, name: str, variable: Plain) -> Plain:
        self.variables[name] = variable
        return variable

    def registerTimer(self, due_ms: int) -> None:
        self.due.add(due_ms)

    def deleteTimer(self, due_ms: int) -> None:
        self.due.discard(due_ms)

    def listTimers(self) -> Iterator[int]:
        return iter(sorted(self.due))
