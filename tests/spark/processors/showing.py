"""Processors that show what they are given, and what becomes of what they do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

if TYPE_CHECKING:
    from pyspark.sql.streaming import StatefulProcessorHandle
    from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

SHOWN = "what string, shown string"


def as_output(api: str, **columns: Any) -> Any:
    """Return one row of output, as a `Row` or as a frame."""
    return Row(**columns) if api == "row" else pd.DataFrame({name: [value] for name, value in columns.items()})


class Showing(StatefulProcessor):
    """Emits the key of each call, and each row or frame of it, as ``repr``; registers timers, and shows their keys."""

    def __init__(self, api: str, timers: tuple[int, ...] = ()) -> None:
        self._api, self._timers = api, timers

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._calls = handle.getValueState("calls", "n int")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:
        (calls,) = self._calls.get() or (0,)
        self._calls.update((calls + 1,))
        yield as_output(self._api, what="key", shown=repr(key))
        yield as_output(self._api, what="state", shown=f"{key!r} {calls}")
        for row in rows:
            yield as_output(self._api, what="rows", shown=repr(row) if self._api == "row" else shown_frame(row))
        for due_ms in self._timers:
            self._handle.registerTimer(due_ms)

    def handleExpiredTimer(
        self, key: tuple[Any, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Any]:
        yield as_output(self._api, what="timer", shown=f"{expiredTimerInfo.getExpiryTimeInMs()} {key!r}")


def shown_frame(frame: pd.DataFrame) -> str:
    """Show a frame's index, columns, their types and values."""
    columns = {
        name: (
            str(frame[name].dtype),
            [value.tolist() if isinstance(value, np.ndarray) else value for value in frame[name]],
        )
        for name in frame.columns
    }
    return f"{frame.index.start}..{frame.index.stop} {columns}"


def of(shown: Iterable[tuple[str, str]], what: str) -> list[str]:
    """Return what was shown of one kind."""
    return [text for kind, text in shown if kind == what]


class Calling(StatefulProcessor):
    """Does for the rows of a key what a function says, with a value, a list, a map and the handle at hand."""

    def __init__(self, api: str, function: Callable[..., Any], on_timer: Callable[..., Any] | None = None) -> None:
        self.api, self._function, self._on_timer = api, function, on_timer
        self.kept: list[Any] = []

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n int")
        self.items = handle.getListState("items", "n int")
        self.entries = handle.getMapState("entries", "k int", "n int")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timerValues: TimerValues) -> Any:
        return self._function(key, rows, self)

    def handleExpiredTimer(
        self, key: tuple[Any, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Any:
        if self._on_timer is None:
            return super().handleExpiredTimer(key, timerValues, expiredTimerInfo)
        return self._on_timer(key, expiredTimerInfo.getExpiryTimeInMs(), self)

    def emit(self, what: str, shown: object = "") -> Any:
        """Return one row of output."""
        return as_output(self.api, what=what, shown=str(shown))


class Logging(StatefulProcessor):
    """Writes its life into a file, a line an event; fails where it is told to."""

    def __init__(self, api: str, log: Path, fails: str = "") -> None:
        self._api, self._log, self._fails = api, log, fails
        self.keys_seen = 0

    def _happened(self, event: str) -> None:
        with open(self._log, "a") as file:
            file.write(f"{event}\n")
        if event == self._fails:
            raise LookupError(f"no {event} today")

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._process = os.getpid()
        self._value = handle.getValueState("value", "n int")
        self._happened("init")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:
        self.keys_seen += 1
        self._happened(f"rows {key[0]}")
        self._value.update((self.keys_seen,))
        if timerValues.getCurrentProcessingTimeInMs() >= 0:
            self._handle.registerTimer(-ord(key[0]))
        yield as_output(self._api, what="keys seen", shown=str(self.keys_seen))
        self._happened(f"generated {key[0]}")

    def handleExpiredTimer(
        self, key: tuple[Any, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Any]:
        self._happened(f"timer {key[0]}")
        return iter(())

    def close(self) -> None:
        self._happened("close")
