"""Sinks of a query that is saved, restored with other shards on another backend, and continues them: nothing twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

import holdfast
from holdfast import savepoints, sinks
from holdfast.errors import ConflictError, InvalidArgumentError
from holdfast.sinks import TwoPhaseSink
from tests.spark.conftest import Lab, count_and_sum
from tests.spark.parity.engines import configured
from tests.spark.savepoints import queries
from tests.spark.savepoints.sink_queries import (
    FED,
    SINKS,
    Query,
    Row,
    Unanswered,
    counted_at_random,
    parquet_rows,
    run_data_source,
    totals,
)
from tests.spark.sinks.conftest import forget_the_last_end
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.slow(40)]

CASES_OF_STATE = [case for case in queries.CASES if case.has_timers]
Function = Callable[[holdfast.ShardBatch], pa.Table]


def save(lab: Lab, query: str = "query") -> savepoints.Savepoint:
    return savepoints.create(lab.spark, lab.folder / query, lab.folder / "savepoints", query)


def restore(lab: Lab, name: str, *, continue_sinks: bool, of: str = "query") -> str:
    """Restore a query with twice the shards, for another backend."""
    lab.configure({"backend": "filesystem", "shards": "4"})
    target = lab.folder / "savepoints"
    return savepoints.restore(lab.spark, target, of, lab.folder / name, shards=4, continue_sinks=continue_sinks)


def decided_and_not_committed(lab: Lab, sink: TwoPhaseSink, function: Function, how: str) -> str:
    """Run a query over three micro-batches, the last of which Spark has not ended; return its id."""
    for table in FED[:2]:
        lab.feed(table)
    query = Query(lab, sink, function)
    query_id = query.run()
    lab.feed(FED[2])
    if how == "shown":
        query.run()
        forget_the_last_end(lab.folder / "query")
    else:
        with pytest.raises(StreamingQueryException, match="the target does not answer"):
            Query(lab, Unanswered(sink, "no such folder"), function).run()
    return query_id


CASES = [
    ("parquet", "decided", count_and_sum),
    ("parquet", "shown", counted_at_random),
    ("delta", "shown", counted_at_random),
    ("delta", "decided", count_and_sum),
    ("csv", "decided", counted_at_random),
]


@pytest.mark.parametrize(("kind", "how", "function"), cases(CASES))
def test_what_a_sink_has_decided_is_shown_once(
    lab: Lab, caplog: pytest.LogCaptureFixture, kind: str, how: str, function: Function
) -> None:
    """The driver died between a sink's decision and Spark's commit; whatever the function returns the second time."""
    make, read = SINKS[kind]
    url = str(lab.folder / "shown")
    require_continued(lab, caplog, make(url), lambda: read(url), how, function)


def require_continued(
    lab: Lab,
    caplog: pytest.LogCaptureFixture,
    sink: TwoPhaseSink,
    read: Callable[[], list[Row]],
    how: str,
    function: Function,
) -> None:
    """Save a query, restore it without its sink and with it, and let it go on."""
    caplog.set_level(logging.WARNING)
    old = decided_and_not_committed(lab, sink, function, how)
    made = save(lab)
    assert "has decided micro-batch 2, and the savepoint is of micro-batch 1" in caplog.text
    assert [(one.sink, one.batch_id) for one in made.query.sinks] == [(sink.name, 2)]
    before = read()
    caplog.clear()
    restore(lab, "plain", continue_sinks=False)
    assert "restore with continue_sinks" in caplog.text
    with pytest.raises(StreamingQueryException, match=r"--continue-sinks.*saved=1.*shown=2"):
        Query(lab, sink, function, "plain", replaces=old).run()
    assert read() == before, "it has shown nothing"

    query_id = restore(lab, "again", continue_sinks=True)
    lab.feed(FED[3])
    assert Query(lab, sink, function, "again").run() == query_id
    shown = read()
    if function is count_and_sum:
        assert shown == totals(*FED)
    if how == "shown":
        assert set(before) < set(shown), "the rows of the attempt that was decided"
    assert [row[:2] for row in shown] == [row[:2] for row in totals(*FED)]
    assert lab.state(query="again") == {
        key: (n, total) for key, n, total in {row[0]: row for row in totals(*FED)}.values()
    }
    lab.configure({"shards": "2"})
    with pytest.raises(StreamingQueryException, match="another query writes to this sink"):
        Query(lab, sink, function, replaces=None).run()
    assert read() == shown


@pytest.mark.all
def test_sinks_that_ended_in_step_with_spark_are_continued(lab: Lab) -> None:
    """By rescale, in one step; the query that it is of, and a savepoint of what was, can show nothing more."""
    url, sink = str(lab.folder / "shown"), sinks.parquet("out", str(lab.folder / "shown"))
    for table in FED[:2]:
        lab.feed(table)
    Query(lab, sink).run()
    early = save(lab)
    lab.feed(FED[2])
    Query(lab, sink).run()
    assert (early.query.sinks[0].batch_id, early.query.planned) == (1, None)
    with pytest.raises(ConflictError, match=r"shows more than the savepoint holds.*saved=1.*shown=2"):
        restore(lab, "early", continue_sinks=True)
    savepoints.rescale(lab.spark, lab.folder / "query", lab.folder / "again", shards=4, continue_sinks=True)
    lab.configure({"shards": "2"})
    lab.feed(FED[3])
    with pytest.raises(StreamingQueryException, match="another query continues this sink"):
        Query(lab, sink).run()
    lab.configure({"shards": "4"})
    Query(lab, sink, name="again").run()
    assert parquet_rows(url) == totals(*FED)


@pytest.mark.all
def test_sinks_elsewhere_are_not_continued(lab: Lab) -> None:
    """Nothing can end the saved query from another state directory; and a query without sinks has none."""
    lab.feed(FED[0])
    lab.run(lab.totals())
    save(lab)
    with pytest.raises(InvalidArgumentError, match="names no holdfast sink"):
        restore(lab, "again", continue_sinks=True)
    sink = sinks.parquet("out", str(lab.folder / "shown"))
    old = Query(lab, sink, name="shown-query").run()
    save(lab, "shown-query")
    lab.configure({"state.dir": str(lab.folder / "elsewhere")})
    with pytest.raises(InvalidArgumentError, match="no log in this state directory"):
        restore(lab, "again", continue_sinks=True, of="shown-query")
    restore(lab, "again", continue_sinks=False, of="shown-query")
    lab.feed(FED[1])
    with pytest.raises(StreamingQueryException, match="copy _sinks/out from its state directory into this one"):
        Query(lab, sink, name="again", replaces=old).run()


@pytest.mark.all
@pytest.mark.since("4.1")
def test_a_sink_as_a_data_source_is_continued(lab: Lab) -> None:
    """Each of its micro-batches is a start, which finds what the saved query had decided."""
    url = str(lab.folder / "shown")
    run = partial(run_data_source, lab, url, counted_at_random)

    for table in FED[:3]:
        lab.feed(table)
    run("query")
    forget_the_last_end(lab.folder / "query")
    before = parquet_rows(url)
    assert [one.batch_id for one in save(lab).query.sinks] == [2]
    restore(lab, "again", continue_sinks=True)
    lab.feed(FED[3])
    run("again")
    assert set(before) < set(parquet_rows(url))
    assert [row[:2] for row in parquet_rows(url)] == [row[:2] for row in totals(*FED)]
    lab.configure({"shards": "2"})
    with pytest.raises(StreamingQueryException, match="another query writes to this sink"):
        run("query")


@pytest.mark.all
@pytest.mark.parametrize("case", CASES_OF_STATE, ids=str)
def test_what_was_planned_runs_with_its_own_time_and_watermark(lab: Lab, case: queries.Case) -> None:
    """Timers and late rows are those of the query that was never moved, of each API; all results are shown once."""
    sink = sinks.parquet("out", url := str(lab.folder / "shown"))
    truth: list[dict[str, object]] = []

    def run(name: str) -> None:
        frame = case.query(lab.source(case.schema)).writeStream.outputMode(case.mode).trigger(availableNow=True)
        writer = frame.foreachBatch(sinks.exactly_once(sink)).option("checkpointLocation", str(lab.folder / name))
        writer.start().awaitTermination()

    def run_both(name: str) -> None:
        run(name)
        lab.configure({"shards": "2"})
        truth.extend(row for batch in lab.run(case.query(lab.source(case.schema)), "truth", case.mode) for row in batch)

    files = case.files()
    with configured(lab.spark, dict(case.settings)):
        for file in files[:2]:
            lab.feed(file)
        run_both("query")
        forget_the_last_end(lab.folder / "query")
        save(lab)
        restore(lab, "again", continue_sinks=True)
        for file in files[2:]:
            lab.feed(file)
        run_both("again")
    shown = pa.concat_tables(map(pq.read_table, sinks.parquet_files(url))).to_pylist()
    assert truth
    assert sorted(map(repr, shown)) == sorted(map(repr, truth))
