"""Drop-in replacements: functions of one key at a time that run unchanged on Spark's operators and on holdfast's.

Each micro-batch touches the next `DropIn.touched` keys, with the same number of rows each; keys recur after some
micro-batches.

``dropin``: a running count and sum by ``applyInPandasWithState``; there is a vectorised function, too.

``dropin-tws``: a `StatefulProcessor` by ``transformWithState``. `ByProcessor.variable` selects the state of a key:
``value`` is a running count and sum; ``map`` has `ENTRIES` entries, of which a micro-batch reads and writes one;
``list`` appends all rows and never reads them; ``timer`` is a count and sum that ends by an event-time timer, two
micro-batches after its registration.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import pandas as pd
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructField, StructType

from holdfast.benches.jobs.job import FIRST_SECOND, option
from holdfast.benches.jobs.job_a import JobA
from holdfast.errors import InvalidArgumentError

ENTRIES = 20
_BATCH_S = 60


@dataclass(frozen=True)
class DropIn(JobA):
    """Running count and sum by ``applyInPandasWithState``."""

    name = "dropin"

    rows: int = option(40_000, "rows per micro-batch")
    keys: int = option(40_000, "possible keys")
    touched: int = option(20_000, "keys per micro-batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.touched <= min(self.rows, self.keys):
            raise InvalidArgumentError("--touched must be between 1 and the smaller of --rows and --keys")

    def source(self, spark: SparkSession) -> DataFrame:
        return self.numbers(spark).select(*self.columns())

    def columns(self) -> list[Column]:
        """Return the columns of the row with the number ``value``."""
        number = F.expr(f"(value div {self.rows}) * {self.touched} + (value % {self.rows}) % {self.touched}")
        return [(number % self.keys).alias("key"), (F.col("value") % 100).alias("v")]


def one_key(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n, s = state.getOption or (0, 0)
    for frame in frames:
        n += len(frame)
        s += int(frame["v"].sum())
    state.update((n, s))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "s": [s]})


@dataclass(frozen=True)
class ByProcessor(DropIn):
    """Running count and sum by ``transformWithState``."""

    name = "dropin-tws"

    variable: str = option("value", "state variable of a key", click.Choice(["value", "map", "list", "timer"]))

    @property
    def time_mode(self) -> str:
        return "EventTime" if self.variable == "timer" else "None"

    def source(self, spark: SparkSession) -> DataFrame:
        rows = super().source(spark)
        return rows.withWatermark("at", "0 seconds") if self.variable == "timer" else rows

    def columns(self) -> list[Column]:
        if self.variable != "timer":
            return super().columns()
        at = F.timestamp_seconds(F.expr(f"value div {self.rows}") * _BATCH_S + FIRST_SECOND)
        return [*super().columns(), at.alias("at")]

    def processor(self, *, in_pandas: bool) -> StatefulProcessor:
        return _PROCESSORS[self.variable](in_pandas)


def longs(*names: str) -> StructType:
    """Return a schema of integers without Spark's parser, which would need a JVM."""
    return StructType([StructField(name, LongType()) for name in names])


class _ByKey(StatefulProcessor):
    """Reads a key's rows and yields one row of output, as `Row` objects or as frames."""

    def __init__(self, in_pandas: bool) -> None:
        self._in_pandas = in_pandas

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield self._shown(key, *self._take(rows))

    def _shown(self, key: Any, n: int, s: int) -> Any:
        return pd.DataFrame({"key": [key[0]], "n": [n], "s": [s]}) if self._in_pandas else Row(key=key[0], n=n, s=s)

    @abstractmethod
    def _take(self, rows: Iterator[Any]) -> tuple[int, int]:
        """Add a key's rows to its state; return count and sum for the output."""

    def _values(self, rows: Iterator[Any]) -> list[int]:
        return [v for frame in rows for v in frame["v"].tolist()] if self._in_pandas else [row.v for row in rows]


class _Totals(_ByKey):
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
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._all = handle.getListState("values", longs("v"))

    def _take(self, rows: Iterator[Any]) -> tuple[int, int]:
        values = self._values(rows)
        for v in values:
            self._all.appendValue((v,))
        return len(values), 0


class _Ending(_Totals):
    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        # The watermark is the time of the last micro-batch's rows.
        self._handle.registerTimer(timerValues.getCurrentWatermarkInMs() + _BATCH_S * 1500)
        yield from super().handleInputRows(key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        total = self._total.get()
        assert total is not None  # registered with the timer
        yield self._shown(key, *total)
        self._total.clear()


_PROCESSORS: dict[str, type[_ByKey]] = {"value": _Totals, "map": _Entries, "list": _Appended, "timer": _Ending}
