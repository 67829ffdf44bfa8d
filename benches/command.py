"""``holdfast bench``: the jobs, measured as paired runs, with a table on the terminal and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from holdfast.benches import report
from holdfast.benches.engines import ENGINES
from holdfast.benches.job_a import Job
from holdfast.benches.machine import machine, versions
from holdfast.benches.paired import Entry, Run, run_paired
from holdfast.benches.results import Document, document
from holdfast.errors import InvalidArgumentError

_console = Console()


@click.group(context_settings={"show_default": True})
def bench() -> None:
    """Measure holdfast against Spark's own state, in paired runs on this machine."""


def _options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command the options of a job; `defaults` replace those of `Job`."""
    job = Job(**{k: v for k, v in defaults.items() if k not in ("engines", "repeats")})
    options = [
        click.option("--rows", default=job.rows, help="rows of a micro-batch"),
        click.option("--keys", default=job.keys, help="possible keys"),
        click.option("--batches", default=job.batches, help="micro-batches of a run"),
        click.option("--warmup", default=job.warmup, help="first micro-batches, which are not counted"),
        click.option("--repeats", default=defaults.get("repeats", 2), help="runs of each engine, in turns"),
        click.option("--slots", default=job.slots, help="task slots: local[slots]"),
        click.option("--partitions", default=job.partitions, help="partitions of source and shuffle"),
        click.option("--transport", type=click.Choice(["packed", "rows"]), default=job.transport),
        click.option("--profile", is_flag=True, help="also say where a micro-batch's time goes; costs a little"),
        click.option("--disk", type=click.Path(file_okay=False), help="directory on the disk to measure with"),
        click.option("--json", "json_file", type=click.Path(dir_okay=False), help="file for all that was measured"),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _engines(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--engines", default=default, help=f"the first is compared with all others: {', '.join(ENGINES)}"
    )


@bench.command("job-a")
@_engines("holdfast-memory,spark-agg-rocksdb,floor")
@_options()
def job_a(engines: str, **options: Any) -> None:
    """Running count and sum for each of a million keys."""
    _compare("job-a", engines, options)


@bench.command("small-batch")
@_engines("holdfast-memory,spark-aiwps-count")
@_options(rows=1000, batches=45, warmup=15, transport="rows")
def small_batch(engines: str, **options: Any) -> None:
    """Job A with few rows a micro-batch: the fixed cost, against Spark's applyInPandasWithState."""
    _compare("small-batch", engines, options)


@bench.command("scaling")
@click.option("--engine", type=click.Choice(list(ENGINES)), default="holdfast-memory")
@_options()
def scaling(engine: str, **options: Any) -> None:
    """Job A with one task slot and with --slots of them, and what limits the gain."""
    many = options.pop("slots")
    plan = _Plan.of(options)
    entries = {f"{slots} slots": Entry(engine, Job(slots=slots, **plan.job)) for slots in (many, 1)}
    found = plan.carry_out("scaling", f"--engine {engine} --slots {many}", entries)
    _console.print(report.what_limits(found))


@bench.command("report")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
def report_files(files: tuple[str, ...]) -> None:
    """Print stored measurements as Markdown."""
    for file in files:
        click.echo(report.markdown(json.loads(Path(file).read_text())))


def _compare(name: str, engines: str, options: dict[str, Any]) -> None:
    labels = engines.split(",")
    unknown = [label for label in labels if label not in ENGINES]
    if unknown or len(set(labels)) != len(labels):
        raise InvalidArgumentError(
            "engines must be different known names with a comma between", given=engines, known=list(ENGINES)
        )
    plan = _Plan.of(options)
    plan.carry_out(name, f"--engines {engines}", {label: Entry(label, Job(**plan.job)) for label in labels})


class _Plan:
    """The options of a command, sorted: those of the job, and how to run it."""

    def __init__(self, job: Mapping[str, Any], repeats: int, profile: bool, disk: str | None, file: str | None) -> None:
        self.job, self.repeats, self.profile, self.disk, self.file = job, repeats, profile, disk, file

    @classmethod
    def of(cls, options: dict[str, Any]) -> _Plan:
        """Return the plan of a command's options; those that are not named here are the job's."""
        run = {name: options.pop(name) for name in ("repeats", "profile", "disk")}
        return cls(file=options.pop("json_file"), job=options, **run)

    def carry_out(self, bench_name: str, engine_options: str, entries: Mapping[str, Entry]) -> Document:
        """Run, print and store."""
        if self.file and not Path(self.file).parent.is_dir():
            raise InvalidArgumentError("the folder of --json does not exist", file=self.file)
        shown = [f"--{name} {value}" for name, value in self.job.items() if value is not None]
        facts = {
            "command": " ".join(["holdfast bench", bench_name, engine_options, *shown, f"--repeats {self.repeats}"]),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
        }
        runs = run_paired(entries, self.repeats, profile=self.profile, disk=self.disk, tell=self._tell)
        found = document(bench_name, entries, runs, facts)
        for sheet in report.sheets(found):
            _console.print(sheet.rich())
        if self.file:
            Path(self.file).write_text(json.dumps(found, indent=1) + "\n")
        return found

    def _tell(self, label: str, repeat: int, run: Run | None) -> None:
        where = f"{label}, repeat {repeat + 1} of {self.repeats}"
        if run is None:
            _console.print(f"[dim]{where} …[/dim]")
        else:
            _console.print(f"{where}: {run['rows_per_second']:,.0f} rows a second, ms: {run['batch_ms']}")
