"""A small run of an engine whose rows are kept, so that engines which find different ones are not measured."""

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

from holdfast.benches.instruments.measured import Places
from holdfast.benches.instruments.spark import session
from holdfast.benches.jobs.job import StreamingJob
from holdfast.benches.jobs.operators import Operators
from holdfast.benches.runs.child_process import call_in_child
from holdfast.benches.runs.engines import ENGINES, SparkEngine

_LOOK_EVERY_S = 0.05
_LIMIT_S = 900.0


def shown(
    spark: SparkSession,
    engine: SparkEngine,
    rows: DataFrame,
    job: StreamingJob,
    folder: Path,
    batches: int,
    settings: Mapping[str, str],
) -> list[list[dict[str, Any]]]:
    """Return what an engine shows in its first micro-batches, in a session that is there.

    Checkpoints and state go to the folder; `settings` of Spark take the place of the engine's own.
    """
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


def checked(job: Operators, engines: Sequence[str]) -> dict[str, Any]:
    """Compare engines on a small run of an operator, in a process of its own.

    Returns ``what`` was compared; ``rows`` of the first engine; whether all are ``equal``; where they are not,
    ``differences`` by engine: in which micro-batch, how many rows, and one of them.
    """
    small = replace(job, rows=min(job.rows, 2_000), keys=min(job.keys, 1_000), batches=6, warmup=0)
    return compared_in_child(f"what {job.operator} shows", f"{__name__}:_compared", small, engines)


def compared_in_child(what: str, function: str, job: StreamingJob, engines: Sequence[str]) -> dict[str, Any]:
    """Call a comparison, ``module:name``, in a process of its own, with the stored job, the engines and a folder."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True) as folder:
        found: dict[str, Any] = call_in_child(
            f"a comparison of {what}",
            function,
            *(job.stored(), list(engines), folder),
            folders=[Path(folder)],
            limit_s=_LIMIT_S,
        )
    return found


def _compared(stored: Mapping[str, Any], engines: Sequence[str], folder: str) -> dict[str, Any]:
    job = Operators(**{name: value for name, value in stored.items() if name != "name"})
    chosen = {name: engine for name in engines if isinstance(engine := ENGINES[name], SparkEngine)}
    spark = session(chosen[engines[0]].settings(job, Places(Path(folder), Path(folder))))
    found = {
        name: shown(spark, engine, job.source(spark), job, Path(folder, name), job.batches, {})
        for name, engine in chosen.items()
    }
    spark.stop()
    return {
        "what": f"{job.operator} in {job.batches} micro-batches of {job.rows} rows: {', '.join(engines)}"
    } | verdict({name: [_counted(rows, job.compared) for rows in batches] for name, batches in found.items()})


def _counted(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Counter[str]:
    return Counter(repr({name: row[name] for name in columns or row}) for row in rows)


def verdict(found: Mapping[str, Sequence[Counter[str]]]) -> dict[str, Any]:
    """Return what `checked` does, but for ``what``; no row at all is no equality."""
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
