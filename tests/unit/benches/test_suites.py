"""What suites measure: jobs, Nexmark, micro-benchmarks, snapshots, and stores as they grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from holdfast.backends.registry import backend_names
from holdfast.backends.run import Run
from holdfast.benches.command import bench
from holdfast.benches.instruments.measured import Measured, Places
from holdfast.benches.jobs import rows, shard
from holdfast.benches.jobs.by_key import DropIn, one_key
from holdfast.benches.jobs.by_name import JOBS, read_job
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.shard import COLD_MS, FEW, FULL_BYTES, NEW_BYTES, RESTORE_MS, Restore, Size, Snapshots
from holdfast.benches.micro.store import TimerShard
from holdfast.benches.nexmark.job import QUERIES, Nexmark
from holdfast.benches.report import tables
from holdfast.benches.report.results import Target, document
from holdfast.benches.runs.by_name import ENGINES, engines_for
from holdfast.benches.runs.equality import results, verdict
from holdfast.benches.runs.paired import Entry, run_engine, summarize
from holdfast.benches.suites.measurement import Profile, Shape
from holdfast.benches.suites.suites import durability, growth, nexmark
from holdfast.errors import CorruptionError, InvalidArgumentError
from holdfast.testing import PandasWithStateTester
from tests.unit.benches.test_report_summary import FACTS, a_document

FAR = Shape(keys=5000, rows=1000, shards=8, store_latency_ms=20)


def test_a_quick_run_asks_only_about_a_store_that_is_far_away() -> None:
    assert growth(Profile(quick=True)) == []
    assert durability(Profile(quick=True)) == []
    many = replace(FAR, shards=200)
    assert durability(Profile(quick=True, shape=many)) == [], "they would take longer than the minute"
    (only,) = durability(Profile(quick=True, shape=FAR))
    (far, near) = (entry.job for entry in only.entries.values())
    assert (far.rows, far.keys, far.partitions, far.latency_ms) == (1000, 5000, 8, 20)  # type: ignore[attr-defined]
    assert (near.rows, near.partitions) == (far.rows, far.partitions)  # type: ignore[attr-defined]
    assert only.minutes <= 1


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.parametrize("backend", backend_names())
def test_size_is_measured_on_every_backend(backend: str, tmp_path: Path) -> None:
    job = Size(rows=50, keys=3000, batches=4, warmup=1)
    found = job.measure(backend, {}, Places(tmp_path, tmp_path))
    assert len(found.batch_ms) == 4
    assert set(found.phases_ms[0]) == {"get", "commit", "maintain", FEW}
    assert found.storage[FULL_BYTES] / len(job.counted) > 3000 * 50, "half of each value is letters by chance"
    assert found.storage[RESTORE_MS] > 0
    assert (found.storage.get(COLD_MS, 0) > 0) == (backend != "memory"), "what is in RAM is never cold"
    assert found.state_bytes["local_final"] > 3000 * 50
    assert not [path for path in (tmp_path / "durable").rglob("*") if path.is_file()]


@pytest.mark.all
@pytest.mark.slow
def test_a_run_of_the_store_alone_is_stored(tmp_path: Path) -> None:
    """End to end, in a process of its own, as a suite runs it."""
    run = run_engine(Entry("store-filesystem", Size(rows=50, keys=3000, batches=3, warmup=1)), disk=str(tmp_path))
    assert run["rows_per_second"] > 0
    assert run["memory"]["store"]["anonymous"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", JOBS.values())
def test_a_stored_job_is_read_as_it_was(kind: type[Job]) -> None:
    job = kind(batches=900, warmup=3, memory_mb=77)
    assert read_job(json.loads(json.dumps(job.stored()))) == job


def test_every_drop_in_batch_touches_as_many_keys_as_said() -> None:
    job = DropIn(rows=8, keys=12, touched=4, batches=6, warmup=0)
    tester = PandasWithStateTester(one_key, "key", "key long, v long", job.output, job.state)
    for _ in range(3):
        found = tester.test([(i % job.touched, 2) for i in range(job.rows)])
        assert len(found) == job.touched
    assert (found[0].n, found[0].s) == (6, 12)


def test_no_snapshot_falls_into_job_b() -> None:
    job = JobB()
    settings = job.settings()
    for key in ("spark.holdfast.snapshot.maxCommits", "spark.sql.streaming.stateStore.minDeltasForSnapshot"):
        assert int(settings[key]) > job.all_batches
    assert int(settings["spark.holdfast.snapshot.maxBytes"]) > 1_000 * (job.keys + job.all_batches * job.rows)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((JobA, wrong) for wrong in ({"rows": 0}, {"warmup": 8}, {"slots": 0}, {"memory_mb": 0})),
        *((JobB, {"skew": 0.5}), (JobB, {"fill_rows": 8}), (DropIn, {"touched": 50_000})),
    ],
)
def test_impossible_jobs_are_refused(kind: type[Job], wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        kind(**wrong)


@pytest.mark.parametrize("value_bytes", [16, 17, 100, 1000])
def test_rows_of_the_store_benches_are_as_wide_as_said(value_bytes: int) -> None:
    table = rows.table_of(value_bytes)
    keys = rows.keys_of(table, np.arange(1000))
    values = rows.values_of(table, 1000, value_bytes, np.random.default_rng(0))
    assert len(Run.build(table, keys, values)) == 1000, "no two keys are equal"
    assert len(np.unique(keys.hashes >> np.uint64(56))) > 200, "hashes are spread over the shard"
    assert keys.columns.nbytes == 1000 * (16 + 8)
    assert sum(column.nbytes for column in values.columns) == 1000 * (value_bytes + (value_bytes > 16) * 8)


RIGHT = {(1,): (1, 10), (2,): (2, 20)}


def test_the_suite_asks_for_every_query_and_compares_what_is_found() -> None:
    full, quick = (nexmark(Profile(quick=quick)) for quick in (False, True))
    assert [entry.job.query for one in full for entry in [one.entries[one.baseline]]] == list(QUERIES)  # type: ignore[attr-defined]
    assert len(quick) == 1
    assert sum(one.minutes for one in full) <= 30
    for one in (*full, *quick):
        assert one.check is not None
        assert {entry.engine for entry in one.entries.values()} <= set(engines_for(Nexmark)) <= set(ENGINES)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"disorder_ms": 4_000}, "late"), ({"per_second": 2_000_000}, "microsecond"), ({"per_second": 953}, "shuffled")],
)
def test_events_that_would_be_lost_or_alike_are_refused(wrong: dict[str, int], why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        Nexmark(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "differing"),
    [({(1,): (1, 11), (2,): (2, 20)}, 1), ({(1,): (1, 10)}, 1), (RIGHT | {(3,): (3, 30)}, 1), ({}, 2)],
)
def test_wrong_and_missing_results_are_differences(found: dict[tuple[int], tuple[int, int]], differing: int) -> None:
    told = verdict(RIGHT, {"good": RIGHT, "bad": found})
    assert not told["equal"]
    assert [(name, one["results"]) for name, one in told["differences"].items()] == [("bad", differing)]


def test_equal_results_are_equal_unless_there_are_none() -> None:
    assert verdict(RIGHT, {"good": RIGHT}) == {"rows": 2, "equal": True}
    assert not verdict({}, {"empty": {}})["equal"]


def test_in_append_mode_a_result_comes_once_and_in_update_mode_the_last_one_counts() -> None:
    average = QUERIES["4"]
    batches = [[{"category": 10, "average": 1.0}], [{"category": 10, "average": 2.0}]]
    right = results(average, batches[1:])
    assert results(average, batches, once=False) == right
    assert results(average, batches) != right


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
    assert "| operation | keys | value bytes | memory | rocksdb |" in text
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
    shard = TimerShard("memory", tmp_path, 3_000)
    for _ in range(4):
        shard.fire()
        shard.merge_sometimes()
    assert (shard.earliest_ms, shard.end_ms) == (4_000, 7_000)
    assert shard.pointer is not None
    with shard.store.read_at(shard.pointer) as view:
        assert sum(len(run) for run in view.scan("timers")) == 3_000


_SMALL = Restore(rows=3000, batches=3, warmup=1)


def run_of(found: Measured, job: Snapshots | Restore) -> dict[str, object]:
    return vars(found) | summarize(found.batch_ms, job) | {"busy_before_cores": 0.0}


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.parametrize("backend", backend_names())
def test_a_snapshot_sends_what_changed(backend: str, tmp_path: Path) -> None:
    job = Snapshots(rows=20, keys=2000, batches=6, warmup=2)
    found = job.measure(backend, {}, Places(tmp_path, tmp_path))
    assert [set(phases) for phases in found.phases_ms] == [{"commit", "maintain", "snapshot"}] * 6
    assert found.batch_ms == [phases["snapshot"] for phases in found.phases_ms]
    assert 0 < found.storage[NEW_BYTES] < found.storage[FULL_BYTES]
    assert found.storage[FULL_BYTES] > 4 * 2000 * 50, "four counted snapshots of letters that hardly shrink"
    assert not [path for path in (tmp_path / "durable").rglob("*") if path.is_file()]


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.parametrize("backend", backend_names())
def test_a_restore_is_held_against_a_download(backend: str, tmp_path: Path) -> None:
    found = _SMALL.measure(backend, {}, Places(tmp_path, tmp_path))
    runs = {"store-rocksdb": [run_of(found, _SMALL)]}
    entries, target = {"store-rocksdb": Entry("store-rocksdb", _SMALL)}, Target("restore store-rocksdb", at_most=1.5)
    (told,) = document("restore", entries, runs, FACTS, [target])["targets"]
    ratios = sorted(phases["restore"] / phases["plain download"] for phases in found.phases_ms[1:])
    assert (told["what"], told["measured"]) == ("restore store-rocksdb", round(sum(ratios) / 2, 2))


@pytest.mark.all
@pytest.mark.slow
def test_less_state_than_was_stored_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = shard.Shard.fill
    monkeypatch.setattr(shard.Shard, "fill", lambda one, keys: fill(one, keys // 2))
    with pytest.raises(CorruptionError, match="differs from the stored state"):
        _SMALL.measure("memory", {}, Places(tmp_path, tmp_path))


@pytest.mark.all
@pytest.mark.slow
def test_the_longest_micro_batch_may_have_a_target() -> None:
    targets = [Target("with snapshots/without", at_least=0.95), Target("longest with snapshots", at_most=2.0)]
    found = a_document(("with snapshots", "without"), targets)
    assert {t["what"]: t["measured"] for t in found["targets"]} == {
        "with snapshots/without": 0.75,
        "longest with snapshots": 1.09,
    }
