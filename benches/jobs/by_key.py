"""Functions that see one key at a time, unchanged under Spark's operator and holdfast's: the drop-ins.

Micro-batch b touches `DropIn.touched` of the keys, each with as many rows, those that follow the ones of the batch
before it; all keys come again after some batches.

``dropin``: a running count and sum by ``applyInPandasWithState``; there is a vectorised function, too.

``dropin-tws``: a `StatefulProcessor` by ``transformWithState``. `ByProcessor.variable` says what it keeps for a key:
``value`` is a running count and sum; ``map`` has `ENTRIES` entries, of which a micro-batch reads one and writes one;
``list`` holds the rows themselves, appended and never read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import pandas as pd
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructField, StructType

from holdfast.benches.jobs.job import option
from holdfast.benches.jobs.job_a import JobA
from holdfast.errors import InvalidArgumentError

ENTRIES = 20


@dataclass(frozen=True)
class DropIn(JobA):
    """See the module."""

    name = "dropin"

    rows: int = option(40_000, "rows of a micro-batch")
    keys: int = option(40_000, "possible keys")
    touched: int = option(20_000, "keys of a micro-batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.touched <= min(self.rows, self.keys):
            raise InvalidArgumentError("a micro-batch touches at most as many keys as there are, each with a row")

    def source(self, spark: SparkSession) -> DataFrame:
        number = F.expr(f"(value div {self.rows}) * {self.touched} + (value % {self.rows}) % {self.touched}")
        return self.numbers(spark).select((number % self.keys).alias("key"), (F.col("value") % 100).alias("v"))


def one_key(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Add a key's rows to its count and sum."""
    n, s = state.getOption or (0, 0)
    for frame in frames:
        n += len(frame)
        s += int(frame["v"].sum())
    state.update((n, s))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "s": [s]})


@dataclass(frozen=True)
class ByProcessor(DropIn):
    """See the module."""

    name = "dropin-tws"

    variable: str = option("value", "what is kept for a key", click.Choice(["value", "map", "list"]))

    def processor(self, *, in_pandas: bool) -> StatefulProcessor:
        """Return the processor, for `Row` objects or for frames."""
        return _PROCESSORS[self.variable](in_pandas)


def longs(*names: str) -> StructType:
    """Return columns of integers; a schema as text would need Spark's parser, and so a JVM."""
    return StructType([StructField(name, LongType()) for name in names])


class _ByKey(StatefulProcessor):
    """Takes a key's rows and yields one row of output, as `Row` objects or as frames."""

    def __init__(self, in_pandas: bool) -> None:
        self._in_pandas = in_pandas

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n, s = self._take(rows)
        yield pd.DataFrame({"key": [key[0]], "n": [n], "s": [s]}) if self._in_pandas else Row(key=key[0], n=n, s=s)

    @abstractmethod
    def _take(self, rows: Iterator[Any]) -> tuple[int, int]:
        """Add a key's rows to its state; return what the output shows."""

    def _values(self, rows: Iterator[Any]) -> list[int]:
        return [v for frame in rows for v in frame["v"].tolist()] if self._in_pandas else [row.v for row in rows]


class _Totals(_ByKey):
    """A running count and sum."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", longs("n", "s"))

    def _take(self, rows: Iterator[Any]) -> tuple[int, int]:
        n = s = 0
        for part in rows:
            n, s = (n + len(part), s + int(part["v"].sum())) if self._in_pandas else (n + 1, s + part.v)
        before = self._total.get()
        if before is not None:
            n, s = n + before[0], s + before[1]
        self._total.update((n, s))
        return n, s


class _Entries(_ByKey):
    """One entry of many counts."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._counts = handle.getMapState("counts", longs("entry"), longs("n"))

    def _take(self, rows: Iterator[Any]) -> tuple[int, int]:
        values = self._values(rows)
        entry, n = (values[0] % ENTRIES,), len(values)
        before = self._counts.getValue(entry)
        if before is None:  # the key is new
            for i in range(ENTRIES):
                self._counts.updateValue((i,), (0,))
        n += 0 if before is None else before[0]
        self._counts.updateValue(entry, (n,))
        return n, sum(values)


class _Appended(_ByKey):
    """All rows of a key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._all = handle.getListState("values", longs("v"))

    def _take(self, rows: Iterator[Any]) -> tuple[int, int]:
        values = self._values(rows)
        for v in values:
            self._all.appendValue((v,))
        return len(values), 0


_PROCESSORS: dict[str, type[_ByKey]] = {"value": _Totals, "map": _Entries, "list": _Appended}
