"""Savepoints of a large state, in turns with a plain copy of the same objects.

::

    write once ──▶ savepoint ──restore──▶ query ──create──▶ savepoint
                       └──restore, 64 shards──▶ query
                       └──plain copy: get and put of each object, by as many threads as a task has──▶ objects

All is on one storage. A restore includes the query of one micro-batch which puts the pointers into Spark's state.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
import numpy as np
import pyarrow as pa

from holdfast import savepoints
from holdfast.benches.instruments.measured import Measured, Places
from holdfast.benches.instruments.store_watch import StoreWatch
from holdfast.benches.jobs.job import StoreJob, option
from holdfast.benches.jobs.rows import keys_of, table_of, values_of
from holdfast.benches.jobs.store.snapshots import serving, timed_ms
from holdfast.errors import CorruptionError
from holdfast.settings import PREFIX
from holdfast.snapshotter.storage.object_storage import ObjectInfo
from holdfast.snapshotter.storage.opening import open_storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COLUMNS = "key string, n long, total long, page string"
_THREADS = 8
_NAME = "bench"


@dataclass(frozen=True)
class Savepoints(StoreJob):
    """See the module."""

    name = "savepoints"

    rows: int = option(10_000_000, "keys in the state: 1 GB")
    keys: int = option(10_000_000, "the same")
    batches: int = option(3, "turns")
    warmup: int = option(1, "first of these, which are not counted")
    memory_mb: int | None = option(None, "not used", click.IntRange(1))
    value_bytes: int = option(92, "bytes of a value")
    partitions: int = option(2, "shards of the state")
    more_shards: int = option(64, "shards of the state when it is rescaled")
    state_dir: str | None = option(None, "where all of it is, as s3://bucket/bench; by default on local disk")
    serves: bool = option(False, "starts an S3 server with s3://bucket, unless the environment names one")

    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        """Make a savepoint of rows; then restore, create, rescale and copy it, again and again."""
        phases_ms, watch = [], StoreWatch()
        with serving(self.serves), session(places) as spark:
            root = f"{self.state_dir.rstrip('/')}/{places.disk.parent.name}" if self.state_dir else f"{places.disk}/all"
            turns = _Turns(self, spark, root, places)
            size_bytes = turns.write()
            for batch in range(self.batches):
                if batch == self.warmup:
                    watch.count_from_here()
                phases_ms.append(turns.run())
                watch.look(size_bytes)
        restore_ms = [phases["restore"] for phases in phases_ms]
        return watch.measured(phases_ms, restore_ms, {"backend": backend_name, **options})


class _Turns:
    """One savepoint, and what is made of it in each turn."""

    def __init__(self, job: Savepoints, spark: SparkSession, root: str, places: Places) -> None:
        self._job, self._spark, self._root, self._places = job, spark, root, places
        self._target = f"{root}/savepoints"

    def write(self) -> int:
        """Make the savepoint; return its size in bytes."""
        job = self._job
        frame = rows_of(self._spark, job.rows, job.value_bytes)
        made = savepoints.write(frame, self._target, _NAME, "bench", keys="key", shards=job.partitions)
        self._require_whole(made)
        return made.size_bytes

    def run(self) -> dict[str, float]:
        """Do each thing once; return what each took. What was made is removed."""
        shards = self._job.more_shards
        taken_ms = {
            "restore": self._restored_ms("same", None),
            "create": timed_ms(self._create),
            f"restore into {shards} shards": self._restored_ms("more", shards),
            "plain copy": self._copied_ms(),
        }
        self._clean()
        return taken_ms

    def _restored_ms(self, name: str, shards: int | None) -> float:
        self._spark.conf.set(f"{PREFIX}state.dir", f"{self._root}/state-{name}")
        location = self._places.disk / f"query-{name}"
        return timed_ms(lambda: savepoints.restore(self._spark, self._target, _NAME, location, shards=shards))

    def _create(self) -> None:
        self._spark.conf.set(f"{PREFIX}state.dir", f"{self._root}/state-same")
        location = self._places.disk / "query-same"
        self._require_whole(savepoints.create(self._spark, location, self._target, "again"))

    def _require_whole(self, made: savepoints.Savepoint) -> None:
        found = made.operators[0].rows["state"]
        if found != self._job.rows:
            raise CorruptionError("the savepoint does not hold the rows", found=found, rows=self._job.rows)

    def _copied_ms(self) -> float:
        with open_storage(f"{self._target}/{_NAME}") as source, open_storage(f"{self._root}/copy") as copy:

            def copied(info: ObjectInfo) -> None:
                copy.put(info.key, source.get(info.key, info.size_bytes))

            with ThreadPoolExecutor(_THREADS) as threads:
                return timed_ms(lambda: list(threads.map(copied, source.list(""))))

    def _clean(self) -> None:
        savepoints.delete(self._target, "again")
        for name in ("state-same", "state-more", "copy"):
            with open_storage(f"{self._root}/{name}") as storage:
                storage.delete([info.key for info in storage.list("")])
        for name in ("same", "more"):
            shutil.rmtree(self._places.disk / f"query-{name}")


@contextmanager
def session(places: Places) -> Iterator[SparkSession]:
    """Yield a session of two slots, which keeps what is on disk in the run's places."""
    from pyspark.sql import SparkSession

    from holdfast.spark_integration.java import ensure_java

    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("holdfast bench").master("local[2]")
    for name, value in {
        "spark.driver.memory": "4g",
        "spark.local.dir": str(places.disk / "spark"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        f"{PREFIX}local.dir": str(places.disk / "local"),
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def rows_of(spark: SparkSession, rows: int, value_bytes: int) -> DataFrame:
    """Return keys and values as `holdfast.benches.jobs.rows` makes them, the same whenever they are computed."""

    def made(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = table_of(value_bytes)
        for batch in batches:
            numbers = batch.column(0).to_numpy()
            keys = keys_of(table, numbers).columns
            values = values_of(table, len(numbers), value_bytes, np.random.default_rng(int(numbers[0])))
            columns = [column.cast(pa.string()) if column.type == pa.large_string() else column for column in values]
            yield pa.record_batch([keys.column(0).cast(pa.string()), *columns], ["key", *values.schema.names])

    return spark.range(rows, numPartitions=2).mapInArrow(made, _COLUMNS)
