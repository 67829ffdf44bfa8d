"""The tester of processors: what a query does, and Spark's own tester does not."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import IllegalArgumentException, PySparkRuntimeError, PySparkTypeError, PySparkValueError
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructType

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.processor import transform_with_state
from holdfast.testing import TwsTester


class Doing(StatefulProcessor):
    """Declares three variables, and does with them what a row says: a function of the processor and the key."""

    ttl_ms: int | None = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n int", self.ttl_ms)
        self.items = handle.getListState("items", "n int", self.ttl_ms)
        self.entries = handle.getMapState("entries", "k string", StructType().add("n", LongType()), self.ttl_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(key=key, seen=row.do(self))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=key, seen=expiredTimerInfo.getExpiryTimeInMs())


class Expiring(Doing):
    """The same with a time to live."""

    ttl_ms = 1000


def do(tester: TwsTester, what: Callable[[Any], Any], key: Any = "ann") -> Any:
    """Return what a function returns that is called with the processor."""
    return tester.test(key, [Row(do=what)])[0].seen


def register(*due_ms: int) -> Callable[[Any], Any]:
    return lambda p: [p.handle.registerTimer(ms) for ms in due_ms] and None


@pytest.fixture(autouse=True)
def first_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test see the warnings that a process gives once."""
    monkeypatch.setattr(transform_with_state, "_warned", set())


def test_ttl_of_values() -> None:
    """TL2 to TL5: what has not been written for its time to live is gone, to the processor and to whoever looks."""
    tester = TwsTester(Expiring(), timeMode="ProcessingTime")
    do(tester, lambda p: p.value.update((1,)))
    tester.setProcessingTime(600)
    tester.updateValueState("value", "bob", (2,))
    assert do(tester, lambda p: p.value.get()) == (1,), "a read does not refresh"
    tester.setProcessingTime(999)
    assert tester.peekValueState("value", "ann") == (1,)
    tester.setProcessingTime(1000)
    assert tester.peekValueState("value", "ann") is None
    assert do(tester, lambda p: p.value.exists()) is False
    assert do(tester, lambda p: p.value.get(), "bob") == (2,)
    tester.setProcessingTime(1600)
    assert tester.peekValueState("value", "bob") is None


def test_several_grouping_columns() -> None:
    """K1: a tuple is a key of several columns, and reaches the processor as it is."""
    tester = TwsTester(Doing(), timeMode="ProcessingTime")
    for key in (("ann", 1), ("ann", 2), (None, 1)):
        [row] = tester.test(key, [Row(do=register(5))])
        assert row.key == key
        do(tester, lambda p: p.value.update((7,)), key)
    tester.deleteState("value", ("ann", 2))
    values = [tester.peekValueState("value", key) for key in (("ann", 1), ("ann", 2), (None, 1), ("bob", 1))]
    assert values == [(7,), None, (7,), None]
    assert {row.key for row in tester.setProcessingTime(5)} == {(None, 1), ("ann", 1), ("ann", 2)}


def test_declared_grouping_columns() -> None:
    """K1, K2: values have the columns' types, and a timer's key is a `Row` with their names."""
    tester = TwsTester(Doing(), timeMode="ProcessingTime", keyStructType="user string, day date, n int")
    key = ("ann", dt.date(2026, 1, 2), None)
    assert tester.setProcessingTime(1) == []
    assert tester.test(key, [Row(do=register(5))])[0].key == key
    [row] = tester.setProcessingTime(5)
    assert (row.key.user, row.key.day, row.key.n) == key


@pytest.mark.parametrize(
    "keys",
    [
        ("ann", ("ann", 1)),
        (1, "ann"),
        (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), 5),
        (("ann", 1), "ann"),
        (object(),),
        ({"a": 1},),
    ],
)
def test_keys_that_do_not_fit(keys: tuple[Any, ...]) -> None:
    """The columns are those of the first key."""
    tester = TwsTester(Doing())
    *fitting, wrong = keys
    for key in fitting:
        do(tester, lambda p: None, key)
    with pytest.raises(InvalidArgumentError, match="key"):
        do(tester, lambda p: None, wrong)
    with pytest.raises(InvalidArgumentError, match="group by map"):
        TwsTester(Doing(), keyStructType="m map<string,int>")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (lambda p: p.value.update(5), TypeError),
        (lambda p: p.value.update(("one",)), SchemaMismatchError),
        (lambda p: p.items.put([]), PySparkRuntimeError),
        (lambda p: p.handle.registerTimer(5), PySparkRuntimeError),
    ],
)
def test_calls_that_fail_in_a_query(what: Callable[[Any], Any], error: type[Exception]) -> None:
    """V2, V3, Q3, S2, S3, M3, TM7, L5: the same errors; they name operator and key, and the call leaves no trace."""
    tester = TwsTester(Doing())
    tester.updateValueState("value", "ann", (1,))

    def write_and_fail(p: Any) -> None:
        p.value.update((2,))
        p.entries.updateValue(("a",), (2,))
        what(p)

    with pytest.raises(error) as failure:
        do(tester, write_and_fail)
    assert "in operator 'Doing' for key ('ann',)" in failure.value.__notes__[0]
    assert (tester.peekValueState("value", "ann"), tester.peekMapState("entries", "ann")) == ((1,), {})


def test_timers_that_fail_can_be_tried_again() -> None:
    """L12: neither time nor state has moved on; the timer is still there."""

    class Failing(Doing):
        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
            at_ms = timerValues.getCurrentProcessingTimeInMs()
            self.value.update((at_ms,))
            if at_ms < 20:
                raise LookupError
            yield Row(seen=self.value.get())

    tester = TwsTester(Failing(), timeMode="ProcessingTime")
    do(tester, register(10))
    with pytest.raises(LookupError):
        tester.setProcessingTime(15)
    assert tester.peekValueState("value", "ann") is None
    with pytest.raises(LookupError):
        tester.setProcessingTime(14)
    assert tester.setProcessingTime(20) == [Row(seen=(20,))]


def test_values_that_are_set_must_fit() -> None:
    """TT6: also those that a test sets."""
    tester = TwsTester(Doing())
    with pytest.raises(SchemaMismatchError):
        tester.updateValueState("value", "ann", ("one",))
    with pytest.raises(TypeError):
        tester.updateListState("items", "ann", [5])  # type: ignore[list-item]
    assert tester.peekValueState("value", "ann") is None


@pytest.mark.parametrize(
    ("declare", "mode", "words"),
    [
        (lambda h: h.getValueState("v", "n int", 5), "None", "INCORRECT_TIME_MODE_TO_ASSIGN_TTL"),
        (lambda h: h.getValueState("v", "n intt"), "None", "no such type: 'intt'"),
        (lambda h: h.getValueState("v", LongType()), "None", "StructType"),
    ],
)
def test_declarations_that_a_query_refuses(declare: Callable[[Any], Any], mode: str, words: str) -> None:
    """D1, Q17, TL1: where the tester is made."""

    class Declaring(Doing):
        def init(self, handle: StatefulProcessorHandle) -> None:
            declare(handle)

    with pytest.raises(Exception, match=words):
        TwsTester(Declaring(), timeMode=mode)


def test_what_a_query_refuses_at_definition() -> None:
    """A9: modes, and a processor that cannot travel."""
    with pytest.raises(IllegalArgumentException, match=r"STREAMING_OUTPUT_MODE\.INVALID"):
        TwsTester(Doing(), outputMode="sometimes")
    with pytest.raises(InvalidArgumentError, match="instance of"):
        TwsTester(Doing)  # type: ignore[arg-type]
    processor: Any = Doing()
    processor.lock = sys._getframe()
    with pytest.raises(InvalidArgumentError, match="cannot be pickled"):
        TwsTester(processor)


def test_a_key_without_rows_is_not_called() -> None:
    """L8: neither with none, nor when all are late."""
    tester = TwsTester(Doing(), timeMode="EventTime", eventTimeExtractor=lambda row: 0)
    assert tester.test("ann", []) == []
    tester.setWatermark(1)
    assert tester.test("ann", [Row(do=lambda p: p.value.update((1,)))]) == []
    assert tester.testInPandas("ann", pd.DataFrame({"v": []})).empty
    assert tester.peekValueState("value", "ann") is None


class Forgetful(Doing):
    """Counts in an attribute."""

    n = 0

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.n += 1
        yield Row(n=self.n)


def test_attributes_do_not_last() -> None:
    """L2, Q24: each call has a new processor, as each micro-batch has; who counts on them is warned, once."""
    tester = TwsTester(Forgetful())
    with pytest.warns(UserWarning, match="Forgetful has changed its attributes.*: n. The changes will be lost"):
        assert tester.test("ann", [Row(v=1)]) == [Row(n=1)]
    assert tester.test("ann", [Row(v=1)]) == [Row(n=1)]


def test_initial_state_may_set_timers() -> None:
    """N2 to N4: several rows of a key come one by one; a timer that is due at once comes with the first call."""

    class Starting(Doing):
        def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
            self.items.appendValue((initialState.n,))
            self.handle.registerTimer(initialState.n)

    initial = [("ann", Row(n=0)), ("bob", Row(n=7)), ("ann", Row(n=5))]
    tester = TwsTester(Starting(), initialStateRow=initial, timeMode="ProcessingTime")
    assert tester.peekListState("items", "ann") == [(0,), (5,)]
    output = tester.setProcessingTime(7)
    assert [(row.key[0], row.seen) for row in output] == [("ann", 0), ("ann", 5), ("bob", 7)]


class Echo(StatefulProcessor):
    """Emits what it was given, as text."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for piece in rows:
            if isinstance(piece, pd.DataFrame):
                yield pd.DataFrame({"shown": [f"{piece.dtypes['v']} {len(piece)}"], "n": [len(piece)]})
            else:
                yield Row(n=1, shown=repr((piece.at, piece.s, piece.m)))


def test_declared_input() -> None:
    """I1, I4, I5: rows and frames have the types of a query."""
    columns = "at timestamp, s struct<a: int>, m map<string, int>"
    tester = TwsTester(Echo(), inputStructType=columns, timezone="Europe/Berlin")
    [row] = tester.test(1, [Row(at=dt.datetime(2026, 1, 2, tzinfo=dt.UTC), s=Row(a=1), m={"a": 1})])
    assert "ZoneInfo(key='Europe/Berlin')" in row.shown
    assert row.shown.endswith("{'a': 1}, [('a', 1)])")
    in_pieces = TwsTester(Echo(), inputStructType="v long", rowsEach=2)
    output = in_pieces.testInPandas("ann", pd.DataFrame({"v": [1, 2, None]}))
    assert output["shown"].tolist() == ["int64 2", "float64 1"]
    assert in_pieces.testInPandas("ann", pd.DataFrame({"v": []})).empty


def test_declared_output() -> None:
    """R1, R2, R4: it is checked and converted as a query's; columns that were not declared are dropped."""
    row = Row(at=1, s=2, m=3)
    assert TwsTester(Echo(), outputStructType="n long").test("ann", [row]) == [Row(n=1)]
    with pytest.raises(SchemaMismatchError, match="without a column"):
        TwsTester(Echo(), outputStructType="n long, other long").test("ann", [row])
    with pytest.raises(Exception, match=r"[Cc]ould not convert|tried to convert"):
        TwsTester(Echo(), outputStructType="shown long").test("ann", [row])
    frames = TwsTester(Echo(), outputStructType="n int, shown string")
    output = frames.testInPandas("ann", pd.DataFrame({"v": [1.5]}))
    assert (list(output.columns), output["n"].dtype.name) == (["n", "shown"], "int32")


@pytest.mark.parametrize(
    ("returned", "error"),
    [([("a", 1)], AttributeError), ([Row("a", 1)], PySparkTypeError), (None, TypeError), ([{"a": 1}], AttributeError)],
)
def test_output_that_a_query_refuses(returned: Any, error: type[Exception]) -> None:
    """R1, L10: without declared columns too."""

    class Returning(Doing):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            return returned

    with pytest.raises(error):
        TwsTester(Returning()).test("ann", [Row(v=1)])
    with pytest.raises((PySparkValueError, TypeError)):
        TwsTester(Returning()).testInPandas("ann", pd.DataFrame({"v": [1]}))


@pytest.mark.slow(3)
def test_no_java_is_needed(environment_without_java: dict[str, str], tmp_path: Path) -> None:
    """Schemas given as text are parsed without a JVM."""
    program = (
        "from pyspark.sql import Row\n"
        "from holdfast.testing import TwsTester\n"
        "from tests.unit.holdfast.test_tws_tester import Totals\n"
        "assert TwsTester(Totals()).test('ann', [Row(kind='a', v=1)]) == [Row(key='ann', n=1, total=1)]\n"
    )
    root = str(Path(__file__).parents[3])
    environment = environment_without_java | {"PYTHONPATH": root, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, check=True, timeout=120)
