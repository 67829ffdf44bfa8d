"""What metrics cost: of a micro-batch, and of one call of a shard.

::

    in a query   two queries of one session, with their metrics in the progress and without, whose micro-batches take
                 turns: the median of the ratios of turns, of their time and of the CPU time of Spark and its workers
    of a call    what measuring itself adds to a call of a shard, which has no switch: CPU time of its parts

Run ``python -m holdfast.benches.micro.metrics [--rows N] [--turns N] [--backend NAME]``.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.benches.jobs.job_a import JobA
from holdfast.mvcc.measures import Measures
from holdfast.spark_integration.client.measures import CallMeasures
from holdfast.spark_integration.transport.observed import ObservedOutput
from holdfast.spark_integration.transport.output import PackedOutput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_ROUNDS = 200
_SCHEMA = TableSchema.of("state", pa.schema([("key", pa.int64())]), pa.schema([("n", pa.int64())]))
#: A shard as its size is asked for: two tables, as of a function with timers.
_SIZE_ROWS = 100_000
_TABLES = {name: TableSchema.of(name, _SCHEMA.key, _SCHEMA.value) for name in ("state", "timers")}


class _Turns:
    """Two queries over files of their own, each with a micro-batch in each turn."""

    def __init__(self, spark: SparkSession, folder: Path, job: JobA) -> None:
        self._folder = folder
        self._job = job
        self._queries = {name: self._started(spark, name) for name in ("true", "false")}

    def _started(self, spark: SparkSession, in_progress: str) -> StreamingQuery:
        from holdfast.spark_integration.stream import stream

        spark.conf.set("spark.holdfast.metrics.inProgress", in_progress)
        (self._folder / in_progress).mkdir()
        source = spark.readStream.schema("key long, v long").parquet(str(self._folder / in_progress))
        totals = (
            stream(source)
            .groupBy("key")
            .applyInArrowWithState(self._job.stateful, self._job.output, self._job.state, "update", name=in_progress)
        )
        writer = totals.writeStream.format("noop").outputMode("update")
        return writer.option("checkpointLocation", str(self._folder / f"query-{in_progress}")).start()

    def turn(self, number: int) -> dict[str, tuple[float, float]]:
        """Run a micro-batch of each; the one that begins takes turns, too."""
        rng = np.random.default_rng(number)
        keys, values = (rng.integers(0, top, self._job.rows) for top in (self._job.keys, 100))
        pq.write_table(pa.table({"key": keys, "v": values}), self._folder / "new")
        took = {}
        for name in sorted(self._queries, reverse=bool(number % 2)):
            before_ms = _cpu_ms()
            os.link(self._folder / "new", self._folder / name / f"{number}.parquet")
            self._queries[name].processAllAvailable()
            progress: Any = next(p for p in reversed(self._queries[name].recentProgress) if p["numInputRows"])
            took[name] = float(progress["durationMs"]["triggerExecution"]), _cpu_ms() - before_ms
        (self._folder / "new").unlink()
        return took

    def stop(self) -> None:
        """Stop both."""
        for query in self._queries.values():
            query.stop()


def _in_a_query(job: JobA, turns: int, warm_up: int, backend: str, folder: Path) -> None:
    from pyspark.sql import SparkSession

    from holdfast.spark_integration.java import ensure_java

    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(job.partitions),
        "spark.holdfast.backend": backend,
        "spark.holdfast.transport": job.transport or "packed",
        "spark.holdfast.state.dir": str(folder / "durable"),
        "spark.holdfast.local.dir": str(folder / "local"),
    }
    builder = SparkSession.builder.appName("holdfast bench")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    running = _Turns(spark, folder, job)
    took = [running.turn(number) for number in range(warm_up + turns)][warm_up:]
    running.stop()
    spark.stop()
    for at, what in enumerate(("time", "CPU time")):
        ratios = [turn["true"][at] / turn["false"][at] for turn in took]
        low, middle, high = statistics.quantiles(ratios, n=4)
        error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
        without_ms = statistics.median(turn["false"][at] for turn in took)
        print(
            f"{job.rows:9,} rows, {job.partitions} shards, {backend}, {what}: {without_ms:7.0f} ms without, "
            f"ratio {middle:.4f} ± {error:.4f} (quartiles {low:.3f} to {high:.3f}, {len(ratios)} turns)"
        )


def _cpu_ms() -> float:
    """Return the CPU time of Spark and its workers so far."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return 1000 * sum(found.user + found.system for found in times)


def _of_a_call(keys: int, folder: Path) -> None:
    numbers = np.sort(np.random.default_rng(1).integers(0, 1 << 63, keys, np.int64).view(np.uint64))
    given = Keys.of(_SCHEMA, numbers, pa.table({"key": pa.array(numbers.view(np.int64))}))
    run = Run.build(_SCHEMA, given, pa.record_batch({"n": pa.array(numbers.view(np.int64))}))
    half = given.take(np.arange(0, keys, 2))
    output = ObservedOutput.of(PackedOutput(StructType().add("key", "long"), 10_000), "holdfast.totals")
    values = CallMeasures(0, *range(12))

    def counted(keys: Keys) -> None:
        measures = Measures()
        measures.looked_up("state", keys, np.ones(len(keys), np.bool_))
        measures.written({"state": run}, is_first=False)

    with ExitStack() as opened:
        sizes = {}
        for backend_class in (MemoryBackend, RocksDBBackend):
            backend = opened.enter_context(backend_class(folder / backend_class.__name__, _TABLES, clock.new_id))
            backend.apply(None, Pointer(1, "a"), {table: _many(table) for table in _TABLES}, {})
            sizes[f"the shard's size, {backend_class.__name__}, {len(_TABLES)} tables"] = backend.statistics
        parts: dict[str, Callable[[], object]] = {
            f"rows counted, {keys:,} looked up and written": lambda: counted(given),
            f"rows counted, every other of {keys:,}": lambda: counted(half),
            "the row beside the output": lambda: list(output.send_measures(values)),
        }
        for what, part in (parts | sizes).items():
            print(f"{_cpu_us(part):9.1f} µs  {what}")


def _many(table: str) -> Run:
    numbers = np.sort(np.random.default_rng(1).integers(0, 1 << 63, _SIZE_ROWS, np.int64).view(np.uint64))
    keys = Keys.of(_TABLES[table], numbers, pa.table({"key": pa.array(numbers.view(np.int64))}))
    return Run.build(_TABLES[table], keys, pa.record_batch({"n": pa.array(numbers.view(np.int64))}))


def _cpu_us(part: Callable[[], object]) -> float:
    found = []
    for _ in range(_ROUNDS):
        started_ns = time.process_time_ns()
        part()
        found.append(time.process_time_ns() - started_ns)
    return statistics.median(found) / 1000


@click.command()
@click.option("--rows", default=1000, help="of a micro-batch")
@click.option("--keys", default=1_000_000, help="of which the rows are")
@click.option("--turns", default=60)
@click.option("--warm-up", default=20, help="turns that do not count")
@click.option("--shards", default=2)
@click.option("--transport", default="rows", type=click.Choice(["packed", "rows"]))
@click.option("--backend", default="memory")
def main(rows: int, keys: int, turns: int, warm_up: int, shards: int, transport: str, backend: str) -> None:
    """Measure, and print."""
    job = JobA(rows=rows, keys=keys, partitions=shards, transport=transport)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder, suppress(KeyboardInterrupt):
        _of_a_call(max(1, min(rows, keys) // shards), Path(folder))
        _in_a_query(job, turns, warm_up, backend, Path(folder))


if __name__ == "__main__":
    main()
