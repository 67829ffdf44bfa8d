"""What is refused before a query runs: on Spark's operator and on ours, with the same class of error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    ParseException,
    PySparkTypeError,
    UnsupportedOperationException,
)

import holdfast
from holdfast.errors import InvalidArgumentError
from tests.spark.parity import program
from tests.spark.parity.engines import SPARK, STRICT, Engine, Open, Trial

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark]

engines = pytest.mark.parametrize("engine", [SPARK, STRICT[0]], ids=lambda engine: engine.name)


def applied(run: Trial, frame: DataFrame | None = None, **changed: Any) -> DataFrame:
    """Apply `program.interpret`, with some arguments changed."""
    run.feed([("a", 1, "")])
    arguments = {
        "func": program.interpret,
        "outputStructType": program.OUTPUT,
        "stateStructType": program.STATE,
        "outputMode": "update",
        "timeoutConf": "NoTimeout",
    }
    return run.apply(frame or run.source(delay=None), ["key"], *(arguments | changed).values())


@engines
@pytest.mark.parametrize("timeout", ["Never", "notimeout", "", None])
def test_timeouts(engine: Engine, timeout: str, run_on: Open) -> None:
    """C1: what is no timeout is an AssertionError, and case matters."""
    with run_on(engine) as run, pytest.raises(AssertionError):
        applied(run, timeoutConf=timeout)


@engines
@pytest.mark.parametrize(
    ("argument", "value", "error", "words"),
    [
        ("outputMode", "sometimes", IllegalArgumentException, "STREAMING_OUTPUT_MODE.INVALID.*sometimes"),
        ("outputMode", "complete", IllegalArgumentException, "append or update"),
        ("outputStructType", "key strin", ParseException, "STRIN"),
        ("stateStructType", "n lon", ParseException, "LON"),
    ],
)
def test_arguments(
    engine: Engine, argument: str, value: object, error: type[Exception], words: str, run_on: Open
) -> None:
    """C1: modes and schemas that Spark refuses with an error of its own."""
    with run_on(engine) as run, pytest.raises(error, match=words):
        applied(run, **{argument: value})


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("func", 7, (TypeError, TypeError)),
        ("outputStructType", 7, (PySparkTypeError, PySparkTypeError)),
        ("outputStructType", "long", (PySparkTypeError, PySparkTypeError)),
        ("stateStructType", 7, (AttributeError, PySparkTypeError)),
        ("stateStructType", "long", (Exception, PySparkTypeError)),
        ("outputMode", None, (Exception, PySparkTypeError)),
    ],
)
def test_arguments_of_the_wrong_type(argument: str, value: object, error: tuple[Any, Any], run_on: Open) -> None:
    """C1: where Spark fails with whatever comes first, in Python or in the JVM, ours says what is wrong."""
    for engine, expected in zip((SPARK, STRICT[0]), error, strict=True):
        with run_on(engine) as run, pytest.raises(expected):
            applied(run, **{argument: value})


@engines
@pytest.mark.parametrize("mode", ["append", "Append", "UPDATE"])
def test_modes_in_any_case(engine: Engine, mode: str, run_on: Open) -> None:
    """C1: modes are written as one likes; schemas are texts or types."""
    with run_on(engine) as run:
        frame = applied(run, outputMode=mode)
        assert frame.schema == applied(run, outputStructType=frame.schema).schema
        assert frame.schema.simpleString() == "struct<key:string,note:string>"


@engines
@pytest.mark.parametrize(
    ("function", "query", "words"),
    [
        ("append", "update", "append mode is not supported with Update"),
        ("update", "append", "update mode.*with Append"),
    ],
)
def test_mode_of_the_query(engine: Engine, function: str, query: str, words: str, run_on: Open) -> None:
    """The function's mode must be the query's."""
    with run_on(engine) as run, pytest.raises(AnalysisException, match=words):
        run.run(applied(run, outputMode=function), query)


@engines
def test_complete_mode_of_the_query(engine: Engine, run_on: Open) -> None:
    """Without an aggregation a query cannot be complete."""
    with run_on(engine) as run, pytest.raises(AnalysisException, match=r"OUTPUT_MODE.*UNSUPPORTED_OPERATION"):
        run.run(applied(run), "complete")


@engines
def test_aggregations(engine: Engine, run_on: Open) -> None:
    """In update mode there is no aggregation in the query, and in no mode one before the function."""
    with run_on(engine) as run:
        with pytest.raises(AnalysisException, match=r"update mode.*with aggregation"):
            run.run(applied(run).groupBy("key").count(), "complete")
        counted = run.source().groupBy("key", "at").count()
        with pytest.raises(AnalysisException, match="after aggregation"):
            run.run(applied(run, counted, outputMode="append"), "append")


@pytest.mark.parametrize("engine", [SPARK], ids=lambda engine: engine.name)
def test_two_of_them(engine: Engine, run_on: Open) -> None:
    """Spark allows one in a query."""
    with run_on(engine) as run, pytest.raises(AnalysisException, match="Multiple applyInPandasWithStates"):
        run.run(applied(run, applied(run)))


def test_two_of_ours(run_on: Open) -> None:
    """Two of one name are refused before Spark sees them, others as Spark's are."""
    with run_on(STRICT[0]) as run:
        one = applied(run)
        with pytest.raises(InvalidArgumentError, match="same name"):
            applied(run, one)
        given = (program.interpret, program.OUTPUT, program.STATE, "update", "NoTimeout")
        other = holdfast.stream(one).groupBy("key").applyInPandasWithState(*given, name="another")
        with pytest.raises(AnalysisException, match="Multiple applyInPandasWithStates"):
            run.run(other)


@engines
def test_event_time_without_a_watermark(engine: Engine, run_on: Open) -> None:
    """Event-time timeouts need a watermark."""
    with run_on(engine) as run, pytest.raises(AnalysisException, match="Watermark must be specified"):
        run.run(applied(run, timeoutConf="EventTimeTimeout"))


@engines
@pytest.mark.parametrize("timeout", ["NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"])
def test_batch_frames(engine: Engine, timeout: str, run_on: Open, spark: SparkSession) -> None:
    """C8: Spark refuses them in Python; ours calls each key once, with empty state, and nothing times out."""
    with run_on(engine) as run:
        rows = [("a", 1, "update 5;get"), ("a", 2, "get;remove"), ("b@fail", 3, "get;timed-out")]
        batch = spark.createDataFrame(rows, "key string, v long, do string")
        frame = applied(run, batch, timeoutConf=timeout)
        if engine is SPARK:
            with pytest.raises(UnsupportedOperationException, match="unsupported in batch query"):
                frame.collect()
        else:
            missing = "PySparkValueError [STATE_NOT_EXISTS] State is either not defined or has already been removed."
            assert sorted(run.collect(frame)) == [
                ("a", "data [1, 2], new None | update 5: None | get: (5,) | get: (5,) | remove: None | new None"),
                ("b@fail", f"data [3], new None | get: {missing} | timed-out: False | new None"),
            ]
