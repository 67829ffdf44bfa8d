"""Scripts: what keys do, micro-batch by micro-batch, in a query whose clock stands at a second for each of them.

Keys know nothing of each other, so many cases share one query. What a key does are Python expressions, separated by
``;``, over the names that `Scripted` gives them; what begins with ``?`` is shown::

    Case("an update is seen", {0: "value.update((1,))", 1: "?value.get()"}, ["0 rows", "1 rows (1,)"])

All queries go by the same clocks; in the last micro-batch there is no data::

    micro-batch                       0        1        2     …
    processing time               10000    11000    12000     …
    event times of rows            1000     2000     3000     …
    watermark, if there is one        0     1000     2000     …

In the middle of a script the query is stopped and started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from tests.spark.processors.probes.probe import attempt

if TYPE_CHECKING:
    from pyspark.sql.streaming import StatefulProcessorHandle
    from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

    from tests.spark.parity.engines import Row as InputRow

INPUT = "key string, at timestamp, v long, do string"
OUTPUT = "key string, note string"
TimeMode = Literal["None", "ProcessingTime", "EventTime"]


@dataclass(frozen=True)
class Case:
    """One key of a script."""

    #: Begins with the item of the reference.
    name: str
    #: What its rows do, by micro-batch.
    do: dict[int, str]
    #: Its calls: the micro-batch, ``rows`` or ``timer`` and when it was due, and what was shown.
    notes: list[str]
    #: What it does when one of its timers fires; ``due`` says which.
    on_timer: str = ""
    #: Its calls on Spark, where we differ on purpose.
    on_spark: list[str] | None = None


@dataclass(frozen=True)
class Script:
    """A query: its time mode and what its keys do."""

    name: str
    time_mode: TimeMode
    cases: tuple[Case, ...]
    micro_batches: int
    #: Of all its variables.
    ttl_ms: int | None = None
    watermark: bool = False

    def rows(self, number: int) -> list[InputRow]:
        """Return the rows of one micro-batch."""
        at_ms = 1000 * (number + 1)
        return [("clock", at_ms, ""), *((c.name, at_ms, c.do[number]) for c in self.cases if number in c.do)]

    def on_timer(self) -> dict[str, str]:
        """Return what keys do when a timer fires."""
        return {case.name: case.on_timer for case in self.cases}


def now_ms(number: int) -> int:
    """Return the processing time of a micro-batch."""
    return 10_000 + 1000 * number


class Scripted(StatefulProcessor):
    """Carries out what rows say, and says what it saw."""

    def __init__(self, api: str, on_timer: dict[str, str], ttl_ms: int | None = None) -> None:
        self._api, self._on_timer, self._ttl_ms = api, on_timer, ttl_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._names: dict[str, Any] = {
            "handle": handle,
            "value": handle.getValueState("value", "n long", self._ttl_ms),
            "items": handle.getListState("items", "n long", self._ttl_ms),
            "entries": handle.getMapState("entries", "k long", "n long", self._ttl_ms),
            "np": np,
            "attempt": attempt,
        }

    def handleInputRows(self, key: tuple[Any, ...], rows: Any, timerValues: TimerValues) -> Iterator[Any]:
        if self._api == "row":
            found = [(row.v, row.do) for row in rows]
        else:
            found = [pair for frame in rows for pair in zip(frame["v"], frame["do"], strict=True)]
        program = ";".join(do for _, do in sorted(found))
        yield from self._carried_out("rows", program, key, times=timerValues)

    def handleExpiredTimer(
        self, key: tuple[Any, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Any]:
        due = expiredTimerInfo.getExpiryTimeInMs()
        yield from self._carried_out(f"timer {due}", self._on_timer[key[0]], key, times=timerValues, due=due)

    def _carried_out(self, what: str, program: str, key: tuple[Any, ...], **names: Any) -> Iterator[Any]:
        names |= self._names | {"key": key}
        times = names["times"]
        names["now"] = times.getCurrentProcessingTimeInMs
        names["watermark"] = times.getCurrentWatermarkInMs
        shown = []
        for command in filter(None, map(str.strip, program.split(";"))):
            result = eval(command.removeprefix("?"), names)
            if command.startswith("?"):
                shown.append(repr(result))
        note = " ".join([what, ", ".join(shown)]).strip()
        yield Row(key=key[0], note=note) if self._api == "row" else pd.DataFrame({"key": [key[0]], "note": [note]})


@dataclass(frozen=True)
class Played:
    """What a script came to: by key its notes, each with its micro-batch."""

    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, number: int, rows: list[tuple[Any, ...]]) -> None:
        """Add the output of a micro-batch."""
        for key, note in rows:
            self.notes.setdefault(key, []).append(f"{number} {note}")


Play = Callable[[Any, Script], Played]
