"""How an operator is planned: its names, state columns, task slots, event time, session and stored state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.errors import PySparkAttributeError
from pyspark.errors.exceptions.connect import SparkConnectGrpcException
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from holdfast.backends.column_names import ColumnChanges
from holdfast.errors import InvalidArgumentError
from holdfast.settings import Settings
from holdfast.spark_integration.plan.arguments import (
    changes_of_tables,
    changes_of_variables,
    operator_name,
    require_takes_batch,
)
from holdfast.spark_integration.plan.definition import StoredState, stored_state
from holdfast.spark_integration.plan.event_time import marked_as_delivered, without_watermark
from holdfast.spark_integration.plan.session import require_session, task_slots, warn_of_partitions
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.spark_types import WATERMARK_METADATA, Watermark

STANDALONE = {"spark.master": "spark://host:7077"}
YARN = {"spark.master": "yarn", "spark.executor.instances": "5", "spark.executor.cores": "4"}
DYNAMIC = YARN | {"spark.dynamicAllocation.enabled": "true"}


@pytest.mark.parametrize(
    ("configuration", "slots"),
    [
        ({"spark.master": "local"}, 1),
        ({"spark.master": "local[4]"}, 4),
        ({"spark.master": "local[4, 3]"}, 4),
        ({"spark.master": "local[*]"}, 6),
        ({"spark.master": "local[*,3]", "spark.task.cpus": "2"}, 3),
        ({"spark.master": "local[2]", "spark.task.cpus": "4"}, 1),
        ({"spark.master": "local-cluster[2, 4, 1024]"}, 8),
        (YARN, 20),
        (YARN | {"spark.master": "k8s://https://host", "spark.task.cpus": "2"}, 10),
        ({"spark.master": "yarn", "spark.executor.instances": "5"}, 5),
        ({"spark.master": "yarn"}, None),
        (DYNAMIC, None),
        (DYNAMIC | {"spark.dynamicAllocation.maxExecutors": "50"}, 200),
        (DYNAMIC | {"spark.dynamicAllocation.maxExecutors": "infinity"}, None),
        (STANDALONE, None),
        (STANDALONE | {"spark.executor.instances": "3"}, None),
        (STANDALONE | {"spark.cores.max": "12"}, 12),
        (STANDALONE | {"spark.cores.max": "12", "spark.executor.instances": "2", "spark.executor.cores": "3"}, 6),
        ({"spark.master": "something new"}, None),
        ({}, None),
    ],
)
def test_task_slots_follow_from_the_configuration(configuration: dict[str, str], slots: int | None) -> None:
    """What is not known stays unknown: a wrong figure would be worse than none."""
    assert task_slots(configuration, local_cores=6) == slots


def a_session(partitions: int, configuration: dict[str, str], **others: Any) -> Any:
    conf = SimpleNamespace(getAll=configuration, get={"spark.sql.shuffle.partitions": str(partitions)}.get)
    return SimpleNamespace(conf=conf, **others)


@pytest.mark.parametrize(
    ("master", "context", "said"),
    [
        ("local[2]", {}, r"200 shuffle partitions for 2 task slots.*partitions=2,.*initial number"),
        ("local[*]", {"sparkContext": SimpleNamespace(defaultParallelism=3)}, r"shuffle\.partitions=3"),
    ],
)
def test_far_more_partitions_than_slots_are_told_with_the_figure_to_set(
    master: str, context: dict[str, Any], said: str
) -> None:
    """The newcomer reads what to set, and until when; ``local[*]`` has its cores in no setting."""
    with pytest.warns(UserWarning, match=said):
        warn_of_partitions(a_session(200, {"spark.master": master}, **context), stacklevel=1)


@pytest.mark.parametrize(
    "session",
    [
        a_session(16, {"spark.master": "local[2]"}),
        a_session(200, STANDALONE),
        # Spark Connect: no SparkContext says how many cores `*` is.
        a_session(200, {"spark.master": "local[*]"}),
        # A default parallelism that somebody chose is not the number of cores.
        a_session(
            200,
            {"spark.master": "local[*]", "spark.default.parallelism": "2"},
            sparkContext=SimpleNamespace(defaultParallelism=2),
        ),
    ],
)
def test_nothing_is_said_of_a_small_multiple_or_where_slots_are_unknown(session: Any) -> None:
    """A warning that may be wrong teaches users to ignore warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_partitions(session, stacklevel=1)


ONE = {"state": ["n", "total"]}
TWO = {"a": ["n"], "b": ["n"]}
COLUMNS = StructType([StructField("total", LongType())])


def test_changes_by_table_and_by_variable() -> None:
    wanted = {"state": ColumnChanges(frozenset({"m"}), {"old": "total"})}
    given: dict[str, Any] = {"drop": ["m"], "rename": {"old": "total"}}
    assert changes_of_tables(given, ONE) == changes_of_tables({"state": given}, ONE) == wanted
    assert changes_of_tables(None, ONE) == changes_of_tables({}, ONE) == {}
    assert changes_of_tables({"b": {"drop": ("m",)}}, TWO) == {"b": ColumnChanges(frozenset({"m"}))}
    variables = [StateVariable("sum", "value", COLUMNS), StateVariable("drop", "map", COLUMNS, COLUMNS)]
    assert changes_of_variables({"drop": given}, variables) == {"m.drop": wanted["state"]}
    assert changes_of_variables(None, variables) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["m"], "it must be a mapping"),
        ({"dorp": ["m"]}, "that the operator declares; did you mean 'drop'?, unknown=['dorp']"),
        ({"sate": {"drop": ["m"]}}, "did you mean 'state'?, unknown=['sate']"),
        ({"state": {"drop": ["m"], "renmae": {"m": "n"}}}, "'drop' and 'rename'; did you mean 'rename'?"),
        ({"rename": {"m": "totl"}}, "a name that is not declared; did you mean 'total'?"),
        ({"drop": ["m"], "add": ["x"]}, "only 'drop' and 'rename'"),
        ({"state": ["m"]}, "only 'drop' and 'rename'"),
        ({"drop": "m"}, "'drop' must be a list of column names"),
        ({"drop": [1]}, "'drop' must be a list of column names"),
        ({"rename": ["m"]}, "'rename' must map old column names to new names"),
        ({"rename": {"m": 1}}, "'rename' must map old column names to new names"),
        ({"drop": ["m"], "rename": {"m": "n"}}, "both dropped and renamed"),
        ({"drop": ["n"]}, "is still declared"),
        ({"rename": {"n": "total"}}, "is still declared"),
        ({"rename": {"m": "x"}}, "renamed to a name that is not declared"),
        ({"rename": {"m": "n", "x": "n"}}, "two columns are renamed to the same name"),
        ({"drop": ["expires_ms"]}, "is reserved by holdfast"),
        ({"rename": {"expires_ms": "n"}}, "is reserved by holdfast"),
    ],
    ids=str,
)
def test_what_is_no_change(given: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match="stateChanges must look like") as caught:
        changes_of_tables(given, ONE)
    assert words in str(caught.value)


def test_changes_of_what_is_not_declared() -> None:
    """A table that is left out for now is changed when it is back."""
    with pytest.raises(InvalidArgumentError, match="name a state table that the operator declares"):
        changes_of_tables({"c": {"drop": ["m"]}}, TWO)
    with pytest.raises(InvalidArgumentError, match="name a state variable that the operator declares"):
        changes_of_variables({"drop": ["m"]}, [StateVariable("sum", "value", COLUMNS)])
    with pytest.raises(InvalidArgumentError, match="did you mean 'sum'"):
        changes_of_variables({"sums": {"drop": ["m"]}}, [StateVariable("sum", "value", COLUMNS)])


class _Hidden:
    pass


def __hidden_too() -> None:
    pass


@pytest.mark.parametrize(
    ("func", "name", "chosen"),
    [(_Hidden, None, "Hidden"), (__hidden_too, None, "hidden_too"), (_Hidden, "totals", "totals")],
)
def test_a_private_class_gives_its_name_without_underscores(func: Any, name: str | None, chosen: str) -> None:
    """Spark takes private classes, and readers of savepoints pass over folders that begin with an underscore."""
    assert operator_name(func, name) == chosen


@pytest.mark.parametrize(("func", "name"), [(type("_", (), {}), None), (lambda: None, None), (_Hidden, "_hidden")])
def test_what_names_no_operator_is_refused(func: Any, name: str | None) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot name an operator: pass name="):
        operator_name(func, name)


def test_a_copied_schema_loses_its_mark_and_nothing_else() -> None:
    """As ``outputStructType=df.schema`` has it."""
    noted = StructField("at", TimestampType(), False, {"note": "kept", WATERMARK_METADATA: 1000})
    other = StructField("until", TimestampType())
    without = StructType([StructField("at", TimestampType(), False, {"note": "kept"}), other])
    assert without_watermark(StructType([noted, other])) == without
    assert without_watermark(without) == without


def test_a_processor_hands_a_watermark_on_but_in_processing_time() -> None:
    """Behind a mark that nobody keeps up, a window never ends, and no timer of a second processor ever fires."""
    marked = StructType([StructField("at", TimestampType(), True, {WATERMARK_METADATA: 1000})])
    assert marked_as_delivered(marked, "EventTime") == marked
    assert marked_as_delivered(marked, "ProcessingTime") == without_watermark(marked)


def test_rows_that_come_later_have_a_mark_that_spark_does_not_know() -> None:
    """Spark's operators would take them for late; ours wait so much longer, and add up what several joins wait."""
    watermark = Watermark(1000).later(600).later(1)
    late = StructField("at", TimestampType(), True, {"note": "kept", **watermark.metadata})
    assert WATERMARK_METADATA not in late.metadata
    assert Watermark.of(late) == Watermark(1000, 601)
    assert without_watermark(StructType([late]))["at"].metadata == {"note": "kept"}
    assert Watermark(1000).metadata == {WATERMARK_METADATA: 1000}


def test_a_stopped_session_is_said_to_be_stopped() -> None:
    """It was an AssertionError without words, of the next function of Spark's that a definition calls."""
    context: Any = object.__new__(SparkContext)
    context._jsc = None  # as `SparkContext.stop` leaves it
    session: Any = SimpleNamespace(sparkContext=context)
    with pytest.raises(
        InvalidArgumentError, match="the Spark session of this DataFrame was stopped: start a new session"
    ):
        require_session(session)
    context._jsc = SimpleNamespace(startTime=lambda: 1)
    require_session(session)


def test_a_session_of_connect_has_no_context_to_ask() -> None:
    class Session:
        @property
        def sparkContext(self) -> Any:  # noqa: N802  Spark's name
            raise PySparkAttributeError("no JVM here")

    session: Any = Session()
    require_session(session)


LOST = SparkConnectGrpcException(
    "Lost task 0.0 in stage 4.0 (TID 9): java.nio.channels.CancelledKeyException\n\tat java.base/X"
)


def session(*answers: SparkConnectGrpcException | dict[str, Any]) -> Any:
    """Return a session that gives its jobs these answers, one after the other."""
    left = list(answers)

    def collect() -> list[dict[str, Any]]:
        answer = left.pop(0)
        if isinstance(answer, SparkConnectGrpcException):
            raise answer
        return [answer]

    def map_in_arrow(_look: Callable[..., object], _columns: str) -> SimpleNamespace:
        return SimpleNamespace(collect=collect)

    return SimpleNamespace(range=lambda *_args, **_named: SimpleNamespace(mapInArrow=map_in_arrow))


FOUND = {"shards": 4, "query": "q", "problem": None}


def looked(spark: Any) -> StoredState:
    return stored_state(spark, Settings.parse({}), "totals", object())  # type: ignore[arg-type]


def test_a_worker_that_spark_lost_costs_a_second_look() -> None:
    """Spark repeats no task of a local master, and a look changes nothing."""
    assert looked(session(LOST, FOUND)) == StoredState(4, "q", None)


@pytest.mark.parametrize(
    "answers", [(LOST, LOST), (SparkConnectGrpcException("No module named 'app'"), FOUND)], ids=len
)
def test_what_stays_wrong_is_raised(answers: tuple[Any, ...]) -> None:
    with pytest.raises(SparkConnectGrpcException):
        looked(session(*answers))


@pytest.mark.parametrize(
    ("func", "said"),
    [
        ("totals", "func must be callable, given=str"),
        (lambda key, rows, state: None, r"one argument, the batch.*func\(key, rows, state\)"),
        (lambda: None, r"one argument, the batch.*func\(\)"),
        (lambda batch, *, strict: None, "one argument, the batch"),
    ],
)
def test_a_vectorised_function_takes_a_batch(func: object, said: str) -> None:
    """Of a query that was moved from Spark's API, it is told at definition, not by the first micro-batch."""
    with pytest.raises(InvalidArgumentError, match=said):
        require_takes_batch(func)


@pytest.mark.parametrize("func", [lambda batch: batch, lambda batch, more=1: more, lambda *batches: None, dict, print])
def test_what_can_be_called_with_a_batch_is_taken(func: object) -> None:
    require_takes_batch(func)
