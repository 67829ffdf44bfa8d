"""The engines that can be compared: each runs job A its own way and returns what was measured.

A new engine is a subclass of `Engine` in `ENGINES`. It runs in a fresh process (`holdfast.benches.child`), with a
directory of its own on disk and one in RAM; both are removed afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.benches import job_a
from holdfast.benches.job_a import Job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


@dataclass(frozen=True)
class Places:
    """Where a run may write.

    Attributes
    ----------
    disk : pathlib.Path
        Checkpoints and Spark's own local files.
    memory : pathlib.Path
        Local state in RAM where the machine has room for it.
    profile : pathlib.Path or None
        Where workers leave their spans; None does not profile.
    """

    disk: Path
    memory: Path
    profile: Path | None = None


@dataclass(frozen=True)
class Measured:
    """What one run yields; JSON values.

    Attributes
    ----------
    batch_ms : list of int
        Every micro-batch, warm-up included.
    phases_ms : list of dict
        Of each micro-batch, what Spark's progress says of its parts.
    cpu : dict
        Over the counted micro-batches: seconds by kind of process, and of the wall.
    settings : dict
        All Spark settings of the run.
    state_bytes : dict or None
        ``live_arrow``, ``local_peak``, ``local_final``, ``ratio`` and the sizes after each micro-batch.
    """

    batch_ms: list[int]
    phases_ms: list[dict[str, int]]
    cpu: dict[str, float]
    settings: dict[str, str]
    state_bytes: dict[str, Any] | None = None


class Engine(ABC):
    """One way to run job A."""

    name: str

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
    settings : dict
        Spark settings besides the base.
    holdfast : bool
        Whether ``spark.holdfast.*`` is set: durable commits on local disk, local state in its default place.
    live_bytes : callable or None
        Takes the local state's directory, returns the Arrow size of the live state.
    """

    name: str
    query: Callable[[DataFrame, Job], DataFrame]
    settings: dict[str, str] = field(default_factory=dict)
    holdfast: bool = False
    live_bytes: Callable[[Path], int] | None = None

    def all_settings(self, job: Job, places: Places) -> dict[str, str]:
        """Return every Spark setting of a run."""
        settings = job.base_settings() | {"spark.local.dir": str(places.disk / "spark")} | self.settings
        if self.holdfast:
            settings["spark.holdfast.checkpoint.dir"] = f"file://{places.disk / 'holdfast'}"
            settings["spark.holdfast.local.dir"] = str(places.memory)
            if job.transport is not None:
                settings["spark.holdfast.transport"] = job.transport
        return settings

    def run(self, job: Job, places: Places) -> Measured:
        from holdfast.benches.spark_run import run_query

        live_bytes = self.live_bytes
        return run_query(
            self.all_settings(job, places),
            lambda spark: self.query(job_a.source(spark, job), job),
            job,
            places,
            (lambda: live_bytes(places.memory)) if live_bytes else None,
        )


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        SparkEngine(
            "holdfast-memory",
            job_a.holdfast_query,
            {"spark.holdfast.backend": "memory"},
            holdfast=True,
            live_bytes=job_a.live_state_bytes,
        ),
        SparkEngine("floor", job_a.floor_query, holdfast=True),
        SparkEngine("spark-agg-rocksdb", job_a.spark_aggregation, _ROCKSDB),
        SparkEngine("spark-aiwps-count", job_a.spark_counting),
    )
}
