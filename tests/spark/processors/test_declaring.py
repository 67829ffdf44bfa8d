"""What a processor declares, and the arguments of the call: refused with Spark's classes, ours when it is defined."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, IllegalArgumentException, PythonException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import IntegerType, StructType

from holdfast.errors import InvalidArgumentError
from tests.spark.answers import text_of
from tests.spark.parity.engines import Open
from tests.spark.processors.engines import BY_ROW, SPARK_ROW, ProcessorEngine, by_engine, engines
from tests.spark.processors.showing import SHOWN
from tests.spark.processors.ways import Run, Way

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow(2)]

_KEYS = pa.table({"k": ["a"]})
Init = Callable[[StatefulProcessorHandle], Any]


class Declaring(StatefulProcessor):
    """Declares what a function does, and emits nothing."""

    def __init__(self, init: Init) -> None:
        self._init = init

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.declared = self._init(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return []


_INVALID = "STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME"
_RESERVED = "STATE_STORE_CANNOT_CREATE_COLUMN_FAMILY_WITH_RESERVED_CHARS"
_TTL_MODE = "STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL"
_DUPLICATE = "STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED"

# By item: what init does, the time mode, and words of the error that both have.
WRONG: dict[str, tuple[Init, str, str]] = {
    "D3 an empty name": (lambda h: h.getValueState("", "n int"), "none", _INVALID),
    "D3 a leading blank": (lambda h: h.getListState(" x", "n int"), "none", _INVALID),
    "D3 a trailing blank": (lambda h: h.getMapState("x ", "k int", "n int"), "none", _INVALID),
    "D3 default": (lambda h: h.getValueState("default", "n int"), "none", _INVALID),
    "D3 a dollar": (lambda h: h.getValueState("$x", "n int"), "none", _RESERVED),
    "TL1 a negative TTL": (
        lambda h: h.getValueState("x", "n int", -1),
        "processingTime",
        "STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE",
    ),
    "TL1 a TTL without time": (lambda h: h.getValueState("x", "n int", 5), "none", _TTL_MODE),
    "TL1 a TTL with event time": (lambda h: h.getMapState("x", "k int", "n int", 5), "eventTime", _TTL_MODE),
    "TL1 a TTL that is no integer": (lambda h: h.getListState("x", "n int", 1.5), "processingTime", "TypeError|float"),
    "D1 a schema that does not parse": (
        lambda h: h.getValueState("x", "n strin"),
        "none",
        "UNSUPPORTED_DATATYPE|STRIN",
    ),
    "D2 a map as a user key": (lambda h: h.getMapState("x", "m map<int,int>", "n int"), "none", "(?i)map"),
    "L6 a timer in init": (
        lambda h: h.registerTimer(5),
        "processingTime",
        "INVALID_HANDLE_STATE.*operation=register_timer",
    ),
    "L7 state in init": (
        lambda h: h.getValueState("x", "n int").get(),
        "none",
        "(?i)implicit key|INVALID_HANDLE_STATE",
    ),
    "D5 value twice": (
        lambda h: [h.getValueState("x", "n int"), h.getValueState("x", "n int")],
        "none",
        f"{_DUPLICATE}|already exists",
    ),
    "D5 value, then list": (
        lambda h: [h.getValueState("x", "n int"), h.getListState("x", "n int")],
        "none",
        f"{_DUPLICATE}|already exists",
    ),
    "D5 map, then value": (
        lambda h: [h.getMapState("x", "k int", "n int"), h.getValueState("x", "n int")],
        "none",
        f"{_DUPLICATE}|already exists",
    ),
}


# What only the driver refuses, so not in a batch query, which then goes wrong or not.
_BY_THE_DRIVER = {"D2 a map as a user key", "D5 value, then list", "D5 map, then value"}


@pytest.mark.all
@pytest.mark.parametrize("name", list(WRONG))
def test_what_spark_refuses(name: str, run: Run, run_on: Open) -> None:
    """D1 to D5, TL1, L6, L7: so that we learn when it changes."""
    init, time_mode, words = WRONG[name]
    if name in _BY_THE_DRIVER:
        with run_on(SPARK_ROW) as on:
            on.feed_table(_KEYS)
            source = on.source("k string", delay=None)
            error = on.failure(SPARK_ROW.transform(source, ["k"], Declaring(init), SHOWN, "append", "none"), "append")
            assert re.search(words, text_of(error))
    else:
        with pytest.raises(PythonException, match=words):
            run(Way(SPARK_ROW, is_batch=True), _KEYS, "k string", ["k"], Declaring(init), SHOWN, time_mode)


@pytest.mark.parametrize("name", list(WRONG))
def test_what_init_must_not_declare(name: str, run_on: Open) -> None:
    """D1 to D5, TL1, L6, L7, Q16: when the step is defined; nothing has run."""
    init, time_mode, words = WRONG[name]
    [engine] = BY_ROW[:1]
    with run_on(engine) as on:
        on.feed_table(pa.table({"key": ["a"]}))
        with pytest.raises(Exception, match=words):
            engine.transform(on.source(), ["key"], Declaring(init), SHOWN, "append", time_mode)


@by_engine(engines(5))
def test_d3_names_that_go(engine: ProcessorEngine, run_on: Open) -> None:
    """D3, D1: anything else, and case matters; schemas are texts or types. D7: deleting an unknown name is fine."""

    def init(handle: StatefulProcessorHandle) -> None:
        for at, name in enumerate(("a b", "X", "x", "y.z", "a/b", "größe", "timers", "state", "_", "v.x", "%", "a$")):
            if at % 3 == 0:
                handle.getValueState(name, StructType().add("n", IntegerType()))
            elif at % 3 == 1:
                handle.getListState(name, "n int, s string")
            else:
                handle.getMapState(name, "k int", StructType().add("n", IntegerType()))
        handle.deleteIfExists("nobody knows it")

    with run_on(engine) as on:
        on.feed_table(_KEYS)
        source = on.source("k string", delay=None)
        on.run(engine.transform(source, ["k"], Declaring(init), SHOWN, "append", "none"), "append")
        assert on.batches == [[]]


def test_d2_a_schema_without_columns(run: Run, run_on: Open) -> None:
    """D2: Spark takes it; we ask for a column, as everywhere."""
    processor = Declaring(lambda handle: handle.getMapState("x", "k int", StructType([])))
    assert run(Way(SPARK_ROW, is_batch=True), _KEYS, "k string", ["k"], processor, SHOWN) == []
    with run_on(BY_ROW[0]) as on:
        on.feed_table(_KEYS)
        source = on.source("k string", delay=None)
        with pytest.raises(InvalidArgumentError, match="at least one column"):
            BY_ROW[0].transform(source, ["k"], processor, SHOWN, "append", "none")


_NOTHING = Declaring(lambda handle: None)
_MODES = [SPARK_ROW, BY_ROW[0]]


@pytest.mark.all
@by_engine(_MODES)
def test_a9_modes(engine: ProcessorEngine, run_on: Open) -> None:
    """A9: in any case; what is none is an error when the step is defined. A1: schemas are texts or types."""
    with run_on(engine) as on:
        on.feed([("a", 1, "")])
        modes = [("Append", "NONE"), ("append", "NoTime"), ("update", "ProcessingTime"), ("APPEND", "eventtime")]
        for output_mode, time_mode in modes:
            frame = engine.transform(on.source(), ["key"], _NOTHING, SHOWN, output_mode, time_mode)
            assert frame.schema.simpleString() == "struct<what:string,shown:string>"
            assert engine.transform(on.source(), ["key"], _NOTHING, frame.schema, output_mode, time_mode).schema
        with pytest.raises(IllegalArgumentException, match=r"STREAMING_OUTPUT_MODE\.INVALID.*sometimes"):
            engine.transform(on.source(), ["key"], _NOTHING, SHOWN, "sometimes", "none")
        with pytest.raises(IllegalArgumentException, match="STATEFUL_PROCESSOR_UNKNOWN_TIME_MODE"):
            engine.transform(on.source(), ["key"], _NOTHING, SHOWN, "append", "never")


@by_engine(_MODES)
def test_k3_keys_that_are_no_columns(engine: ProcessorEngine, run_on: Open) -> None:
    """K3, Q27: expressions are refused by Spark and taken by us."""
    with run_on(engine) as on:
        on.feed([("a", 1, "")])
        if engine.is_spark:
            with pytest.raises(AnalysisException, match="UNRESOLVED_COLUMN"):
                assert engine.transform(on.source(), [F.upper("key")], _NOTHING, SHOWN, "append", "none").schema
        else:
            assert engine.transform(on.source(), [F.upper("key")], _NOTHING, SHOWN, "append", "none").schema
            with pytest.raises(InvalidArgumentError, match="at least one key"):
                engine.transform(on.source(), [], _NOTHING, SHOWN, "append", "none")


@by_engine(_MODES)
def test_i6_two_columns_of_one_name(engine: ProcessorEngine, run_on: Open) -> None:
    """I6: refused at definition, with the name."""
    with run_on(engine) as on:
        on.feed([("a", 1, "")])
        source = on.source().withColumn("x", F.lit(1)).select("key", "x", F.lit(2).alias("x"))
        with pytest.raises(Exception, match=r"AMBIGUOUS_REFERENCE.*`x`|'x'"):
            engine.transform(source, ["key"], _NOTHING, SHOWN, "append", "none")


def test_w4_event_time_without_a_watermark(run_on: Open) -> None:
    """W4, Q18: Spark takes it without a word, and no timer ever fires; we refuse it."""
    for engine in _MODES:
        with run_on(engine) as on:
            on.feed([("a", 1, "")])
            source = on.source(delay=None)
            if engine.is_spark:
                assert engine.transform(source, ["key"], _NOTHING, SHOWN, "append", "eventTime").schema
            else:
                with pytest.raises(Exception, match="needs an input with a watermark"):
                    engine.transform(source, ["key"], _NOTHING, SHOWN, "append", "eventTime")
