"""Runs a processor as ``transformWithState`` does, in one process and over dicts, as an undisturbed query would."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from tests.plain_states import PlainKey

Key = tuple[Any, ...]


class PlainRun:
    """All keys of an operator, each with a processor of its own: that keeps nothing but state, so nothing differs."""

    def __init__(self, processor: Callable[[], StatefulProcessor], key_columns: list[str], time_mode: str) -> None:
        self._new_processor = processor
        self._key_columns = key_columns
        self._time_mode = time_mode
        self._processors: dict[Key, StatefulProcessor] = {}
        self.keys: dict[Key, PlainKey] = {}
        self.output: list[Key] = []

    def micro_batch(self, rows: Iterable[Row], now_ms: int, watermark_ms: int) -> None:
        """Handle rows, none of which is late, and then what is due."""
        times = TimerValues(now_ms, watermark_ms)
        by_key: dict[Key, list[Row]] = {}
        for row in rows:
            by_key.setdefault(tuple(row[name] for name in self._key_columns), []).append(row)
        for key in by_key.keys() - self.keys.keys():
            self.keys[key], self._processors[key] = PlainKey(), self._new_processor()
            self._processors[key].init(self.keys[key])  # type: ignore[arg-type]
        for of_key in self.keys.values():
            of_key.now_ms = now_ms
        for key, of_rows in by_key.items():
            self._emit(self._processors[key].handleInputRows(key, iter(of_rows), times))
        clock_ms = now_ms if self._time_mode == "ProcessingTime" else watermark_ms
        due = [(due_ms, key) for key, of_key in self.keys.items() for due_ms in of_key.due if due_ms <= clock_ms]
        for due_ms, key in sorted(due, key=lambda timer: timer[0]):
            timer = ExpiredTimerInfo(due_ms)
            found = self._processors[key].handleExpiredTimer(key=key, timerValues=times, expiredTimerInfo=timer)
            self._emit(found)
            self.keys[key].deleteTimer(due_ms)

    def _emit(self, rows: Iterable[Row]) -> None:
        self.output.extend(tuple(row) for row in rows)
