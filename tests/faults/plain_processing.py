"""Runs a processor as ``transformWithState`` does, in one process and over dicts: what an undisturbed query comes to.

It knows nothing of slabs, tables, commits or indexes, so it shares no fault with what it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

Key = tuple[Any, ...]
#: When a value expires that has no TTL.
NEVER = 1 << 62


class PlainRun:
    """A processor, its state and timers; also the handle that it gets.

    Parameters
    ----------
    processor : StatefulProcessor
    time_mode : {"ProcessingTime", "EventTime"}

    Attributes
    ----------
    variables : dict of str to Plain
    timers : set of (tuple, int)
        Keys, and when they are due.
    output : list of tuple
    """

    def __init__(self, processor: StatefulProcessor, time_mode: str) -> None:
        self._processor = processor
        self._time_mode = time_mode
        self.variables: dict[str, Plain] = {}
        self.timers: set[tuple[Key, int]] = set()
        self.output: list[tuple[Any, ...]] = []
        self.key: Key = ()
        self.now_ms = 0
        processor.init(self)  # type: ignore[arg-type]

    def micro_batch(self, rows: Iterable[Row], key_columns: list[str], now_ms: int, watermark_ms: int) -> None:
        """Handle rows, none of which is late, and then what is due."""
        self.now_ms = now_ms
        times = TimerValues(now_ms, watermark_ms)
        by_key: dict[Key, list[Row]] = {}
        for row in rows:
            by_key.setdefault(tuple(row[name] for name in key_columns), []).append(row)
        for self.key, of_key in by_key.items():
            self._emit(self._processor.handleInputRows(self.key, iter(of_key), times))
        clock_ms = now_ms if self._time_mode == "ProcessingTime" else watermark_ms
        due = sorted((timer for timer in self.timers if timer[1] <= clock_ms), key=lambda timer: timer[1])
        for self.key, due_ms in due:
            timer = ExpiredTimerInfo(due_ms)
            self._emit(self._processor.handleExpiredTimer(key=self.key, timerValues=times, expiredTimerInfo=timer))
            self.timers.discard((self.key, due_ms))

    def _emit(self, rows: Iterable[Row]) -> None:
        self.output.extend(tuple(row) for row in rows)

    def getValueState(self, stateName: str, schema: str, ttlDurationMs: int | None = None) -> PlainValue:
        return self._declared(stateName, PlainValue(self, ttlDurationMs))

    def getListState(self, stateName: str, schema: str, ttlDurationMs: int | None = None) -> PlainList:
        return self._declared(stateName, PlainList(self, ttlDurationMs))

    def getMapState(
        self, stateName: str, userKeySchema: str, valueSchema: str, ttlDurationMs: int | None = None
    ) -> PlainMap:
        names = [column.split()[0] for column in valueSchema.split(",")]
        return self._declared(stateName, PlainMap(self, ttlDurationMs, names))

    def _declared(self, name: str, variable: Any) -> Any:
        self.variables[name] = variable
        return variable

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self.timers.add((self.key, expiryTimestampMs))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self.timers.discard((self.key, expiryTimestampMs))

    def listTimers(self) -> Iterator[int]:
        return iter(sorted(due_ms for key, due_ms in self.timers if key == self.key))


class Plain:
    """A variable: by key and entry, a value and when it expires.

    Attributes
    ----------
    ttl_ms : int or None
    expired : int
        How many live entries were last seen as expired.
    """

    def __init__(self, run: PlainRun, ttl_ms: int | None) -> None:
        self._run = run
        self.ttl_ms = ttl_ms
        self._rows: dict[Key, dict[Any, tuple[Key, int]]] = {}
        self.expired = 0

    def rows(self) -> list[tuple[Any, ...]]:
        """Return what is live: grouping key, entry, values, and when they expire."""
        return [
            (*key, *self._shown(at, entry), *value, expires_ms)
            for key in list(self._rows)
            for at, (entry, (value, expires_ms)) in enumerate(self._live(key).items())
        ]

    def _shown(self, at: int, entry: Any) -> Key:
        return tuple(entry)

    def _live(self, key: Key | None = None) -> dict[Any, tuple[Key, int]]:
        of_key = self._rows.setdefault(self._run.key if key is None else key, {})
        for entry in [entry for entry, (_, expires_ms) in of_key.items() if expires_ms <= self._run.now_ms]:
            del of_key[entry]
            self.expired += 1
        return of_key

    def _put(self, entry: Any, value: Iterable[Any]) -> None:
        expires_ms = NEVER if self.ttl_ms is None else self._run.now_ms + self.ttl_ms
        self._live()[entry] = (tuple(value), expires_ms)

    def exists(self) -> bool:
        return bool(self._live())

    def clear(self) -> None:
        self._live().clear()


class PlainValue(Plain):
    """A value is the entry ``()``."""

    def get(self) -> Key | None:
        return self._live().get((), (None,))[0]

    def update(self, newValue: Iterable[Any]) -> None:
        self._put((), newValue)


class PlainList(Plain):
    """An element is an entry under a number."""

    def __init__(self, run: PlainRun, ttl_ms: int | None) -> None:
        super().__init__(run, ttl_ms)
        self._numbers = count()

    def _shown(self, at: int, entry: Any) -> Key:
        return (at,)

    def get(self) -> Iterator[Key]:
        return iter([value for value, _ in self._live().values()])

    def appendList(self, newState: Iterable[Iterable[Any]]) -> None:
        for element in newState:
            self._put(next(self._numbers), element)

    def put(self, newState: Iterable[Iterable[Any]]) -> None:
        self.clear()
        self.appendList(newState)


class PlainMap(Plain):
    """An entry is one under its user key."""

    def __init__(self, run: PlainRun, ttl_ms: int | None, names: list[str]) -> None:
        super().__init__(run, ttl_ms)
        self._make_row = Row(*names)

    def getValue(self, key: Key) -> Row | None:
        found = self._live().get(key)
        return None if found is None else self._make_row(*found[0])

    def updateValue(self, key: Key, value: Iterable[Any]) -> None:
        self._put(key, value)

    def removeKey(self, key: Key) -> None:
        self._live().pop(key, None)

    def iterator(self) -> Iterator[tuple[Key, Key]]:
        return iter([(key, value) for key, (value, _) in self._live().items()])
