"""A small run that compares the results of engines before they are measured.

Operators in one line must emit the same rows in each micro-batch. Nexmark queries must find what SQL finds over the
same events as whole tables; in append mode each result must appear once, in update mode the last one counts::

    micro-batch   0 … b-1               b                        b+1
                  the events            50 events a day later    50 more: emits what the watermark has passed
                  └─ immediate results ─┘
                  └─ results that wait for the watermark ────────────┘
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from holdfast.benches.instruments.measured import Places
from holdfast.benches.instruments.spark import session
from holdfast.benches.jobs.by_name import read_job
from holdfast.benches.jobs.job import StreamingJob
from holdfast.benches.jobs.operators import Operators
from holdfast.benches.nexmark.events import AUCTION, BID, CYCLE, PERSON, events, of_kind
from holdfast.benches.nexmark.job import Nexmark
from holdfast.benches.nexmark.query import Query
from holdfast.benches.runs.by_name import ENGINES
from holdfast.benches.runs.child_process import call_in_child
from holdfast.benches.runs.engines import SparkEngine

_LOOK_EVERY_S = 0.05
_LIMIT_S = 900.0
_LATER_S = 86_400
_WAITING = 5_000
_VIEWS = {"person": PERSON, "auction": AUCTION, "bid": BID}

Result = dict[tuple[Any, ...], tuple[Any, ...]]


def small(job: Nexmark, rows: int = 10_000, batches: int = 4) -> Nexmark:
    """Return a run whose micro-batches span 20 s of event time: several windows, sessions and auctions end in each."""
    return replace(job, rows=rows, batches=batches, warmup=0, per_second=rows // 20)


def checked(job: Operators | Nexmark, engines: Sequence[str]) -> dict[str, Any]:
    """Compare engines on a small run of a job, in a fresh process.

    Returns ``what`` was compared, the number of result ``rows``, whether all are ``equal``, and if not, the
    ``differences`` by engine: their number and the first one.
    """
    if isinstance(job, Nexmark):
        stored = small(job).stored()
    else:
        few = replace(job, rows=min(job.rows, 2_000), keys=min(job.keys, 1_000), batches=6, warmup=0)
        if job.waiting:  # keeps the number of rows per key
            few = replace(few, waiting=_WAITING, keys=job.keys * _WAITING // job.waiting)
        stored = few.stored()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True) as folder:
        arguments = stored, list(engines), folder
        what, function = f"a comparison of {', '.join(engines)}", f"{__name__}:_compared"
        found: dict[str, Any] = call_in_child(what, function, *arguments, folders=[Path(folder)], limit_s=_LIMIT_S)
    return found


def _compared(stored: Mapping[str, Any], engines: Sequence[str], folder: str) -> dict[str, Any]:
    job, home = read_job(stored), Path(folder)
    assert isinstance(job, Operators | Nexmark)
    spark = session(_engine(engines[0]).settings(job, Places(home, home)))
    if isinstance(job, Nexmark):
        found = compare(spark, job, engines, home)
    else:
        found = _compare_operators(spark, job, engines, home)
    spark.stop()
    return found


def _engine(name: str) -> SparkEngine:
    found = ENGINES[name]
    assert isinstance(found, SparkEngine)
    return found


def _compare_operators(spark: SparkSession, job: Operators, engines: Sequence[str], folder: Path) -> dict[str, Any]:
    """Compare each engine's rows, by micro-batch, with those of the first engine."""
    found = {}
    for name in engines:
        batches = shown(spark, _engine(name), job.source(spark), job, folder / name, job.batches, {})
        found[name] = rows_by_batch(batches, job.compared)
    what = f"{job.operator} in {job.batches} micro-batches of {job.rows} rows: {', '.join(engines)}"
    return {"what": what} | verdict(found[engines[0]], found)


def compare(
    spark: SparkSession, job: Nexmark, engines: Sequence[str], folder: Path, settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Compare engines with SQL over whole tables, in a running session; returns what `checked` does."""
    found = {name: computed(spark, job, name, folder / name, settings or {}) for name in engines}
    what = f"query {job.query} over {job.rows * job.batches} events: {', '.join(engines)}, and SQL over whole tables"
    return {"what": what} | verdict(expected(spark, job), found)


def shown(
    spark: SparkSession,
    engine: SparkEngine,
    rows: DataFrame,
    job: StreamingJob,
    folder: Path,
    batches: int,
    settings: Mapping[str, str],
) -> list[list[dict[str, Any]]]:
    """Return the rows that an engine emits in its first micro-batches, in a running session."""
    places = Places(folder / "disk", folder / "memory")
    for place in (places.disk, places.memory):
        place.mkdir(parents=True)
    found: list[list[dict[str, Any]]] = []
    with _configured(spark, engine.settings(job, places) | dict(settings)):
        writer = engine.query(rows, job).writeStream.foreachBatch(lambda frame, _: found.append(rows_of(frame)))
        mode = engine.output_mode(job)
        started = writer.outputMode(mode).option("checkpointLocation", str(places.checkpoint)).start()
        try:
            while len(found) < batches:
                # Not checked after the stop, which can fail a later micro-batch.
                if (failure := started.exception()) is not None:
                    raise failure
                time.sleep(_LOOK_EVERY_S)
        finally:
            started.stop()
    return found[:batches]


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return found


@contextmanager
def _configured(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set what a running session lets us set, and restore it afterwards."""
    before = {name: spark.conf.get(name, None) for name in settings if spark.conf.isModifiable(name)}
    before |= {name: None for name in settings if name.startswith("spark.holdfast.")}
    for name in before:
        spark.conf.set(name, settings[name])
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def rows_by_batch(batches: Sequence[Sequence[Mapping[str, Any]]], columns: Sequence[str] = ()) -> Result:
    """Count each row in each micro-batch, by these columns or all."""
    rows = (
        (batch, repr({name: row[name] for name in columns or row})) for batch, of in enumerate(batches) for row in of
    )
    return {row: (n,) for row, n in Counter(rows).items()}


def verdict(right: Result, found: Mapping[str, Result]) -> dict[str, Any]:
    """Return what `checked` does, without ``what``; results are not equal if there are none."""
    differences = {}
    for name, result in found.items():
        differs = sorted(key for key in {*right, *result} if right.get(key) != result.get(key))
        if differs:
            first = repr({differs[0]: result.get(differs[0])})
            differences[name] = {"results": len(differs), "first": first, "right": repr(right.get(differs[0]))}
    equality = {"rows": len(right), "equal": bool(right) and not differences}
    return equality | ({"differences": differences} if differences else {})


def expected(spark: SparkSession, job: Nexmark) -> Result:
    """Return the query's results by SQL over whole tables."""
    numbers = spark.range(job.rows * job.batches).withColumnRenamed("id", "number")
    tables = events(numbers, job.mix).cache()
    try:
        for view, kind in _VIEWS.items():
            of_kind(tables, kind).createOrReplaceTempView(view)
        return results(job.asked, [rows_of(spark.sql(job.asked.sql))])
    finally:
        for view in _VIEWS:
            spark.catalog.dropTempView(view)
        tables.unpersist()


def computed(spark: SparkSession, job: Nexmark, engine: str, folder: Path, settings: Mapping[str, str]) -> Result:
    chosen = _engine(engine)
    batches = job.batches if job.asked.at_once else job.batches + 2
    found = shown(spark, chosen, events(_with_an_end(job, spark), job.mix), job, folder, batches, settings)
    return results(job.asked, found, once=chosen.output_mode(job) == "append")


def _with_an_end(job: Nexmark, spark: SparkSession) -> DataFrame:
    """Let event time jump after the last micro-batch that counts, so that the watermark passes all earlier events."""
    end, cycle = job.rows * job.batches, CYCLE * job.mix.group
    later = _LATER_S * job.per_second // cycle * cycle
    number = F.col("value")
    kept = job.numbers(spark).where((number < end) | (number % job.rows < CYCLE))
    return kept.select(F.when(number < end, number).otherwise(number + later).alias("number"))


def results(query: Query, batches: Sequence[Sequence[Mapping[str, Any]]], *, once: bool = True) -> Result:
    """Return results by key: each must appear `once`, or else the last one counts."""
    found: Result = {}
    for rows in batches:
        for row in rows:
            key = tuple(row[name] for name in query.result_of)
            value = tuple(row[name] for name in sorted(row))
            found[key] = ("twice", found[key], value) if once and key in found else value
    return found
