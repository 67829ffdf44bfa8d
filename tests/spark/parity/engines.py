"""The engines that run a user's function side by side, and one query on one of them, micro-batch by micro-batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException

import holdfast
from tests.input_files import add_file
from tests.spark.answers import Batches, Questions
from tests.spark.parity import program
from tests.spark.running_tasks import wait_for_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_OPERATOR = "parity"
FRAME_TEMPLATES = "spark.holdfast.pandas.frameTemplates"


@dataclass(frozen=True)
class Engine:
    """Who runs the function: Spark's own operator, or holdfast with one of its backends."""

    name: str
    #: For the session, while a query of this engine runs.
    settings: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_spark(self) -> bool:
        return self.name == "spark"

    def require(self) -> None:
        """Skip the test where this engine cannot run it."""

    def apply(self, frame: DataFrame, keys: Sequence[Any], *arguments: Any) -> DataFrame:
        """Group a frame and call Spark's ``applyInPandasWithState``, or ours, with the same arguments."""
        if self.is_spark:
            return frame.groupBy(*keys).applyInPandasWithState(*arguments)
        return holdfast.stream(frame).groupBy(*keys).applyInPandasWithState(*arguments, name=_OPERATOR)


def _holdfast(backend: str, **settings: str) -> dict[str, str]:
    return {"spark.holdfast.backend": backend, **{f"spark.holdfast.{name}": value for name, value in settings.items()}}


SPARK = Engine("spark", {_PROVIDER: _ROCKSDB})
# What is documented of timeouts, and the one engine that must differ from Spark in nothing else.
DOCUMENTED = Engine("holdfast-documented", _holdfast("memory", timeouts="documented"))
MEMORY, FILESYSTEM, ROCKSDB = [
    Engine(f"holdfast-{b}", _holdfast(b, timeouts="spark")) for b in ("memory", "filesystem", "rocksdb")
]
# With all frames made by pandas itself.
WITHOUT_TEMPLATES = Engine("holdfast-without-templates", {**MEMORY.settings, FRAME_TEMPLATES: "false"})
STRICT = [MEMORY, FILESYSTEM, ROCKSDB, WITHOUT_TEMPLATES]

Row = tuple[str | None, int, str]
"""Key, event time in ms, and commands for `program.interpret`."""

State = dict[str | None, tuple[tuple[Any, ...] | None, int | None]]
"""By key: the value, and when it times out, in ms."""


def engines(*own: Engine) -> pytest.MarkDecorator:
    """Parametrise a test by Spark's engine, these of ours and one without templates; ``make test`` has our first."""
    later = [pytest.param(engine, marks=pytest.mark.all) for engine in (*own[1:], WITHOUT_TEMPLATES)]
    return pytest.mark.parametrize("engine", [SPARK, own[0], *later], ids=lambda engine: engine.name)


# What depends on the backend hardly, or on whether it is made of runs; and what depends on none.
of_runs = engines(FILESYSTEM, MEMORY, ROCKSDB)
of_rocksdb = engines(ROCKSDB, MEMORY, FILESYSTEM)
of_any_backend = engines(MEMORY)


@dataclass
class Trial:
    """One query on one engine, in a folder of its own."""

    session: SparkSession
    engine: Engine
    #: Holds input, Spark's checkpoint and what is durable of the state.
    folder: Path
    #: Settings of Spark for this query.
    conf: dict[str, str] = field(default_factory=dict)
    batches: Batches = field(default_factory=list)
    #: By which Spark's own operator is asked: it may have answered already. None asks it itself.
    questions: Questions | None = None
    _files: int = 0

    def feed(self, rows: Iterable[Row]) -> None:
        """Add the rows of one micro-batch; ``v`` numbers them."""
        rows = list(rows)
        columns = {
            "key": pa.array([row[0] for row in rows], pa.string()),
            "at": pa.array([row[1] * 1000 for row in rows], pa.timestamp("us", "UTC")),
            "v": pa.array(range(len(rows)), pa.int64()),
            "do": pa.array([row[2] for row in rows], pa.string()),
        }
        self.feed_table(pa.table(columns))

    def feed_table(self, table: pa.Table) -> None:
        """Add the rows of one micro-batch."""
        add_file(self.folder / "input", self._files, table)
        self._files += 1

    def source(self, schema: str = program.INPUT, *, delay: str | None = "0 seconds") -> DataFrame:
        """Return the input as a streaming frame, with a watermark on ``at`` unless there is no delay."""
        reader = self.session.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        frame = reader.parquet(str(self.folder / "input"))
        return frame if delay is None else frame.withWatermark("at", delay)

    def run(self, frame: DataFrame, mode: str = "update") -> None:
        """Run the query over what it has not read yet, and keep its output by micro-batch."""
        self.batches = self.answer(lambda: self._run(frame, mode))

    def _run(self, frame: DataFrame, mode: str) -> Batches:
        batches = list(self.batches)

        def collect(rows: DataFrame, number: int) -> None:
            del batches[number:]
            batches.append([tuple(row) for row in rows.collect()])

        self._await(frame.writeStream.foreachBatch(collect), mode)
        return batches

    def failure(self, frame: DataFrame, mode: str = "update") -> StreamingQueryException:
        """Run the query, which must fail, and return its error once no task of it runs any more."""

        def fails() -> Batches:
            try:
                self._await(frame.writeStream.format("noop"), mode)
            finally:
                wait_for_tasks(self.session)
            return []

        try:
            self.answer(fails)
        except StreamingQueryException as exc:
            return exc
        raise AssertionError("the query did not fail")

    def _await(self, writer: DataStreamWriter, mode: str) -> None:
        writer = writer.outputMode(mode).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.folder / "query")).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()

    def collect(self, frame: DataFrame) -> list[tuple[Any, ...]]:
        """Return the rows of a batch query."""
        [rows] = self.answer(lambda: [[tuple(row) for row in frame.collect()]])
        return rows

    def answer(self, ask: Callable[[], Batches]) -> Batches:
        """Return what this engine says, of Spark's own what it has said."""
        return ask() if self.questions is None else self.questions.ask(self.engine.name, ask)

    def apply(self, frame: DataFrame, keys: Sequence[Any], *arguments: Any) -> DataFrame:
        """Group a frame and call Spark's ``applyInPandasWithState``, or ours, with the same arguments."""
        return self.engine.apply(frame, keys, *arguments)

    def state(self, *, exact: bool = True) -> State:
        """Return what is stored for each key; if not `exact`, a time is 1 whenever it is."""

        def stored() -> Batches:
            rows = self._state_of_spark() if self.engine.is_spark else self._state_of_holdfast()
            return [[(key, value, due_ms and (due_ms if exact else 1)) for key, value, due_ms in rows]]

        [rows] = self.answer(stored)
        found = {key: (value, due_ms) for key, value, due_ms in rows}
        assert len(found) == len(rows)
        return found

    def _state_of_spark(self) -> list[tuple[Any, ...]]:
        found = []
        for row in self.session.read.format("statestore").load(str(self.folder / "query")).collect():
            due_ms = row["value"].asDict().get("timeoutTimestamp", -1)
            group = row["value"]["groupState"]
            found.append((row["key"][0], None if group is None else tuple(group), None if due_ms == -1 else due_ms))
        return found

    def _state_of_holdfast(self) -> list[tuple[Any, ...]]:
        def of_table(name: str) -> dict[str | None, tuple[Any, ...]]:
            rows = holdfast.read_state(self.session, self.folder / "query", _OPERATOR, table=name).to_pylist()
            return {key: tuple(values) for key, *values in (row.values() for row in rows)}

        values = of_table("state")
        try:
            timers = of_table("timers")
        except holdfast.NotFoundError:
            timers = {}
        return [(key, values.get(key), timers.get(key, (None,))[0]) for key in {**values, **timers}]


@contextmanager
def configured(session: SparkSession, settings: dict[str, str]) -> Iterator[None]:
    """Set settings of a session, and put back what was there."""
    before = {name: session.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, old)


Open = Callable[..., Any]
"""The fixture `run_on`: takes an engine and settings, and opens a trial."""


@contextmanager
def trial(
    session: SparkSession,
    engine: Engine,
    folder: Path,
    local: Path,
    conf: dict[str, str] | None = None,
    questions: Questions | None = None,
) -> Iterator[Trial]:
    """Give a query of an engine its folder and its settings."""
    engine.require()
    folder.mkdir(parents=True, exist_ok=True)
    places = {"spark.holdfast.state.dir": str(folder / "durable"), "spark.holdfast.local.dir": str(local)}
    with configured(session, {**({} if engine.is_spark else places), **engine.settings, **(conf or {})}):
        yield Trial(session, engine, folder, questions=questions if engine.is_spark else None)


_CAUSE = re.compile(r"^(?:[\w.]*\.)?(\w+(?:Error|Exception))(?:: (.*))?$")
_OF_JAVA = ("\t", "Caused by", "org.apache", "java.", "pyspark.errors.exceptions.captured")


def cause_of(error: BaseException) -> tuple[str, str]:
    """Return class and message of the Python error in a worker: the last one of the tracebacks in a message."""
    lines = [line for line in str(error).splitlines() if not line.startswith(_OF_JAVA)]
    found = [match for line in lines if (match := _CAUSE.match(line))]
    assert found, str(error)
    return found[-1][1], found[-1][2] or ""
