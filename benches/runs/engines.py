"""The engines to compare: each runs a job its own way and returns what the driver measured.

To add an engine, add an `Engine` to `ENGINES`, or to a table that `holdfast.benches.runs.by_name` merges. It runs in a
fresh process with private directories on disk and in RAM, which are removed afterwards.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.state import GroupState

import holdfast
from holdfast.backends.run import TableSchema
from holdfast.benches.instruments.measured import Measured, Places, Processes, since, spark_kind, state_bytes
from holdfast.benches.instruments.object_store import delayed_store
from holdfast.benches.instruments.spark import EXECUTOR_MEMORY_MB, session, standalone_cluster
from holdfast.benches.jobs.by_key import ByProcessor, DropIn, one_key
from holdfast.benches.jobs.job import Job, SparkJob, StoreJob, StreamingJob, server_of_environment
from holdfast.benches.jobs.operators import Operators
from holdfast.snapshotter.storage.opening import open_storage

_LOOK_EVERY_S = 0.05
_LOOK_AT_PROCESSES_EVERY_S = 0.5
_SETTLE_S = 1.0


@dataclass(frozen=True)
class StateFolders:
    local: Callable[[], Iterable[Path]]  # the folders of the working state, which appear while the query runs
    durable: Path  # where restarts find the state
    live_bytes: Callable[[], int] | None = None  # the Arrow size of the live state after the last micro-batch
    storage: Callable[[], dict[str, float]] = dict  # requests to the storage so far by kind, if counted


def run_query(
    settings: dict[str, str],
    query: Callable[[SparkSession], DataFrame],
    job: StreamingJob,
    places: Places,
    folders: StateFolders,
    output_mode: str,
) -> Measured:
    """Run a query into the noop sink until its last micro-batch is done."""
    spark = session(settings)
    writer = query(spark).writeStream.format("noop").outputMode(output_mode)
    started = writer.option("checkpointLocation", str(places.checkpoint)).start()
    watch = _Watch(job, folders)
    try:
        watch.until_done(started)
        progress = [p for p in started.recentProgress if p["batchId"] < job.all_batches]
    finally:
        started.stop()
    time.sleep(_SETTLE_S)  # the state server still works on the last commit
    live = folders.live_bytes() if folders.live_bytes is not None else None
    watch.look_at_folders()
    spark.stop()
    return Measured(
        batch_ms=[p["durationMs"]["triggerExecution"] for p in progress],
        phases_ms=[dict(p["durationMs"]) for p in progress],
        cpu=watch.used[0],
        memory=watch.processes.peak(),
        written=watch.used[1],
        settings={k: v for k, v in settings.items() if not v.startswith(("/", "file:"))},
        state_bytes=state_bytes(watch.local, watch.after_batch, live),
        storage=watch.used[2],
    )


class _Watch:
    """Polls the progress, processes and files of a running query."""

    def __init__(self, job: StreamingJob, folders: StateFolders) -> None:
        self._job, self._folders = job, folders
        self.processes = Processes(spark_kind)
        self.local: list[int] = []
        self.after_batch: list[int] = []
        #: Over the counted micro-batches: seconds, bytes written, requests to the storage.
        self.used: list[dict[str, float]] = []

    def until_done(self, query: StreamingQuery) -> None:
        """Wait for the last micro-batch; raise the error that stopped the query."""
        done, before, looked_s = -1, self._so_far(), 0.0
        while done < self._job.all_batches - 1:
            time.sleep(_LOOK_EVERY_S)
            failure = query.exception()
            if failure is not None:
                raise failure
            self.look_at_folders()
            if time.monotonic() - looked_s > _LOOK_AT_PROCESSES_EVERY_S:
                self.processes.look()
                looked_s = time.monotonic()
            last = query.lastProgress
            if last is not None and last["batchId"] > done:
                done = last["batchId"]
                self.after_batch.append(self.local[-1])
                if done < self._job.counted.start:
                    before = self._so_far()
        self.used = [since(*of) for of in zip(before, self._so_far(), strict=True)]

    def _so_far(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        self.processes.look()
        written = {**self.processes.written(), "durable": folder_bytes(self._folders.durable)}
        return self.processes.seconds(), written, self._folders.storage()

    def look_at_folders(self) -> None:
        self.local.append(sum(map(folder_bytes, self._folders.local())))


def folder_bytes(folder: Path, *, hidden: bool = True) -> int:
    """Return the size of all files below a folder; hard links count once."""
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names if hidden else [name for name in names if not name.startswith(".")]:
            try:
                facts = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue
            sizes[facts.st_ino] = facts.st_size
    return sum(sizes.values())


#: The operator's name in holdfast's queries.
OPERATOR = "bench"


def with_state(frame: DataFrame, job: SparkJob) -> DataFrame:
    grouped = holdfast.stream(frame).groupBy("key")
    return grouped.applyInArrowWithState(job.stateful, job.output, job.state, "update", name=OPERATOR)


def without_state(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Run holdfast's pipeline around a function without state."""
    grouped = holdfast.stream(frame).groupBy("key")
    return grouped.applyInArrowWithState(job.stateless, job.output, job.state, "update", name=OPERATOR)


def spark_aggregation(frame: DataFrame, job: SparkJob) -> DataFrame:
    return frame.groupBy("key").agg(*job.aggregates())


def by_key(frame: DataFrame, job: DropIn) -> DataFrame:
    grouped = holdfast.stream(frame).groupBy("key")
    return grouped.applyInPandasWithState(one_key, job.output, job.state, "update", "NoTimeout", name=OPERATOR)


def spark_by_key(frame: DataFrame, job: DropIn) -> DataFrame:
    return frame.groupBy("key").applyInPandasWithState(one_key, job.output, job.state, "update", "NoTimeout")


def by_processor(frame: DataFrame, job: ByProcessor, *, in_pandas: bool) -> DataFrame:
    grouped, processor = holdfast.stream(frame).groupBy("key"), job.processor(in_pandas=in_pandas)
    method = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
    return method(processor, job.output, "update", job.time_mode, name=OPERATOR)


def spark_by_processor(frame: DataFrame, job: ByProcessor, *, in_pandas: bool) -> DataFrame:
    grouped, processor = frame.groupBy("key"), job.processor(in_pandas=in_pandas)
    method = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
    return method(processor, job.output, "update", job.time_mode)


def _count(_key: tuple[object, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    rows = sum(len(chunk) for chunk in chunks)
    before = state.get[0] if state.exists else 0
    state.update((before + rows,))
    yield pd.DataFrame({"n": [before + rows]})


def spark_counting(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Count the rows of one key per partition by Spark's ``applyInPandasWithState``, to show its fixed cost."""
    route = F.pmod(F.xxhash64("key"), F.lit(job.partitions)).cast("int")
    few = frame.select(route.alias("route"), *[name for name in frame.columns if name != "key"])
    return few.groupBy("route").applyInPandasWithState(_count, "n long", "n long", "update", "NoTimeout")


def live_bytes(local_dir: Path, backend_name: str, job: SparkJob) -> int:
    """Return the Arrow size of the live rows in the newest version of all shards of `with_state`."""
    from pyspark.sql.types import StructType

    from holdfast import clock
    from holdfast.backends.registry import find_backend
    from holdfast.spark_integration.shard.operator import STATE_TABLE
    from holdfast.spark_integration.spark_types import arrow_schema, parse_struct

    key = arrow_schema(StructType(parse_struct(job.output, "output").fields[:1]), "the key")
    table = TableSchema.of(STATE_TABLE, key, arrow_schema(parse_struct(job.state, "state"), "state"))
    total = 0
    for directory in local_dir.glob("holdfast-*/executor-*/**/shard-*"):
        with find_backend(backend_name)(directory, {STATE_TABLE: table}, clock.new_id) as backend:
            for pointer in backend.versions()[-1:]:
                with backend.view(pointer) as view:
                    total += sum(run.keys.nbytes + run.values.nbytes for run in view.scan(STATE_TABLE))
    return total


BACKENDS = ("memory", "filesystem", "rocksdb")
_STATE_STORE = "spark.sql.streaming.stateStore."
SPARK_ROCKSDB = {
    f"{_STATE_STORE}providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STATE_STORE}rocksdb.changelogCheckpointing.enabled": "true",
}
_SPARK_IN_HEAP = {
    f"{_STATE_STORE}providerClass": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
}


class Engine(ABC):
    """A way to run jobs of the class `runs`."""

    name: str
    runs: type[Job]

    @abstractmethod
    def run(self, job: Any, places: Places) -> Measured:
        """Run a job in this process, which runs nothing else."""


@dataclass(frozen=True)
class SparkEngine(Engine):
    """A Spark query whose state either holdfast or Spark keeps."""

    name: str
    query: Callable[[DataFrame, Any], DataFrame]  # takes the source and the job
    runs: type[Job]
    backend: str = ""  # holdfast's; empty if Spark keeps the state
    #: Settings of Spark's state store, which keeps holdfast's pointers if the query is a processor.
    state_store: Mapping[str, str] = field(default_factory=dict)
    table: str = ""  # the state table of counts and sums that a job can verify
    on_s3: bool = False  # whether commits go to S3, through a proxy that delays and counts requests
    output_mode: Callable[[Any], str] = lambda _: "update"

    def settings(self, job: StreamingJob, places: Places) -> dict[str, str]:
        settings = job.settings() | {"spark.local.dir": str(places.disk / "spark")} | dict(self.state_store)
        if self.backend:
            settings |= {
                "spark.holdfast.backend": self.backend,
                "spark.holdfast.state.dir": self._state_dir(job, places),
                "spark.holdfast.local.dir": str(self._local(places)),
            }
        if job.memory_mb is not None and self.backend == "rocksdb":
            settings["spark.holdfast.rocksdb.memory"] = f"{job.memory_mb}m"
        elif job.memory_mb is not None and not self.backend and self.state_store == SPARK_ROCKSDB:
            settings[f"{_STATE_STORE}rocksdb.boundedMemoryUsage"] = "true"
            settings[f"{_STATE_STORE}rocksdb.maxMemoryUsageMB"] = str(job.memory_mb)
        return settings

    def _state_dir(self, job: StreamingJob, places: Places) -> str:
        if self.on_s3:
            return f"{job.state_dir.rstrip('/')}/{places.disk.parent.name}"
        return f"file://{places.disk / 'holdfast'}"

    def _local(self, places: Places) -> Path:
        return places.memory if self.backend == "memory" else places.disk / "local"

    def _folders(self, job: StreamingJob, places: Places, storage: Callable[[], dict[str, float]]) -> StateFolders:
        if not self.backend:
            spark = places.disk / "spark"
            return StateFolders(lambda: spark.glob("spark-*/StateStoreId*"), places.checkpoint / "state")
        local, live = self._local(places), None
        # RocksDB's files cannot be opened while their owner has them open.
        if isinstance(job, SparkJob) and self.query is with_state and self.backend != "rocksdb":
            live = partial(live_bytes, local, self.backend, job)
        return StateFolders(lambda: [local], places.disk / "holdfast", live, storage)

    def run(self, job: StreamingJob, places: Places) -> Measured:
        settings = self.settings(job, places)
        storage: Callable[[], dict[str, float]] = dict
        with ExitStack() as stack:
            if job.executors:
                settings |= {
                    "spark.master": stack.enter_context(standalone_cluster(places.disk / "cluster", job.executors)),
                    "spark.cores.max": str(job.executors),
                    "spark.executor.cores": "1",
                    "spark.executor.memory": f"{EXECUTOR_MEMORY_MB}m",
                }
            if self.on_s3:
                store = stack.enter_context(delayed_store(job.latency_ms, server_of_environment()))
                os.environ |= store.environment  # for the workers and the state server, which this process starts
                stack.callback(_delete_all, settings["spark.holdfast.state.dir"])
                storage = lambda: store.so_far() | files_of_spark(places.checkpoint)  # noqa: E731
            measured = run_query(
                settings,
                lambda spark: self.query(job.source(spark), job),
                job,
                places,
                self._folders(job, places, storage),
                self.output_mode(job),
            )
        return replace(measured, equality=job.verify(settings, places, self.table, ours=bool(self.backend)))


def _delete_all(state_dir: str) -> None:
    with open_storage(state_dir) as storage:
        storage.delete([found.key for found in storage.list("")])


def files_of_spark(checkpoint: Path) -> dict[str, float]:
    """Return the number and size of the files in a checkpoint location, each a request on an object store."""
    # Hidden files are checksums, which only the local file system has.
    names = [name for _, _, of in os.walk(checkpoint) for name in of if not name.startswith(".")]
    return {"Spark: files": len(names), "Spark: bytes": folder_bytes(checkpoint, hidden=False)}


@dataclass(frozen=True)
class StoreEngine(Engine):
    """holdfast's store on one backend, without Spark."""

    name: str
    backend: str
    runs: type[Job] = StoreJob

    def run(self, job: StoreJob, places: Places) -> Measured:
        budget = {"memory": f"{job.memory_mb}m"} if job.memory_mb and self.backend == "rocksdb" else {}
        return job.measure(self.backend, budget, places)


def _each(made: Callable[[str], Engine]) -> list[Engine]:
    return [made(backend) for backend in BACKENDS]


def _by_processor(api: str) -> list[Engine]:
    ours, theirs = (partial(query, in_pandas=api == "pandas") for query in (by_processor, spark_by_processor))
    return [
        *_each(lambda on: SparkEngine(f"holdfast-{on}-{api}", ours, ByProcessor, on, SPARK_ROCKSDB, "total")),
        SparkEngine(f"spark-tws-{api}", theirs, ByProcessor, "", SPARK_ROCKSDB),
    ]


def _operator(name: str, ours: bool, backend: str = "") -> Engine:
    def query(events: DataFrame, job: Operators) -> DataFrame:
        return job.on_holdfast(events) if ours else job.on_spark(events)

    state_store = {} if ours else SPARK_ROCKSDB
    return SparkEngine(name, query, Operators, backend, state_store, output_mode=lambda job: job.output_mode)


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        *_each(lambda on: SparkEngine(f"holdfast-{on}", with_state, SparkJob, on, table="state")),
        *_each(lambda on: SparkEngine(f"holdfast-{on}-s3", with_state, SparkJob, on, on_s3=True)),
        SparkEngine("floor", without_state, SparkJob, "memory"),
        SparkEngine("spark-agg-rocksdb", spark_aggregation, SparkJob, "", SPARK_ROCKSDB, "state"),
        SparkEngine("spark-agg-hdfs", spark_aggregation, SparkJob, "", _SPARK_IN_HEAP),
        SparkEngine("spark-aiwps-count", spark_counting, SparkJob),
        *_each(lambda on: SparkEngine(f"pandas-{on}", by_key, DropIn, on, table="state")),
        SparkEngine("spark-pandas-rocksdb", spark_by_key, DropIn, "", SPARK_ROCKSDB),
        *_by_processor("row"),
        *_by_processor("pandas"),
        *_each(lambda on: _operator(f"operator-{on}", True, on)),
        _operator("spark-operator", False),
        *_each(lambda on: StoreEngine(f"store-{on}", on)),
    )
}
