"""A processor's life: what is called when, what survives, and what becomes of errors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming import StatefulProcessor

from tests.spark.answers import text_of
from tests.spark.parity.engines import Open, cause_of
from tests.spark.processors.engines import ProcessorEngine, by_engine, engines, ours
from tests.spark.processors.showing import SHOWN, Logging
from tests.spark.processors.test_keys import ONE_PARTITION
from tests.spark.processors.ways import Run, Way, by_way, ways

if TYPE_CHECKING:
    from pyspark.sql.streaming import StatefulProcessorHandle

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow(3)]

_KEYS = pa.table({"k": ["b", "a"]})


@by_way(ways(0, batch_only=True))
def test_o1_the_order_of_calls(way: Way, run: Run, tmp_path: Path) -> None:
    """O1, O3, L4, Q23: init, keys, timers, close; L9: a generator has ended before the next key begins."""
    log = tmp_path / "log"
    processor = Logging(way.api, log)
    run(way, _KEYS, "k string", ["k"], processor, SHOWN, "processingTime", conf=ONE_PARTITION)
    events = log.read_text().split("\n")[:-1]
    if not way.is_spark:
        assert events[:2] == ["init", "close"], "L1: what is declared is learnt on the driver, of batch queries too"
        events = events[2:]
    assert events == [
        *("init", "rows a", "generated a", "rows b", "generated b"),
        *("timer b", "timer a"),
        "close",
    ]


@by_engine(engines(2))
def test_l2_nothing_that_the_object_holds_survives(engine: ProcessorEngine, run_on: Open, tmp_path: Path) -> None:
    """L2, Q24: each batch has a new object; L1: init and close run once more, on the driver, before the first batch."""
    log = tmp_path / "log"
    with run_on(engine, **ONE_PARTITION) as on:
        for _ in range(2):
            on.feed_table(pa.table({"k": ["a", "b", "c"]}))
        frame = engine.transform(
            on.source("k string", delay=None), ["k"], Logging(engine.api, log), SHOWN, "append", "none"
        )
        on.run(frame, "append")
        assert [[int(n) for _, n in rows] for rows in on.batches] == [[1, 2, 3]] * 2
    events = Counter(event for event in log.read_text().split("\n") if event in {"init", "close"})
    assert events == {"init": 3, "close": 3}


_FAILS = ["init", "rows a", "generated a", "close"]


@by_engine(engines(3))
@pytest.mark.parametrize("event", _FAILS)
def test_x5_an_error_of_the_user(engine: ProcessorEngine, event: str, run_on: Open, tmp_path: Path) -> None:
    """X5, L1: the query ends with the user's own error; ours fails at definition where Spark does at the start."""
    log = tmp_path / "log"
    with run_on(engine, **ONE_PARTITION) as on:
        on.feed_table(pa.table({"k": ["a"]}))
        processor = Logging(engine.api, log, fails=event)

        def define() -> Any:
            return engine.transform(on.source("k string", delay=None), ["k"], processor, SHOWN, "append", "none")

        if event in {"init", "close"} and not engine.is_spark:
            with pytest.raises(LookupError, match=f"no {event} today"):
                define()
        else:
            error = on.failure(define(), "append")
            assert f"no {event} today" in text_of(error)
            if event not in {"init", "close"}:
                assert cause_of(error) == ("LookupError", f"no {event} today")
                assert engine.is_spark or "raised in operator 'parity' for key ('a',)" in str(error), "beyond Spark"
                assert log.read_text().count("close") == 1, "L4: not after an error"


@by_way(ways(2, batch_only=True))
def test_x5_an_error_in_a_timer(way: Way, run: Run, tmp_path: Path) -> None:
    """X5: it reaches the driver with the user's traceback."""
    processor = Logging(way.api, tmp_path / "log", fails="timer a")
    with pytest.raises(Exception, match="no timer a today") as error:
        run(way, _KEYS, "k string", ["k"], processor, SHOWN, "processingTime")
    assert cause_of(error.value) == ("LookupError", "no timer a today")
    assert "handleExpiredTimer" in str(error.value)


class _OtherNames(StatefulProcessor):
    """Calls the parameters of its timers otherwise."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        self._handle.registerTimer(0)
        return []

    def handleExpiredTimer(self, k: Any, times: Any, info: Any) -> Any:  # type: ignore[override]
        return []


@by_way(ways(3, batch_only=True))
def test_a6_timers_are_called_by_keyword(way: Way, run: Run) -> None:
    """A6, Q9: other parameter names are a TypeError, when the first timer fires."""
    with pytest.raises(Exception, match="unexpected keyword argument 'key'") as error:
        run(way, _KEYS, "k string", ["k"], _OtherNames(), SHOWN, "processingTime")
    assert cause_of(error.value)[0] == "TypeError"


class _NoTimers(StatefulProcessor):
    """Leaves `handleExpiredTimer` and `close` as they are."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for due_ms in (-1, 0, 2**60):
            self._handle.registerTimer(due_ms)
        return []


@by_way(ways(4, batch_only=True))
def test_tm9_by_default_a_timer_is_dropped(way: Way, run: Run) -> None:
    """TM9, A5: and nothing is emitted; B2: later ones are dropped with the batch query."""
    assert run(way, _KEYS, "k string", ["k"], _NoTimers(), SHOWN, "processingTime") == []


@pytest.mark.all
@by_engine(ours(5))
def test_l12_a_failed_batch_leaves_nothing(engine: ProcessorEngine, run_on: Open, tmp_path: Path) -> None:
    """L12, V5, X5: what the failed attempt wrote is gone, and the next start does the batch again."""
    log = tmp_path / "log"
    with run_on(engine, **ONE_PARTITION) as on:
        on.feed_table(pa.table({"k": ["a", "b", "c"]}))

        def define(fails: str) -> Any:
            processor = Logging(engine.api, log, fails=fails)
            return engine.transform(on.source("k string", delay=None), ["k"], processor, SHOWN, "append", "none")

        on.run(define(""), "append")
        on.feed_table(pa.table({"k": ["a", "b", "c"]}))
        with pytest.raises(StreamingQueryException):
            on.run(define("rows c"), "append")
        on.run(define(""), "append")
        assert on.batches == [[("keys seen", str(n)) for n in (1, 2, 3)]] * 2
