"""Peers in separate environments as engines of `FromFiles`.

Each run compares its result with pyarrow's before it returns a time: a peer the totals of sampled keys that it printed,
an engine on Spark its whole state (`FromFiles.verify`).

The dependencies of peers would conflict with ours, so each gets its own environment from PyPI on demand::

    requirements/<peer>.in          the direct requirements, from which `make lock` writes
    requirements/<peer>.txt         all versions with hashes
    <cache>/bench-peers/<peer>-<digest of the .txt and the Python version>/
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from holdfast.benches.instruments.measured import Measured, Places, Processes, state_bytes
from holdfast.benches.jobs.job import Job
from holdfast.benches.peers.job import FromFiles, batches_of, sampled_rows_so_far, totals
from holdfast.benches.peers.progress import Progress, Usage, equality
from holdfast.benches.runs.engines import Engine, folder_bytes
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.java import cache_dir

_REQUIREMENTS = Path(__file__).parent / "requirements"
_READY = ".ready"
_PIP_LINES = 15


@dataclass(frozen=True)
class Environment:
    """The environment of a peer; `pythons` are the oldest and the newest version with wheels."""

    peer: str
    unpacked_mb: int
    pythons: tuple[tuple[int, int], tuple[int, int]]

    @property
    def requirements(self) -> Path:
        return _REQUIREMENTS / f"{self.peer}.txt"

    @property
    def folder(self) -> Path:
        wanted = self.requirements.read_bytes() + f"\n{sys.implementation.cache_tag} {sys.platform}".encode()
        return cache_dir() / "bench-peers" / f"{self.peer}-{hashlib.sha256(wanted).hexdigest()[:16]}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def version(self) -> str:
        """Return the peer's locked version, as ``apache-flink 2.1.0``."""
        wanted = self.requirements.with_suffix(".in").read_text().split("\n")
        name = next(line.partition("=")[0] for line in wanted if line and not line.startswith("#"))
        locked = self.requirements.read_text().split("\n")
        return next(line.split(" ")[0].replace("==", " ") for line in locked if line.startswith(f"{name}=="))

    def install(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Create the environment unless it exists."""
        if (self.folder / _READY).exists():
            return
        oldest, newest = self.pythons
        if not oldest <= sys.version_info[:2] <= newest:
            raise InvalidArgumentError(
                f"{self.peer} has no wheels for this Python; omit its engines, or use a different Python",
                python=_dotted(sys.version_info[:2]),
                oldest=_dotted(oldest),
                newest=_dotted(newest),
            )
        tell(f"installing {self.version()}: about {self.unpacked_mb} MB below {self.folder.parent}")
        _run([sys.executable, "-m", "venv", "--clear", str(self.folder)], self.peer)
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        # --no-deps: otherwise pip would look up the newest version of a requirement with an extra, and refuse it as
        # the lock has no hash for it. `pip check` finds gaps in the lock.
        _run([*pip, "install", "--no-deps", "--require-hashes", "-r", str(self.requirements)], self.peer)
        _run([*pip, "check"], self.peer)
        (self.folder / _READY).touch()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _run(command: list[str], peer: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        log = "\n".join((done.stdout + done.stderr).splitlines()[-_PIP_LINES:])
        raise UnavailableError(f"cannot install {peer} from PyPI:\n{log}")


_PROGRAMS = Path(__file__).parent / "programs"
_LOOK_EVERY_S = 0.5
_END_WITHIN_S = 120.0
_SILENT_S = 300.0
_LOG_LINES = 40
_PIPE_BYTES = 1 << 20


@dataclass(frozen=True)
class Program:
    """A peer's program and its options.

    `options` extend the common part of an order. A program that does not end by itself waits for more files, and is
    killed. Without `in_pieces`, its output shows no micro-batches, and only the time of all rows is meaningful.
    """

    environment: Environment
    script: str
    options: Mapping[str, Any]
    ends: bool = True
    in_pieces: bool = True

    def command(self, order: Path) -> list[str]:
        return [str(self.environment.python), str(_PROGRAMS / self.script), str(order)]


def order_of(job: FromFiles, folder: Path, *, every: int, durable: Path | None) -> dict[str, Any]:
    """Return the common part of an order; `every` selects the keys to print, `durable` is for state to resume from."""
    return {
        "rows": str(job.folder()),
        "batches": [[str(path) for path in files] for files in batches_of(job.folder())],
        "parallelism": job.slots,
        "memory_mb": job.memory_mb,
        "commit_ms": job.commit_ms,
        "commit_rows": job.rows,
        "every": every,
        "local": str(folder / "local"),
        "durable": None if durable is None else str(durable),
    }


class PeerRun:
    """A running program.

    The folder has its order, its log (all output except results) and its own files; `progress` takes its results, and
    `look` is called about twice per second.
    """

    def __init__(
        self, program: Program, order: dict[str, Any], folder: Path, progress: Progress, look: Callable[[], None]
    ) -> None:
        self._program = program
        self._log = folder / "log"
        self._progress = progress
        self._look = look
        folder.mkdir(parents=True, exist_ok=True)
        Path(order["local"]).mkdir(exist_ok=True)
        file = folder / "order.json"
        file.write_text(json.dumps({**order, **program.options}))
        self.started_s = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                program.command(file),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": ""},
                start_new_session=True,
            )
        self._lines = self._read_lines()

    def until(self, enough: Callable[[], bool]) -> None:
        """Follow the program until it ends or `enough` is true; raise if it fails or prints nothing for minutes."""
        with self._log.open("ab") as log:
            for line in self._lines:
                if not self._progress.take(line, time.monotonic()):
                    log.write(line)
                if enough():
                    return
        self._require(self._ended() == 0, "failed or did not exit")

    def _read_lines(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        pipe, rest = self._process.stdout.fileno(), b""
        looked_s = heard_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                if selector.select(_LOOK_EVERY_S):
                    heard_s, found = time.monotonic(), os.read(pipe, _PIPE_BYTES)
                    if not found:
                        return
                    *lines, rest = (rest + found).split(b"\n")
                    yield from (line + b"\n" for line in lines)
                now_s = time.monotonic()
                self._require(now_s - heard_s < _SILENT_S, "printed no result for minutes")
                if now_s - looked_s >= _LOOK_EVERY_S:
                    self._look()
                    looked_s = now_s

    def finish(self) -> None:
        """Wait for a program that ends by itself; kill any other."""
        if self._program.ends:
            self.until(lambda: False)
        self.kill()

    def kill(self) -> None:
        """Kill the program and all processes that it started, like a machine failure."""
        processes = _in_session(self._process.pid)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, _END_WITHIN_S)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ended(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_WITHIN_S)
        return None

    def _require(self, fine: bool, what: str) -> None:
        if not fine:
            log = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise UnavailableError(f"the program {self._program.script} {what}:\n{log}")


def _in_session(leader: int) -> list[psutil.Process]:
    """Return the processes of a session, including orphans."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found


@dataclass(frozen=True)
class PeerEngine(Engine):
    """A peer; a `durable` one survives kills."""

    name: str
    program: Program
    durable: bool
    runs: type[Job] = FromFiles

    def run(self, job: FromFiles, places: Places) -> Measured:
        self.program.environment.install()
        folder, durable = places.disk / "peer", places.disk / "durable"
        order = order_of(job, folder, every=job.every, durable=durable if self.durable else None)
        progress = Progress(sampled_rows_so_far(job.folder(), job.every))
        processes, sizes = Processes(peer_kind), [0]
        seconds = Usage(processes.seconds)
        written = Usage(lambda: {**processes.written(), "durable": folder_bytes(durable)})

        def look() -> None:
            processes.look()
            seconds.look()
            written.look()
            sizes.append(folder_bytes(folder / "local"))

        run = PeerRun(self.program, order, folder, progress, look)
        try:
            look()
            run.until(lambda: progress.done(job.batches))
            look()
            run.finish()
        finally:
            run.kill()
        found = equality("sampled keys", progress.totals(), totals(job.folder(), job.every))
        assert progress.ready_s is not None
        times = [progress.ready_s, *progress.ends_s(in_pieces=self.program.in_pieces)]
        counted = times[job.counted.start], times[-1]
        return Measured(
            batch_ms=[round(1000 * (b - a), 1) for a, b in pairwise(times)],
            phases_ms=[{} for _ in range(job.batches)],
            cpu=seconds.between(*counted),
            memory=processes.peak(),
            written=written.between(*counted),
            settings=self._settings(order),
            state_bytes=state_bytes(sizes, []),
            start_ms=round(1000 * (progress.ready_s - run.started_s), 1),
            equality=found,
        )

    def _settings(self, order: dict[str, object]) -> dict[str, str]:
        common = {name: order[name] for name in ("parallelism", "memory_mb")}
        commits = {name: order[name] for name in ("commit_ms", "commit_rows")} if self.durable else {}
        found = {**common, **commits, **self.program.options, "survives a kill": self.durable}
        return {"version": self.program.environment.version()} | {name: str(value) for name, value in found.items()}


def peer_kind(process: psutil.Process) -> str | None:
    """Return the kind of a process below an engine: ``jvm`` or ``python``; None for the engine itself."""
    if process == psutil.Process():
        return None
    return "jvm" if "java" in process.name() else "python"


_BYTEWAX = Environment("bytewax", 60, ((3, 11), (3, 12)))
_FLINK = Environment("flink", 850, ((3, 11), (3, 12)))
_PATHWAY = Environment("pathway", 1600, ((3, 11), (3, 13)))
_QUIX = Environment("quixstreams", 130, ((3, 11), (3, 13)))
ENVIRONMENTS = (_BYTEWAX, _FLINK, _PATHWAY, _QUIX)


def _twice(name: str, program: Program) -> tuple[PeerEngine, PeerEngine]:
    """Return a durable and a volatile engine of a peer."""
    return PeerEngine(name, program, durable=True), PeerEngine(f"{name}-volatile", program, durable=False)


def _flink(api: str, backend: str, *, mini_batch: bool = False) -> Program:
    return Program(_FLINK, "flink_totals.py", {"api": api, "backend": backend, "mini_batch": mini_batch})


ENGINES: dict[str, PeerEngine] = {
    engine.name: engine
    for pair in (
        _twice("flink-sql-rocksdb", _flink("sql", "rocksdb")),
        _twice("flink-sql-rocksdb-mini-batch", _flink("sql", "rocksdb", mini_batch=True)),
        _twice("flink-sql-heap", _flink("sql", "hashmap")),
        _twice("flink-sql-heap-mini-batch", _flink("sql", "hashmap", mini_batch=True)),
        _twice("flink-process-rocksdb", _flink("function", "rocksdb")),
        _twice("bytewax", Program(_BYTEWAX, "bytewax_totals.py", {})),
        _twice("pathway", Program(_PATHWAY, "pathway_totals.py", {"backlog": False}, ends=False, in_pieces=False)),
        _twice("pathway-backlog", Program(_PATHWAY, "pathway_totals.py", {"backlog": True}, ends=False)),
        _twice("quixstreams", Program(_QUIX, "quix_totals.py", {})),
    )
    for engine in pair
}
