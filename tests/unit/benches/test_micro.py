"""The micro-benchmarks run, and their results become tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.benches.command import bench
from holdfast.benches.micro.store import TimerShard
from holdfast.benches.report import tables

ROOT = Path(__file__).parents[3]


def a_micro_benchmark(name: str, seconds: float, **about: Any) -> dict[str, Any]:
    stats = {"median": seconds, "min": seconds / 2, "max": seconds * 2, "rounds": 3}
    return {"name": name, "extra_info": about, "stats": stats}


def test_micro_benchmarks_become_a_table_by_backend() -> None:
    sizes = {"keys": 1000, "value_bytes": 16}
    measured = [
        a_micro_benchmark("test_put[memory-1000x16]", 0.25, backend="memory", **sizes),
        a_micro_benchmark("test_get[memory-1000x16]", 0.002, backend="memory", **sizes),
        a_micro_benchmark("test_get[rocksdb-1000x16]", 0.0001, backend="rocksdb", **sizes),
        a_micro_benchmark("test_pack", 0.01),
    ]
    info = {"cpu": {"brand_raw": "a cpu", "count": 2}, "node": "a-host"}
    text = tables.markdown({"benchmarks": measured, "machine_info": info, "datetime": "2026-01-02T03:04:05"})
    assert "| operation | keys | bytes of a value | memory | rocksdb |" in text
    assert "| get | 1,000 | 16 | 2.0 (1.0 to 4.0) | 0.10 (0.05 to 0.20) |" in text
    assert "| put | 1,000 | 16 | 250 (125 to 500) | - |" in text
    assert "| pack | 10.0 (5.0 to 20.0) | 3 |" in text
    assert "a-host" not in text


@pytest.mark.all
@pytest.mark.slow
def test_the_smallest_micro_benchmarks_run(tmp_path: Path) -> None:
    file = tmp_path / "micro.json"
    run = [sys.executable, "-m", "pytest", "benches/micro", "-o", "python_files=store.py", "-k", "memory and 1000x100"]
    # Tests may run side by side, but benchmarks refuse to.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*run, f"--benchmark-json={file}"], cwd=ROOT, env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = CliRunner().invoke(bench, ["table", str(file)], catch_exceptions=False).output
    for operation in ("get", "scan", "put", "commit", "rollback", "restore"):
        assert f"| {operation} | 1,000 | 100 |" in shown


def test_timers_of_the_bench_fire_in_turns(tmp_path: Path) -> None:
    """Each transaction fires the earliest ones, sets as many later ones, and knows which is the next."""
    shard = TimerShard("memory", tmp_path, 3_000)
    for _ in range(4):
        shard.fire()
        shard.merge_sometimes()
    assert (shard.earliest_ms, shard.end_ms) == (4_000, 7_000)
    assert shard.pointer is not None
    with shard.store.read_at(shard.pointer) as view:
        assert sum(len(run) for run in view.scan("timers")) == 3_000
