"""The tester of processors: what Spark's own and ours both do, by the items of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyspark.sql.streaming
import pytest
from pyspark.errors import IllegalArgumentException, PySparkAssertionError, PySparkValueError
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast.testing

OURS = pytest.param(holdfast.testing.TwsTester, id="holdfast")
# Spark has one since 4.2.
SPARKS = pytest.param(
    getattr(pyspark.sql.streaming, "TwsTester", None),
    id="spark",
    marks=pytest.mark.skipif(not hasattr(pyspark.sql.streaming, "TwsTester"), reason="Spark 4.2 and later"),
)


@pytest.fixture(params=[SPARKS, OURS])
def tester(request: pytest.FixtureRequest) -> Any:
    """The class of testers, Spark's and ours."""
    return request.param


class Totals(StatefulProcessor):
    """Counts and adds up: a value, a list of what came, and a map by kind."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "n long, v long")
        self.seen = handle.getListState("seen", "v long")
        self.kinds = handle.getMapState("kinds", "kind string", "n long")

    def _add(self, kind: Any, v: int) -> tuple[int, int]:
        n, total = self.total.get() or (0, 0)
        self.total.update((n + 1, total + v))
        self.seen.appendValue((v,))
        of_kind = self.kinds.getValue((kind,))
        self.kinds.updateValue((kind,), (1 if of_kind is None else of_kind[0] + 1,))
        return n + 1, total + v

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            n, total = self._add(row.kind, row.v)
            yield Row(key=key[0], n=n, total=total)

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        self.total.update((initialState.n, initialState.v))


class TotalsInPandas(Totals):
    """The same by frames; a row for each call."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            for kind, v in zip(frame["kind"], frame["v"], strict=True):
                n, total = self._add(kind, int(v))
            yield pd.DataFrame({"key": [key[0]], "n": [n], "total": [total]})

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
        self.total.update((int(initialState["n"].iloc[0]), int(initialState["v"].iloc[0])))


class Clock(StatefulProcessor):
    """Registers a timer for each row, `after` ms from now or at `at`; emits what it sees of time."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.delete is not None:
                self.handle.deleteTimer(row.delete)
            if row.at is not None:
                self.handle.registerTimer(row.at)
        yield Row(key=key[0], at=None, timers=str(sorted(self.handle.listTimers())))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        if at % 1000 == 1:
            self.handle.registerTimer(at + 1)  # due already, where time is set by thousands
        yield Row(key=key[0], at=at, timers=str(sorted(self.handle.listTimers())))


class ClockInPandas(Clock):
    """The same by frames."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            for at in frame["at"].tolist():
                self.handle.registerTimer(at)
            yield pd.DataFrame({"key": [key[0]] * len(frame), "at": frame["at"]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"key": [key[0]], "at": [expiredTimerInfo.getExpiryTimeInMs()]})


class Times(StatefulProcessor):
    """Emits both clocks."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield Row(now=timerValues.getCurrentProcessingTimeInMs(), watermark=timerValues.getCurrentWatermarkInMs())


def sale(v: int, kind: str | None = "a") -> Row:
    return Row(kind=kind, v=v)


def at(ms: int | None = None, delete: int | None = None) -> Row:
    return Row(at=ms, delete=delete)


def fired(output: list[Row]) -> list[tuple[Any, Any]]:
    return [(row.key, row.at) for row in output]


def test_tt1_init_runs_at_once(tester: Any) -> None:
    """TT1: what is wrong in init fails where the tester is made."""

    class Broken(Totals):
        def init(self, handle: StatefulProcessorHandle) -> None:
            raise LookupError("in init")

    with pytest.raises(LookupError, match="in init"):
        tester(Broken())


def test_tt1_initial_state_by_row(tester: Any) -> None:
    """TT1: it is there before the first call."""
    totals = tester(Totals(), initialStateRow=[("ann", Row(n=5, v=50)), ("bob", Row(n=1, v=9))])
    assert totals.peekValueState("total", "ann") == (5, 50)
    assert totals.test("bob", [sale(1)]) == [Row(key="bob", n=2, total=10)]


def test_tt1_initial_state_in_pandas(tester: Any) -> None:
    """TT1: a frame for each key."""
    initial = [(7, pd.DataFrame({"n": [5], "v": [50]}))]
    totals = tester(TotalsInPandas(), initialStatePandas=initial, timeMode="processingTime", outputMode="update")
    output = totals.testInPandas(7, pd.DataFrame({"kind": ["a"], "v": [1]}))
    assert output.to_dict("list") == {"key": [7], "n": [6], "total": [51]}


def test_tt1_wrong_arguments(tester: Any) -> None:
    """TT1: with the same errors."""
    with pytest.raises(AssertionError):
        tester(Totals(), timeMode="sometimes")
    with pytest.raises(AssertionError):
        tester(Totals(), initialStateRow=[], initialStatePandas=[])
    with pytest.raises(PySparkValueError) as failure:
        tester(Totals(), timeMode="EventTime")
    assert failure.value.getCondition() == "ARGUMENT_REQUIRED"


def test_tt2_rows_of_one_key(tester: Any) -> None:
    """TT2: state is carried from call to call, and is a key's own; what is emitted is returned as it is."""
    totals = tester(Totals())
    assert totals.test("ann", [sale(3), sale(4)]) == [Row(key="ann", n=1, total=3), Row(key="ann", n=2, total=7)]
    assert totals.test("bob", [sale(1)]) == [Row(key="bob", n=1, total=1)]
    assert totals.test("ann", [sale(5, None)]) == [Row(key="ann", n=3, total=12)]
    assert totals.peekListState("seen", "ann") == [(3,), (4,), (5,)]
    assert totals.peekMapState("kinds", "ann") == {("a",): (2,), (None,): (1,)}


@pytest.mark.parametrize("key", ["", 5, 2.5, True, b"bytes", None])
def test_tt2_keys_of_any_type(tester: Any, key: Any) -> None:
    """TT2: the processor sees it as the only member of a tuple."""
    totals = tester(Totals())
    assert totals.test(key, [sale(1)]) == [Row(key=key, n=1, total=1)]
    assert totals.peekValueState("total", key) == (1, 1)


def test_tt2_frames_of_one_key(tester: Any) -> None:
    """TT2: a frame comes in one piece, and the frames that are returned are one."""
    totals = tester(TotalsInPandas())
    sales = pd.DataFrame({"kind": ["a", "b"], "v": [3, 4]}, index=[7, 7])
    assert totals.testInPandas("ann", sales).to_dict("list") == {"key": ["ann"], "n": [2], "total": [7]}
    assert totals.testInPandas("ann", sales).to_dict("list") == {"key": ["ann"], "n": [4], "total": [14]}
    assert totals.peekMapState("kinds", "ann") == {("a",): (2,), ("b",): (2,)}


def test_tt2_timers_that_are_not_due_wait(tester: Any) -> None:
    """TT2, TT3: `test` does not advance time."""
    clock = tester(Clock(), timeMode="ProcessingTime")
    assert clock.test("ann", [at(1000), at(2000)]) == [Row(key="ann", at=None, timers="[1000, 2000]")]
    assert clock.test("ann", [at(delete=1000)]) == [Row(key="ann", at=None, timers="[2000]")]
    assert fired(clock.setProcessingTime(1500)) == []
    assert fired(clock.setProcessingTime(2000)) == [("ann", 2000)]


@pytest.mark.parametrize(("mode", "advance"), [("ProcessingTime", "setProcessingTime"), ("EventTime", "setWatermark")])
def test_tt3_time_is_advanced_by_hand(tester: Any, mode: str, advance: str) -> None:
    """TT3: timers fire at their very time, once; those of a key in order, each in the list while it fires."""
    clock = tester(Clock(), timeMode=mode, eventTimeExtractor=lambda row: 1 << 60)
    clock.test("ann", [at(3000), at(1000), at(2000), at(1000)])
    assert fired(getattr(clock, advance)(999)) == []
    assert getattr(clock, advance)(2000) == [
        Row(key="ann", at=1000, timers="[1000, 2000, 3000]"),
        Row(key="ann", at=2000, timers="[2000, 3000]"),
    ]
    assert fired(getattr(clock, advance)(9000)) == [("ann", 3000)]
    assert fired(getattr(clock, advance)(99_000)) == []


def test_tt3_what_is_registered_meanwhile_waits(tester: Any) -> None:
    """TT3: a timer that is registered while timers fire comes with the next time, due or not."""
    clock = tester(Clock(), timeMode="ProcessingTime")
    clock.test("ann", [at(1001)])
    assert fired(clock.setProcessingTime(5000)) == [("ann", 1001)]
    assert fired(clock.setProcessingTime(6000)) == [("ann", 1002)]


def test_tt3_time_moves_forward(tester: Any) -> None:
    """TT3: and only the clock of the time mode."""
    clock = tester(Clock(), timeMode="ProcessingTime")
    clock.setProcessingTime(5)
    for wrong in (5, 4, -1):
        with pytest.raises(IllegalArgumentException):
            clock.setProcessingTime(wrong)
    by_event = tester(Clock(), timeMode="EventTime", eventTimeExtractor=lambda row: row.at)
    with pytest.raises(IllegalArgumentException):
        by_event.setWatermark(0)
    none = tester(Totals())
    for wrong_call in (clock.setWatermark, by_event.setProcessingTime, none.setWatermark, none.setProcessingTime):
        with pytest.raises(PySparkValueError) as failure:
            wrong_call(10)
        assert failure.value.getCondition() == "UNSUPPORTED_OPERATION"


def test_tt3_timers_in_pandas(tester: Any) -> None:
    """TT3: their output is a frame, after a call with frames; without output one without rows."""
    clock = tester(ClockInPandas(), timeMode="ProcessingTime")
    clock.testInPandas("ann", pd.DataFrame({"at": [1000, 2000]}))
    assert clock.setProcessingTime(2000).to_dict("list") == {"key": ["ann", "ann"], "at": [1000, 2000]}
    assert len(clock.setProcessingTime(3000)) == 0


def test_tt3_times_that_a_processor_sees(tester: Any) -> None:
    """TT3: -1 without a time mode, and 0 before time was set."""
    assert tester(Times()).test("ann", [Row(at=1)]) == [Row(now=-1, watermark=-1)]
    clock = tester(Times(), timeMode="processingtime")
    assert clock.test("ann", [Row(at=1)])[0].now == 0
    clock.setProcessingTime(500)
    assert clock.test("ann", [Row(at=1)])[0].now == 500
    by_event = tester(Times(), timeMode="EVENTTIME", eventTimeExtractor=lambda row: row.at)
    by_event.setWatermark(500)
    assert by_event.test("ann", [Row(at=501)])[0].watermark == 500


def test_tt4_state_is_set_and_looked_at(tester: Any) -> None:
    """TT4: by variable and key; what is set is what the processor finds."""
    totals = tester(Totals())
    totals.updateValueState("total", "ann", (40, 400))
    totals.updateListState("seen", "ann", [(1,), (None,)])
    totals.updateMapState("kinds", "ann", {("a",): (7,), ("b",): (8,)})
    assert totals.test("ann", [sale(1)]) == [Row(key="ann", n=41, total=401)]
    assert totals.peekListState("seen", "ann") == [(1,), (None,), (1,)]
    assert totals.peekMapState("kinds", "ann") == {("a",): (8,), ("b",): (8,)}
    totals.updateListState("seen", "ann", [])
    totals.updateMapState("kinds", "ann", {})
    assert (totals.peekListState("seen", "ann"), totals.peekMapState("kinds", "ann")) == ([], {})
    assert totals.peekValueState("total", "bob") is None
    assert (totals.peekListState("seen", "bob"), totals.peekMapState("kinds", "bob")) == ([], {})


def test_tt4_state_is_deleted(tester: Any) -> None:
    """TT4: of one key and one variable."""
    totals = tester(Totals())
    for key in ("ann", "bob"):
        totals.test(key, [sale(1)])
    for name in ("total", "seen", "kinds", "total"):
        totals.deleteState(name, "ann")
    assert totals.peekValueState("total", "ann") is None
    assert totals.peekListState("seen", "ann") == []
    assert totals.peekMapState("kinds", "ann") == {}
    assert totals.peekValueState("total", "bob") == (1, 1)


def test_tt4_names_that_init_does_not_declare(tester: Any) -> None:
    """TT4: also of another kind."""
    totals = tester(Totals())
    for call in (
        lambda: totals.peekValueState("seen", "ann"),
        lambda: totals.peekListState("total", "ann"),
        lambda: totals.peekMapState("nobody", "ann"),
        lambda: totals.updateValueState("nobody", "ann", (1, 1)),
        lambda: totals.updateListState("nobody", "ann", []),
        lambda: totals.updateMapState("seen", "ann", {}),
    ):
        with pytest.raises(AssertionError):
            call()
    with pytest.raises(PySparkAssertionError) as failure:
        totals.deleteState("nobody", "ann")
    assert failure.value.getCondition() == "STATE_NOT_EXISTS"


def test_tt5_late_rows_are_dropped(tester: Any) -> None:
    """TT5: those whose event time is not after the watermark; by row and in pandas."""
    totals = tester(Totals(), timeMode="EventTime", eventTimeExtractor=lambda row: row.v)
    totals.setWatermark(100)
    assert totals.test("ann", [sale(99), sale(100), sale(101)]) == [Row(key="ann", n=1, total=101)]
    frames = tester(TotalsInPandas(), timeMode="EventTime", eventTimeExtractor=lambda row: int(row["v"]))
    frames.setWatermark(100)
    frames.testInPandas("ann", pd.DataFrame({"kind": "a", "v": [101, 100, 99, 102]}))
    assert frames.peekListState("seen", "ann") == [(101,), (102,)]
