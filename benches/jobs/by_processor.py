"""``dropin-tws``: one `StatefulProcessor` under Spark's ``transformWithState`` and under holdfast's, unchanged.

Micro-batches are those of ``dropin``. What a processor keeps for each key is chosen by `ByProcessor.variable`:

* ``value``: a running count and sum.
* ``map``: `ENTRIES` entries, of which a micro-batch reads one and writes one.
* ``list``: the rows themselves, appended and never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructField, StructType

from holdfast.benches.jobs.by_key import DropIn
from holdfast.benches.jobs.job import option

ENTRIES = 20


@dataclass(frozen=True)
class ByProcessor(DropIn):
    """See the module."""

    name = "dropin-tws"

    variable: str = option("value", "what is kept for a key", click.Choice(["value", "map", "list"]))

    def processor(self, *, in_pandas: bool) -> StatefulProcessor:
        """Return the processor, for `Row` objects or for frames."""
        return _PROCESSORS[self.variable, in_pandas]()


def longs(*names: str) -> StructType:
    """Return columns of integers; a schema as text would need Spark's parser, and so a JVM."""
    return StructType([StructField(name, LongType()) for name in names])


class _Totals(StatefulProcessor):
    """A running count and sum."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", longs("n", "s"))

    def _add(self, n: int, s: int) -> tuple[int, int]:
        before = self._total.get()
        if before is not None:
            n, s = n + before[0], s + before[1]
        self._total.update((n, s))
        return n, s


class _TotalsByRow(_Totals):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = s = 0
        for row in rows:
            n, s = n + 1, s + row.v
        n, s = self._add(n, s)
        yield Row(key=key[0], n=n, s=s)


class _TotalsByFrame(_Totals):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[pd.DataFrame]:
        n = s = 0
        for frame in rows:
            n, s = n + len(frame), s + int(frame["v"].sum())
        n, s = self._add(n, s)
        yield pd.DataFrame({"key": [key[0]], "n": [n], "s": [s]})


class _Entries(StatefulProcessor):
    """One entry of many counts."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._counts = handle.getMapState("counts", longs("entry"), longs("n"))

    def _count(self, v: int, n: int) -> int:
        entry = (v % ENTRIES,)
        before = self._counts.getValue(entry)
        if before is None:  # the key is new
            for i in range(ENTRIES):
                self._counts.updateValue((i,), (0,))
        n += 0 if before is None else before[0]
        self._counts.updateValue(entry, (n,))
        return n


class _EntriesByRow(_Entries):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        values = [row.v for row in rows]
        yield Row(key=key[0], n=self._count(values[0], len(values)), s=sum(values))


class _EntriesByFrame(_Entries):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[pd.DataFrame]:
        values = [int(v) for frame in rows for v in frame["v"]]
        n = self._count(values[0], len(values))
        yield pd.DataFrame({"key": [key[0]], "n": [n], "s": [sum(values)]})


class _Appended(StatefulProcessor):
    """All rows of a key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._values = handle.getListState("values", longs("v"))


class _AppendedByRow(_Appended):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = 0
        for row in rows:
            self._values.appendValue((row.v,))
            n += 1
        yield Row(key=key[0], n=n, s=0)


class _AppendedByFrame(_Appended):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[pd.DataFrame]:
        n = 0
        for frame in rows:
            for v in frame["v"].tolist():
                self._values.appendValue((v,))
                n += 1
        yield pd.DataFrame({"key": [key[0]], "n": [n], "s": [0]})


_PROCESSORS: dict[tuple[str, bool], type[StatefulProcessor]] = {
    ("value", False): _TotalsByRow,
    ("value", True): _TotalsByFrame,
    ("map", False): _EntriesByRow,
    ("map", True): _EntriesByFrame,
    ("list", False): _AppendedByRow,
    ("list", True): _AppendedByFrame,
}
