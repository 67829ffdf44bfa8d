"""The engines that run a user's function side by side, and one query on one of them, micro-batch by micro-batch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

import holdfast
from tests.spark.parity import program
from tests.spark.running_tasks import wait_for_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_OPERATOR = "parity"


@dataclass(frozen=True)
class Engine:
    """Who runs the function: Spark's own operator, or holdfast with one of its backends.

    Attributes
    ----------
    name : str
    settings : dict of str to str
        For the session, while a query of this engine runs.
    """

    name: str
    settings: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_spark(self) -> bool:
        return self.name == "spark"

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
STRICT = [Engine(f"holdfast-{b}", _holdfast(b, timeouts="spark")) for b in ("memory", "filesystem", "rocksdb")]
MEMORY, FILESYSTEM, ROCKSDB = STRICT
PACKED = Engine("holdfast-packed", _holdfast("memory", timeouts="spark", transport="packed"))

Row = tuple[str | None, int, str]
"""Key, event time in ms, and commands for `program.interpret`."""

State = dict[str | None, tuple[tuple[Any, ...] | None, int | None]]
"""By key: the value, and when it times out, in ms."""


def engines(*quick: Engine, more: Sequence[Engine] = ()) -> pytest.MarkDecorator:
    """Parametrise a test by engine: by those that show it in ``make test``, and by `more` in ``make test-all``."""
    late = [pytest.param(engine, marks=pytest.mark.all) for engine in more]
    return pytest.mark.parametrize("engine", [*quick, *late], ids=lambda engine: engine.name)


# What depends on the backend hardly, or on whether it is made of runs; and what depends on how rows travel.
of_runs = engines(SPARK, FILESYSTEM, more=[MEMORY, ROCKSDB])
of_rocksdb = engines(SPARK, ROCKSDB, more=[MEMORY, FILESYSTEM])
every_transport = engines(SPARK, MEMORY, PACKED)


@dataclass
class Trial:
    """One query on one engine, in a folder of its own.

    Attributes
    ----------
    session : SparkSession
    engine : Engine
    folder : Path
        Holds input, Spark's checkpoint and what is durable of the state.
    conf : dict of str to str
        Settings of Spark for this query.
    """

    session: SparkSession
    engine: Engine
    folder: Path
    conf: dict[str, str] = field(default_factory=dict)
    batches: list[list[tuple[Any, ...]]] = field(default_factory=list)
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
        (self.folder / "input").mkdir(exist_ok=True)
        path = self.folder / "new.parquet"
        pq.write_table(table, path)
        os.utime(path, (1_700_000_000 + self._files, 1_700_000_000 + self._files))
        path.rename(self.folder / "input" / f"{self._files:03d}.parquet")
        self._files += 1

    def source(self, schema: str = program.INPUT, *, delay: str | None = "0 seconds") -> DataFrame:
        """Return the input as a streaming frame, with a watermark on ``at`` unless there is no delay."""
        reader = self.session.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        frame = reader.parquet(str(self.folder / "input"))
        return frame if delay is None else frame.withWatermark("at", delay)

    def run(self, frame: DataFrame, mode: str = "update") -> None:
        """Run the query over what it has not read yet, and keep its output by micro-batch."""

        def collect(rows: DataFrame, number: int) -> None:
            del self.batches[number:]
            self.batches.append([tuple(row) for row in rows.collect()])

        writer = frame.writeStream.foreachBatch(collect).outputMode(mode).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.folder / "query")).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()

    def failure(self, frame: DataFrame, mode: str = "update") -> StreamingQueryException:
        """Run the query, which must fail, and return its error once no task of it runs any more."""
        writer = frame.writeStream.format("noop").outputMode(mode).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.folder / "query")).start()
        try:
            query.awaitTermination()
        except StreamingQueryException as exc:
            return exc
        finally:
            query.stop()
            wait_for_tasks(self.session)
        raise AssertionError("the query did not fail")

    def apply(self, frame: DataFrame, keys: Sequence[Any], *arguments: Any) -> DataFrame:
        """Group a frame and call Spark's ``applyInPandasWithState``, or ours, with the same arguments."""
        return self.engine.apply(frame, keys, *arguments)

    def state(self) -> State:
        """Return what is stored for each key."""
        return self._state_of_spark() if self.engine.is_spark else self._state_of_holdfast()

    def _state_of_spark(self) -> State:
        rows = self.session.read.format("statestore").load(str(self.folder / "query")).collect()
        found = {}
        for key, value in ((row["key"], row["value"]) for row in rows):
            due_ms = value.asDict().get("timeoutTimestamp", -1)
            group = value["groupState"]
            found[key[0]] = (None if group is None else tuple(group), None if due_ms == -1 else due_ms)
        assert len(found) == len(rows)
        return found

    def _state_of_holdfast(self) -> State:
        def of_table(name: str) -> dict[str | None, tuple[Any, ...]]:
            rows = holdfast.read_state(self.session, self.folder / "query", _OPERATOR, table=name).to_pylist()
            return {key: tuple(values) for key, *values in (row.values() for row in rows)}

        values = of_table("state")
        try:
            timers = of_table("timers")
        except holdfast.NotFoundError:
            timers = {}
        return {key: (values.get(key), timers.get(key, (None,))[0]) for key in {**values, **timers}}


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
    session: SparkSession, engine: Engine, folder: Path, local: Path, conf: dict[str, str] | None = None
) -> Iterator[Trial]:
    """Give a query of an engine its folder and its settings.

    Parameters
    ----------
    local : Path
        Directory of local state, one for all.
    conf : dict of str to str, optional
        Further settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places = {"spark.holdfast.state.dir": str(folder / "durable"), "spark.holdfast.local.dir": str(local)}
    with configured(session, {**({} if engine.is_spark else places), **engine.settings, **(conf or {})}):
        yield Trial(session, engine, folder)


_CAUSE = re.compile(r"^(?:[\w.]*\.)?(\w+(?:Error|Exception))(?:: (.*))?$")
_OF_JAVA = ("\t", "Caused by", "org.apache", "java.", "pyspark.errors.exceptions.captured")


def cause_of(error: BaseException) -> tuple[str, str]:
    """Return class and message of the Python error in a worker: the last one of the tracebacks in a message."""
    lines = [line for line in str(error).splitlines() if not line.startswith(_OF_JAVA)]
    found = [match for line in lines if (match := _CAUSE.match(line))]
    assert found, str(error)
    return found[-1][1], found[-1][2] or ""
