"""A small streaming query over Parquet files, for the tests of this folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import holdfast
from tests.input_files import add_file
from tests.spark.answers import RECORDS, Book, Questions
from tests.spark.parity.engines import Engine, Open, trial
from tests.spark.questions import digest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

STATE = "n long, total long"
OUTPUT = "key string, n long, total long"


def count_and_sum(batch: holdfast.ShardBatch) -> pa.Table:
    """Keep the number and the sum of ``v`` for each key."""
    old = batch.state.get()
    n = pc.add(pc.coalesce(old["n"], 0), batch.groups.count())
    total = pc.add(pc.coalesce(old["total"], 0), batch.groups.sum("v"))
    batch.state.put(n=n, total=total)
    return batch.keys.append_column("n", n).append_column("total", total)


def count(batch: holdfast.ShardBatch) -> pa.Table:
    """Keep the number of rows of each key."""
    n = pc.add(pc.coalesce(batch.state.get()["n"], 0), batch.groups.count())
    batch.state.put(n=n)
    return batch.keys.append_column("n", n)


@dataclass
class Lab:
    """One test's folder, with input, Spark's checkpoint location and durable state."""

    spark: SparkSession
    folder: Path
    local: Path
    files: int = 0

    def configure(self, settings: dict[str, str]) -> None:
        """Set ``spark.holdfast.*`` until the end of the test."""
        for name, value in settings.items():
            self.spark.conf.set(f"spark.holdfast.{name}", value)

    def feed(self, table: pa.Table | list[tuple[str | None, int]]) -> None:
        """Add an input file: a micro-batch of its own."""
        if isinstance(table, list):
            keys, values = zip(*table, strict=True)
            table = pa.table({"key": pa.array(keys, pa.string()), "v": pa.array(values, pa.int64())})
        add_file(self.folder / "input", self.files, table)
        self.files += 1

    def source(self, schema: str | StructType = "key string, v long") -> DataFrame:
        reader = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self.folder / "input"))

    def totals(self, **options: Any) -> DataFrame:
        arguments = {"func": count_and_sum, "outputStructType": OUTPUT, "stateStructType": STATE, "name": "totals"}
        arguments |= options
        return holdfast.stream(self.source()).groupBy("key").applyInArrowWithState(**arguments, outputMode="update")

    def run(
        self, frame: DataFrame, query: str = "query", mode: str = "update", group: str | None = None
    ) -> list[list[dict[str, Any]]]:
        """Run a query over the files that it has not read yet, in a job group if any; return rows by micro-batch."""
        batches: list[list[dict[str, Any]]] = []

        def collect(rows: DataFrame, _: int) -> None:
            if group is not None:
                rows.sparkSession.sparkContext.setJobGroup(group, "the user's")
            batches.append(rows.toArrow().to_pylist())

        writer = frame.writeStream.foreachBatch(collect).outputMode(mode).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self.folder / query)).start().awaitTermination()
        return batches

    def state(self, operator: str = "totals", query: str = "query") -> dict[Any, Any]:
        rows = holdfast.read_state(self.spark, self.folder / query, operator).to_pylist()
        found = {row["key"]: tuple(value for name, value in row.items() if name != "key") for row in rows}
        assert len(found) == len(rows)
        return found

    def lose_local_state(self) -> None:
        """Remove what executors keep of all queries, as a new machine would."""
        for directory in self.local.glob("*/executor-*/*/*-*-*"):
            if directory.is_dir():
                shutil.rmtree(directory)

    def commits(self) -> list[Path]:
        paths = (self.folder / "durable").glob("*/shard-*/commits/*")
        return sorted(paths, key=lambda path: int(path.name.partition("-")[0]))


@pytest.fixture
def questions(request: pytest.FixtureRequest) -> Questions | None:
    """Return how this test asks Spark's own operators; what is marked ``live`` asks them itself."""
    if request.node.get_closest_marker("live"):
        return None
    return Questions(Book.of(request.path), _name_without_engine(request.node), digest(request.function))


@pytest.fixture
def run_on(spark: SparkSession, tmp_path: Path, local_state: Path, questions: Questions | None) -> Open:
    """Return a function that opens a trial on an engine."""

    def opened(engine: Engine, **conf: str) -> Any:
        return trial(spark, engine, tmp_path / engine.name, local_state, conf, questions)

    return opened


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to ``make test-all`` what asks Spark itself; ``make record`` runs only what it is asked for the record."""
    recordable = []
    for item in items:
        engine, is_live = _engine_of(item), item.get_closest_marker("live")
        if is_live and engine is not None and engine.is_spark:
            item.add_marker(pytest.mark.all)
        if not is_live and getattr(engine, "is_spark", True):
            recordable.append(item)
    if RECORDS:
        config.hook.pytest_deselected(items=[item for item in items if item not in recordable])
        items[:] = recordable


def _name_without_engine(item: Any) -> str:
    engine = _engine_of(item)
    if engine is None:
        return str(item.name)
    return f"{item.originalname}[{item.callspec.id.replace(engine.name, '').strip('-')}]"


def _engine_of(item: Any) -> Any:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return next((value for value in given.values() if hasattr(value, "is_spark")), None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid.partition("::")[0])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what Spark has answered to the tests of a module, if it is what all of them expect."""
    if RECORDS and exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        for book in Book.opened():
            if str(book.module.relative_to(session.config.rootpath)) not in _failed:
                book.write()


_failed: set[str] = set()


@pytest.fixture(scope="session")
def local_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of local state; one for all, because each has a state server."""
    return tmp_path_factory.mktemp("local")


@pytest.fixture
def lab(spark: SparkSession, tmp_path: Path, local_state: Path) -> Iterator[Lab]:
    lab = Lab(spark, tmp_path, local_state)
    with configured(lab):
        yield lab


@contextmanager
def configured(lab: Lab) -> Iterator[None]:
    """Give the session the places of a lab, and take back afterwards what was configured."""
    lab.configure({"state.dir": str(lab.folder / "durable"), "local.dir": str(lab.local)})
    try:
        yield
    finally:
        for name in dict(lab.spark.conf.getAll):
            if name.startswith("spark.holdfast."):
                lab.spark.conf.unset(name)


@pytest.fixture
def own_file_manager(spark: SparkSession) -> Iterator[None]:
    """Give Spark its own way with the files of its checkpoint: the other tests' does not replace a failed attempt's."""
    manager = "spark.sql.streaming.checkpointFileManagerClass"
    others = spark.conf.get(manager)
    assert others is not None
    spark.conf.set(manager, others.replace("FileSystemBased", "FileContextBased"))
    yield
    spark.conf.set(manager, others)


def age(paths: Iterator[Path], milliseconds: int) -> None:
    """Let time pass for these files."""
    for path in paths:
        seconds = path.stat().st_mtime - milliseconds / 1000
        os.utime(path, (seconds, seconds))


def claims(lab: Lab) -> Iterator[Path]:
    return (lab.folder / "durable/totals/claims").iterdir()
