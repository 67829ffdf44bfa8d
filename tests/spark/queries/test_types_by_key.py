"""Types that functions by key are handed, beside Spark's own operators of the running version, live.

Frames, rows, initial rows and keys are compared column by column, dtype and value: a dtype decides what a function's
sums come to. Each key's rows are one Arrow batch here, because on Spark a dtype may depend on all rows of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import holdfast
from holdfast.spark_integration import spark_versions
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.slow(20)]

#: A value of each type that Spark hands to Python.
VALUES = {
    "byte": "1Y", "short": "1S", "int": "1", "long": "9007199254740993L", "float": "1.1F", "double": "1.1D",
    "boolean": "true", "string": "'a'", "binary": "X'61'", "date": "DATE'2026-01-02'", "decimal": "1.50BD",
    "timestamp": "TIMESTAMP'2026-01-02 03:04:05.000006'", "ntz": "TIMESTAMP_NTZ'2026-01-02 03:04:05'",
    "interval": "INTERVAL '1 02' DAY TO HOUR", "array": "array(1, null)", "floats": "array(1.1F)",
    "struct": "named_struct('x', 1, 'y', 1.1F, 'at', TIMESTAMP'2026-01-02 03:04:05')", "map": "map('a', 1)",
}  # fmt: skip
KEYS = list(VALUES)[: list(VALUES).index("array")]
#: Of each key two rows, with a value or without.
PRESENT = [(True, True), (True, False), (False, True), (False, False)]
SETTINGS = NEEDED | {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2",
    "spark.sql.session.timeZone": "America/New_York",
}
SHOWN = "what string, shown string"


def of_frame(frame: pd.DataFrame) -> str:
    return "\n".join(f"{name}: {frame[name].dtype} {list(frame[name].array)}" for name in frame.columns)


def of_row(row: Row) -> str:
    return "\n".join(f"{name}: {of_key([value])}" for name, value in row.asDict().items())


def of_key(key: Iterable[Any]) -> str:
    return ", ".join(f"{type(value).__name__} {value!r}" for value in key)


class Showing(StatefulProcessor):
    """Emits what it is handed: keys, rows and initial rows, with their types; timers if it is told to set them."""

    def __init__(self, *, in_pandas: bool, timer: bool = False) -> None:
        self._in_pandas, self._timer = in_pandas, timer

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._begun = handle.getListState("begun", "shown string")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._begun.appendValue((self._of(initialState),))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield self._emit(key, "key", of_key(key))
        for given in rows:
            yield self._emit(key, "rows", self._of(given))
        for (text,) in self._begun.get():
            yield self._emit(key, "initial", text)
        self._begun.clear()
        if self._timer:
            self._handle.registerTimer(0)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield self._emit(key, "timer", of_key(key))

    def _of(self, given: Any) -> str:
        return of_frame(given) if self._in_pandas else of_row(given)

    def _emit(self, key: Any, what: str, shown: str) -> Any:
        columns = {"what": f"{what} of {key}", "shown": shown}
        return pd.DataFrame({name: [text] for name, text in columns.items()}) if self._in_pandas else Row(**columns)


def typed(frame: DataFrame) -> DataFrame:
    columns = [f"if(present, {value}, null) as `{name}`" for name, value in VALUES.items()]
    return frame.selectExpr("k", *columns)


@pytest.fixture
def in_order(lab: Lab) -> Iterator[Lab]:
    """A lab with two micro-batches of the same rows, and no Arrow batch with rows of two keys."""
    table = pa.table({
        "k": pa.array([k for k, pair in enumerate(PRESENT) for _ in pair], pa.int64()),
        "present": [present for pair in PRESENT for present in pair],
    })  # fmt: skip
    lab.feed(table)
    lab.feed(table)
    with configured(lab.spark, SETTINGS):
        yield lab


Group = Callable[..., Any]
SPARK: Group = lambda frame, *keys: frame.groupBy(*keys)  # noqa: E731
OURS: Group = lambda frame, *keys: holdfast.stream(frame).groupBy(*keys)  # noqa: E731
BY_ROW = pytest.param(False, id="row", marks=[pytest.mark.since("4.1"), pytest.mark.all])


def shown_in(lab: Lab, query: Callable[[Group], DataFrame], group: Group) -> list[list[tuple[str, str]]]:
    """Return by micro-batch what a query shows, line by line."""
    batches = lab.run(query(group), "spark" if group is SPARK else "ours", "append")
    return [lines((row["what"], row["shown"]) for row in batch) for batch in batches]


def lines(shown: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(what, line) for what, text in sorted(shown) for line in text.split("\n")]


def show_frames(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    for frame in frames:
        yield pd.DataFrame({"what": [of_key(key)], "shown": [of_frame(frame)]})


@pytest.mark.all
@pytest.mark.parametrize("keys", [["k"], ["k", *KEYS]], ids=["rows", "keys"])
def test_functions_of_apply_in_pandas_with_state(in_order: Lab, keys: list[str]) -> None:
    """Arrow's columns in frames, numpy's scalars in keys, among them nulls."""
    rows = typed(in_order.source("k long, present boolean"))
    if len(keys) > 1:
        rows = rows.where("k in (0, 3)")  # with equal rows, which are one Arrow batch

    def query(group: Group) -> DataFrame:
        return group(rows, *keys).applyInPandasWithState(show_frames, SHOWN, "n int", "append", "NoTimeout")

    assert shown_in(in_order, query, OURS) == shown_in(in_order, query, SPARK)


@pytest.mark.parametrize("in_pandas", [pytest.param(True, id="pandas", marks=pytest.mark.smoke), BY_ROW])
def test_processors(in_order: Lab, in_pandas: bool) -> None:
    """Rows of two micro-batches, and initial rows before the first, where Spark 4.1 shows Arrow's columns."""
    rows = typed(in_order.source("k long, present boolean"))
    first = in_order.folder / "input" / "000.parquet"
    initial = typed(in_order.spark.read.schema("k long, present boolean").parquet(str(first)))

    def query(group: Group) -> DataFrame:
        grouped = group(rows, "k")
        call = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
        return call(Showing(in_pandas=in_pandas), SHOWN, "append", "none", initial.groupBy("k"))

    ours = shown_in(in_order, query, OURS)
    assert [{what.split()[0] for what, _ in batch} for batch in ours] == [{"key", "rows", "initial"}, {"key", "rows"}]
    assert ours == shown_in(in_order, query, SPARK)


@pytest.mark.all
@pytest.mark.parametrize("in_pandas", [pytest.param(True, id="pandas"), BY_ROW])
def test_keys_of_processors_and_their_timers(in_order: Lab, in_pandas: bool) -> None:
    """A batch query, because with processing time a stream does not end.

    In UTC: Spark shifts the timestamp in a timer's key by pandas, and ours does not. The keys of timers are compared
    from Spark 4.1 on. On Spark 4.1 the timer of a key with a struct fails.
    """
    timer = spark_versions.makes_frames_anew()
    keys = [*KEYS, "struct"] if spark_versions.makes_frames_anew(beside_initial_state=True) else KEYS
    spark_versions.start_state_coordinator(in_order.spark)  # which Spark 4.1 needs here and starts only for a stream
    in_order.spark.conf.set("spark.sql.session.timeZone", "UTC")
    rows = typed(in_order.spark.createDataFrame([(1, True)] * 2, "k long, present boolean"))

    def shown_by(group: Group) -> list[tuple[str, str]]:
        grouped = group(rows, *keys)
        call = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
        shown = call(Showing(in_pandas=in_pandas, timer=timer), SHOWN, "append", "processingTime")
        return lines((row.what, row.shown) for row in shown.collect())

    ours = shown_by(OURS)
    assert {what.split()[0] for what, _ in ours} == {"key", "rows", *["timer"] * timer}
    assert ours == shown_by(SPARK)
