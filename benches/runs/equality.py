"""A small run of engines whose rows are kept, so that engines which find different ones are not measured.

Operators in one line must show the same rows in each micro-batch. Queries of Nexmark must find what SQL finds over the
same events as whole tables; in append mode a result may come once, in update mode the last one counts::

    micro-batch   0 … b-1            b                 b+1
                  the events         a day later, 50   the same: what the watermark has passed is given out here
                  └─ results at once ┘
                  └─ results that wait for the watermark ─────┘
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
    """Return a run in which a micro-batch has 20 s of event time: several windows, sessions and auctions end in it."""
    return replace(job, rows=rows, batches=batches, warmup=0, per_second=rows // 20)


def checked(job: Operators | Nexmark, engines: Sequence[str]) -> dict[str, Any]:
    """Compare engines on a small run of a job, in a process of its own.

    Returns ``what`` was compared; ``rows`` of the result; whether all are ``equal``; where they are not,
    ``differences`` by engine: how many there are, and one of them.
    """
    if isinstance(job, Nexmark):
        stored = small(job).stored()
    else:
        few = replace(job, rows=min(job.rows, 2_000), keys=min(job.keys, 1_000), batches=6, warmup=0)
        if job.waiting:  # as many rows of a key
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
    found = compare(spark, job, engines, home) if isinstance(job, Nexmark) else _compare(spark, job, engines, home)
    spark.stop()
    return found


def _engine(name: str) -> SparkEngine:
    found = ENGINES[name]
    assert isinstance(found, SparkEngine)
    return found


def _compare(spark: SparkSession, job: Operators, engines: Sequence[str], folder: Path) -> dict[str, Any]:
    """Compare what engines show in each micro-batch with what the first one shows."""
    found = {
        name: shown(spark, _engine(name), job.source(spark), job, folder / name, job.batches, {}) for name in engines
    }
    what = f"{job.operator} in {job.batches} micro-batches of {job.rows} rows: {', '.join(engines)}"
    of_rows = {name: [_counted(rows, job.compared) for rows in batches] for name, batches in found.items()}
    return {"what": what} | verdict_of_batches(of_rows)


def compare(
    spark: SparkSession,
    job: Nexmark,
    engines: Sequence[str],
    folder: Path,
    settings: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Compare engines with SQL over whole tables, in a running session; returns what `checked` does."""
    found = {name: computed(spark, job, name, folder / name, settings or {}) for name in engines}
    equality = verdict(expected(spark, job), found)
    of = f"query {job.query} over {job.rows * job.batches} events"
    return {"what": f"{of}: {', '.join(engines)}, and SQL over whole tables"} | equality


def shown(
    spark: SparkSession,
    engine: SparkEngine,
    rows: DataFrame,
    job: StreamingJob,
    folder: Path,
    batches: int,
    settings: Mapping[str, str],
) -> list[list[dict[str, Any]]]:
    """Return what an engine shows in its first micro-batches, in a running session."""
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
                # Asked before the stop only: that can fail the micro-batch after the last one wanted.
                if (failure := started.exception()) is not None:
                    raise failure
                time.sleep(_LOOK_EVERY_S)
        finally:
            started.stop()
    return found[:batches]


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame."""
    found: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return found


@contextmanager
def _configured(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Give a session what can be set while it runs, and take it back."""
    before = {name: spark.conf.get(name, None) for name in settings if spark.conf.isModifiable(name)}
    before |= {name: None for name in settings if name.startswith("spark.holdfast.")}
    for name in before:
        spark.conf.set(name, settings[name])
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def _counted(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Counter[str]:
    return Counter(repr({name: row[name] for name in columns or row}) for row in rows)


def verdict_of_batches(found: Mapping[str, Sequence[Counter[str]]]) -> dict[str, Any]:
    """Return what `checked` does of each engine's rows by micro-batch, but for ``what``; no row is no equality."""
    right, *others = found
    differences = {}
    for name in others:
        for batch, (one, other) in enumerate(zip(found[right], found[name], strict=True)):
            if one != other:
                differs = sorted(((one - other) + (other - one)).elements())
                differences[name] = {"batch": batch, "rows": len(differs), "first": differs[0]}
                break
    rows = sum(batch.total() for batch in found[right])
    return {"rows": rows, "equal": rows > 0 and not differences} | ({"differences": differences} if differences else {})


def verdict(right: Result, found: Mapping[str, Result]) -> dict[str, Any]:
    """Return what `checked` does, but for ``what``; no result at all is no equality."""
    differences = {}
    for name, result in found.items():
        differs = sorted(key for key in {*right, *result} if right.get(key) != result.get(key))
        if differs:
            key = differs[0]
            differences[name] = {
                "results": len(differs),
                "first": repr({key: result.get(key)}),
                "right": repr(right.get(key)),
            }
    equality = {"rows": len(right), "equal": bool(right) and not differences}
    return equality | ({"differences": differences} if differences else {})


def expected(spark: SparkSession, job: Nexmark) -> Result:
    """Return what the query finds by SQL over whole tables."""
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
    """Return what an engine finds in a stream."""
    chosen = _engine(engine)
    batches = job.batches if job.asked.at_once else job.batches + 2
    found = shown(spark, chosen, events(_with_an_end(job, spark), job.mix), job, folder, batches, settings)
    return results(job.asked, found, once=chosen.output_mode(job) == "append")


def _with_an_end(job: Nexmark, spark: SparkSession) -> DataFrame:
    """Let the time jump after the last micro-batch that counts, so that the watermark passes all that was before."""
    end, cycle = job.rows * job.batches, CYCLE * job.mix.group
    later = _LATER_S * job.per_second // cycle * cycle
    number = F.col("value")
    kept = job.numbers(spark).where((number < end) | (number % job.rows < CYCLE))
    return kept.select(F.when(number < end, number).otherwise(number + later).alias("number"))


def results(query: Query, batches: Sequence[Sequence[Mapping[str, Any]]], *, once: bool = True) -> Result:
    """Return results by what they are of: each shown `once`, or else the last one counts."""
    found: Result = {}
    for rows in batches:
        for row in rows:
            key = tuple(row[name] for name in query.result_of)
            value = tuple(row[name] for name in sorted(row))
            # What comes twice and should not is no result of anything.
            found[key] = ("twice", found[key], value) if once and key in found else value
    return found
