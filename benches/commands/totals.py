"""Jobs A and B: one running total for each key, by engine, by slots and by the partitions of the shuffle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from holdfast.benches.commands.single import Plan, compare, console, engines_option, known_engines, options_of
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.report import tables
from holdfast.benches.runs.by_name import engines_for
from holdfast.benches.runs.paired import Entry


@click.command("job-a")
@engines_option(JobA, "holdfast-memory,holdfast-filesystem,holdfast-rocksdb,spark-agg-rocksdb,floor")
@options_of(JobA())
def job_a(engines: str, **options: Any) -> None:
    """Running count and sum for each of a million keys."""
    compare("job-a", JobA(), engines, options)


@click.command("job-b")
@engines_option(JobB, "holdfast-rocksdb,holdfast-filesystem,spark-agg-rocksdb")
@options_of(JobB(), repeats=1)
def job_b(engines: str, **options: Any) -> None:
    """Micro-batches that touch a few of many keys: --keys 20000000 --fill-rows 1000000 is the large one."""
    compare("job-b", JobB(), engines, options)


@click.command("small-batch")
@engines_option(JobA, "holdfast-memory,spark-aiwps-count")
@options_of(JobA(rows=1000, batches=45, warmup=15, transport="rows"))
def small_batch(engines: str, **options: Any) -> None:
    """Job A with few rows a micro-batch: the fixed cost, against Spark's applyInPandasWithState."""
    compare("small-batch", JobA(), engines, options)


@click.command("hosts")
@engines_option(JobA, "host-group-state,host-group-state-rocksdb,host-stateful-processor")
@options_of(JobA(rows=1000, batches=60, warmup=40))
def hosts(engines: str, **options: Any) -> None:
    """Spark's operators in which shards run, around a function that does nothing: --partitions 200 is the large one."""
    compare("hosts", JobA(), engines, options)


@click.command("many-partitions")
@engines_option(JobA, "holdfast-memory,spark-aiwps-count,spark-agg-rocksdb")
@options_of(JobA(rows=1000, batches=6, warmup=3, partitions=200, transport="rows"), repeats=1, without="plain_files")
def many_partitions(engines: str, **options: Any) -> None:
    """Few rows in Spark's 200 shuffle partitions: what a task costs, and what it costs where Spark forks nothing."""
    plan = Plan.of(JobA(), options)
    plain = replace(plan.job, plain_files=True)  # type: ignore[call-arg]
    entries: dict[str, Entry] = {}
    for label in known_engines(JobA, engines):
        entries |= {label: Entry(label, plan.job), f"{label}, plain files": Entry(label, plain)}
    plan.carry_out("many-partitions", f"--engines {engines}", entries)


@click.command("scaling")
@click.option("--engine", type=click.Choice(engines_for(JobA)), default="holdfast-memory")
@click.option("--slots", default=2, help="task slots to compare with one")
@options_of(JobA(), without="slots")
def scaling(engine: str, slots: int, **options: Any) -> None:
    """Job A with one task slot and with --slots of them, and what limits the gain."""
    plan = Plan.of(JobA(), options)
    entries = {f"{n} slots": Entry(engine, replace(plan.job, slots=n)) for n in (slots, 1)}  # type: ignore[call-arg]
    found = plan.carry_out("scaling", f"--engine {engine} --slots {slots}", entries)
    console.print(tables.what_limits(found))


COMMANDS = (job_a, job_b, small_batch, many_partitions, hosts, scaling)
