"""Single benches: one command per job, whose options are the job's fields.

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
    """A command: a job with the options' defaults, the engines to compare, and the help text."""

    job: Job
    engines: str
    help: str
    repeats: int = 1


SINGLE = (
    Single(
        JobA(),
        "holdfast-memory,holdfast-filesystem,holdfast-rocksdb,spark-agg-rocksdb,floor",
        "Running count and sum per key, a million keys.",
        repeats=2,
    ),
    Single(
        JobB(),
        "holdfast-rocksdb,holdfast-filesystem,spark-agg-rocksdb",
        "Micro-batches that touch a few of many keys; large: --keys 20000000 --fill-rows 1000000.",
    ),
    Single(
        DropIn(batches=14, warmup=6),
        "pandas-memory,pandas-filesystem,pandas-rocksdb,holdfast-memory,spark-pandas-rocksdb",
        "Running count and sum by applyInPandasWithState, on holdfast and on Spark.",
    ),
    Single(
        # Spark takes about 5 s per micro-batch, with pandas 17 s: too slow for a long warm-up.
        ByProcessor(rows=20_000, batches=10, warmup=6),
        "holdfast-memory-row,holdfast-memory-pandas,holdfast-rocksdb-row,spark-tws-row,spark-tws-pandas",
        "One processor by transformWithState, on holdfast and on Spark.",
    ),
    Single(Operators(), "operator-memory,spark-operator", "A built-in operator, on holdfast and on Spark.", 2),
    Single(Nexmark(), ",".join(NEXMARK), "A Nexmark query, such as --query 5; engines must agree on its results."),
    Single(
        FromFiles(),
        "holdfast-rocksdb,flink-sql-rocksdb-mini-batch,pathway",
        "holdfast and other stream processors on the same files; first use installs up to 1.6 GB per peer from PyPI.",
    ),
    Single(Snapshots(), "store-rocksdb,store-memory", "Bytes that a snapshot uploads after few keys changed."),
    Single(
        Restore(),
        "store-rocksdb,store-filesystem,store-memory",
        "Restores against plain downloads of the same objects; on S3: --serves true --state-dir s3://bucket/bench.",
    ),
    Single(
        Size(),
        "store-memory,store-filesystem,store-rocksdb",
        "Micro-batches, a snapshot and a restore of one shard, by the store alone.",
    ),
    Single(
        Sinks(),
        "store-memory",
        "Sinks against the fastest plain writes: --postgres 'host=… dbname=…' --kafka … --topic ….",
    ),
)


def command_of(single: Single) -> click.Command:
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
        click.Option(["--engines"], default=single.engines, help=f"compare each with all that follow: {known}"),
        click.Option(["--vary"], help="also compare variants of the job: FIELD=VALUE,VALUE…, such as slots=2,1"),
        *of_job,
        click.Option(["--repeats"], default=single.repeats, help="runs of each entry, in turns"),
        click.Option(["--disk"], type=click.Path(file_okay=False), help="directory on the disk to measure on"),
        click.Option(
            ["--json", "file"],
            type=click.Path(dir_okay=False, path_type=Path),
            help="write all measurements to this file",
        ),
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
    file: Path | None,
) -> None:
    """Run entries in turns; print tables of the measurements and store them."""
    if file and not file.parent.is_dir():
        raise InvalidArgumentError("the folder of --json does not exist; create it", file=file)
    labels = _known_engines(type(job), engines)
    variants = _variants(job, vary, of_job)
    entries = {label + variant: Entry(label, of) for variant, of in variants.items() for label in labels}
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
            _console.print(f"{label}: {run['rows_per_second']:,.0f} rows/s, ms: {_first_ms(run)}")
    found = document(job.name, entries, runs, facts)
    for sheet in tables.sheets(found):
        _console.print(sheet.rich())
    if file:
        file.write_text(json.dumps(found, indent=1) + "\n")


def _known_engines(job: type[Job], engines: str) -> list[str]:
    labels, known = engines.split(","), engines_for(job)
    if not set(labels) <= set(known) or len(set(labels)) != len(labels):
        raise InvalidArgumentError("give distinct known engines, separated by commas", given=engines, known=known)
    if any(label.endswith("-s3") for label in labels):
        server_of_environment()  # refuses a server whose requests cannot be counted
    return labels


def _variants(job: Job, vary: str | None, of_job: list[click.Option]) -> Mapping[str, Job]:
    """Return the jobs to compare by their suffix of a label."""
    if vary is None:
        return {"": job}
    name, _, values = vary.partition("=")
    option = next((option for option in of_job if option.name == name.replace("-", "_")), None)
    if option is None or not values:
        known = [of.name for of in of_job]
        raise InvalidArgumentError("--vary takes a field of the job and values: slots=2,1", given=vary, known=known)
    found = {value: option.type.convert(value, option, None) for value in values.split(",")}
    return {f", {name} {shown}": replace(job, **{str(option.name): value}) for shown, value in found.items()}


def _prepared(job: Job, labels: list[str]) -> dict[str, Any]:
    """Install the peers that a job needs and compare the engines' results; return the comparison."""
    for environment in dict.fromkeys(PEERS[name].program.environment for name in labels if name in PEERS):
        environment.install(_console.print)
    if not isinstance(job, Nexmark | Operators):
        return {}
    _console.print(f"[dim]comparing the results of {', '.join(labels)} …[/dim]")
    equality = checked(job, labels)
    if not equality["equal"]:
        raise BenchError("the engines' results differ, so nothing is measured", **equality)
    _console.print(f"all find the same {equality['rows']} results")
    return {"equality": equality}


def _command(job: Job, engines: str, vary: str | None, repeats: int) -> str:
    given = {"engines": engines, "vary": vary, **asdict(job), "repeats": repeats}
    shown = [f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value is not None]
    return " ".join(["holdfast bench", job.name, *shown])


def _first_ms(run: Run, shown: int = 40) -> str:
    times = run["batch_ms"]
    more = f" … ({len(times)} in total)" if len(times) > shown else ""
    return " ".join(f"{ms:.0f}" for ms in times[:shown]) + more
