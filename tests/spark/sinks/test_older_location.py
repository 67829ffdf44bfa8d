"""A checkpoint location that is one micro-batch older than its sink: what Spark plans anew is no repeat."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

from holdfast import savepoints, sinks
from holdfast.errors import ConflictError
from holdfast.examples.sinks.csv_folder import CsvFolder
from holdfast.spark_integration.sinks.postgres import connecting
from tests import sink_logs
from tests.read_kafka import committed
from tests.servers.kafka import Kafka
from tests.servers.postgres import Postgres
from tests.spark.conftest import Lab, count_and_sum
from tests.spark.savepoints.sink_queries import FED, Query, csv_rows, delta_rows, parquet_rows, run_data_source, totals
from tests.spark.savepoints.sources import Reader
from tests.spark.sinks.repeating import forget_the_last_end
from tests.tiers import cases

if TYPE_CHECKING:
    from holdfast.sinks import TwoPhaseSink

pytestmark = [pytest.mark.spark, pytest.mark.slow(20)]

PLANNED_ANEW = "planned this micro-batch anew, and the sink shows it as it was planned before"
SINKS: dict[str, tuple[Callable[[str], TwoPhaseSink], Callable[[str], object]]] = {
    "parquet": (lambda url: sinks.parquet("out", url), parquet_rows),
    "delta": (lambda url: sinks.delta("out", url, create=True), delta_rows),
    "csv": (CsvFolder, csv_rows),
}


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
    for table in FED[:2]:
        lab.feed(table)
    run("query")
    older = copy(lab, "older")
    lab.feed(FED[2])
    run("query")
    shown = read()
    feed_earlier(lab, FED[3])
    with pytest.raises(StreamingQueryException, match=PLANNED_ANEW):
        run(older)
    assert read() == shown
    run("query")
    assert read() == totals(*FED), "nobody has ended the query itself"


@pytest.mark.all
@pytest.mark.parametrize("kind", cases(list(SINKS), quick=1))
def test_what_is_planned_anew_is_refused(lab: Lab, kind: str) -> None:
    """Its rows were dropped, with a warning only if they were as many or none if they were not."""
    make, read = SINKS[kind]
    url = str(lab.folder / "shown")
    require_refused(lab, lambda: read(url), lambda name: Query(lab, make(url), name=name).run())


@pytest.mark.all
@pytest.mark.postgres
def test_what_is_planned_anew_is_refused_for_a_table(lab: Lab, postgres: Postgres) -> None:
    """As above, in PostgreSQL."""
    table = f"shown_{secrets.token_hex(6)}"
    lab.configure({f"sink.{table}.{name}": value for name, value in postgres.options.items()})
    sink = sinks.postgres(table, table, create=True)

    def rows() -> list[object]:
        with postgres.connect() as connection:
            return sorted(connection.execute(f"SELECT key, n, total FROM {table}").fetchall())

    require_refused(lab, rows, lambda name: Query(lab, sink, name=name).run())
    connecting.close_idle()


@pytest.mark.all
@pytest.mark.kafka
def test_what_is_planned_anew_is_refused_for_a_topic(lab: Lab, kafka: Kafka) -> None:
    """As above, in Kafka."""
    topic, name = kafka.add_topic(2), f"sink-{secrets.token_hex(6)}"
    lab.configure({f"sink.{name}.{option}": value for option, value in kafka.sasl_options().items()})
    sink = sinks.kafka(name, topic, servers=kafka.servers)

    def rows() -> list[object]:
        found = [(message.key(), json.loads(message.value() or b"")) for message in committed(kafka, topic)]
        return sorted(((key or b"").decode(), value["n"], value["total"]) for key, value in found)

    require_refused(lab, rows, lambda location: Query(lab, sink, name=location).run())


@pytest.mark.all
@pytest.mark.since("4.1")
def test_what_is_planned_anew_is_refused_by_a_data_source(lab: Lab) -> None:
    """Its driver reads the plan from the location: the option that names it."""
    url = str(lab.folder / "shown")
    run = partial(run_data_source, lab, url, count_and_sum)

    require_refused(lab, lambda: parquet_rows(url), run)


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
    with pytest.raises(StreamingQueryException, match=f"{PLANNED_ANEW}.*offsets/1 as it was"):
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
    for table in FED[:2]:
        lab.feed(table)
    Query(lab, sink).run()
    older = copy(lab, "older")
    lab.feed(FED[2])
    Query(lab, sink).run()
    feed_earlier(lab, FED[3])
    with pytest.raises(StreamingQueryException, match=PLANNED_ANEW):
        Query(lab, sink, name=older).run()
    lab.lose_local_state()
    savepoints.create(lab.spark, lab.folder / older, lab.folder / "savepoints", "older")
    with pytest.raises(ConflictError, match="the savepoint holds another plan for it"):
        savepoints.restore(
            lab.spark, lab.folder / "savepoints", "older", lab.folder / "again", shards=4, continue_sinks=True
        )
    forget_the_last_end(lab.folder / "query")
    Query(lab, sink).run()
    assert parquet_rows(url) == totals(*FED)
