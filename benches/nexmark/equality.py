"""All engines find the same: a small run of each, compared with SQL over the same events as whole tables.

::

    micro-batch   0 … b-1            b                 b+1
                  the events         a day later, 50   the same: what the watermark has passed is given out here
                  └─ results at once ┘
                  └─ results that wait for the watermark ─────┘

In append mode a result may come once; in update mode the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from holdfast.benches.instruments.measured import Places
from holdfast.benches.instruments.spark import session
from holdfast.benches.nexmark.events import AUCTION, BID, CYCLE, PERSON, events, of_kind
from holdfast.benches.nexmark.job import ENGINES, Nexmark
from holdfast.benches.nexmark.query import Query
from holdfast.benches.runs.small_run import compared_in_child, rows_of, shown

_LATER_S = 86_400
_VIEWS = {"person": PERSON, "auction": AUCTION, "bid": BID}

Result = dict[tuple[Any, ...], tuple[Any, ...]]


def small(job: Nexmark, rows: int = 10_000, batches: int = 4) -> Nexmark:
    """Return a run in which a micro-batch has 20 s of event time: several windows, sessions and auctions end in it."""
    return replace(job, rows=rows, batches=batches, warmup=0, per_second=rows // 20)


def checked(job: Nexmark, engines: Sequence[str]) -> dict[str, Any]:
    """Compare engines on a small run of the job's query, in a process of its own; the result is that of `compare`."""
    return compared_in_child(f"what query {job.query} finds", f"{__name__}:_compared", small(job), engines)


def _compared(stored: Mapping[str, Any], engines: Sequence[str], folder: str) -> dict[str, Any]:
    job = Nexmark(**{name: value for name, value in stored.items() if name != "name"})
    spark = session(ENGINES[engines[0]].settings(job, Places(Path(folder), Path(folder))))
    found = compare(spark, job, engines, Path(folder))
    spark.stop()
    return found


def compare(
    spark: SparkSession, job: Nexmark, engines: Sequence[str], folder: Path, settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Compare engines with SQL over whole tables, in a session that is there.

    Returns ``what`` was compared; ``rows`` of the result; whether all are ``equal``; where they are not,
    ``differences`` by engine: how many results differ, and one of them beside the one that is right. Checkpoints and
    state go to the folder; `settings` of Spark take the place of the engines' own.
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
        return results(job.asked, [rows_of(spark.sql(job.asked.sql))])
    finally:
        for view in _VIEWS:
            spark.catalog.dropTempView(view)
        tables.unpersist()


def computed(spark: SparkSession, job: Nexmark, engine: str, folder: Path, settings: Mapping[str, str]) -> Result:
    """Return what an engine finds in a stream."""
    chosen = ENGINES[engine]
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
    """Return the results that micro-batches give out, by what they are the results of.

    A result comes `once`, as in append mode; otherwise the last one counts.
    """
    found: Result = {}
    for rows in batches:
        for row in rows:
            key = tuple(row[name] for name in query.result_of)
            value = tuple(row[name] for name in sorted(row))
            # What comes twice and should not is no result of anything.
            found[key] = ("twice", found[key], value) if once and key in found else value
    return found
