"""What is refused when it is defined, and what is said of a query that fails."""

from __future__ import annotations

import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
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
from holdfast.errors import InvalidArgumentError, NotFoundError
from tests.spark.conftest import OUTPUT, STATE, Lab, count_and_sum
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.tiers import cases

pytestmark = pytest.mark.spark

CANARY = "CANARY+secret/0123456789"


def test_not_a_data_frame() -> None:
    with pytest.raises(InvalidArgumentError, match=r"takes a Spark DataFrame.*given=Table"):
        holdfast.stream(pa.table({"a": [1]}))  # type: ignore[arg-type]


def test_the_python_of_the_session_counts(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark takes its setting before PYSPARK_PYTHON, and that before the python3 of the PATH."""
    lab.feed([("a", 1)])
    venv.create(tmp_path / "bare", with_pip=False)
    bare = str(tmp_path / "bare/bin/python3")
    missing = pytest.raises(InvalidArgumentError, match=r"which has no .*pandas, pyarrow, holdfast")
    with configured(lab.spark, {"spark.sql.execution.pyspark.python": bare}), missing:
        lab.totals()
    monkeypatch.setattr(lab.spark.sparkContext, "pythonExec", bare)
    with configured(lab.spark, {"spark.sql.execution.pyspark.python": sys.executable}):
        assert lab.run(lab.totals()) == [[{"key": "a", "n": 1, "total": 1}]]
    monkeypatch.setattr(lab.spark.sparkContext, "pythonExec", bare)
    with pytest.raises(InvalidArgumentError, match=r"which has no .*pandas, pyarrow, holdfast: set .* PYSPARK_PYTHON"):
        lab.totals()


def test_unknown_key_column(lab: Lab) -> None:
    with pytest.raises(AnalysisException, match=r"UNRESOLVED_COLUMN.*kee"):
        holdfast.stream(lab.spark.range(1).withColumn("key", F.lit("a"))).groupBy("kee")


def test_no_key(lab: Lab) -> None:
    with pytest.raises(InvalidArgumentError, match=r"at least one key column; stream\(df\)\.window"):
        holdfast.stream(lab.spark.range(1)).groupBy()


def test_a_method_in_the_wrong_place_says_which_is_the_right_one(lab: Lab) -> None:
    """Not a bare AttributeError, for what is missing before it or stands behind it."""
    begun: Any = holdfast.stream(lab.spark.range(1))
    with pytest.raises(
        AttributeError, match=r"group first: holdfast\.stream\(df\)\.groupBy\(…\)\.applyInArrowWithState"
    ):
        begun.applyInArrowWithState(count_and_sum, OUTPUT, STATE, "update")
    with pytest.raises(AttributeError, match=r"holdfast\.stream\(df\.withWatermark\(…\)\)\.groupBy"):
        begun.withWatermark("at", "1 minute")
    with pytest.raises(AttributeError, match=r"did you mean groupBy\? holdfast\.stream\(df\)\.groupBy\(…\)$"):
        begun.groupby("id")  # which a DataFrame has, too
    with pytest.raises(AttributeError, match=r"did you mean dropDuplicates\?"):
        begun.drop_duplicates(["id"])
    with pytest.raises(AttributeError, match=r"groupBy\(…\)\.<operator>\(…\)\.writeStream$"):
        _ = begun.writeStream
    with pytest.raises(AttributeError, match=r"groupBy\(…\)\.agg\(n=holdfast\.count\(\)\)"):
        begun.groupBy("id").count()
    with pytest.raises(AttributeError, match=r"\.agg\(n=holdfast\.max\('column'\)\)"):
        begun.groupBy("id").max("id")
    with pytest.raises(AttributeError, match=r"pivot is Spark's,.*groupBy\(…\)\.pivot\(…\).*agg, window, session,"):
        begun.groupBy("id").pivot("id")
    timed: Any = holdfast.stream(lab.spark.sql("select 1 id, current_timestamp() at")).groupBy("id")
    for unfinished, until in (
        (timed, r"groupBy\(…\)\.<operator>\(…\)"),
        (timed.window("at", "1 minute"), r"\.window\(…\)\.agg\(n=holdfast\.count\(\)\)"),
        (timed.session("at", "1 minute"), r"\.session\(…\)\.agg\(n=holdfast\.count\(\)\)"),
    ):
        with pytest.raises(AttributeError, match=rf"nothing is computed yet: .*{until}\.writeStream$"):
            _ = unfinished.writeStream
        assert not hasattr(unfinished, "_private")
    grouped: Any = lab.spark.range(1).groupBy("id")
    with pytest.raises(AttributeError) as caught:
        grouped.applyInArrowWithState(count_and_sum, OUTPUT, STATE, "update")
    assert "start from holdfast.stream: holdfast.stream(df)" in holdfast.explain(caught.value)


def test_an_output_mode_that_is_left_out(lab: Lab) -> None:
    """Spark speaks of the operator that we run in, and does not say that its default is append."""
    lab.feed([("a", 1)])
    with pytest.raises(AnalysisException) as caught:
        lab.totals().writeStream.format("noop").start()
    what, to_do = holdfast.explain(caught.value).splitlines()
    assert what == "what:        the query was started in output mode Append, but its operator was defined for update"
    assert to_do.startswith('to do:       add .outputMode("update") to its writeStream (the default is append)')


def defined(frame: DataFrame, **options: Any) -> DataFrame:
    given = {"func": count_and_sum, "outputStructType": OUTPUT, "stateStructType": STATE, "outputMode": "update"}
    return holdfast.stream(frame).groupBy("key").applyInArrowWithState(**given | options)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("cast('a' as string collate UTF8_LCASE)", r"collated column.*UTF8_BINARY"),
        ("array(cast('a' as string collate UNICODE_CI))", r"collated column"),
        ("named_struct('s', 'a' collate UTF8_LCASE)", r"collated column"),
        ("map('a', 1)", r"map column.*to_json"),
        ("parse_json('1')", r"variant"),
        ("make_interval(1)", r"interval"),
        ("interval '1' year", r"interval"),
    ],
)
def test_key_types_that_cannot_be_grouped_by(lab: Lab, expression: str, expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected):
        defined(lab.spark.range(1).select(F.expr(expression).alias("key"), F.lit(1).alias("v")))


@pytest.fixture
def rows(lab: Lab) -> DataFrame:
    return lab.spark.createDataFrame([("a", 1)], "key string, v long")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stateStructType": "n variant"}, r"'n' of stateStructType.*type=variant"),
        ({"stateStructType": "n interval"}, "'n' of stateStructType"),
        ({"stateStructType": "n long, n long"}, r"names a column twice.*n"),
        ({"stateStructType": 7}, r"stateStructType must be.*given=int"),
        ({"outputStructType": "n long, n long"}, "names a column twice"),
        ({"outputMode": "complete"}, r"'append' or 'update'.*'complete'"),
        ({"name": "a/b"}, r"'a/b' cannot name an operator"),
        ({"name": ".."}, "cannot name an operator"),
        ({"name": ""}, "cannot name an operator"),
        ({"func": lambda batch: None, "name": None}, "pass name="),
    ],
)
def test_arguments(rows: DataFrame, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected):
        defined(rows, **options)


def test_more_shards_than_there_can_be(lab: Lab, rows: DataFrame) -> None:
    """The default comes from the session, which knows no limit; beyond it packed rows would mix shards up."""
    refused = pytest.raises(InvalidArgumentError, match=r"at most 65536 shards.*holdfast\.shards.*shards=65537")
    with configured(lab.spark, {"spark.sql.shuffle.partitions": "65537"}), refused:
        defined(rows)


def test_event_time_behind_an_operator(lab: Lab) -> None:
    """No watermark gets there, so nothing there may wait for one: windows never emit, timers never fire."""
    lab.feed(pa.table({"key": ["a"], "at": pa.array([0], pa.timestamp("us", "UTC"))}))
    events = lab.source("key string, at timestamp").withWatermark("at", "1 second")
    # The input's schema marks its event time; the output's must not.
    shown = holdfast.stream(events).groupBy("key").applyInArrowWithState(count_and_sum, events.schema, STATE, "append")
    windows = shown.groupBy(F.window("at", "1 minute")).count()
    with pytest.raises(AnalysisException, match="watermark"):
        lab.run(windows, mode="append")
    with pytest.raises(InvalidArgumentError, match="pass on no watermark; transformWithState does"):
        holdfast.stream(shown).groupBy("key").applyInArrowWithState(
            count_and_sum, OUTPUT, STATE, "append", name="second", timeMode="EventTime"
        )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"backnd": "memory"}, r"unknown setting 'spark.holdfast.backnd'.*did you mean 'spark.holdfast.backend'"),
        ({"timeouts": "carrier pigeon"}, r"spark.holdfast.timeouts.*'documented' or 'spark'"),
        ({"backend": "mine", "mine.level": "9"}, r"no backend named 'mine'; known names: .*entry point group"),
        ({"memory.limt": "2g"}, r"'spark\.holdfast\.memory\.limt': did you mean spark\.holdfast\.memory\.limit"),
        ({"memory.limit": "lots"}, r"spark\.holdfast\.memory\.limit cannot be 'lots'.*512m"),
    ],
)
def test_settings(lab: Lab, rows: DataFrame, settings: dict[str, str], expected: str) -> None:
    """All of it shows when the operator is defined: no query is started that could only fail."""
    lab.configure(settings)
    with pytest.raises(InvalidArgumentError, match=expected):
        defined(rows)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"state.dir": "gs://bucket/app"}, r"gcsfs"),
        ({"state.dir": "s3://bucket/app", "storage.secrett": CANARY}, r"did you mean 'secret'\?.*option=secrett"),
    ],
)
def test_state_directories_that_cannot_be(lab: Lab, settings: dict[str, str], expected: str) -> None:
    """The definition says so, before a query is started; no value is repeated."""
    lab.configure(settings)
    lab.feed([("a", 1)])
    with pytest.raises(InvalidArgumentError, match=f"(?s){expected}") as failed:
        lab.totals(func=never_called)
    assert CANARY not in str(failed.value)


def never_called(batch: holdfast.ShardBatch) -> None:
    raise AssertionError("the function was called")


def test_a_state_directory_that_is_a_file(lab: Lab) -> None:
    (lab.folder / "durable").write_bytes(b"precious")
    lab.feed([("a", 1)])
    with pytest.raises(
        StreamingQueryException, match=r"failed the check at query start.*this is a file: give a directory"
    ):
        lab.run(lab.totals(func=never_called))
    assert (lab.folder / "durable").read_bytes() == b"precious"


def test_a_directory_that_the_query_has_not_used(lab: Lab) -> None:
    """A query at work never begins again with empty state because it was shown another place; it says the old one."""
    lab.configure({"commit.carriedBytes": "0"})
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    lab.configure({"state.dir": str(lab.folder / "elsewhere")})
    lab.feed([("a", 10)])
    with pytest.raises(StreamingQueryException, match=r"(?s)StateLostError.*is not in the state directory") as caught:
        lab.run(lab.totals(func=never_called))
    assert f"last_used={lab.folder / 'durable'}" in str(caught.value)
    lab.configure({"state.dir": str(lab.folder / "durable")})
    lab.run(lab.totals())
    assert lab.state() == {"a": (2, 11)}


def test_state_of_a_newer_release(lab: Lab) -> None:
    """It is neither read nor changed, and not called damaged."""
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    record = lab.folder / "durable/totals/operator"
    newer = bytearray(record.read_bytes())
    newer[-26] += 1  # the format version, see FORMAT.md section 1
    record.write_bytes(newer)
    before = {path: path.read_bytes() for path in (lab.folder / "durable").rglob("*") if path.is_file()}
    lab.feed([("a", 1)])
    with pytest.raises(StreamingQueryException, match=r"(?s)totals/operator has a different format.*format_version=2"):
        lab.run(lab.totals(func=never_called))
    assert {path: path.read_bytes() for path in (lab.folder / "durable").rglob("*") if path.is_file()} == before


def test_reading_state_that_is_not_there(lab: Lab) -> None:
    with pytest.raises(InvalidArgumentError, match="not the checkpoint location"):
        lab.state()
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    with pytest.raises(NotFoundError, match=r"operator=other"):
        lab.state("other")
    with pytest.raises(InvalidArgumentError, match=r"not the checkpoint location.*no-such-query"):
        lab.state(query="no-such-query")
    with pytest.raises(NotFoundError, match=r"no such table.*table=timers"):
        holdfast.read_state(lab.spark, lab.folder / "query", "totals", table="timers")
    lab.spark.conf.unset("spark.holdfast.state.dir")
    with pytest.raises(InvalidArgumentError, match=r"no state directory is set: set spark\.holdfast\.state\.dir"):
        lab.state()


@pytest.mark.all
def test_a_location_that_spark_escapes_is_read(lab: Lab) -> None:
    """Spark's own reader would look for ``my%20query``."""
    lab.feed([("a", 1)])
    lab.run(lab.totals(), query="my query")
    (lab.folder / "mü-query").symlink_to(lab.folder / "my query")
    for query in ("my query", "mü-query"):
        assert lab.state(query=query) == {"a": (1, 1)}


@pytest.mark.all
def test_a_query_with_durable_state_needs_its_directory(lab: Lab) -> None:
    """Without, its state would seem lost, and the query would be told to begin again."""
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    lab.feed([("a", 1)])
    lab.spark.conf.unset("spark.holdfast.state.dir")
    with pytest.warns(UserWarning, match="not durable"):
        totals = lab.totals()
    with pytest.raises(StreamingQueryException, match=r"set spark\.holdfast\.state\.dir to the directory"):
        lab.run(totals)


@pytest.mark.all
def test_reading_state_of_another_query(lab: Lab) -> None:
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    lab.run(lab.totals(name="others"), query="other-query")
    with pytest.raises(NotFoundError, match=r"no state of this operator.* operator=totals operators=others"):
        lab.state("totals", query="other-query")


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
    place = f"raises_for_b (test_refused.py, line {raises_for_b.__code__.co_firstlineno + 2})"
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

    place = f"fail (test_refused.py, line {Failing.fail.__code__.co_firstlineno + 2})"
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


PASSED = [{"key": "a", "v": 1}]
OPERATORS = [(passed, "Passing"), (passed_as_arrow, "pass_on")]
SAME_NAME = (
    "two operators of this query have the same name: pass each its own name=. Without name=, an operator has the name "
    "of its function or its processor's class"
)


@pytest.mark.parametrize(("define", "name"), cases(OPERATORS))
@pytest.mark.parametrize("is_durable", cases([True, False]))
@pytest.mark.filterwarnings("ignore:this query's state is not durable")
def test_one_class_or_function_twice_without_names(
    lab: Lab, define: Callable[[DataFrame], DataFrame], name: str, is_durable: bool
) -> None:
    """Which query a definition is part of, only its first micro-batch knows; that says what to pass."""
    if not is_durable:
        lab.spark.conf.unset("spark.holdfast.state.dir")
    with configured(lab.spark, {**NEEDED, "spark.sql.streaming.unsupportedOperationCheck": "false"}):
        lab.feed([("a", 1), ("b", 2), ("c", 3)])
        what, operator, shard, batch, to_do = explained(lab, define(lab.source()).union(define(lab.source())))
    assert what.startswith(f"what:        ConflictError: {SAME_NAME}")
    assert (operator, batch) == (f"operator:    {name}", "micro-batch: 0")
    assert (shard[:6], to_do) == (
        "shard:",
        "to do:       do as the message says, and start the query again: nothing of this micro-batch was kept",
    )


@pytest.mark.parametrize(("define", "name"), OPERATORS)
def test_one_name_twice_in_what_an_operator_reads(
    lab: Lab, define: Callable[[DataFrame], DataFrame], name: str
) -> None:
    """A definition sees the operators before it, whatever lies between, and is refused before any job."""
    lab.feed([("a", 1)])
    refused = pytest.raises(InvalidArgumentError, match=rf"^{SAME_NAME}.* operator={name}\b")
    with configured(lab.spark, NEEDED):
        first = define(lab.source())
        with refused:
            define(first)
        first.filter("v > 0").createOrReplaceTempView("passed")
        with refused:
            define(lab.spark.table("passed").select("v", "key").union(lab.source()))
        side_by_side = first.union(define(lab.source()))
        with refused:
            holdfast.stream(side_by_side).dropDuplicates(["key"], ttl="1 day")
        once = holdfast.stream(lab.source()).dropDuplicates(["key"], ttl="1 day")
        with pytest.raises(InvalidArgumentError, match=r"have the same name.* operator=dropDuplicates\b"):
            holdfast.stream(once).dropDuplicates(["v"], ttl="1 day")


def test_one_function_in_what_is_no_operator_of_the_query(lab: Lab) -> None:
    """Nothing is refused that runs: another query, the query again, a batch, an operator's rows read twice."""
    lab.feed([("a", 1)])
    batch = passed_as_arrow(lab.spark.createDataFrame([("a", 5)], "key string, v long"))
    for query in ("query", "other"):
        assert lab.run(passed_as_arrow(lab.source().join(batch.select("key"), "key")), query) == [PASSED]
        assert lab.run(passed_as_arrow(lab.source().join(batch.select("key"), "key")), query) == []
    with configured(lab.spark, {**NEEDED, "spark.sql.streaming.unsupportedOperationCheck": "false"}):
        once = passed(lab.source())
        twice = holdfast.stream(once.union(once)).dropDuplicates(["key"], ttl="1 day")
        assert lab.run(twice, "twice") == [PASSED]


@pytest.mark.all
def test_one_function_twice_with_metrics_in_the_progress(lab: Lab) -> None:
    """Spark refuses the plan then, and speaks of metrics."""
    lab.configure({"metrics.inProgress": "true"})
    lab.feed([("a", 1)])
    with pytest.raises(AnalysisException, match="The metric name is not unique") as caught:
        lab.run(passed_as_arrow(lab.source()).union(passed_as_arrow(lab.source())))
    assert holdfast.explain(caught.value) == (
        "what:        two operators of this query have the same name, 'pass_on'\n"
        "to do:       pass each its own name=; by default an operator has the name of its function or of its "
        "processor's class"
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
    with pytest.warns(UserWarning, match="cannot continue the state"):
        frame = lab.totals(func=never_called, stateStructType="n string, total long")
    lines = explained(lab, frame)
    assert lines[0].startswith("what:        SchemaMismatchError: ")
    assert [line.split(":")[0] for line in lines] == ["what", "operator", "shard", "micro-batch", "to do"]


@pytest.mark.since("4.1")
@pytest.mark.usefixtures("own_file_manager")
def test_a_foreach_batch_that_takes_a_part(lab: Lab) -> None:
    """Spark says only "Exception thrown in awaitResult"; we say why, what reads all rows, and how to go on."""
    keys = [(key, 1) for key in "abcdefgh"]
    lab.feed(keys)
    location = lab.folder / "query"
    writer = lab.totals().writeStream.foreachBatch(lambda rows, _: rows.first()).outputMode("update")
    writer = writer.trigger(availableNow=True).option("checkpointLocation", str(location))
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
        assert "delete the newest file of commits/" in lines[2]
    lab.feed(keys)
    what, to_do = explained(lab, lab.totals())
    assert "lacks a file of the last micro-batch: foreachBatch" in what
    assert "delete the newest file of commits/" in to_do
    for log, number in (("commits", 0), ("offsets", 1)):
        (location / log / f"{number}").unlink()
        (location / log / f".{number}.crc").unlink()
    shown = lab.run(lab.totals(), "query", "update")
    assert [sorted(row["total"] for row in batch) for batch in shown] == [[1] * 8, [2] * 8]


def test_an_error_of_sparks_own(lab: Lab) -> None:
    """One line, Spark's innermost cause."""
    lab.feed([("a", 1)])
    frame = lab.source().select(F.raise_error(F.lit("sql says no")).alias("key"))
    (line,) = explained(lab, frame)
    assert "sql says no" in line
