"""``holdfast bench``: the jobs, measured as paired runs, with a table on the terminal and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from holdfast.benches.instruments.machine import machine, versions
from holdfast.benches.jobs.by_key import DropIn, Timers
from holdfast.benches.jobs.by_processor import ByProcessor
from holdfast.benches.jobs.commits import Commits
from holdfast.benches.jobs.job import Job, SparkJob
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.requests import Requests, server_of_environment
from holdfast.benches.jobs.sessions import Sessions
from holdfast.benches.jobs.snapshots import Restore, Snapshots
from holdfast.benches.jobs.ttl import Ttl
from holdfast.benches.report import micro_tables, tables
from holdfast.benches.report.results import (
    SPARK_BY_KEY,
    WITH_SNAPSHOTS,
    WITH_TIMEOUTS,
    WITH_TTL,
    WITHOUT,
    WITHOUT_TIMEOUTS,
    WITHOUT_TTL,
    Document,
    document,
)
from holdfast.benches.runs.engines import engines_for
from holdfast.benches.runs.paired import Entry, Run, run_paired
from holdfast.errors import InvalidArgumentError

_console = Console()
_Command = Callable[..., None]


@click.group(context_settings={"show_default": True})
def bench() -> None:
    """Measure holdfast against Spark's own state, in paired runs on this machine."""


def _options(job: Job, *, repeats: int = 2, without: str = "") -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command the fields of a job as options, and those of every bench.

    Parameters
    ----------
    job : Job
        Its values are the options' defaults.
    without : str
        A field that the command sets itself.
    """
    options = [
        click.option(
            f"--{field.name.replace('_', '-')}",
            default=getattr(job, field.name),
            type=field.metadata["type"],
            help=field.metadata["help"],
        )
        for field in fields(job)
        if field.name != without
    ]
    options += [
        click.option("--repeats", default=repeats, help="runs of each engine, in turns"),
        click.option("--profile", is_flag=True, help="also say where a micro-batch's time goes; costs a little"),
        click.option("--disk", type=click.Path(file_okay=False), help="directory on the disk to measure with"),
        click.option("--json", "json_file", type=click.Path(dir_okay=False), help="file for all that was measured"),
    ]

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _engines(job: type[Job], default: str) -> Callable[[_Command], _Command]:
    known = ", ".join(engines_for(job))
    return click.option("--engines", default=default, help=f"each is compared with all that follow it: {known}")


@bench.command("job-a")
@_engines(JobA, "holdfast-memory,holdfast-filesystem,holdfast-rocksdb,spark-agg-rocksdb,floor")
@_options(JobA())
def job_a(engines: str, **options: Any) -> None:
    """Running count and sum for each of a million keys."""
    _compare("job-a", JobA(), engines, options)


@bench.command("job-b")
@_engines(JobB, "holdfast-rocksdb,holdfast-filesystem,spark-agg-rocksdb")
@_options(JobB(), repeats=1)
def job_b(engines: str, **options: Any) -> None:
    """Micro-batches that touch a few of many keys: --keys 20000000 --fill-rows 1000000 is the large one."""
    _compare("job-b", JobB(), engines, options)


@bench.command("small-batch")
@_engines(JobA, "holdfast-memory,spark-aiwps-count")
@_options(JobA(rows=1000, batches=45, warmup=15, transport="rows"))
def small_batch(engines: str, **options: Any) -> None:
    """Job A with few rows a micro-batch: the fixed cost, against Spark's applyInPandasWithState."""
    _compare("small-batch", JobA(), engines, options)


@bench.command("hosts")
@_engines(JobA, "host-group-state,host-group-state-rocksdb,host-stateful-processor")
@_options(JobA(rows=1000, batches=60, warmup=40))
def hosts(engines: str, **options: Any) -> None:
    """Spark's operators in which shards run, around a function that does nothing: --partitions 200 is the large one."""
    _compare("hosts", JobA(), engines, options)


@bench.command("many-partitions")
@_engines(JobA, "holdfast-memory,spark-aiwps-count,spark-agg-rocksdb")
@_options(JobA(rows=1000, batches=6, warmup=3, partitions=200, transport="rows"), repeats=1, without="plain_files")
def many_partitions(engines: str, **options: Any) -> None:
    """Few rows in Spark's 200 shuffle partitions: what a task costs, and what it costs where Spark forks nothing."""
    plan = _Plan.of(JobA(), options)
    plain = replace(plan.job, plain_files=True)  # type: ignore[call-arg]
    entries: dict[str, Entry] = {}
    for label in _known_engines(JobA, engines):
        entries |= {label: Entry(label, plan.job), f"{label}, plain files": Entry(label, plain)}
    plan.carry_out("many-partitions", f"--engines {engines}", entries)


@bench.command("dropin")
@_engines(DropIn, "pandas-memory,pandas-filesystem,pandas-rocksdb,holdfast-memory")
@click.option("--larger", default=10, help="holdfast also runs with so many times the keys, rows and touched keys")
@_options(DropIn(batches=14, warmup=6), repeats=1)
def dropin(engines: str, larger: int, **options: Any) -> None:
    """Spark's applyInPandasWithState by holdfast's with the same function, a running count and sum."""
    plan = _Plan.of(DropIn(), options)
    large = _larger(plan.job, larger)
    labels = _known_engines(DropIn, engines)
    entries = {f"{label} x{larger}": Entry(label, large) for label in labels} if larger > 1 else {}
    entries |= {label: Entry(label, plan.job) for label in [*labels, SPARK_BY_KEY]}
    plan.carry_out("dropin", f"--engines {engines} --larger {larger}", entries)


@bench.command("dropin-small")
@_engines(DropIn, f"pandas-memory,{SPARK_BY_KEY}")
# The JVM compiles what each of the two runs, for some hundred micro-batches.
@_options(DropIn(rows=1000, keys=1000, touched=1000, batches=220, warmup=140))
def dropin_small(engines: str, **options: Any) -> None:
    """The same with few rows: --rows 10 --touched 10 is the smaller one."""
    _compare("dropin-small", DropIn(), engines, options)


@bench.command("dropin-tws")
@_engines(ByProcessor, "holdfast-memory-row,holdfast-memory-pandas,holdfast-rocksdb-row,spark-tws-row,spark-tws-pandas")
@click.option("--larger", default=10, help="holdfast also runs with so many times the keys, rows and touched keys")
# Spark's own takes some 5 s a micro-batch, by pandas 17: no time for a long warm-up.
@_options(ByProcessor(rows=20_000, batches=10, warmup=6), repeats=1)
def dropin_tws(engines: str, larger: int, **options: Any) -> None:
    """Spark's transformWithState by holdfast's with the same processor."""
    plan = _Plan.of(ByProcessor(), options)
    labels = _known_engines(ByProcessor, engines)
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


@bench.command("timers")
@click.option("--engine", type=click.Choice(engines_for(Timers)), default="pandas-memory")
@_options(Timers(), repeats=1, without="timeouts")
def timers(engine: str, **options: Any) -> None:
    """Micro-batches in which a few of very many timeouts are due, and the same without timeouts."""
    plan = _Plan.of(Timers(), options)
    without = replace(plan.job, timeouts=False)  # type: ignore[call-arg]
    entries = {WITH_TIMEOUTS: Entry(engine, plan.job), WITHOUT_TIMEOUTS: Entry(engine, without)}
    plan.carry_out("timers", f"--engine {engine}", entries)


@bench.command("ttl")
@click.option("--engine", type=click.Choice(engines_for(Ttl)), default="holdfast-memory")
@_options(Ttl(), repeats=1, without="expires")
def ttl(engine: str, **options: Any) -> None:
    """Micro-batches that refresh all of many entries with a time to live, and the same without one."""
    plan = _Plan.of(Ttl(), options)
    without = replace(plan.job, expires=False)  # type: ignore[call-arg]
    entries = {WITH_TTL: Entry(engine, plan.job), WITHOUT_TTL: Entry(engine, without)}
    plan.carry_out("ttl", f"--engine {engine}", entries)


@bench.command("sessions")
@_engines(Sessions, f"holdfast-memory,pandas-memory,{SPARK_BY_KEY}")
@_options(Sessions(), repeats=1)
def sessions(engines: str, **options: Any) -> None:
    """The same session window three ways: vectorised, by key, and by the same function in Spark's own operator."""
    _compare("sessions", Sessions(), engines, options)


@bench.command("stalls")
@_engines(Commits, "store-memory,store-filesystem,store-rocksdb")
@_options(Commits(), repeats=1)
def stalls(engines: str, **options: Any) -> None:
    """Commits to the store alone, one after another: how long merges and compaction hold one back."""
    _compare("stalls", Commits(), engines, options)


@bench.command("requests")
@_engines(Requests, "holdfast-memory-s3")
@_options(Requests(), repeats=1)
def requests(engines: str, **options: Any) -> None:
    """What small micro-batches of many shards ask of an S3 server, such as `make s3` starts."""
    server_of_environment()
    _compare("requests", Requests(), engines, options)


@bench.command("snapshots")
@_engines(Snapshots, "store-rocksdb,store-memory")
@_options(Snapshots(), repeats=1)
def snapshots(engines: str, **options: Any) -> None:
    """Bytes that a snapshot sends when few keys have changed, by those of a full one."""
    _compare("snapshots", Snapshots(), engines, options)


@bench.command("restore")
@_engines(Restore, "store-rocksdb,store-filesystem,store-memory")
@_options(Restore(), repeats=1, without="keys")
def restore(engines: str, **options: Any) -> None:
    """State that is in the storage only, against a plain download: --checkpoint s3://bucket/bench, as of `make s3`."""
    _compare("restore", Restore(), engines, options)


def _uploads(name: str, job: SparkJob) -> None:
    @bench.command(name)
    @click.option("--engine", type=click.Choice(engines_for(type(job))), default="holdfast-rocksdb")
    @_options(job)
    def uploads(engine: str, **options: Any) -> None:
        """A job with snapshots that are uploaded while it runs, and without."""
        plan = _Plan.of(job, options)
        without = replace(plan.job, snapshot_commits=plan.job.all_batches + 1)  # type: ignore[call-arg]
        entries = {WITH_SNAPSHOTS: Entry(engine, plan.job), WITHOUT: Entry(engine, without)}
        plan.carry_out(name, f"--engine {engine}", entries)


_uploads("uploads-a", JobA(batches=24, warmup=4, snapshot_commits=5))
_uploads("uploads-b", JobB(batches=24, warmup=4, snapshot_commits=5))


@bench.command("scaling")
@click.option("--engine", type=click.Choice(engines_for(JobA)), default="holdfast-memory")
@click.option("--slots", default=2, help="task slots to compare with one")
@_options(JobA(), without="slots")
def scaling(engine: str, slots: int, **options: Any) -> None:
    """Job A with one task slot and with --slots of them, and what limits the gain."""
    plan = _Plan.of(JobA(), options)
    entries = {f"{n} slots": Entry(engine, replace(plan.job, slots=n)) for n in (slots, 1)}  # type: ignore[call-arg]
    found = plan.carry_out("scaling", f"--engine {engine} --slots {slots}", entries)
    _console.print(tables.what_limits(found))


@bench.command("report")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
def report_files(files: tuple[str, ...]) -> None:
    """Print stored measurements as Markdown: of this command, or of pytest-benchmark (--benchmark-json)."""
    for file in files:
        found = json.loads(Path(file).read_text())
        click.echo(micro_tables.markdown(found) if "benchmarks" in found else tables.markdown(found))


def _compare(name: str, job: Job, engines: str, options: dict[str, Any]) -> None:
    labels = _known_engines(type(job), engines)
    plan = _Plan.of(job, options)
    plan.carry_out(name, f"--engines {engines}", {label: Entry(label, plan.job) for label in labels})


def _known_engines(job: type[Job], engines: str) -> list[str]:
    labels, known = engines.split(","), engines_for(job)
    if not set(labels) <= set(known) or len(set(labels)) != len(labels):
        raise InvalidArgumentError(
            "engines must be different known names with a comma between", given=engines, known=known
        )
    return labels


@dataclass(frozen=True)
class _Plan:
    """The options of a command, sorted: the job, and how to run it."""

    job: Job
    repeats: int
    profile: bool
    disk: str | None
    file: str | None

    @classmethod
    def of(cls, job: Job, options: dict[str, Any]) -> _Plan:
        """Return the plan of a command's options; those that are fields of `job` change it."""
        sizes = {field.name: options.pop(field.name) for field in fields(job) if field.name in options}
        return cls(replace(job, **sizes), file=options.pop("json_file"), **options)

    def carry_out(self, bench_name: str, engine_options: str, entries: Mapping[str, Entry]) -> Document:
        """Run, print and store."""
        if self.file and not Path(self.file).parent.is_dir():
            raise InvalidArgumentError("the folder of --json does not exist", file=self.file)
        facts = {
            "command": self._command(bench_name, engine_options),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
        }
        runs = run_paired(entries, self.repeats, profile=self.profile, disk=self.disk, tell=self._tell)
        found = document(bench_name, entries, runs, facts)
        for sheet in tables.sheets(found):
            _console.print(sheet.rich())
        if self.file:
            Path(self.file).write_text(json.dumps(found, indent=1) + "\n")
        return found

    def _command(self, bench_name: str, engine_options: str) -> str:
        shown = [
            f"--{name.replace('_', '-')} {value}"
            for name, value in asdict(self.job).items()
            if value is not None and f"--{name} " not in engine_options
        ]
        return " ".join(["holdfast bench", bench_name, engine_options, *shown, f"--repeats {self.repeats}"])

    def _tell(self, label: str, repeat: int, run: Run | None) -> None:
        where = f"{label}, repeat {repeat + 1} of {self.repeats}"
        if run is None:
            _console.print(f"[dim]{where} …[/dim]")
        else:
            _console.print(f"{where}: {run['rows_per_second']:,.0f} rows a second, ms: {_first_ms(run)}")


def _first_ms(run: Run, shown: int = 40) -> str:
    times = run["batch_ms"]
    more = f" … ({len(times)} in all)" if len(times) > shown else ""
    return " ".join(f"{ms:.0f}" for ms in times[:shown]) + more
