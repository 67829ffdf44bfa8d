"""Micro-batches of real queries into Delta tables and Parquet files, over restarts and repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from pyspark import cloudpickle
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from holdfast import sinks
from holdfast.examples.sinks.state_image import image_of_totals
from holdfast.sinks import TwoPhaseSink
from tests.servers.hdfs import Hdfs
from tests.spark.sinks.conftest import forget_the_last_end
from tests.tiers import cases

if TYPE_CHECKING:
    import pyarrow as pa

pytestmark = [pytest.mark.spark, pytest.mark.slow(30)]
TYPES = (
    "n",
    "cast(n AS int) i",
    "concat('ü', n) s",
    "cast(concat('b', n) AS binary) b",
    "cast(n AS decimal(20, 4)) d",
    "date_add(DATE'2020-01-01', cast(n AS int)) day",
    "timestamp_micros(n * 1234567) at",
    "cast(timestamp_micros(n) AS timestamp_ntz) local",
    "array(n, null) list",
    "map('k', n) map",
    "named_struct('x', n, 'y', array(named_struct('z', 'a'))) struct",
    "if(n % 3 = 0, null, cast(n AS double)) f",
    "n `value.n`",  # PySpark parses the dot
)


class Appending:
    """A query that appends rows of all types, and starts anew for each micro-batch or two."""

    def __init__(self, session: SparkSession, folder: Path, sink: TwoPhaseSink) -> None:
        self.session, self.folder = session, folder
        self.function = sinks.exactly_once(sink)
        self.fed = 0
        (folder / "source").mkdir()

    def feed(self, rows: int) -> None:
        text = "".join(json.dumps({"n": self.fed + i}) + "\n" for i in range(rows))
        (self.folder / "source" / f"{self.fed:06}.json").write_text(text)
        self.fed += rows

    def rows(self) -> DataFrame:
        source = self.session.readStream.schema("n long").option("maxFilesPerTrigger", 1)
        return source.json(str(self.folder / "source")).selectExpr(*TYPES).repartition(2)

    def run(self) -> None:
        """Start it as another driver would, which remembers nothing, and read what is there."""
        function = cloudpickle.loads(cloudpickle.dumps(self.function))
        writer = self.rows().writeStream.foreachBatch(function).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self.folder / "query")).start().awaitTermination()

    def forget_the_last_end(self) -> None:
        forget_the_last_end(self.folder / "query")

    def scenario(self) -> None:
        """Three micro-batches; then the last one again, and one more."""
        for rows in (10, 7, 5):
            self.feed(rows)
        self.run()
        self.forget_the_last_end()
        self.run()
        self.feed(3)
        self.run()

    def expected(self) -> list[Any]:
        frame = self.session.range(self.fed).withColumnRenamed("id", "n")
        return sorted(frame.selectExpr(*TYPES).toArrow().to_pylist(), key=lambda row: row["n"])


def _sorted(table: pa.Table) -> list[Any]:
    return sorted(table.to_pylist(), key=lambda row: row["n"])


def test_parquet_shows_each_micro_batch_once(session: SparkSession, tmp_path: Path) -> None:
    """Rows of all types come back as they were, to our reader and to Spark by the list of files."""
    url = str(tmp_path / "shown")
    query = Appending(session, tmp_path, sinks.parquet("out", url))
    query.scenario()
    assert _sorted(sinks.read_parquet(url)) == query.expected()
    assert _sorted(session.read.parquet(*sinks.parquet_files(url)).toArrow()) == query.expected()
    with pytest.raises(AnalysisException, match="UNABLE_TO_INFER_SCHEMA"):
        session.read.parquet(url)


@pytest.mark.all
@pytest.mark.hdfs
def test_parquet_on_hdfs_shows_each_micro_batch_once(session: SparkSession, hdfs: Hdfs, tmp_path: Path) -> None:
    """Written by Spark's forked workers; its daemons are killed between two starts of the query."""
    url = f"{hdfs.url}/shown"
    session.conf.set("spark.holdfast.sink.out.dfs.client.socket-timeout", "3000")
    query = Appending(session, tmp_path, sinks.parquet("out", url))
    query.scenario()
    hdfs.namenode.kill()
    hdfs.datanode.kill()
    hdfs.revive()
    query.feed(4)
    query.run()
    assert _sorted(sinks.read_parquet(url)) == query.expected()
    files = sinks.parquet_files(url)
    assert _sorted(session.read.parquet(*files).toArrow()) == query.expected()
    assert not [path for path in hdfs.files("/shown") if "_attempts" in path or ".tmp-" in path]


@pytest.mark.parametrize("partition_by", cases([(), ("i",)]))
def test_delta_shows_each_micro_batch_once(session: SparkSession, tmp_path: Path, partition_by: list[str]) -> None:
    """Rows of all types come back as they were, to a Delta reader; each micro-batch is one transaction."""
    url = str(tmp_path / "shown")
    query = Appending(session, tmp_path, sinks.delta("out", url, create=True, partition_by=partition_by))
    query.scenario()
    table = DeltaTable(url)
    shown = table.to_pyarrow_table().select(["n", *(text.split()[-1].strip("`") for text in TYPES[1:])])
    assert _sorted(shown) == query.expected()
    assert table.version() == 4


@pytest.mark.all
def test_a_delta_table_is_the_image_of_state(session: SparkSession, tmp_path: Path) -> None:
    """After each micro-batch and any restart, the table has each key once, with the total that the state has."""
    source, url = tmp_path / "source", str(tmp_path / "image")
    source.mkdir()
    totals: dict[str, tuple[int, int]] = {}
    for batch in range(3):
        rows = [(f"account {i % (4 + batch)}", i + batch) for i in range(20)]
        lines = "".join(json.dumps({"account": account, "amount": amount}) + "\n" for account, amount in rows)
        (source / f"{batch}.json").write_text(lines)
        for account, amount in rows:
            payments, total = totals.get(account, (0, 0))
            totals[account] = payments + 1, total + amount
        writer = image_of_totals(session, str(source), url, str(tmp_path / "work"))
        writer.trigger(availableNow=True).start().awaitTermination()
        shown = DeltaTable(url).to_pyarrow_table().to_pylist()
        assert len(shown) == len(totals)
        assert {row["account"]: (row["payments"], row["total"]) for row in shown} == totals
