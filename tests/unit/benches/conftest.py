"""A run of tiny suites, whose engines no test waits for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.running import execution
from holdfast.benches.running.directory import ResultsDirectory
from holdfast.benches.runs.child_process import BenchError
from holdfast.benches.runs.paired import Entry, Run
from holdfast.benches.suites.measurement import Measurement


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    found = Engines()
    monkeypatch.setattr(execution, "run_engine", found.run)
    return found


MACHINE = {"cpu": "a cpu", "cores": 2, "memory_gb": 23.5, "os": "Linux"}
#: What a document says of its run.
RUN_FACTS = {"machine": MACHINE, "versions": {"holdfast": "0.1.0"}, "started": "2026-01-02T03:04:05+00:00"}
FACTS = {"format": 1, "profile": "full", "shape": {}, "seed": 1, **RUN_FACTS}
JOB = JobA(rows=10, keys=50, batches=3, warmup=1)
BOTH = {"ours": Entry("holdfast-memory", JOB), "theirs": Entry("spark-agg-rocksdb", JOB)}
TWO = Measurement("tiny", "two", "Which is faster?", BOTH, minutes=4, repeats=2, baseline="theirs")


def a_run(rows_per_second: float = 100.0) -> Run:
    state_bytes = {"live_arrow": None, "local_peak": 1, "local_final": 1, "ratio": None, "after_batch": []}
    counted = {"rows_per_second": rows_per_second, "median_batch_ms": 100, "busy_before_cores": 0.1}
    used = {"cpu": {"wall": 0.2}, "memory": {}, "written": {}, "settings": {}, "state_bytes": state_bytes}
    return {"batch_ms": [300, 100, 100], "phases_ms": [{}] * 3, **used, **counted}


class Engines:
    """Stands for processes: notes what was run, and fails or stops where it is told to."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fails: set[str] = set()
        self.stops_at: int | None = None

    def run(self, entry: Entry, **_: Any) -> Run:
        if self.stops_at == len(self.ran):
            raise KeyboardInterrupt
        self.ran.append(entry.engine)
        if entry.engine in self.fails:
            raise BenchError("no room on the disk")
        return a_run(100.0 + len(self.ran))


def prepared(path: Path, *, fresh: bool = False, **facts: Any) -> ResultsDirectory:
    with ResultsDirectory.opened(path, FACTS | facts, fresh=fresh) as directory:
        return directory


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "tiny/two.json").read_text())
    return found
