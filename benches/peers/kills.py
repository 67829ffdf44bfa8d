"""Whether a peer survives a kill as it says: killed half-way, started again, and every count and sum is right.

::

    first run    ──── rows ────▶ half of them are done ✗ kill -9, every process
    second run                   ├──── goes on from what is durable ────▶ all rows

Results of the first run that were not yet durable come again, so the last result of a key counts. That the second run
went on, and did not begin anew, shows in its counts: with few keys, no count of it is one of the beginning.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.benches.peers import input_files
from holdfast.benches.peers.engines import PeerEngine
from holdfast.benches.peers.job import FromFiles
from holdfast.benches.peers.peer_run import PeerRun, order_of
from holdfast.benches.peers.progress import Progress, equality
from holdfast.errors import CorruptionError

#: Few keys, so that the counts of the second half are far from those of the first rows; all of them are compared.
KILLED = FromFiles(rows=100_000, keys=100, batches=8, warmup=0, commit_ms=200)


def survive(engines: Iterable[PeerEngine], job: FromFiles = KILLED, disk: str | None = None) -> dict[str, Any]:
    """Kill a run of each engine, start it again, and return what was compared.

    Raises
    ------
    CorruptionError
        A result is wrong, or the second run began anew.
    """
    found = [survive_one(engine, job, disk) for engine in engines]
    return {
        "what": "all keys, after a kill and a restart: " + ", ".join(str(one["what"]) for one in found),
        "rows": sum(one["rows"] for one in found),
        "equal": True,
    }


def survive_one(engine: PeerEngine, job: FromFiles, disk: str | None = None) -> dict[str, Any]:
    """Kill a run of an engine, start it again, and return what was compared; `disk` is for its files."""
    engine.program.environment.install()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=disk))
    rows_so_far = input_files.sampled_rows_so_far(job.folder(), 1)
    half, durable = rows_so_far[-1] // 2, folder / "durable"
    try:
        first = Progress(rows_so_far)
        _follow(engine, job, folder / "first", durable, first, half)
        second = Progress(rows_so_far, before=first)
        _follow(engine, job, folder / "second", durable, second, None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if second.least_n is None or second.least_n < half // job.keys // 10:
        raise CorruptionError("the second run started over", engine=engine.name, least_count=second.least_n)
    return equality(engine.name, second.totals(), input_files.totals(job.folder()))


def _follow(
    engine: PeerEngine, job: FromFiles, folder: Path, durable: Path, progress: Progress, until_rows: int | None
) -> None:
    """Run a program until it has done so many rows, and kill it; or to its end."""
    order = order_of(job, folder, every=1, durable=durable)
    run = PeerRun(engine.program, order, folder, progress, lambda: None)
    try:
        if until_rows is not None:
            run.until(lambda: progress.rows >= until_rows)
        else:
            run.until(lambda: progress.done(job.batches))
            run.finish()
    finally:
        run.kill()
