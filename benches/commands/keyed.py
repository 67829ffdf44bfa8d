"""Functions that see one key at a time, timers, time to live, sessions: holdfast's beside Spark's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import click

from holdfast.benches.commands.single import (
    Plan,
    compare,
    compare_with_change,
    engines_option,
    known_engines,
    options_of,
)
from holdfast.benches.jobs.by_key import DropIn, Timers
from holdfast.benches.jobs.by_processor import ByProcessor
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.sessions import Sessions
from holdfast.benches.jobs.ttl import Ttl
from holdfast.benches.report.results import (
    SPARK_BY_KEY,
    WITH_TIMEOUTS,
    WITH_TTL,
    WITHOUT_TIMEOUTS,
    WITHOUT_TTL,
)
from holdfast.benches.runs.by_name import engines_for
from holdfast.benches.runs.paired import Entry


@click.command("dropin")
@engines_option(DropIn, "pandas-memory,pandas-filesystem,pandas-rocksdb,holdfast-memory")
@click.option("--larger", default=10, help="holdfast also runs with so many times the keys, rows and touched keys")
@options_of(DropIn(batches=14, warmup=6), repeats=1)
def dropin(engines: str, larger: int, **options: Any) -> None:
    """Spark's applyInPandasWithState by holdfast's with the same function, a running count and sum."""
    plan = Plan.of(DropIn(), options)
    large = _larger(plan.job, larger)
    labels = known_engines(DropIn, engines)
    entries = {f"{label} x{larger}": Entry(label, large) for label in labels} if larger > 1 else {}
    entries |= {label: Entry(label, plan.job) for label in [*labels, SPARK_BY_KEY]}
    plan.carry_out("dropin", f"--engines {engines} --larger {larger}", entries)


@click.command("dropin-small")
@engines_option(DropIn, f"pandas-memory,{SPARK_BY_KEY}")
# The JVM compiles what each of the two runs, for some hundred micro-batches.
@options_of(DropIn(rows=1000, keys=1000, touched=1000, batches=220, warmup=140))
def dropin_small(engines: str, **options: Any) -> None:
    """The same with few rows: --rows 10 --touched 10 is the smaller one."""
    compare("dropin-small", DropIn(), engines, options)


@click.command("dropin-tws")
@engines_option(
    ByProcessor, "holdfast-memory-row,holdfast-memory-pandas,holdfast-rocksdb-row,spark-tws-row,spark-tws-pandas"
)
@click.option("--larger", default=10, help="holdfast also runs with so many times the keys, rows and touched keys")
# Spark's own takes some 5 s a micro-batch, by pandas 17: no time for a long warm-up.
@options_of(ByProcessor(rows=20_000, batches=10, warmup=6), repeats=1)
def dropin_tws(engines: str, larger: int, **options: Any) -> None:
    """Spark's transformWithState by holdfast's with the same processor."""
    plan = Plan.of(ByProcessor(), options)
    labels = known_engines(ByProcessor, engines)
    large = _larger(plan.job, larger)
    entries = {f"{label} x{larger}": Entry(label, large) for label in labels if _is_ours(label)} if larger > 1 else {}
    plan.carry_out(
        "dropin-tws",
        f"--engines {engines} --larger {larger}",
        entries | {label: Entry(label, plan.job) for label in labels},
    )


def _is_ours(engine: str) -> bool:
    return not engine.startswith("spark-")


def _larger(job: Job, times: int) -> DropIn:
    """Return a job with so many times the rows; its micro-batches are long, so that it needs less of a warm-up."""
    assert isinstance(job, DropIn)
    warmup = max(2, job.warmup // 4)
    shorter = replace(job, warmup=warmup, batches=warmup + min(3, job.batches - job.warmup))
    return replace(shorter, rows=job.rows * times, keys=job.keys * times, touched=job.touched * times)


@click.command("timers")
@click.option("--engine", type=click.Choice(engines_for(Timers)), default="pandas-memory")
@options_of(Timers(), repeats=1, without="timeouts")
def timers(engine: str, **options: Any) -> None:
    """Micro-batches in which a few of very many timeouts are due, and the same without timeouts."""
    labels = (WITH_TIMEOUTS, WITHOUT_TIMEOUTS)
    compare_with_change("timers", Timers(), engine, options, labels, partial(replace, timeouts=False))


@click.command("ttl")
@click.option("--engine", type=click.Choice(engines_for(Ttl)), default="holdfast-memory")
@options_of(Ttl(), repeats=1, without="expires")
def ttl(engine: str, **options: Any) -> None:
    """Micro-batches that refresh all of many entries with a time to live, and the same without one."""
    compare_with_change("ttl", Ttl(), engine, options, (WITH_TTL, WITHOUT_TTL), partial(replace, expires=False))


@click.command("sessions")
@engines_option(Sessions, f"holdfast-memory,pandas-memory,{SPARK_BY_KEY}")
@options_of(Sessions(), repeats=1)
def sessions(engines: str, **options: Any) -> None:
    """The same session window three ways: vectorised, by key, and by the same function in Spark's own operator."""
    compare("sessions", Sessions(), engines, options)


COMMANDS = (dropin, dropin_small, dropin_tws, timers, ttl, sessions)
