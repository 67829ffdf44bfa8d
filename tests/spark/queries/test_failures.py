"""`holdfast.explain` on what Spark really raises; over Connect, tests/spark/queries/test_connect.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.tiers import cases

pytestmark = pytest.mark.spark


def explained(lab: Lab, frame: DataFrame, query: str = "query") -> list[str]:
    """Return the lines of what a query fails with; the exception that it keeps must say the same."""
    with pytest.raises(StreamingQueryException) as caught:
        lab.run(frame, query)
    return holdfast.explain(caught.value).splitlines()


def raises_for_b(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    if key == ("b",):
        raise ValueError("no b here")
    yield pd.DataFrame({"key": [key[0]]})


def test_a_function_that_raises_for_a_key(lab: Lab) -> None:
    """The key, the micro-batch and the user's own line are named."""
    lab.feed([("a", 1)])
    lab.feed([("b", 1)])
    grouped = holdfast.stream(lab.source()).groupBy("key")
    frame = grouped.applyInPandasWithState(raises_for_b, "key string", "n long", "update", "NoTimeout")
    place = f"raises_for_b (test_failures.py, line {raises_for_b.__code__.co_firstlineno + 2})"
    assert explained(lab, frame) == [
        "what:        ValueError: no b here",
        "operator:    raises_for_b",
        "key:         ('b',)",
        "micro-batch: 1",
        f"to do:       correct {place}, and start the query again: nothing of this micro-batch was kept",
    ]


class Failing(StatefulProcessor):
    """Fails in `init` or `close`: at the definition, or in a task only."""

    def __init__(self, where: str, in_task: bool) -> None:
        self.where, self.in_task = where, in_task

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.fail("init")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        yield Row(key=key[0])

    def close(self) -> None:
        self.fail("close")

    def fail(self, where: str) -> None:
        if where == self.where and self.in_task is (TaskContext.get() is not None):
            raise ValueError("no connection")


@pytest.mark.parametrize("where", cases(["init", "close"]))
def test_a_processor_that_fails_beside_its_keys(lab: Lab, where: str) -> None:
    """The operator is named wherever it fails, although no key is at fault."""

    def processed(in_task: bool) -> DataFrame:
        grouped = holdfast.stream(lab.source()).groupBy("key")
        return grouped.transformWithState(Failing(where, in_task), "key string", "update", "None", name="failing")

    place = f"fail (test_failures.py, line {Failing.fail.__code__.co_firstlineno + 2})"
    with configured(lab.spark, NEEDED):
        lab.feed([("a", 1)])
        with pytest.raises(ValueError, match="no connection") as caught:
            processed(in_task=False)
        assert holdfast.explain(caught.value).splitlines() == [
            "what:        ValueError: no connection",
            "operator:    failing",
            f"to do:       correct {place}",
        ]
        what, operator, shard, batch, to_do = explained(lab, processed(in_task=True))
    assert (what, operator, batch) == (
        "what:        ValueError: no connection",
        "operator:    failing",
        "micro-batch: 0",
    )
    assert shard.startswith("shard:")
    assert to_do.startswith(f"to do:       correct {place}, and start")


class Passing(StatefulProcessor):
    """Hands rows on."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        self.n.update((sum(1 for _ in rows),))
        yield Row(key=key[0], v=1)


def passed(frame: DataFrame) -> DataFrame:
    grouped = holdfast.stream(frame).groupBy("key")
    return grouped.transformWithState(Passing(), "key string, v long", "update", "None")


def pass_on(batch: holdfast.ShardBatch) -> pa.Table:
    batch.state.put(n=batch.groups.count())
    return batch.keys.append_column("v", batch.groups.count())


def passed_as_arrow(frame: DataFrame) -> DataFrame:
    return (
        holdfast.stream(frame).groupBy("key").applyInArrowWithState(pass_on, "key string, v long", "n long", "update")
    )


HOWS = ["one behind the other", "side by side"]
TWICE = list(product([(passed, "Passing"), (passed_as_arrow, "pass_on")], HOWS, [True, False]))


@pytest.mark.parametrize(("of", "how", "is_durable"), cases(TWICE))
def test_one_class_or_function_twice_without_names(
    lab: Lab, of: tuple[Callable[[DataFrame], DataFrame], str], how: str, is_durable: bool
) -> None:
    """Which query a definition is part of, only its first micro-batch knows; that says what to pass."""
    define, name = of
    if not is_durable:
        lab.spark.conf.unset("spark.holdfast.state.dir")
    with configured(lab.spark, {**NEEDED, "spark.sql.streaming.unsupportedOperationCheck": "false"}):
        lab.feed([("a", 1), ("b", 2), ("c", 3)])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="this query's state is not durable")
            first = define(lab.source())
            frame = define(first) if how == "one behind the other" else define(lab.source()).union(first)
        what, operator, shard, batch, to_do = explained(lab, frame)
    assert what.startswith(
        "what:        ConflictError: two operators of this query have the same name: pass each its own name=. Without "
        "one, an operator is called as its function or its processor's class is"
    )
    assert (operator, batch) == (f"operator:    {name}", "micro-batch: 0")
    assert (shard[:6], to_do) == (
        "shard:",
        "to do:       do as the message says, and start the query again: nothing of this micro-batch was kept",
    )


@pytest.mark.all
@pytest.mark.parametrize("how", cases(HOWS))
def test_one_function_twice_with_metrics_in_the_progress(lab: Lab, how: str) -> None:
    """Spark refuses the plan then, and speaks of metrics."""
    lab.configure({"metrics.inProgress": "true"})
    lab.feed([("a", 1)])
    first = passed_as_arrow(lab.source())
    with pytest.raises(AnalysisException, match="The metric name is not unique") as caught:
        lab.run(passed_as_arrow(first) if how == "one behind the other" else passed_as_arrow(lab.source()).union(first))
    assert holdfast.explain(caught.value) == (
        "what:        two operators of this query have the same name, 'pass_on'\n"
        "to do:       pass each its own name=: without one, an operator is called as its function or its processor's "
        "class is"
    )


def test_state_that_is_lost(lab: Lab) -> None:
    lab.configure({"commit.carriedBytes": "0"})
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    lab.lose_local_state()
    for commit in lab.commits():
        commit.unlink()
    lab.feed([("a", 10)])
    lines = explained(lab, lab.totals())
    assert lines[0].startswith("what:        StateLostError: ")
    assert lines[1] == "operator:    totals"
    assert lines[2].startswith("shard:       ")
    assert lines[3] == "micro-batch: 1"
    assert "go back to an earlier micro-batch" in lines[4]


def test_state_of_other_columns(lab: Lab) -> None:
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    lab.feed([("a", 10)])

    def never(batch: holdfast.ShardBatch) -> pa.Table:
        raise AssertionError

    with pytest.warns(UserWarning, match="cannot continue the state"):
        frame = lab.totals(func=never, stateStructType="n string, total long")
    lines = explained(lab, frame)
    assert lines[0].startswith("what:        SchemaMismatchError: ")
    assert [line.split(":")[0] for line in lines] == ["what", "operator", "shard", "micro-batch", "to do"]


@pytest.mark.since("4.1")
def test_a_foreach_batch_that_takes_a_part(lab: Lab) -> None:
    """Spark says only "Exception thrown in awaitResult"; we say why, and what reads all rows."""
    lab.feed([("a", 1), ("b", 2), ("c", 3), ("d", 4)])
    writer = lab.totals().writeStream.foreachBatch(lambda rows, _: rows.first()).outputMode("update")
    writer = writer.trigger(availableNow=True).option("checkpointLocation", str(lab.folder / "query"))
    query = writer.start()
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination()
    kept = query.exception()
    assert kept is not None
    for error in (caught.value, kept):
        lines = holdfast.explain(error).splitlines()
        assert lines[0].startswith("what:        foreachBatch read only a part of the micro-batch")
        assert lines[1] == "micro-batch: 0"
        assert "count() or collect()" in lines[2]


def test_an_error_of_sparks_own(lab: Lab) -> None:
    """One line, Spark's innermost cause."""
    lab.feed([("a", 1)])
    frame = lab.source().select(F.raise_error(F.lit("sql says no")).alias("key"))
    (line,) = explained(lab, frame)
    assert "sql says no" in line
