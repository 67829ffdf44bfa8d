"""``holdfast demo``: starts the query's driver, kills or stops it half-way, lets another go on, checks the result."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import click
import pandas as pd
from rich.console import Console

from holdfast import clock
from holdfast.backends.registry import find_backend
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.examples.flights import data, report
from holdfast.examples.flights.drivers import BACKEND, LOCAL_DIR, Drivers, wait_for_state_servers
from holdfast.examples.flights.query import Job, stored
from holdfast.examples.flights.results.base import Results
from holdfast.examples.flights.results.looking import ended, query_id
from holdfast.examples.flights.results.places import RESULTS
from holdfast.settings import STORAGE_PREFIX
from holdfast.spark_integration.java import ensure_java

_END_OF_TIME_MS = 1 << 52


@click.command()
@click.option("--backend", default="memory", show_default=True, help="Where working state lives.")
@click.option(
    "--state-dir", metavar="URL", help="Where state is durable: a path, s3://bucket/… [default: the work dir]"
)
@click.option("--flights", type=click.IntRange(min=1000), metavar="N", help="Only the first N flights.")
@click.option("--batches", type=click.IntRange(min=2), default=24, show_default=True, help="Number of micro-batches.")
@click.option("--kill/--no-kill", default=True, show_default=True, help="Kill the driver half-way.")
@click.option(
    "--savepoint",
    is_flag=True,
    help="Instead, stop half-way with a savepoint; restore it on another backend, resharded.",
)
@click.option(
    "--sink",
    type=click.Choice(list(filter(None, RESULTS))),
    help="Show results through this sink, exactly once. PostgreSQL and Kafka: `make postgres`, `make kafka` start one.",
)
@click.option("--lose-local", is_flag=True, help="Also delete local state at the kill, as losing the machine would.")
@click.option(
    "--restarts", type=click.IntRange(min=0), default=0, show_default=True, help="Restarts of a query that failed."
)
@click.option(
    "--work-dir", type=click.Path(path_type=Path), help="Input, output and logs go here [default: temporary]."
)
@click.option("--keep", is_flag=True, help="Keep the work dir and the state.")
@click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting of the Spark session; may be repeated.")
def demo(
    backend: str,
    state_dir: str | None,
    flights: int | None,
    batches: int,
    kill: bool,
    savepoint: bool,
    sink: str | None,
    lose_local: bool,
    restarts: int,
    work_dir: Path | None,
    keep: bool,
    conf: tuple[str, ...],
) -> None:
    """Run a query that is killed half-way, and check its results.

    The flights that left New York in 2013 pass through Spark as micro-batches, in time order. Running totals of each
    aircraft, carrier and route are holdfast state. Half-way the driver is killed with SIGKILL and started again; at
    the end state and output must equal what plain pandas computes from the whole file. With --savepoint the query is
    stopped with a savepoint instead, and another one continues from it, on another backend with twice the shards.
    With --sink results go to a table, topic or files, where an independent reader must find each micro-batch of the
    state once, at the kill and at the end; with both, the second query continues the sink of the first.
    """
    if savepoint and lose_local:
        raise InvalidArgumentError("--lose-local is for a kill: with --savepoint nothing is killed")
    console = Console(highlight=False)
    settings = {BACKEND: backend, **_parse_configuration(conf)}
    ensure_java()
    all_flights = data.load_flights(flights)
    with _work_directory(work_dir, keep) as folder:
        durable = f"{state_dir.rstrip('/')}/holdfast-demo-{clock.new_id()}" if state_dir else str(folder / "state")
        job = replace(_job(folder, durable, settings, restarts), sink=sink, run=clock.new_id())
        results = job.results()
        results.prepare()
        data.write_files(all_flights, folder / "flights", batches)
        console.print(
            f"[bold]{len(all_flights):,} flights[/] in {batches} micro-batches; backend {backend}, "
            f"state durable in {durable}, results in {results.where}, log in {folder / 'spark.log'}",
            soft_wrap=True,
        )
        try:
            drivers = Drivers(job, batches, console, results, lose_local=lose_local)
            killed = None
            ended_as = job
            if savepoint:
                first, ended_as = _moving(job, settings, batches // 2)
                drivers.move(first, ended_as)
            else:
                killed = drivers.run(kill_after=batches // 2 if kill else None)
            correct = _show(console, (job, ended_as), all_flights, drivers, results, killed)
        finally:
            if not keep:
                _remove(job, results, console)
        if keep:
            console.print(f"kept: {folder}, {durable} and {results.where}", soft_wrap=True)
        console.print(_how_to_look(ended_as, keep=keep), soft_wrap=True, markup=False)
    if not correct:
        raise SystemExit(1)


def _how_to_look(job: Job, *, keep: bool) -> str:
    """Return how to open the page of the query's state."""
    if not keep:
        return "with --keep the state stays, and holdfast ui shows it as a web page"
    # By name only: a value may be a secret.
    options = [key.removeprefix(STORAGE_PREFIX) for key in sorted(job.configuration) if key.startswith(STORAGE_PREFIX)]
    given = "".join(f" --option {name}=…" for name in options)
    places = f"{shlex.quote(job.state_dir)} {shlex.quote(str(job.query))}"
    return f"look into its state: {_program()} ui {places}{given}"


def _program() -> str:
    """Return what a shell finds this program by: its name, or else where it is, as when ``make`` has called it."""
    called = Path(sys.argv[0])
    if called.name != "holdfast" or shutil.which("holdfast"):
        return "holdfast"
    return shlex.quote(str(called.absolute()))


def _job(folder: Path, durable: str, settings: dict[str, str], restarts: int) -> Job:
    # Files on disk outlive their executor: these go with the work dir.
    in_memory = find_backend(settings[BACKEND]).in_memory
    local = {} if in_memory else {LOCAL_DIR: str(folder / "local")}
    return Job(str(folder), durable, local | settings, restarts)


def _moving(job: Job, settings: dict[str, str], stop_after: int) -> tuple[Job, Job]:
    """Return the job that stops with a savepoint, and the one that goes on from it, on another backend.

    Where it continues a sink, the sink's decisions stay where they are, and so does the state.
    """
    savepoints = f"{job.state_dir}/savepoints"
    first = replace(job, state_dir=f"{job.state_dir}/first", savepoints=savepoints, stop_after=stop_after)
    other = "memory" if settings[BACKEND] == "filesystem" else "filesystem"
    state_dir = first.state_dir if job.sink else f"{job.state_dir}/second"
    second = _job(job.folder, state_dir, settings | {BACKEND: other}, job.restarts)
    return first, replace(second, savepoints=savepoints, from_savepoint=True, sink=job.sink, run=job.run)


def _parse_configuration(given: tuple[str, ...]) -> dict[str, str]:
    pairs = [item.partition("=") for item in given]
    wrong = [item for item, pair in zip(given, pairs, strict=True) if not pair[1]]
    if wrong:
        # Not shown: it may be a credential.
        raise InvalidArgumentError("--conf takes KEY=VALUE", wrong=len(wrong))
    return {key: value for key, _, value in pairs}


@contextmanager
def _work_directory(given: Path | None, keep: bool) -> Iterator[Path]:
    """Give an empty directory; remove it at the end unless it is to be kept or something failed."""
    if given is None:
        folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    elif given.exists() and any(given.iterdir()):
        raise InvalidArgumentError("the work dir must be empty or absent", work_dir=given)
    else:
        folder = given.absolute()
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        with suppress(OSError):  # it holds what may tell why
            folder.rmdir()
        raise
    if not keep:
        wait_for_state_servers(folder.glob("local/*/executor-*"))
        shutil.rmtree(folder)


def _show(
    console: Console,
    jobs: tuple[Job, Job],
    flights: pd.DataFrame,
    drivers: Drivers,
    results: Results,
    killed: report.Kill | None,
) -> bool:
    job, ended_as = jobs
    expected = data.expected_totals(flights)
    differences = report.differences(report.state_totals(job.folder / "state.arrow"), expected)
    subjects = f"all {len(expected):,} subjects, all totals"
    checks = [report.Check("equal", f"state and plain pandas, {subjects}", differences)]
    # The first micro-batch of a query that was restored is not its own.
    batches = ended(job.query) + (ended(ended_as.query) - 1 if ended_as is not job else 0)
    checks += results.checks(flights, expected, batches)
    if drivers.look is not None:
        checks.append(drivers.look.check(report.state_totals(job.folder / "state-half-way.arrow")))
    report.show_worst(console, expected)
    report.show_figures(console, job.folder, drivers.starts, killed)
    for check in checks:
        check.show(console)
    return not any(check.wrong for check in checks)


def _remove(job: Job, results: Results, console: Console) -> None:
    """Remove what is outside of the work directory."""
    try:
        results.remove(query_id(job.query))
    except HoldfastError as exc:
        console.print(f"{results.where} could not be removed: {exc}", markup=False, soft_wrap=True)
    if not Path(job.state_dir).is_relative_to(job.folder):
        with stored(job) as storage:
            storage.delete([found.key for found in storage.list("")])
            with suppress(HoldfastError):  # what may not be listed may stay: it is no object
                storage.abort_unfinished_uploads("", before_ms=_END_OF_TIME_MS)
