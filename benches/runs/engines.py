"""The engines that can be compared: each runs a job its own way and returns what was measured.

A new engine is a subclass of `Engine` in `ENGINES`, or in a table of its own that `holdfast.benches.runs.by_name` adds.
It runs in a fresh process (`holdfast.benches.runs.child`), with a directory of its own on disk and one in RAM; both are
removed afterwards.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.benches.instruments.delayed_store import DelayedStore
from holdfast.benches.instruments.measured import Measured, Places
from holdfast.benches.instruments.standalone_cluster import EXECUTOR_MEMORY_MB, standalone_cluster
from holdfast.benches.jobs.by_key import JobByKey
from holdfast.benches.jobs.by_processor import ByProcessor
from holdfast.benches.jobs.job import Job, SparkJob, StoreJob, StreamingJob
from holdfast.benches.jobs.job_a import JobAOnCluster
from holdfast.benches.jobs.requests import DurableJob, files_of_spark, server_of_environment
from holdfast.benches.runs import queries
from holdfast.snapshotter.storage.opening import open_storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STATE_STORE = "spark.sql.streaming.stateStore."
SPARK_ROCKSDB = {
    f"{_STATE_STORE}providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STATE_STORE}rocksdb.changelogCheckpointing.enabled": "true",
}
_SPARK_IN_HEAP = {
    f"{_STATE_STORE}providerClass": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
}
SPARK_ROCKSDB_BUDGET = {
    f"{_STATE_STORE}rocksdb.boundedMemoryUsage": "true",
    f"{_STATE_STORE}rocksdb.maxMemoryUsageMB": "{mb}",
}


class Engine(ABC):
    """One way to run jobs of a kind.

    Attributes
    ----------
    runs : type
        Of the jobs.
    """

    name: str
    runs: ClassVar[type[Job]]

    @abstractmethod
    def run(self, job: Job, places: Places) -> Measured:
        """Run the job in this process, which runs nothing else."""


@dataclass(frozen=True)
class SparkEngine(Engine):
    """A query in a local Spark.

    Attributes
    ----------
    name : str
    query : callable
        Takes the source and the job, returns the frame to write.
    state_settings : dict
        Spark settings that say how state is kept.
    budget : dict
        Spark settings that bound the memory, where the job does; ``{mb}`` stands for the MiB.
    """

    name: str
    query: Callable[[DataFrame, Any], DataFrame]
    state_settings: Mapping[str, str] = field(default_factory=dict)
    budget: Mapping[str, str] = field(default_factory=dict)
    runs: ClassVar[type[Job]] = SparkJob

    def settings(self, job: StreamingJob, places: Places) -> dict[str, str]:
        """Return every Spark setting of a run."""
        settings = job.settings() | {"spark.local.dir": str(places.disk / "spark")} | dict(self.state_settings)
        if job.memory_mb is not None:
            settings |= {key: value.format(mb=job.memory_mb) for key, value in self.budget.items()}
        return settings

    def local_state(self, places: Places) -> list[Path]:
        """Return the folders of the working state, as far as they are there."""
        return list((places.disk / "spark").glob("spark-*/StateStoreId*"))

    def durable_state(self, places: Places) -> list[Path]:
        """Return the folders from which the state is restored."""
        return [places.checkpoint / "state"]

    def live_bytes(self, job: StreamingJob, places: Places) -> int | None:
        """Return the Arrow size of the live state after a run, or None where that is not measured."""
        return None

    def output_mode(self, job: StreamingJob) -> str:
        """Return the output mode of the query."""
        return "update"

    def run(self, job: Job, places: Places) -> Measured:
        return self.measure(job, places)

    def measure(
        self,
        job: Job,
        places: Places,
        storage: Callable[[], dict[str, float]] = dict,
        more_settings: Mapping[str, str] = MappingProxyType({}),
    ) -> Measured:
        """Run the job in this process.

        Parameters
        ----------
        storage : callable
            Tells what was asked of the durable storage so far.
        more_settings : mapping of str to str
            Spark settings of this run alone.
        """
        from holdfast.benches.runs.spark_run import StateFolders, run_query

        assert isinstance(job, StreamingJob)
        folders = StateFolders(
            lambda: self.local_state(places),
            lambda: self.durable_state(places),
            lambda: self.live_bytes(job, places),
            storage,
        )
        settings = self.settings(job, places) | dict(more_settings)
        return run_query(
            settings,
            lambda spark: self.query(job.source(spark), job),
            job,
            places,
            folders,
            self.output_mode(job),
        )


@dataclass(frozen=True)
class HoldfastEngine(SparkEngine):
    """A query whose state holdfast keeps: commits durable on local disk, local state in RAM or on disk.

    Attributes
    ----------
    backend : str
    in_memory : bool
        Whether local state goes to RAM, as `Backend.in_memory` says.
    """

    backend: str = "memory"
    in_memory: bool = False

    def settings(self, job: StreamingJob, places: Places) -> dict[str, str]:
        settings = super().settings(job, places) | {
            "spark.holdfast.backend": self.backend,
            "spark.holdfast.state.dir": f"file://{places.disk / 'holdfast'}",
            "spark.holdfast.local.dir": str(self._local(places)),
        }
        return settings | ({"spark.holdfast.transport": job.transport} if job.transport is not None else {})

    def _local(self, places: Places) -> Path:
        return places.memory if self.in_memory else places.disk / "local"

    def local_state(self, places: Places) -> list[Path]:
        return [self._local(places)]

    def durable_state(self, places: Places) -> list[Path]:
        return [places.disk / "holdfast"]

    def live_bytes(self, job: StreamingJob, places: Places) -> int | None:
        from holdfast.backends.registry import find_backend

        assert isinstance(job, SparkJob)
        if job.time_mode != "None" or job.ttl_ms is not None:
            return None  # timers and expiry times are state too
        backend = find_backend(self.backend)
        # One that has an owner cannot be opened beside it.
        return None if backend.has_one_owner else queries.live_bytes(self._local(places), backend, job)


@dataclass(frozen=True)
class ByKeyEngine(HoldfastEngine):
    """The same, for functions that see one key at a time."""

    runs = JobByKey

    def live_bytes(self, job: StreamingJob, places: Places) -> int | None:
        return None  # timers are state too


@dataclass(frozen=True)
class SparkByKeyEngine(SparkEngine):
    """Spark's own state under functions that see one key at a time."""

    runs = JobByKey


@dataclass(frozen=True)
class ProcessorEngine(ByKeyEngine):
    """The same, for processors."""

    runs = ByProcessor


@dataclass(frozen=True)
class SparkProcessorEngine(SparkEngine):
    """Spark's own state under processors."""

    runs = ByProcessor


@dataclass(frozen=True)
class CountedEngine(HoldfastEngine):
    """The same, but commits are durable on S3, and all requests are delayed and counted on their way."""

    runs = DurableJob

    def settings(self, job: StreamingJob, places: Places) -> dict[str, str]:
        return super().settings(job, places) | {"spark.holdfast.state.dir": self._checkpoint(job, places)}

    def _checkpoint(self, job: StreamingJob, places: Places) -> str:
        assert isinstance(job, DurableJob)
        return f"{job.state_dir.rstrip('/')}/{places.disk.parent.name}"

    def durable_state(self, places: Places) -> list[Path]:
        return []

    def run(self, job: Job, places: Places) -> Measured:
        assert isinstance(job, DurableJob)
        with DelayedStore(job.latency_ms, server_of_environment()) as store:
            os.environ |= store.environment  # for the workers and the state server, which this process starts
            try:
                return self.measure(job, places, lambda: store.so_far() | files_of_spark(places.checkpoint))
            finally:
                with open_storage(self._checkpoint(job, places)) as storage:
                    storage.delete([found.key for found in storage.list("")])


@dataclass(frozen=True)
class ClusterEngine(HoldfastEngine):
    """A query on a standalone cluster of its own, whose executors share the local directory, as they may."""

    runs = JobAOnCluster

    def run(self, job: Job, places: Places) -> Measured:
        assert isinstance(job, JobAOnCluster)
        with standalone_cluster(places.disk / "cluster", job.executors) as master:
            of_cluster = {
                "spark.master": master,
                "spark.cores.max": str(job.executors),
                "spark.executor.cores": "1",
                "spark.executor.memory": f"{EXECUTOR_MEMORY_MB}m",
            }
            return self.measure(job, places, more_settings=of_cluster)


@dataclass(frozen=True)
class StoreEngine(Engine):
    """The store on one backend, without Spark.

    Attributes
    ----------
    name : str
    backend : str
    budget : dict
        As for `SparkEngine`, but options of the backend.
    """

    name: str
    backend: str
    budget: Mapping[str, str] = field(default_factory=dict)
    runs = StoreJob

    def run(self, job: Job, places: Places) -> Measured:
        assert isinstance(job, StoreJob)
        options = {key: value.format(mb=job.memory_mb) for key, value in self.budget.items()} if job.memory_mb else {}
        return job.measure(self.backend, options, places)


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        HoldfastEngine("holdfast-memory", queries.with_state, backend="memory", in_memory=True),
        HoldfastEngine("holdfast-filesystem", queries.with_state, backend="filesystem"),
        HoldfastEngine(
            "holdfast-rocksdb", queries.with_state, budget={"spark.holdfast.rocksdb.memory": "{mb}m"}, backend="rocksdb"
        ),
        HoldfastEngine("floor", queries.without_state, in_memory=True),
        HoldfastEngine("host-group-state", queries.in_group_state, in_memory=True),
        HoldfastEngine("host-group-state-rocksdb", queries.in_group_state, SPARK_ROCKSDB, in_memory=True),
        HoldfastEngine("host-stateful-processor", queries.in_stateful_processor, SPARK_ROCKSDB, in_memory=True),
        SparkEngine(
            "spark-agg-rocksdb",
            queries.spark_aggregation,
            SPARK_ROCKSDB,
            SPARK_ROCKSDB_BUDGET,
        ),
        SparkEngine("spark-agg-hdfs", queries.spark_aggregation, _SPARK_IN_HEAP),
        ByKeyEngine("pandas-memory", queries.by_key, backend="memory", in_memory=True),
        ByKeyEngine("pandas-filesystem", queries.by_key, backend="filesystem"),
        ByKeyEngine(
            "pandas-rocksdb", queries.by_key, budget={"spark.holdfast.rocksdb.memory": "{mb}m"}, backend="rocksdb"
        ),
        SparkByKeyEngine("spark-pandas-rocksdb", queries.spark_by_key, SPARK_ROCKSDB, SPARK_ROCKSDB_BUDGET),
        *(
            ProcessorEngine(
                f"holdfast-{backend}-{api}",
                partial(queries.by_processor, in_pandas=api == "pandas"),
                SPARK_ROCKSDB,  # for the pointers, as Spark's operator requires
                budget={"spark.holdfast.rocksdb.memory": "{mb}m"} if backend == "rocksdb" else {},
                backend=backend,
                in_memory=backend == "memory",
            )
            for backend in ("memory", "filesystem", "rocksdb")
            for api in ("row", "pandas")
        ),
        *(
            SparkProcessorEngine(
                f"spark-tws-{api}",
                partial(queries.spark_by_processor, in_pandas=api == "pandas"),
                SPARK_ROCKSDB,
                SPARK_ROCKSDB_BUDGET,
            )
            for api in ("row", "pandas")
        ),
        CountedEngine("holdfast-memory-s3", queries.with_state, backend="memory", in_memory=True),
        CountedEngine("holdfast-filesystem-s3", queries.with_state, backend="filesystem"),
        CountedEngine(
            "holdfast-rocksdb-s3",
            queries.with_state,
            budget={"spark.holdfast.rocksdb.memory": "{mb}m"},
            backend="rocksdb",
        ),
        ClusterEngine("holdfast-memory-cluster", queries.with_state, backend="memory", in_memory=True),
        SparkEngine("spark-aiwps-count", queries.spark_counting),
        StoreEngine("store-memory", "memory"),
        StoreEngine("store-filesystem", "filesystem"),
        StoreEngine("store-rocksdb", "rocksdb", {"memory": "{mb}m"}),
    )
}
