"""Starts, watches and kills the demo's driver processes, and reads the results while no driver runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast import clock
from holdfast.backends.registry import find_backend
from holdfast.errors import HoldfastError, UnavailableError
from holdfast.examples.flights import report
from holdfast.examples.flights.query import QUERY, RESTORED, Job, committed, encode, stored
from holdfast.examples.flights.results.base import Results
from holdfast.examples.flights.results.looking import Look
from holdfast.examples.flights.starts import Start, StartWatch
from holdfast.spark_integration.executor import local_dirs

BACKEND = "spark.holdfast.backend"
LOCAL_DIR = "spark.holdfast.local.dir"
_RETAIN, _RETAINED = "spark.sql.streaming.minBatchesToRetain", 100
_WATCH_EVERY_S = 0.05
# After this time the next micro-batch is running.
_KILL_AFTER_COMMIT_S = 0.4
# A state server ends within 20 s of its driver, usually at once.
_SERVER_ENDS_WITHIN_S = 25.0
_LOG_LINES_SHOWN = 30


class Drivers:
    """Runs the query's driver process, and a second driver if the first is killed.

    Attributes
    ----------
    starts : list of Start
        The times that each start took.
    look : Look or None
        The results as read at the kill.
    """

    def __init__(self, job: Job, batches: int, console: Console, results: Results, *, lose_local: bool) -> None:
        self.starts: list[Start] = []
        self.look: Look | None = None
        self._results = results
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
            # The time to read results is not part of the recovery.
            killed_ms += self._look()
            with self._driver() as driver:
                self._watch_start(driver, show)
                recovery_ms = clock.monotonic_ms() - killed_ms
                # Taking over a shard's directory renames it.
                taken_over = bool(left) and not any(path.exists() for path in left)
                source = "local files" if taken_over else "durable storage"
                self._watch(driver, show)
            # If killed while planning, Spark may put two files into one micro-batch.
            show(self._batches)
        return report.Kill(committed, recovery_ms, source)

    def _look(self) -> int:
        """Read the results and schedule a read of the state at the same micro-batch; return the time in ms."""
        began_ms = clock.monotonic_ms()
        look = self.look = self._results.look(self._job.query, lambda: stored(self._job))
        if look is not None:
            # The next driver reads that state at the end, so Spark must retain it until then.
            kept = {_RETAIN: str(max(_RETAINED, self._batches))}
            self._job = replace(self._job, half_way=look.newest, configuration=self._job.configuration | kept)
            self._console.print(look.said(), soft_wrap=True)
        return clock.monotonic_ms() - began_ms

    def move(self, first: Job, second: Job) -> None:
        """Run the first job until it stops with a savepoint, then the second job to the end."""
        with self._bar() as show:
            self._job = first
            with self._driver() as driver:
                self._watch_start(driver, show)
                self._watch(driver, show)
            saved = json.loads((first.folder / "savepoint.json").read_text())
            self._console.print(
                f"[yellow]stopped[/] the query with a savepoint after {saved['batches']} micro-batches: "
                f"{saved['rows']:,} keys from {saved['shards']} shards, {saved['size_bytes']:,} bytes in "
                f"{first.savepoints}; a second query continues",
                soft_wrap=True,
            )
            self._job = second
            with self._driver() as driver:
                self._watch_start(driver, show)
                restored = json.loads((second.folder / "restored.json").read_text())
                self._console.print(
                    f"[green]restored[/] it with backend {second.configuration[BACKEND]} and "
                    f"{restored['shards']} shards, as query {restored['query_id']}",
                    soft_wrap=True,
                )
                self._watch(driver, show)
            show(self._batches)

    @contextmanager
    def _bar(self) -> Iterator[Callable[[int], None]]:
        """Show a progress bar; yield a function that updates it."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task("starting Spark", total=self._batches)

            def show(committed: int) -> None:
                description = "micro-batches" if committed else "starting Spark"
                progress.update(bar, completed=committed, description=description)

            yield show

    @contextmanager
    def _driver(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start a driver in a new process group, and kill the group at the end of the context."""
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
        """Wait for the first commit of a new driver, and record its start."""
        configuration = self._job.configuration
        in_memory = find_backend(configuration[BACKEND]).in_memory
        local_root = local_dirs.choose_root(configuration.get(LOCAL_DIR), in_memory=in_memory)
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
        """Wait until `until` micro-batches are committed or the driver has ended."""
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
        """Count the micro-batches in Spark's commit logs."""
        return sum(committed(self._job.folder / query) for query in (QUERY, RESTORED))

    def _local_shards(self) -> list[Path]:
        """Return the query's shard directories on disk."""
        query_id = json.loads((self._job.folder / "query" / "metadata").read_text())["id"]
        names = f"holdfast-*/executor-*/{local_dirs.ON_DISK}/{query_id}/*/{local_dirs.SHARD_PREFIX}*"
        local_dir = self._job.configuration.get(LOCAL_DIR)
        return list(Path(local_dir).glob(names)) if local_dir else []

    def _delete_local_state(self) -> str:
        """Delete the killed driver's local state; return a phrase for the output.

        The state server itself removes state in memory when its executor ends.
        """
        shards = self._local_shards()
        wait_for_state_servers(shard.parents[3] for shard in shards)
        for shard in shards:
            shutil.rmtree(shard)
        return f", and deleted its {len(shards)} local shards" if shards else " and its state in memory"

    def _fail(self, status: int) -> None:
        lines = self._log.read_text(errors="replace").splitlines()
        self._console.print("\n".join(lines[-_LOG_LINES_SHOWN:]), style="dim", markup=False, soft_wrap=True)
        raise HoldfastError("the query failed; see the end of its log above", status=status, log=self._log)


def wait_for_state_servers(executors: Iterable[Path]) -> None:
    """Wait until the state servers in these executors' directories have ended."""
    deadline_s = time.monotonic() + _SERVER_ENDS_WITHIN_S
    for executor in executors:
        with suppress(UnavailableError):  # it has removed its directory
            while (lock := local_dirs.take_lock(executor)) is None and time.monotonic() < deadline_s:
                time.sleep(_WATCH_EVERY_S)
            if lock is not None:
                os.close(lock)
