"""What the commands of single benches share: their options, and how a plan made of them is carried out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from rich.console import Console

from holdfast.benches.instruments.machine import machine, versions
from holdfast.benches.jobs.job import Job
from holdfast.benches.report import tables
from holdfast.benches.report.results import Document, document
from holdfast.benches.runs.by_name import engines_for
from holdfast.benches.runs.paired import Entry, Run, run_paired
from holdfast.errors import InvalidArgumentError

console = Console()
_Command = Callable[..., None]


def options_of(job: Job, *, repeats: int = 2, without: str = "") -> Callable[[_Command], _Command]:
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


def engines_option(job: type[Job], default: str) -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command the choice of the engines that run jobs of a kind."""
    known = ", ".join(engines_for(job))
    return click.option("--engines", default=default, help=f"each is compared with all that follow it: {known}")


def compare(name: str, job: Job, engines: str, options: dict[str, Any]) -> None:
    """Run one job on some engines."""
    labels = known_engines(type(job), engines)
    plan = Plan.of(job, options)
    plan.carry_out(name, f"--engines {engines}", {label: Entry(label, plan.job) for label in labels})


def compare_with_change(
    name: str, job: Job, engine: str, options: dict[str, Any], labels: tuple[str, str], change: Callable[[Any], Any]
) -> None:
    """Run one engine on a job, and on the same with a change; `labels` name the two."""
    plan = Plan.of(job, options)
    entries = zip(labels, (plan.job, change(plan.job)), strict=True)
    plan.carry_out(name, f"--engine {engine}", {label: Entry(engine, one) for label, one in entries})


def known_engines(job: type[Job], engines: str) -> list[str]:
    """Return the engines that an option names.

    Raises
    ------
    InvalidArgumentError
        One of them is unknown, does not run the job, or stands there twice.
    """
    labels, known = engines.split(","), engines_for(job)
    if not set(labels) <= set(known) or len(set(labels)) != len(labels):
        raise InvalidArgumentError(
            "engines must be different known names with a comma between", given=engines, known=known
        )
    return labels


@dataclass(frozen=True)
class Plan:
    """The options of a command, sorted: the job, and how to run it."""

    job: Job
    repeats: int
    profile: bool
    disk: str | None
    file: str | None

    @classmethod
    def of(cls, job: Job, options: dict[str, Any]) -> Plan:
        """Return the plan of a command's options; those that are fields of `job` change it."""
        sizes = {field.name: options.pop(field.name) for field in fields(job) if field.name in options}
        return cls(replace(job, **sizes), file=options.pop("json_file"), **options)

    def carry_out(
        self,
        bench_name: str,
        engine_options: str,
        entries: Mapping[str, Entry],
        more_facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> Document:
        """Run, print and store; `more_facts` stand in the document beside those of every bench."""
        if self.file and not Path(self.file).parent.is_dir():
            raise InvalidArgumentError("the folder of --json does not exist", file=self.file)
        facts = {
            "command": self._command(bench_name, engine_options),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            **more_facts,
        }
        runs = run_paired(entries, self.repeats, profile=self.profile, disk=self.disk, tell=self._tell)
        found = document(bench_name, entries, runs, facts)
        for sheet in tables.sheets(found):
            console.print(sheet.rich())
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
            console.print(f"[dim]{where} …[/dim]")
        else:
            console.print(f"{where}: {run['rows_per_second']:,.0f} rows a second, ms: {_first_ms(run)}")


def _first_ms(run: Run, shown: int = 40) -> str:
    times = run["batch_ms"]
    more = f" … ({len(times)} in all)" if len(times) > shown else ""
    return " ".join(f"{ms:.0f}" for ms in times[:shown]) + more
