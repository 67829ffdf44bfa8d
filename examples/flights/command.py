"""``holdfast demo``: starts the query's driver, kills or stops it half-way, lets another go on, checks the result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import click
import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast import clock
from holdfast.backends.registry import find_backend
from holdfast.errors import HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.examples.flights import data, report
from holdfast.examples.flights.query import QUERY, RESTORED, Job, committed, encode, storage_values
from holdfast.examples.flights.starts import Start, StartWatch
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.executor import local_dirs, server_files
from holdfast.spark_integration.java import ensure_java

_BACKEND = "spark.holdfast.backend"
_LOCAL_DIR = "spark.holdfast.local.dir"
_WATCH_EVERY_S = 0.05
# Long enough after a commit for the next micro-batch to be well on its way.
_KILL_AFTER_COMMIT_S = 0.4
# A state server ends within 20 s of its driver, usually at once.
_SERVER_ENDS_WITHIN_S = 25.0
_LOG_LINES_SHOWN = 30
_END_OF_TIME_MS = 1 << 52


@click.command()
@click.option("--backend", default="memory", show_default=True, help="Where working state lives.")
@click.option(
    "--checkpoint", metavar="URL", help="Where state is durable: a path, s3://bucket/… [default: the work dir]"
)
@click.option("--flights", type=click.IntRange(min=1000), metavar="N", help="Only the first N flights.")
@click.option("--batches", type=click.IntRange(min=2), default=24, show_default=True, help="Number of micro-batches.")
@click.option("--kill/--no-kill", default=True, show_default=True, help="Kill the driver half-way.")
@click.option(
    "--savepoint",
    is_flag=True,
    help="Instead, stop half-way with a savepoint; restore it on another backend, resharded.",
)
@click.option("--lose-local", is_flag=True, help="At the kill also delete local state, as the loss of a machine would.")
@click.option(
    "--restarts", type=click.IntRange(min=0), default=0, show_default=True, help="Restarts of a query that failed."
)
@click.option("--work-dir", type=click.Path(path_type=Path), help="For input, output and logs [default: temporary].")
@click.option("--keep", is_flag=True, help="Leave the work dir and the state behind.")
@click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting of the Spark session; may be repeated.")
def demo(
    backend: str,
    checkpoint: str | None,
    flights: int | None,
    batches: int,
    kill: bool,
    savepoint: bool,
    lose_local: bool,
    restarts: int,
    work_dir: Path | None,
    keep: bool,
    conf: tuple[str, ...],
) -> None:
    """Totals of a year's flights, by a stateful query that is killed half-way.

    The flights that left New York in 2013 pass through Spark as micro-batches, in time order. Running totals of each
    aircraft, carrier and route are holdfast state. Half-way the driver is killed with SIGKILL and started again; at
    the end state and output must equal what plain pandas computes from the whole file. With --savepoint the query is
    stopped with a savepoint instead, and another one goes on from it, on another backend and with twice the shards.
    """
    if savepoint and lose_local:
        raise InvalidArgumentError("--lose-local is for a kill: with --savepoint nothing is killed")
    console = Console(highlight=False)
    settings = {_BACKEND: backend, **_parse_configuration(conf)}
    ensure_java()
    all_flights = data.load_flights(flights)
    with _work_directory(work_dir, keep) as folder:
        durable = f"{checkpoint.rstrip('/')}/holdfast-demo-{clock.new_id()}" if checkpoint else str(folder / "state")
        job = _job(folder, durable, settings, restarts)
        data.write_files(all_flights, folder / "flights", batches)
        console.print(
            f"[bold]{len(all_flights):,} flights[/] in {batches} micro-batches; backend {backend}, "
            f"state durable in {durable}, log in {folder / 'spark.log'}",
            soft_wrap=True,
        )
        try:
            drivers = _Drivers(job, batches, console, lose_local=lose_local)
            killed = None
            if savepoint:
                drivers.move(*_moving(job, settings, batches // 2))
            else:
                killed = drivers.run(kill_after=batches // 2 if kill else None)
            correct = _show(console, folder, all_flights, drivers.starts, killed)
        finally:
            if checkpoint and not keep:
                _remove_state(job)
        if keep:
            console.print(f"kept: {folder} and {durable}", soft_wrap=True)
    if not correct:
        raise SystemExit(1)


def _job(folder: Path, durable: str, settings: dict[str, str], restarts: int) -> Job:
    # Files on disk outlive their executor: these go with the work dir.
    in_memory = find_backend(settings[_BACKEND]).in_memory
    local = {} if in_memory else {_LOCAL_DIR: str(folder / "local")}
    return Job(str(folder), durable, local | settings, restarts)


def _moving(job: Job, settings: dict[str, str], stop_after: int) -> tuple[Job, Job]:
    """Return the job that stops with a savepoint, and the one that goes on from it, on another backend."""
    savepoints = f"{job.checkpoint}/savepoints"
    first = replace(job, checkpoint=f"{job.checkpoint}/first", savepoints=savepoints, stop_after=stop_after)
    other = "memory" if settings[_BACKEND] == "filesystem" else "filesystem"
    second = _job(job.folder, f"{job.checkpoint}/second", settings | {_BACKEND: other}, job.restarts)
    return first, replace(second, savepoints=savepoints, from_savepoint=True)


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
    yield folder
    if not keep:
        _wait_for_state_servers(folder.glob("local/*/executor-*"))
        shutil.rmtree(folder)


def _wait_for_state_servers(executors: Iterable[Path]) -> None:
    """Return when none of these executors' directories has a state server any more."""
    deadline_s = time.monotonic() + _SERVER_ENDS_WITHIN_S
    for executor in executors:
        with suppress(UnavailableError):  # it has removed its directory
            while (lock := server_files.take_lock(executor)) is None and time.monotonic() < deadline_s:
                time.sleep(_WATCH_EVERY_S)
            if lock is not None:
                os.close(lock)


class _Drivers:
    """Runs the query's driver process, and a second one if the first is killed.

    Attributes
    ----------
    starts : list of Start
        How long each took to start.
    """

    def __init__(self, job: Job, batches: int, console: Console, *, lose_local: bool) -> None:
        self.starts: list[Start] = []
        self._job = job
        self._batches = batches
        self._console = console
        self._lose_local = lose_local
        self._log = job.folder / "spark.log"

    def run(self, kill_after: int | None) -> report.Kill | None:
        """Run the query to its end; kill its driver once if `kill_after` micro-batches are committed."""
        with self._bar() as show:
            if kill_after is None:
                with self._driver() as driver:
                    self._watch_start(driver, show)
                    self._watch(driver, show)
                return None
            with self._driver() as driver:
                self._watch_start(driver, show)
                self._watch(driver, show, until=kill_after)
                time.sleep(_KILL_AFTER_COMMIT_S)
                killed_ms = clock.monotonic_ms()
            lost = self._delete_local_state() if self._lose_local else ""
            committed, left = self._committed(), self._local_shards()
            self._console.print(
                f"[red]killed[/] the driver (process {driver.pid}, its JVM and workers) with SIGKILL after "
                f"{committed} micro-batches{lost}; starting again",
                soft_wrap=True,
            )
            with self._driver() as driver:
                self._watch_start(driver, show)
                recovery_ms = clock.monotonic_ms() - killed_ms
                # Taking over a shard's directory renames it.
                taken_over = bool(left) and not any(path.exists() for path in left)
                source = "local files" if taken_over else "durable storage"
                self._watch(driver, show)
            # A file may have joined the next one's micro-batch: Spark does so when it is killed while it plans.
            show(self._batches)
        return report.Kill(committed, recovery_ms, source)

    def move(self, saving: Job, going_on: Job) -> None:
        """Run the query half-way, until its driver stops it with a savepoint, and another one from there to the end."""
        with self._bar() as show:
            self._job = saving
            with self._driver() as driver:
                self._watch_start(driver, show)
                self._watch(driver, show)
            saved = json.loads((saving.folder / "savepoint.json").read_text())
            self._console.print(
                f"[yellow]stopped[/] the query with a savepoint after {saved['batches']} micro-batches: "
                f"{saved['rows']:,} keys from {saved['shards']} shards, {saved['size_bytes']:,} bytes in "
                f"{saving.savepoints}; another one goes on",
                soft_wrap=True,
            )
            self._job = going_on
            with self._driver() as driver:
                self._watch_start(driver, show)
                restored = json.loads((going_on.folder / "restored.json").read_text())
                self._console.print(
                    f"[green]restored[/] it with backend {going_on.configuration[_BACKEND]} and "
                    f"{restored['shards']} shards, as query {restored['query_id']}",
                    soft_wrap=True,
                )
                self._watch(driver, show)
            show(self._batches)

    @contextmanager
    def _bar(self) -> Iterator[Callable[[int], None]]:
        """Show a bar, and give what moves it."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task("starting Spark", total=self._batches)

            def show(committed: int) -> None:
                progress.update(
                    bar, completed=committed, description="micro-batches" if committed else "starting Spark"
                )

            yield show

    @contextmanager
    def _driver(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start a driver in a process group of its own, and kill that group at the end, whatever happened."""
        with self._log.open("ab") as log:
            driver = subprocess.Popen(
                [sys.executable, "-m", "holdfast.examples.flights.query"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._job.folder,
                start_new_session=True,
            )
        assert driver.stdin is not None
        try:
            with driver.stdin as stdin:
                stdin.write(encode(self._job))
            yield driver
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()

    def _watch_start(self, driver: subprocess.Popen[bytes], show: Callable[[int], None]) -> None:
        """Return when the first micro-batch of a driver that has just been started is committed."""
        configuration = self._job.configuration
        in_memory = find_backend(configuration[_BACKEND]).in_memory
        local_root = local_dirs.choose_root(configuration.get(_LOCAL_DIR), in_memory=in_memory)
        start = StartWatch(self._job.folder, local_root, self._job.query.name)
        committed = self._committed()
        self._watch(driver, show, until=committed + 1, look=start.look)
        if self._committed() > committed:
            self.starts.append(start.committed())

    def _watch(
        self,
        driver: subprocess.Popen[bytes],
        show: Callable[[int], None],
        until: int | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Return when so many micro-batches are committed or, without a number, the driver has ended."""
        while driver.poll() is None:
            committed = self._committed()
            show(committed)
            look()
            if until is not None and committed >= until:
                return
            time.sleep(_WATCH_EVERY_S)
        show(self._committed())
        if driver.returncode != 0:
            self._fail(driver.returncode)

    def _committed(self) -> int:
        """Count the micro-batches in Spark's own commit logs."""
        return sum(committed(self._job.folder / query) for query in (QUERY, RESTORED))

    def _local_shards(self) -> list[Path]:
        """Return the directories of the query's shards whose backend keeps them on disk."""
        query_id = json.loads((self._job.folder / "query" / "metadata").read_text())["id"]
        names = f"holdfast-*/executor-*/{local_dirs.ON_DISK}/{query_id}/*/{local_dirs.SHARD_PREFIX}*"
        local_dir = self._job.configuration.get(_LOCAL_DIR)
        return list(Path(local_dir).glob(names)) if local_dir else []

    def _delete_local_state(self) -> str:
        """Delete the local state of the killed driver's executor; return a phrase that says so.

        State in memory needs no help: the state server removes it when its executor ends.
        """
        shards = self._local_shards()
        _wait_for_state_servers(shard.parents[3] for shard in shards)
        for shard in shards:
            shutil.rmtree(shard)
        return f", and deleted its {len(shards)} local shards" if shards else ", whose state in memory went with it"

    def _fail(self, status: int) -> None:
        lines = self._log.read_text(errors="replace").splitlines()
        self._console.print("\n".join(lines[-_LOG_LINES_SHOWN:]), style="dim", markup=False, soft_wrap=True)
        raise HoldfastError("the query failed; the end of its log stands above", status=status, log=self._log)


def _show(
    console: Console, folder: Path, flights: pd.DataFrame, starts: list[Start], killed: report.Kill | None
) -> bool:
    expected = data.expected_totals(flights)
    wrong = {
        "state": report.differences(report.state_totals(folder), expected),
        "output": report.differences(report.output_totals(folder), expected),
    }
    report.show_worst(console, expected)
    report.show_figures(console, folder, starts, killed)
    for what, found in wrong.items():
        if found:
            console.print(f"[bold red]wrong:[/] {what} differs from plain pandas in {len(found):,} values")
            console.print("\n".join(found[:5]), markup=False)
        else:
            console.print(f"[bold green]equal:[/] {what} and plain pandas, all {len(expected):,} subjects, all totals")
    return not any(wrong.values())


def _remove_state(job: Job) -> None:
    with open_storage(job.checkpoint, parse_storage_options(storage_values(job))) as storage:
        storage.delete([found.key for found in storage.list("")])
        with suppress(HoldfastError):  # what may not be listed may stay: it is no object
            storage.abort_unfinished_uploads("", before_ms=_END_OF_TIME_MS)
