"""A sink's two ways in, each as a query that runs: ``foreachBatch``, and a data source, which begins anew each time.

What counts is the time of Spark's whole trigger: planning, in which the data source starts a process and its
coordinator, the tasks, and the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import sinks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

#: Writes the rows of one micro-batch, and returns the ms that it took.
Way = Callable[["DataFrame"], float]


class _Running:
    """A query that reads what is put into its folder."""

    def __init__(self, query: StreamingQuery, folder: Path, kept: Path) -> None:
        self._query, self._folder, self._kept = query, folder, kept
        self._batches = 0

    def write(self, rows: DataFrame) -> float:
        """Let the query write rows as its next micro-batch."""
        files = self._kept / str(rows.count())
        if not files.exists():
            rows.write.parquet(str(files))
        self._batches += 1
        ready = self._folder.with_name("ready")
        ready.mkdir(exist_ok=True)
        for number, path in enumerate(sorted(files.glob("*.parquet"))):
            # One folder more, which is there at once: a micro-batch takes what it finds.
            (ready / f"{self._batches:06}-{number}.parquet").hardlink_to(path)
        ready.rename(self._folder / f"{self._batches:06}")
        self._query.processAllAvailable()
        progress = [each for each in self._query.recentProgress if each["numInputRows"]]
        return float(progress[-1]["durationMs"]["triggerExecution"])


@contextmanager
def running(spark: SparkSession, example: DataFrame, disk: Path) -> Iterator[dict[str, Way]]:
    """Yield both ways into a Delta table, while their queries run."""
    sink = {name: sinks.delta(f"bench-{name}", f"{disk}/{name}", create=True) for name in ("query", "source")}

    def as_function(writer: DataStreamWriter) -> DataStreamWriter:
        return writer.foreachBatch(sinks.exactly_once(sink["query"]))

    def as_source(writer: DataStreamWriter) -> DataStreamWriter:
        options = sinks.source_options(spark, sink["source"])
        given = {"name": "bench-source", "path": f"{disk}/source", "create": "true"}
        return writer.format("holdfast-delta").options(**options).options(**given)

    with ExitStack() as stack:
        ways: dict[str, Way] = {}
        reader = spark.readStream.schema(example.schema).option("recursiveFileLookup", "true")
        for name, into in {"delta, in a query": as_function, "delta, as a data source": as_source}.items():
            place = disk / name.replace(", ", "-").replace(" ", "-")
            (place / "input").mkdir(parents=True)
            rows = reader.parquet(str(place / "input"))
            query = into(rows.writeStream).option("checkpointLocation", str(place / "location")).start()
            stack.callback(query.stop)
            ways[name] = _Running(query, place / "input", disk / "kept").write
        yield ways
