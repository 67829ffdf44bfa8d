"""Runs work on a query's shards and state: by Spark (`SparkTasks`) or in the current process (`OwnProcess`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pyarrow as pa

from holdfast import distribution, errors
from holdfast.backends.registry import backend_names
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.settings import PREFIX, Settings
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.savepoints.new_query import FirstState, NewQuery, partitions_of
from holdfast.spark_integration.shard.task import io_executor, storage_at
from holdfast.spark_integration.spark_state.pointers import PLAIN_ROWS, NewState, PointerOperator
from holdfast.spark_integration.transport.routes import routes_of
from holdfast.spark_integration.worker_python import require_worker_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_PUTS_AT_ONCE = 16
_TYPES = {"string": pa.string(), "int": pa.int32(), "long": pa.int64(), "binary": pa.binary()}
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_UNAVAILABLE = f"{UnavailableError.__module__}.{UnavailableError.__qualname__}"
#: Writes the pointers of a new query's operators, in Spark's order, to Spark's state.
StateMaker = Callable[[NewQuery, Sequence[PointerOperator]], FirstState]


@dataclass(frozen=True)
class ShardTask(ABC):
    """The work for each shard; in Spark, a function for ``mapInArrow``."""

    #: Spark columns of the input and output rows: both include ``operator`` and ``shard``, the output also ``error``.
    #: Fields missing from an output row are null.
    GIVEN: ClassVar[str]
    RETURNED: ClassVar[str]

    settings: Settings  #: The session's, without credentials; with the query's state directory
    target: str  #: URL of the target directory

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield each row's outcomes; missing fields are null."""
        opened = partial(storage_at, settings=self.settings)
        for batch in batches:
            for row in batch.to_pylist():
                for outcome in self.outcomes(row, opened):
                    yield pa.RecordBatch.from_pylist([outcome], schema=columns_of(self.RETURNED))

    def outcomes(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[Mapping[str, Any]]:
        """Yield a row's outcomes, then its error, if any. Raises only errors that a retry may cure."""
        try:
            yield from self.work(row, opened)
        except HoldfastError as exc:
            yield failed(row, exc)

    @abstractmethod
    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[Mapping[str, Any]]:
        """Process a row; `opened` returns the storage at a URL."""


@cache
def columns_of(text: str) -> pa.Schema:
    """Return the Arrow schema for a text such as ``shard int, piece string``."""
    return pa.schema([(name, _TYPES[kind]) for name, kind in map(str.split, text.split(","))])


def versions_of(spark: SparkSession) -> dict[str, str]:
    """Return the versions of the software that makes a savepoint with Spark."""
    return {"holdfast": distribution.VERSION, "spark": spark_versions.version_of(spark)}


def run_tasks(spark: SparkSession, shards: Sequence[tuple[Any, ...]], task: ShardTask) -> list[Row]:
    """Run the work for each shard in its own Spark task; return the results."""
    from pyspark.errors import PySparkException

    if not shards:
        return []
    try:
        # One partition per shard: without a column Spark partitions at random, and a task may get two shards.
        rows = [(*row, route) for row, route in zip(shards, routes_of(len(shards)), strict=True)]
        frame = spark.createDataFrame(rows, f"{task.GIVEN}, route int").repartition(len(shards), "route")
        return run_frame(frame, task, task.RETURNED)
    except PySparkException as exc:
        raise UnavailableError(f"tasks of the savepoint failed: {exc}") from exc


def run_frame(
    frame: DataFrame, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], returned: str
) -> list[Row]:
    """Run a task for each partition of a DataFrame; see `run_tasks`. Raises `PySparkException`."""
    from pyspark.errors import PySparkException

    require_worker_python(frame.sparkSession)
    try:
        found = frame.mapInArrow(task, returned).collect()
    except PySparkException as exc:
        if _UNAVAILABLE not in str(exc):
            raise  # the DataFrame or Spark failed
        raise UnavailableError(f"tasks of the savepoint failed: {exc}") from exc
    require_no_error(found)
    return found


def require_no_error(found: Iterable[Any]) -> None:
    """Raise the first error in the rows that tasks returned."""
    for row in found:
        if row["error"] is not None:
            kind, _, message = row["error"].partition(": ")
            raise errors.class_of(kind, CorruptionError)(f"{row['operator']}, shard {row['shard']}: {message}")


def each_ahead(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Generator[_Result, None, None]:
    """Call a function for each item like `map`, in parallel on the process's storage threads."""
    return ahead(io_executor(), work, items)


def failed(facts: Mapping[str, Any], error: HoldfastError) -> dict[str, Any]:
    """Return an error as a task's output row, with the operator and shard in `facts`; raise it if a retry may help."""
    if error.retryable:
        raise error
    return {"operator": facts["operator"], "shard": facts["shard"], "error": f"{type(error).__name__}: {error}"}


def settings_of(spark: SparkSession) -> tuple[Settings, dict[str, str]]:
    configuration = dict(spark.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    return settings, settings.storage_values(configuration)


def configured(spark: SparkSession) -> tuple[Settings, dict[str, str]]:
    """Return a session's settings and storage options. Raises `InvalidArgumentError` without a state directory."""
    settings, options = settings_of(spark)
    if settings.state_dir is None:
        raise InvalidArgumentError("no state directory is set: set spark.holdfast.state.dir to the query's")
    return settings, options


class SparkTasks:
    """Runs work on a Spark session's executors. Raises `InvalidArgumentError` without a state directory."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.settings, self.options = configured(spark)

    def versions(self) -> dict[str, str]:
        return versions_of(self.spark)

    def run(self, shards: Sequence[tuple[Any, ...]], task: ShardTask) -> Sequence[Any]:
        """Run a task for some shards; see `run_tasks`."""
        return run_tasks(self.spark, shards, task)

    def state_maker(self, conf: Mapping[str, str], hosts: Collection[str]) -> StateMaker:
        """Return the function that makes the state of a query with these settings and operators."""
        from holdfast.spark_integration.savepoints.stub import state_by_stub

        return partial(state_by_stub, self.spark, conf)


class OwnProcess:
    """Runs work in the current process, without Spark.

    `options`: values of ``spark.holdfast.storage.*``; `executor`: the caller is not one of its threads; `at_once`: how
    many shards to process in parallel, each with up to three copies of its rows; `on_shard`: called with 1 per shard.
    """

    def __init__(
        self,
        state_dir: str,
        options: Mapping[str, str],
        executor: Executor,
        at_once: int,
        on_shard: Callable[[int], object],
    ) -> None:
        self.settings = Settings.parse({f"{PREFIX}state.dir": state_dir}, backend_names())
        self.options, self._executor, self._at_once, self._on_shard = options, executor, at_once, on_shard

    def versions(self) -> dict[str, str]:
        return {"holdfast": distribution.VERSION}

    def run(self, shards: Sequence[tuple[Any, ...]], task: ShardTask) -> Sequence[Any]:
        """Run a task for some shards, several in parallel. Raises the first error, with its shard."""
        columns, lacking = columns_of(task.GIVEN).names, dict.fromkeys(columns_of(task.RETURNED).names)
        found: list[Mapping[str, Any]] = []
        with ExitStack() as stack:
            storages: dict[str, ObjectStorage] = {}

            def opened(url: str) -> ObjectStorage:
                if url not in storages:  # two threads may both open it: both storages are closed
                    storages[url] = stack.enter_context(open_storage(url, self.options))
                return storages[url]

            def done(row: tuple[Any, ...]) -> list[Mapping[str, Any]]:
                facts = dict(zip(columns, row, strict=True))
                return [{**lacking, **outcome} for outcome in task.outcomes(facts, opened)]

            with closing(ahead(self._executor, done, shards, self._at_once)) as results:
                for rows in results:
                    require_no_error(rows)
                    found += rows
                    self._on_shard(1)
        return found

    def state_maker(self, conf: Mapping[str, str], hosts: Collection[str]) -> StateMaker:
        """Return the function that `SparkTasks.state_maker` describes. Raises `NeedsSparkError`."""
        state = NewState.of(conf, partitions_of(conf), hosts)

        def make(new: NewQuery, operators: Sequence[PointerOperator]) -> FirstState:
            new.require()  # restoring the shards may have taken long
            puts = ahead(self._executor, lambda file: new.location.put(*file), state.files(operators), _PUTS_AT_ONCE)
            with closing(puts):
                for _ in puts:
                    pass
            return FirstState({**conf, **PLAIN_ROWS})

        return make


#: Either runner; both have the same methods.
Tasks = SparkTasks | OwnProcess
