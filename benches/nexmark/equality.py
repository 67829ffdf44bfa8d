"""All engines find the same: a small run of each, compared with SQL over the same events as whole tables.

::

    micro-batch   0 … b-1            b                 b+1
                  the events         a day later, 50   the same: what the watermark has passed is given out here
                  └─ results at once ┘
                  └─ results that wait for the watermark ─────┘

In append mode a result may come once; in update mode the last one counts. ``python -m
holdfast.benches.nexmark.equality`` reads what to compare from standard input, as `checked` writes it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from holdfast.benches.instruments.measured import Places
from holdfast.benches.instruments.processes import adopt_orphans
from holdfast.benches.nexmark.engines import ENGINES
from holdfast.benches.nexmark.events import AUCTION, BID, CYCLE, PERSON, events, of_kind
from holdfast.benches.nexmark.job import Nexmark
from holdfast.benches.runs.child_process import end_below, end_with_lifeline, order_of_lifeline, run_child
from holdfast.benches.runs.paired import BenchError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from holdfast.benches.nexmark.query import Query

_LATER_S = 86_400
_LOOK_EVERY_S = 0.05
_VIEWS = {"person": PERSON, "auction": AUCTION, "bid": BID}
_LIMIT_S = 900.0
_RESULT = "result.json"

Result = dict[tuple[Any, ...], tuple[Any, ...]]


def small(job: Nexmark, rows: int = 10_000, batches: int = 4) -> Nexmark:
    """Return a run in which a micro-batch has 20 s of event time: several windows, sessions and auctions end in it."""
    return replace(job, rows=rows, batches=batches, warmup=0, per_second=rows // 20)


def checked(job: Nexmark, engines: Sequence[str]) -> dict[str, Any]:
    """Compare engines on a small run of the job's query, in a process of its own.

    Returns
    -------
    dict
        As of `compare`.

    Raises
    ------
    BenchError
        The process failed, or took too long; the message has the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True) as folder:
        order = {"job": small(job).stored(), "engines": list(engines), "folder": folder}
        ended = run_child(order, limit_s=_LIMIT_S, program="holdfast.benches.nexmark.equality")
        if ended.exit_status != 0:
            why = "failed" if ended.exit_status is not None else "took longer than allowed"
            raise BenchError(f"a comparison of what query {job.query} finds {why}:\n{ended.log}", limit_s=_LIMIT_S)
        found: dict[str, Any] = json.loads((Path(folder) / _RESULT).read_text())
    return found


def compare(
    spark: SparkSession,
    job: Nexmark,
    engines: Sequence[str],
    folder: Path,
    settings: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Compare engines with SQL over whole tables, in a session that is there.

    Parameters
    ----------
    folder : pathlib.Path
        For checkpoints and state.
    settings : mapping of str to str, optional
        Of Spark, in place of the engines' own.

    Returns
    -------
    dict
        ``what`` was compared; ``rows`` of the result; whether all are ``equal``; where they are not, ``differences`` by
        engine: how many results differ, and one of them beside the one that is right.
    """
    found = {name: computed(spark, job, name, folder / name, settings or {}) for name in engines}
    equality = verdict(expected(spark, job), found)
    of = f"query {job.query} over {job.rows * job.batches} events"
    return {"what": f"{of}: {', '.join(engines)}, and SQL over whole tables"} | equality


def verdict(right: Result, found: Mapping[str, Result]) -> dict[str, Any]:
    """Return what `compare` does, but for ``what``; no result at all is no equality."""
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
        return results(job.asked, [_rows(spark.sql(job.asked.sql))])
    finally:
        for view in _VIEWS:
            spark.catalog.dropTempView(view)
        tables.unpersist()


def computed(spark: SparkSession, job: Nexmark, engine: str, folder: Path, settings: Mapping[str, str]) -> Result:
    """Return what an engine finds in a stream."""
    chosen = ENGINES[engine]
    places = Places(folder / "disk", folder / "memory")
    for place in (places.disk, places.memory):
        place.mkdir(parents=True)
    batches: list[list[dict[str, Any]]] = []
    with _configured(spark, chosen.settings(job, places) | dict(settings)):
        frame = chosen.query(events(_with_an_end(job.numbers(spark), job), job.mix), job)
        writer = frame.writeStream.foreachBatch(lambda rows, _: batches.append(_rows(rows)))
        started = (
            writer.outputMode(chosen.output_mode(job)).option("checkpointLocation", str(places.checkpoint)).start()
        )
        try:
            last = job.batches - 1 if job.asked.at_once else job.batches + 1
            while started.exception() is None and len(batches) <= last:
                time.sleep(_LOOK_EVERY_S)
        finally:
            started.stop()
        if (failure := started.exception()) is not None:
            raise failure
    return results(job.asked, batches[: last + 1], once=chosen.output_mode(job) == "append")


def _with_an_end(numbers: DataFrame, job: Nexmark) -> DataFrame:
    """Let the time jump after the last micro-batch that counts, so that the watermark passes all that was before."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    end, cycle = job.rows * job.batches, CYCLE * job.mix.group
    later = _LATER_S * job.per_second // cycle * cycle
    number = F.col("number")
    kept = numbers.where((number < end) | (number % job.rows < CYCLE))
    return kept.select(F.when(number < end, number).otherwise(number + later).alias("number"))


def _rows(frame: DataFrame) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return found


def results(query: Query, batches: Sequence[Sequence[Mapping[str, Any]]], *, once: bool = True) -> Result:
    """Return the results that micro-batches give out, by what they are the results of.

    Parameters
    ----------
    once : bool
        Whether a result comes once, as in append mode; otherwise the last one counts.
    """
    found: Result = {}
    for rows in batches:
        for row in rows:
            key = tuple(row[name] for name in query.result_of)
            value = tuple(row[name] for name in sorted(row))
            # What comes twice and should not is no result of anything.
            found[key] = ("twice", found[key], value) if once and key in found else value
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


def main() -> None:
    """Compare what standard input names."""
    from pyspark.sql import SparkSession

    from holdfast.benches.jobs.by_name import read_job
    from holdfast.spark_integration.java import ensure_java

    lifeline = sys.stdin.fileno()
    order = order_of_lifeline(lifeline)
    folder = Path(order["folder"])
    adopt_orphans()
    end_with_lifeline(lifeline, [order["folder"]])
    job = read_job(order["job"])
    assert isinstance(job, Nexmark)
    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("holdfast bench")
    for name, value in ENGINES[order["engines"][0]].settings(job, Places(folder, folder)).items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        found = compare(spark, job, order["engines"], folder)
        spark.stop()
    finally:
        end_below(psutil.Process())
    (folder / _RESULT).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
