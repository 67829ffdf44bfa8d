"""``holdfast demo``: starts a query's driver, kills or stops it half-way, continues, and checks the result."""

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
@click.option("--backend", default="memory", show_default=True, help="Backend of the working state.")
@click.option("--state-dir", metavar="URL", help="Durable storage: a path, s3://bucket/… [default: the work dir]")
@click.option("--flights", type=click.IntRange(min=1000), metavar="N", help="Only the first N flights.")
@click.option("--batches", type=click.IntRange(min=2), default=24, show_default=True, help="Number of micro-batches.")
@click.option("--kill/--no-kill", default=True, show_default=True, help="Kill the driver half-way.")
@click.option(
    "--savepoint",
    is_flag=True,
    help="Stop half-way with a savepoint instead; restore it on a different backend with twice the shards.",
)
@click.option(
    "--sink",
    type=click.Choice(list(filter(None, RESULTS))),
    help="Write results through this sink, exactly once. `make postgres` and `make kafka` start a server.",
)
@click.option("--lose-local", is_flag=True, help="Also delete local state at the kill, like the loss of a machine.")
@click.option(
    "--restarts", type=click.IntRange(min=0), default=0, show_default=True, help="Restarts of a query that failed."
)
@click.option(
    "--work-dir", type=click.Path(path_type=Path), help="Directory for input, output and logs [default: temporary]."
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

    Spark reads the flights that left New York in 2013 in time order. The state has running totals of each aircraft,
    carrier and route. Half-way the driver is killed with SIGKILL and started again; in the end state and output must
    equal the totals that plain pandas computes. With --savepoint the query stops with a savepoint instead, and a second
    query continues from it on a different backend with twice the shards. With --sink results go to a table, topic or
    files, where an independent reader must find each micro-batch of the state once, at the kill and in the end; with
    both, the second query continues the first query's sink.
    """
    if savepoint and lose_local:
        raise InvalidArgumentError("--lose-local needs a kill; leave out --savepoint")
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
                first, ended_as = _halves(job, settings, batches // 2)
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
    """Return the command that shows the query's state."""
    if not keep:
        return "--keep keeps the state, which holdfast ui shows as a web page"
    # Only names: a value may be a secret.
    options = [key.removeprefix(STORAGE_PREFIX) for key in sorted(job.configuration) if key.startswith(STORAGE_PREFIX)]
    given = "".join(f" --option {name}=…" for name in options)
    places = f"{shlex.quote(job.state_dir)} {shlex.quote(str(job.query))}"
    return f"to see its state: {_program()} ui {places}{given}"


def _program() -> str:
    """Return the command of this program: its name, or its path if the shell does not find the name."""
    called = Path(sys.argv[0])
    if called.name != "holdfast" or shutil.which("holdfast"):
        return "holdfast"
    return shlex.quote(str(called.absolute()))


def _job(folder: Path, durable: str, settings: dict[str, str], restarts: int) -> Job:
    # Local files outlive their executor; in the work dir they are deleted with it.
    in_memory = find_backend(settings[BACKEND]).in_memory
    local = {} if in_memory else {LOCAL_DIR: str(folder / "local")}
    return Job(str(folder), durable, local | settings, restarts)


def _halves(job: Job, settings: dict[str, str], stop_after: int) -> tuple[Job, Job]:
    """Return the job that stops with a savepoint, and the job that continues from it on a different backend.

    If it continues a sink, it keeps the state directory, which has the sink's decisions.
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
        # Without the values, which may be credentials.
        raise InvalidArgumentError("--conf takes KEY=VALUE", wrong=len(wrong))
    return {key: value for key, _, value in pairs}


@contextmanager
def _work_directory(given: Path | None, keep: bool) -> Iterator[Path]:
    """Yield an empty directory; remove it at the end unless `keep` is set or the demo failed."""
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
        with suppress(OSError):  # keeps the logs, if there are any
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
    # The first micro-batch of a restored query belongs to the savepoint.
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
    """Remove data outside the work directory."""
    try:
        results.remove(query_id(job.query))
    except HoldfastError as exc:
        console.print(f"cannot remove {results.where}: {exc}", markup=False, soft_wrap=True)
    if not Path(job.state_dir).is_relative_to(job.folder):
        with stored(job) as storage:
            storage.delete([found.key for found in storage.list("")])
            with suppress(HoldfastError):  # listing uploads may be forbidden; unfinished uploads are not objects
                storage.abort_unfinished_uploads("", before_ms=_END_OF_TIME_MS)
