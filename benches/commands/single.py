"""Single benches: a command for each job, whose fields are its options.

::

    holdfast bench job-a --engines holdfast-memory,spark-agg-rocksdb --rows 1000      engines on one job
    holdfast bench job-a --engines holdfast-memory --vary slots=2,1                   one engine on variants of a job
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from holdfast.benches.instruments.machine import machine, versions
from holdfast.benches.jobs.by_key import ByProcessor, DropIn
from holdfast.benches.jobs.job import Job, server_of_environment
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.operators import Operators
from holdfast.benches.jobs.shard import Restore, Size, Snapshots
from holdfast.benches.jobs.sinks import Sinks
from holdfast.benches.nexmark.job import Nexmark
from holdfast.benches.peers.engines import ENGINES as PEERS
from holdfast.benches.peers.job import FromFiles
from holdfast.benches.report import tables
from holdfast.benches.report.results import document
from holdfast.benches.runs.by_name import engines_for
from holdfast.benches.runs.child_process import BenchError
from holdfast.benches.runs.equality import checked
from holdfast.benches.runs.paired import Entry, Run, run_engine
from holdfast.benches.suites.suites import NEXMARK
from holdfast.errors import InvalidArgumentError

_console = Console()


@dataclass(frozen=True)
class Single:
    """A command: the job whose values are the options' defaults, the engines that it compares, and its help."""

    job: Job
    engines: str
    help: str
    repeats: int = 1


SINGLE = (
    Single(
        JobA(),
        "holdfast-memory,holdfast-filesystem,holdfast-rocksdb,spark-agg-rocksdb,floor",
        "Running count and sum for each of a million keys.",
        repeats=2,
    ),
    Single(
        JobB(),
        "holdfast-rocksdb,holdfast-filesystem,spark-agg-rocksdb",
        "Micro-batches that touch a few of many keys: --keys 20000000 --fill-rows 1000000 is the large one.",
    ),
    Single(
        DropIn(batches=14, warmup=6),
        "pandas-memory,pandas-filesystem,pandas-rocksdb,holdfast-memory,spark-pandas-rocksdb",
        "Spark's applyInPandasWithState by holdfast's with the same function, a running count and sum.",
    ),
    Single(
        # Spark's own takes some 5 s a micro-batch, by pandas 17: no time for a long warm-up.
        ByProcessor(rows=20_000, batches=10, warmup=6),
        "holdfast-memory-row,holdfast-memory-pandas,holdfast-rocksdb-row,spark-tws-row,spark-tws-pandas",
        "Spark's transformWithState by holdfast's with the same processor.",
    ),
    Single(
        Operators(), "operator-memory,spark-operator", "An operator in one line by Spark's own of the same name.", 2
    ),
    Single(
        Nexmark(), ",".join(NEXMARK), "A query of Nexmark, such as --query 5; only engines that agree are measured."
    ),
    Single(
        FromFiles(),
        "holdfast-rocksdb,flink-sql-rocksdb-mini-batch,pathway",
        "Flink, Pathway, Bytewax, Quix Streams on files: each is installed on its first use, up to 1.6 GB from PyPI.",
    ),
    Single(Snapshots(), "store-rocksdb,store-memory", "Bytes that a snapshot sends when few keys have changed."),
    Single(
        Restore(),
        "store-rocksdb,store-filesystem,store-memory",
        "State that is in the storage only, against a plain download; S3: --serves true --state-dir s3://bucket/bench.",
    ),
    Single(
        Size(),
        "store-memory,store-filesystem,store-rocksdb",
        "Micro-batches on one shard of --keys by the store alone, then a snapshot and a restore.",
    ),
    Single(
        Sinks(),
        "store-memory",
        "Micro-batches into each sink, by the fastest plain way: --postgres 'host=… dbname=…' --kafka … --topic ….",
    ),
)


def command_of(single: Single) -> click.Command:
    """Return the command of a single bench."""
    of_job = [
        click.Option(
            [f"--{field.name.replace('_', '-')}"],
            default=getattr(single.job, field.name),
            type=field.metadata["type"],
            help=field.metadata["help"],
        )
        for field in fields(single.job)
    ]
    known = ", ".join(engines_for(type(single.job)))
    given = [
        click.Option(["--engines"], default=single.engines, help=f"each is compared with all after it: {known}"),
        click.Option(["--vary"], help="also compare variants of the job: FIELD=VALUE,VALUE…, such as slots=2,1"),
        *of_job,
        click.Option(["--repeats"], default=single.repeats, help="runs of each entry, in turns"),
        click.Option(["--disk"], type=click.Path(file_okay=False), help="directory on the disk to measure with"),
        click.Option(["--json"], type=click.Path(dir_okay=False, path_type=Path), help="file for all measurements"),
    ]

    def run(**options: Any) -> None:
        sizes = {field.name: options.pop(field.name) for field in fields(single.job)}
        _compare(replace(single.job, **sizes), of_job, **options)

    name = single.job.name
    return click.Command(name, callback=run, params=list(given), help=single.help, short_help=single.help.rstrip("."))


def _compare(
    job: Job,
    of_job: list[click.Option],
    engines: str,
    vary: str | None,
    repeats: int,
    disk: str | None,
    json: Path | None,
) -> None:
    """Run entries in turns, print tables of what was measured, and store it."""
    if json and not json.parent.is_dir():
        raise InvalidArgumentError("the folder of --json does not exist", file=json)
    labels = _known_engines(type(job), engines)
    variants = _variants(job, vary, of_job)
    entries = {
        ", ".join(filter(None, (label, variant))): Entry(label, of)
        for variant, of in variants.items()
        for label in labels
    }
    facts = {
        "command": _command(job, engines, vary, repeats),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        **_prepared(job, labels),
    }
    runs: dict[str, list[Run]] = {label: [] for label in entries}
    for repeat in range(repeats):
        for label, entry in entries.items():
            _console.print(f"[dim]{label}, repeat {repeat + 1} of {repeats} …[/dim]")
            run = run_engine(entry, disk=disk)
            runs[label].append(run)
            _console.print(f"{label}: {run['rows_per_second']:,.0f} rows a second, ms: {_first_ms(run)}")
    _show_and_store(document(job.name, entries, runs, facts), json)


def _show_and_store(found: dict[str, Any], file: Path | None) -> None:
    for sheet in tables.sheets(found):
        _console.print(sheet.rich())
    if file:
        file.write_text(json.dumps(found, indent=1) + "\n")


def _known_engines(job: type[Job], engines: str) -> list[str]:
    labels, known = engines.split(","), engines_for(job)
    if not set(labels) <= set(known) or len(set(labels)) != len(labels):
        raise InvalidArgumentError(
            "engines must be different known names with a comma between", given=engines, known=known
        )
    if any(label.endswith("-s3") for label in labels):
        server_of_environment()  # refuses one at which requests cannot be counted
    return labels


def _variants(job: Job, vary: str | None, of_job: list[click.Option]) -> Mapping[str, Job]:
    """Return the jobs to compare by what they add to a label."""
    if vary is None:
        return {"": job}
    name, _, values = vary.partition("=")
    option = next((option for option in of_job if option.name == name.replace("-", "_")), None)
    if option is None or not values:
        known = [of.name for of in of_job]
        raise InvalidArgumentError(
            "--vary takes a field of the job and its values, as slots=2,1", given=vary, known=known
        )
    found = {value: option.type.convert(value, option, None) for value in values.split(",")}
    return {f"{name} {shown}": replace(job, **{str(option.name): value}) for shown, value in found.items()}


def _prepared(job: Job, labels: list[str]) -> dict[str, Any]:
    """Install the peers that a job needs, and compare what engines find; return what is known of that."""
    for environment in dict.fromkeys(PEERS[name].program.environment for name in labels if name in PEERS):
        environment.install(_console.print)
    if not isinstance(job, Nexmark | Operators):
        return {}
    _console.print(f"[dim]do they find the same: {', '.join(labels)} …[/dim]")
    equality = checked(job, labels)
    if not equality["equal"]:
        raise BenchError("engines do not find the same, so no time counts", **equality)
    _console.print(f"they find the same {equality['rows']} results")
    return {"equality": equality}


def _command(job: Job, engines: str, vary: str | None, repeats: int) -> str:
    given = {"engines": engines, "vary": vary, **asdict(job), "repeats": repeats}
    shown = [f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value is not None]
    return " ".join(["holdfast bench", job.name, *shown])


def _first_ms(run: Run, shown: int = 40) -> str:
    times = run["batch_ms"]
    more = f" … ({len(times)} in all)" if len(times) > shown else ""
    return " ".join(f"{ms:.0f}" for ms in times[:shown]) + more
