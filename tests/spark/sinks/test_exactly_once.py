"""Micro-batches through ``foreachBatch`` into a sink: restarts, repeats, failures, other queries, older locations."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming import StreamingQuery

from holdfast import savepoints, sinks
from holdfast.errors import ConflictError, InvalidArgumentError
from holdfast.examples.sinks.csv_folder import CsvFolder, read
from holdfast.spark_integration.sinks.two_phase_sink import SinkAttempt, SinkTransaction
from tests import sink_logs
from tests.spark.application import run_program
from tests.spark.conftest import Lab, count_and_sum
from tests.spark.savepoints.sink_queries import FED as OLDER_FED
from tests.spark.savepoints.sink_queries import SCHEMA, SINKS, Query, parquet_rows, run_data_source, totals
from tests.spark.savepoints.sources import Reader
from tests.spark.sinks import lost_shuffle
from tests.spark.sinks.conftest import forget_the_last_end
from tests.spark.sinks.lost_shuffle import NotingSpares
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.slow(20)]

FED = OLDER_FED[:3]


@dataclass
class Shown:
    """A query that shows its totals in a folder of CSV files."""

    lab: Lab
    name: str = "query"
    frame: DataFrame | None = None
    mode: str = "update"
    replaces: str | None = None
    fed: int = 0
    function: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.lab.folder / "shown"
        self.function = sinks.exactly_once(CsvFolder(str(self.folder)), replaces=self.replaces)

    def feed(self, *tables: list[tuple[str | None, int]]) -> None:
        for table in tables:
            self.lab.feed(table)

    def run(self) -> None:
        """Start the query, and let it read what it has not read yet."""
        self.start().awaitTermination()

    def start(self) -> StreamingQuery:
        frame = self.lab.totals() if self.frame is None else self.frame
        writer = frame.writeStream.foreachBatch(self.function).outputMode(self.mode).trigger(availableNow=True)
        return writer.option("checkpointLocation", str(self.lab.folder / self.name)).start()

    def restart(self) -> None:
        self.function = cloudpickle.loads(cloudpickle.dumps(self.function))
        self.run()

    def rows(self) -> list[tuple[Any, ...]]:
        """What a reader sees."""
        return sorted(tuple(row.values()) for row in read(str(self.folder), SCHEMA).to_pylist())

    def forget_the_last_end(self) -> None:
        forget_the_last_end(self.lab.folder / self.name)

    def decided(self, state_dir: str = "durable") -> list[int | None]:
        """Return the micro-batches that the query which writes now has decided."""
        return sink_logs.decided(self.lab.folder / state_dir, "csv")

    def parts(self) -> int:
        return len(list(self.folder.glob("part-*")))


@pytest.fixture
def shown(lab: Lab) -> Shown:
    return Shown(lab)


@pytest.mark.all
def test_a_query_that_was_replaced_is_refused_in_the_same_process_too(shown: Shown) -> None:
    """Its function remembers a run that went on with the next micro-batch; another query has come between."""
    shown.feed(FED[0])
    query = shown.start()
    query.awaitTermination()
    Shown(shown.lab, "successor", replaces=str(query.id)).run()
    before = shown.rows()
    shown.feed(FED[1])
    with pytest.raises(StreamingQueryException, match="another query writes to this sink"):
        shown.run()
    assert shown.rows() == before


@pytest.mark.all
def test_a_restart_by_the_same_function_takes_frame_and_settings_as_they_are_now(shown: Shown) -> None:
    """What it remembers of an earlier run hides neither other columns nor another place of decisions."""
    shown.feed(FED[0])
    rows = shown.lab.source()
    shown.frame = rows.selectExpr("key", "1L as n", "v as total")
    shown.run()
    shown.feed(FED[1])
    shown.frame = rows.selectExpr("key", "1L as m", "v as total")
    with pytest.raises(StreamingQueryException, match="different columns"):
        shown.run()
    shown.frame = rows.selectExpr("key", "1L as n", "v as total")
    shown.lab.configure({"state.dir": str(shown.lab.folder / "elsewhere")})
    shown.run()
    assert shown.decided("elsewhere") == [1]


@pytest.mark.all
def test_other_columns_in_a_later_micro_batch_are_no_longer_those_of_the_first(shown: Shown) -> None:
    """A pivot has the columns of its rows: the target is asked again, and no value lands in another's column."""
    inner = shown.function
    shown.function = lambda frame, batch_id: inner(frame.withColumnRenamed("n", "m" if batch_id else "n"), batch_id)
    shown.feed(*FED[:2])
    with pytest.raises(StreamingQueryException, match="different columns"):
        shown.run()
    assert shown.rows() == totals(FED[0])


@pytest.mark.parametrize("anew", cases([True, False]), ids=lambda it: "new function" if it else "one function")
def test_a_second_call_in_one_micro_batch_is_an_error(shown: Shown, anew: bool) -> None:
    """The first one is decided: the rows of the second would be dropped as those of a repeat are."""
    function = shown.function

    def inner(frame: DataFrame, batch_id: int) -> None:
        (sinks.exactly_once(CsvFolder(str(shown.folder))) if anew else function)(frame, batch_id)

    def twice(frame: DataFrame, batch_id: int) -> None:
        inner(frame.where("key = 'none'"), batch_id)
        inner(frame.where("key = 'a'"), batch_id)
        with suppress(InvalidArgumentError):
            inner(frame.where("key = 'b'"), batch_id)
        inner(frame.where("key = 'c'"), batch_id)

    shown.function = twice
    shown.feed(FED[0])
    with pytest.raises(StreamingQueryException, match="called twice in one micro-batch"):
        shown.run()
    assert shown.rows() == [("a", 1, 1)]


@pytest.mark.smoke
@pytest.mark.parametrize("remembers", cases([False, True]), ids=lambda it: "same driver" if it else "another driver")
def test_a_repeated_micro_batch_is_not_shown_again_and_its_state_goes_on(shown: Shown, remembers: bool) -> None:
    """Killed between the sink's commit and Spark's: operators run again, rows do not."""
    shown.feed(*FED[:2])
    shown.run()
    parts = shown.parts()
    for _ in range(2):
        shown.forget_the_last_end()
        (shown.run if remembers else shown.restart)()
        assert shown.rows() == totals(*FED[:2])
        assert shown.parts() == parts, "nothing is written again"
    shown.feed(FED[2])
    shown.restart()
    assert shown.rows() == totals(*FED)


def test_what_was_decided_and_not_committed_is_committed_by_the_next_start(shown: Shown) -> None:
    """Killed between the decision and the commit: the handles of the decision count, whatever a repeat computes."""
    shown.feed(*FED[:2])
    shown.run()
    (last,) = shown.folder.glob("list-*-000000000001")
    last.unlink()
    shown.forget_the_last_end()
    assert shown.rows() == totals(FED[0])
    shown.restart()
    assert shown.rows() == totals(*FED[:2])


def test_a_failed_micro_batch_leaves_nothing(shown: Shown) -> None:
    """Of four partitions one fails: what the others prepared is given up, and the repeat shows all."""
    shown.feed(FED[0])
    mark = shown.lab.folder / "fails"
    mark.touch()
    fails = F.udf(lambda key: 1 // 0 if key == "c" and mark.exists() else 0, "int")
    frame = shown.lab.source().select("key", F.lit(1).cast("long").alias("n"), "v")
    shown.frame = frame.withColumn("v", F.col("v") + fails("key")).withColumnRenamed("v", "total").repartition(4)
    shown.mode = "append"
    with pytest.raises(StreamingQueryException, match="ZeroDivisionError"):
        shown.run()
    assert shown.decided() == []
    mark.unlink()
    shown.restart()
    assert shown.rows() == sorted((key, 1, value) for key, value in FED[0])
    assert shown.parts() <= 4, "no part is left of the attempt that failed"


@pytest.mark.all
def test_a_micro_batch_without_rows_stores_nothing(shown: Shown) -> None:
    shown.feed(*FED[:2])
    shown.frame = shown.lab.source().selectExpr("key", "1L as n", "v as total").where("total > 10")
    shown.mode = "append"
    shown.run()
    assert shown.decided() == []
    shown.feed(FED[2])
    shown.run()
    assert shown.decided() == [2]
    assert shown.rows() == [("a", 1, 100), ("b", 1, 20), ("e", 1, 50)]


@pytest.mark.all
def test_complete_mode_and_sparks_own_aggregation(shown: Shown) -> None:
    """The sink needs no operator of holdfast: any query shows its results once."""
    shown.feed(*FED[:2])
    shown.frame = shown.lab.source().groupBy("key").agg(F.count("*").alias("n"), F.sum("v").alias("total"))
    shown.mode = "complete"
    shown.run()
    first = [("a", 1, 1), ("b", 1, 2), ("c", 1, 3), ("d", 1, 4)]
    assert shown.rows() == sorted([*first, *first[1:], ("a", 2, 11), ("e", 1, 5)])


def test_another_query_is_refused_and_a_successor_is_not(shown: Shown) -> None:
    """The checkpoint location was deleted, the target was kept: by consent the new query goes on after the old one."""
    shown.feed(FED[0])
    query = shown.start()
    query.awaitTermination()
    shutil.rmtree(shown.lab.folder / "durable/totals")
    shown.name = "query-2"
    with pytest.raises(StreamingQueryException, match=f"replaces=.*other_query={query.id}"):
        shown.run()
    shown.function = sinks.exactly_once(CsvFolder(str(shown.folder)), replaces=str(query.id))
    shown.run()
    assert shown.rows() == sorted([*totals(FED[0]), *totals(FED[0])])
    shown.feed(FED[1])
    shown.run()
    assert shown.decided() == [0, 1], "its own"
    shown.name, shown.function = "query", sinks.exactly_once(CsvFolder(str(shown.folder)))
    with pytest.raises(StreamingQueryException, match="another query writes to this sink"):
        shown.run()


def test_a_deleted_directory_of_decisions(shown: Shown) -> None:
    """Spark asks for a micro-batch that the target shows and no decision tells of."""
    shown.feed(*FED[:2])
    shown.frame = shown.lab.source().selectExpr("key", "1L as n", "v as total")
    shown.run()
    shown.forget_the_last_end()
    shutil.rmtree(shown.lab.folder / "durable")
    with pytest.raises(StreamingQueryException, match=r"not in this state directory.*shown=1"):
        shown.restart()


@dataclass(frozen=True)
class Guarded(CsvFolder):
    """A sink whose workers need a password."""

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        assert attempt.query.options["password"] == "s3cr3t", attempt.query.options
        return super().begin(attempt, schema)


def test_options_reach_workers_and_no_stored_byte(shown: Shown) -> None:
    """A password is a setting of the session, and nothing else ever holds it."""
    shown.lab.configure({"sink.csv.password": "s3cr3t", "sink.other.password": "another"})
    shown.function = sinks.exactly_once(Guarded(str(shown.folder)))
    shown.feed(FED[0])
    shown.run()
    assert shown.rows() == totals(FED[0])
    assert b"s3cr3t" not in cloudpickle.dumps(shown.function)
    for path in shown.lab.folder.rglob("*"):
        assert path.is_dir() or b"s3cr3t" not in path.read_bytes(), path


def test_what_cannot_be_is_said_before_anything_is_written(shown: Shown) -> None:
    """No place for decisions, no sink, no name of a query where nothing tells it."""
    shown.feed(FED[0])
    shown.frame = shown.lab.source().selectExpr("key", "1L as n", "v as total")
    shown.lab.spark.conf.unset("spark.holdfast.state.dir")
    with pytest.raises(StreamingQueryException, match=r"set spark\.holdfast\.state\.dir"):
        shown.run()
    assert not Path(shown.folder).exists()
    with pytest.raises(ValueError, match="TwoPhaseSink"):
        sinks.exactly_once(print)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="invalid sink name"):
        sinks.exactly_once(CsvFolder("folder", name="../name"))
    with pytest.raises(ValueError, match="query_name='…'"):
        shown.function(shown.lab.spark.range(1), 0)


@pytest.fixture(scope="module")
def lost_shuffles(java_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what became of writes whose shuffles were lost, all in one application."""
    folder, environment = tmp_path_factory.mktemp("lost"), {"JAVA_HOME": str(java_home)}
    found: dict[str, Any] = json.loads(run_program(Path(lost_shuffle.__file__), folder, environment=environment)[0])
    return found


@pytest.mark.all
def test_a_stage_that_is_begun_again_counts_as_repeated(lost_shuffles: dict[str, Any]) -> None:
    """Its tasks are numbered from 0 anew, while twins of the first time may prepare too."""
    begun_again, whole = lost_shuffles["no spares"]["prepared"]
    assert begun_again == [1000, True, []]
    assert whole == [1000, False, []]


@pytest.mark.all
def test_a_stage_that_is_begun_again_takes_no_spare_handles(lost_shuffles: dict[str, Any]) -> None:
    """Two attempts may have been given one: what one prepared the other might end, so all is written anew."""
    found = lost_shuffles["spares"]
    begun_again, whole = found["prepared"]
    assert begun_again == [1000, True, []]
    assert [0, "old-0"] in found["given"]
    assert sum(spare is None for _, spare in found["given"]) >= 3
    assert whole == [1000, False, [{"file": "old-3"}, {"file": "old-4"}]]


@pytest.mark.all
def test_what_the_driver_does_not_know_of_a_stage_proves_nothing(lost_shuffles: dict[str, Any]) -> None:
    """Spark's status comes by events, and a busy driver drops some: that of the second time may be among them."""
    assert lost_shuffles["no events"]["prepared"] == [[1000, True, []]] * 2


@pytest.mark.all
def test_spare_handles_are_of_no_decision_that_a_start_commits_again(shown: Shown) -> None:
    """From the third micro-batch of a run on; each is given to one attempt, and what is not needed stays spare."""
    sink = NotingSpares(str(shown.folder))
    shown.folder.mkdir()
    (shown.folder / "lost").touch()
    shown.function = sinks.exactly_once(sink)
    rows = [[("a", number)] for number in range(7)]
    shown.feed(rows[0], rows[1], rows[2], [("dropped", 0)], rows[4], rows[5])
    rows_of = shown.lab.source().where("key != 'dropped'")
    shown.frame = rows_of.selectExpr("key", "1L as n", "v as total").coalesce(1)
    shown.run()
    files = {batch: shown.folder.glob(f"list-*-{batch:012}") for batch in (0, 1, 2, 4, 5)}
    shows = {batch: next(lists).read_text().strip() for batch, lists in files.items()}
    wanted = [[0, None], [1, None], [2, shows[0]], [4, shows[1]], [5, shows[2]]]
    assert sink.given() == wanted
    shown.feed(rows[6])
    shown.restart()
    assert sink.given() == [*wanted, [6, None]], "what a dead run was given may still be in use"


PLANNED_ANEW = "planned this micro-batch again, but the sink shows the rows of the earlier plan"


def copy(lab: Lab, name: str) -> str:
    """Copy the checkpoint location as it is now."""
    shutil.copytree(lab.folder / "query", lab.folder / name)
    return name


def feed_earlier(lab: Lab, table: list[tuple[str | None, int]]) -> None:
    """Add an input file that Spark reads before the one that was added last, if it has read neither."""
    lab.feed(table)
    at = 1_700_000_000 + lab.files - 2.5
    os.utime(lab.folder / "input" / f"{lab.files - 1:03d}.parquet", (at, at))


def require_refused(lab: Lab, read: Callable[[], object], run: Callable[[str], object]) -> None:
    """Start a query from a location as it was one micro-batch ago; the input has changed meanwhile."""
    for table in OLDER_FED[:2]:
        lab.feed(table)
    run("query")
    older = copy(lab, "older")
    lab.feed(OLDER_FED[2])
    run("query")
    shown = read()
    feed_earlier(lab, OLDER_FED[3])
    with pytest.raises(StreamingQueryException, match=PLANNED_ANEW):
        run(older)
    assert read() == shown
    run("query")
    assert read() == totals(*OLDER_FED), "nobody has ended the query itself"


@pytest.mark.all
@pytest.mark.parametrize("kind", cases(list(SINKS), quick=1))
def test_what_is_planned_anew_is_refused(lab: Lab, kind: str) -> None:
    """Its rows were dropped, with a warning only if they were as many or none if they were not."""
    make, read = SINKS[kind]
    url = str(lab.folder / "shown")
    require_refused(lab, lambda: read(url), lambda name: Query(lab, make(url), name=name).run())


@pytest.mark.all
@pytest.mark.since("4.1")
def test_what_is_planned_anew_is_refused_by_a_data_source(lab: Lab) -> None:
    """Its driver reads the plan from the location: the option that names it."""
    url = str(lab.folder / "shown")
    run = partial(run_data_source, lab, url, count_and_sum)

    require_refused(lab, lambda: parquet_rows(url), run)


@pytest.mark.all
@pytest.mark.since("4.1")
def test_a_copy_of_a_location_is_refused_by_a_data_source(lab: Lab) -> None:
    """Exactly as far as its original, and wherever it runs: its location tells."""
    url = str(lab.folder / "shown")
    run = partial(run_data_source, lab, url, count_and_sum)
    lab.feed(OLDER_FED[0])
    run("query")
    copied = copy(lab, "copied")
    lab.feed(OLDER_FED[1])
    with pytest.raises(StreamingQueryException, match="another checkpoint location"):
        run(copied)
    run("query")
    assert parquet_rows(url) == totals(*OLDER_FED[:2])


@pytest.mark.smoke
def test_what_is_planned_anew_over_the_same_input_is_refused(lab: Lab) -> None:
    """What timers show that are due by then was dropped. A repeat goes on as it was logged. On each Spark."""
    source = Reader(lab.spark, lab.folder / "reader")
    sink = sinks.parquet("out", url := str(lab.folder / "shown"))

    def run(name: str) -> None:
        frame = source.numbers().selectExpr("concat('key ', v) AS key", "1L AS n", "v AS total")
        writer = frame.writeStream.foreachBatch(sinks.exactly_once(sink)).trigger(availableNow=True)
        writer.option("checkpointLocation", str(lab.folder / name)).start().awaitTermination()

    def shown() -> list[int]:
        return sorted(
            row["total"] for row in pa.concat_tables(map(pq.read_table, sinks.parquet_files(url))).to_pylist()
        )

    source.feed(0)
    run("query")
    older = copy(lab, "older")
    source.feed(1)
    run("query")
    with pytest.raises(StreamingQueryException, match=f"{PLANNED_ANEW}.*the original offsets/1"):
        run(older)
    forget_the_last_end(lab.folder / "query")
    run("query")
    assert shown() == list(range(20))
    source.feed(2)
    run("query")
    assert shown() == list(range(30))
    plans = sink_logs.plans(lab.folder / "durable", "out")
    assert len(plans) == len(set(plans)) == 3
    assert all(plans)


@pytest.mark.all
def test_the_sinks_of_an_older_location_are_not_continued(lab: Lab) -> None:
    """A savepoint of it holds a micro-batch that Spark had planned anew, and not the one that the sink shows."""
    sink = sinks.parquet("out", url := str(lab.folder / "shown"))
    for table in OLDER_FED[:2]:
        lab.feed(table)
    Query(lab, sink).run()
    older = copy(lab, "older")
    lab.feed(OLDER_FED[2])
    Query(lab, sink).run()
    feed_earlier(lab, OLDER_FED[3])
    with pytest.raises(StreamingQueryException, match=PLANNED_ANEW):
        Query(lab, sink, name=older).run()
    lab.lose_local_state()
    savepoints.create(lab.spark, lab.folder / older, lab.folder / "savepoints", "older")
    with pytest.raises(ConflictError, match="the savepoint holds a different plan for the micro-batch"):
        savepoints.restore(
            lab.spark, lab.folder / "savepoints", "older", lab.folder / "again", shards=4, continue_sinks=True
        )
    forget_the_last_end(lab.folder / "query")
    Query(lab, sink).run()
    assert parquet_rows(url) == totals(*OLDER_FED)
