"""Peers in environments of their own as engines of `FromFiles`.

Every run compares its own result with pyarrow's before it returns a time: a peer that of sampled keys, as it prints
them; an engine on Spark all of its state (`FromFiles.verify`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import psutil

from holdfast.benches.instruments.measured import Measured, Places, state_bytes
from holdfast.benches.instruments.processes import Processes
from holdfast.benches.jobs.job import Job
from holdfast.benches.peers import input_files
from holdfast.benches.peers.environments import Environment
from holdfast.benches.peers.job import FromFiles
from holdfast.benches.peers.peer_run import PeerRun, Program, order_of
from holdfast.benches.peers.progress import Progress, Usage, equality
from holdfast.benches.runs.engines import Engine
from holdfast.benches.runs.spark_run import folder_bytes


@dataclass(frozen=True)
class PeerEngine(Engine):
    """A peer; if it is durable, it survives a kill."""

    name: str
    program: Program
    durable: bool
    runs: type[Job] = FromFiles

    def run(self, job: FromFiles, places: Places) -> Measured:
        self.program.environment.install()
        folder, durable = places.disk / "peer", places.disk / "durable"
        order = order_of(job, folder, every=job.every, durable=durable if self.durable else None)
        progress = Progress(input_files.sampled_rows_so_far(job.folder(), job.every))
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
        found = equality("sampled keys", progress.totals(), input_files.totals(job.folder(), job.every))
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
    """Return what a process below an engine is: ``jvm`` or ``python``; None for the engine itself."""
    if process == psutil.Process():
        return None
    return "jvm" if "java" in process.name() else "python"


_BYTEWAX = Environment("bytewax", 60, ((3, 11), (3, 12)))
_FLINK = Environment("flink", 850, ((3, 11), (3, 12)))
_PATHWAY = Environment("pathway", 1600, ((3, 11), (3, 13)))
_QUIX = Environment("quixstreams", 130, ((3, 11), (3, 13)))
ENVIRONMENTS = (_BYTEWAX, _FLINK, _PATHWAY, _QUIX)


def _twice(name: str, program: Program) -> tuple[PeerEngine, PeerEngine]:
    """Return a peer that survives a kill, and the same one without."""
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
