"""The pure parts of the benches: ratios, targets, tables, sizes."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from holdfast.backends.registry import backend_names
from holdfast.backends.run import Run
from holdfast.benches import micro_report, micro_timers, report, rows, spans
from holdfast.benches.by_key import DropIn, Timers
from holdfast.benches.command import bench
from holdfast.benches.commits import Commits
from holdfast.benches.engines import ENGINES, SparkEngine, engines_for
from holdfast.benches.job import Job, SparkJob
from holdfast.benches.job_a import JobA
from holdfast.benches.job_b import JobB
from holdfast.benches.jobs import JOBS, read_job
from holdfast.benches.measured import Places
from holdfast.benches.paired import BenchError, Entry, ratios, run_engine, summarize
from holdfast.benches.processes import Processes, spark_kind, store_kind
from holdfast.benches.results import Target, document, memory, usage, written
from holdfast.benches.spark_run import folder_bytes
from holdfast.errors import InvalidArgumentError
from holdfast.testing import PandasWithStateTester

ROOT = Path(__file__).parents[3]
FACTS = {
    "command": "holdfast bench job-a",
    "started": "2026-01-02T03:04:05+00:00",
    "machine": {"cpu": "a cpu", "cores": 2, "memory_gb": 8.0, "os": "Linux"},
    "versions": {"holdfast": "0.1.0", "python": "3.11"},
}


MIB = 1 << 20


def a_run(rows_per_second: float, ratio: float | None = None, server_mib: int = 100) -> dict[str, Any]:
    phases = {"triggerExecution": 1000, "addBatch": 800}
    held = {"rss": server_mib * MIB, "pss": 90 * MIB, "anonymous": 80 * MIB}
    peak = int(100 * (ratio or 1))
    return {
        "batch_ms": [5000, 1000, 1200],
        "phases_ms": [phases] * 3,
        "cpu": {"wall": 2.0, "jvm": 1.5, "python": 1.0, "server": 0.5},
        "memory": {"server": held},
        "written": {"python": 4 * MIB, "server": 2 * MIB, "durable": 1 * MIB},
        "settings": {"spark.master": "local[2]"},
        "state_bytes": {
            "live_arrow": ratio and 100,
            "local_peak": peak,
            "local_final": 200,
            "ratio": ratio,
            "after_batch": [],
        },
        "rows_per_second": rows_per_second,
        "median_batch_ms": 1100,
        "load_before": 0.1,
    }


def a_document(bench_name: str = "job-a", labels: tuple[str, str] = ("holdfast-memory", "floor")) -> dict[str, Any]:
    first, second = labels
    entries = {label: Entry(first, JobA(rows=10, keys=50, batches=3, warmup=1)) for label in labels}
    runs = {first: [a_run(90.0, 2.5), a_run(60.0, 3.5)], second: [a_run(100.0), a_run(100.0)]}
    return document(bench_name, entries, runs, FACTS)


def test_summary_leaves_the_warm_up_and_batches_beyond_the_last_out() -> None:
    job = JobA(rows=100, batches=4, warmup=2)
    assert summarize([9000, 9000, 100, 300, 7], job) == {"rows_per_second": 500.0, "median_batch_ms": 200}


def test_summary_leaves_out_what_fills_the_state() -> None:
    job = JobB(rows=100, keys=250, fill_rows=100, batches=2, warmup=1)
    assert (job.fill_batches, job.all_batches, list(job.counted)) == (3, 5, [4])
    assert summarize([9000, 9000, 9000, 9000, 100], job)["median_batch_ms"] == 100


def test_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_medians() -> None:
    runs = {"a": [{"rows_per_second": r} for r in (10, 40, 30)], "b": [{"rows_per_second": r} for r in (10, 10, 20)]}
    assert ratios(runs) == {"ratios": {"a/b": 1.5}, "ratios_by_pair": {"a/b": [1.0, 4.0, 1.5]}}


def test_every_engine_is_compared_with_all_that_follow_it() -> None:
    runs = {label: [{"rows_per_second": r}] for label, r in (("a", 8), ("b", 4), ("c", 1))}
    assert ratios(runs)["ratios"] == {"a/b": 2.0, "a/c": 8.0, "b/c": 4.0}


@pytest.mark.parametrize(
    ("target", "measured", "met"),
    [
        (Target("x", at_least=4.5), 4.5, True),
        (Target("x", at_least=4.5), 4.4, False),
        (Target("x", at_most=3.0), 3.0, True),
        (Target("x", at_most=3.0), 3.1, False),
    ],
)
def test_targets_include_their_bound(target: Target, measured: float, met: bool) -> None:
    assert target.check(measured)["met"] is met


def test_document_has_all_that_a_reader_needs_to_check_it() -> None:
    found = json.loads(json.dumps(a_document()))
    assert set(found) == {
        *FACTS, "bench", "settings", "engines", "ratios", "ratios_by_pair", "state_bytes", "targets"
    }  # fmt: skip
    assert found["ratios"] == {"holdfast-memory/floor": 0.75}
    assert found["engines"]["floor"]["runs"][0]["batch_ms"] == [5000, 1000, 1200]
    assert found["settings"]["jobs"]["floor"]["rows"] == 10
    assert found["state_bytes"]["holdfast-memory"]["ratio"] == 3.5, "the worst run counts"
    assert [(t["what"], t["met"]) for t in found["targets"]] == [
        ("holdfast-memory/floor", False),
        ("state_bytes holdfast-memory", False),
    ]


@pytest.mark.parametrize(("server_mib", "met"), [(512, True), (513, False)])
def test_memory_is_held_against_its_budget_at_its_peak_in_any_run(server_mib: int, met: bool) -> None:
    job = JobB(batches=3, warmup=1, keys=16, fill_rows=16, rows=16)
    runs = {"holdfast-rocksdb": [a_run(1.0), a_run(1.0, server_mib=server_mib), a_run(1.0)]}
    runs = {label: [run | {"batch_ms": [1] * 4, "phases_ms": [{}] * 4} for run in of] for label, of in runs.items()}
    found = document("job-b", {"holdfast-rocksdb": Entry("holdfast-rocksdb", job)}, runs, FACTS)
    assert [(t["what"], t["met"]) for t in found["targets"]] == [("budget holdfast-rocksdb", met)]
    assert memory(found, "holdfast-rocksdb")["server"]["rss"] == max(server_mib, 100) * MIB


def test_bytes_written_are_those_of_one_counted_batch() -> None:
    assert written(a_document(), "floor") == {"python": 2 * MIB, "server": 1 * MIB, "durable": MIB / 2}


@pytest.mark.parametrize("kind", JOBS.values())
def test_a_stored_job_is_read_as_it_was(kind: type[Job]) -> None:
    job = kind(batches=900, warmup=3, memory_mb=77)
    assert read_job(json.loads(json.dumps(job.stored()))) == job


def test_usage_is_by_counted_batch() -> None:
    found = usage(a_document(), "floor")
    assert found["wall_s"] == 1.0
    assert found["cpu_s"] == 1.5
    assert found["cores"] == 1.5
    assert found["outside_ms"] == 200.0


def test_markdown_shows_every_table() -> None:
    text = report.markdown(a_document())
    for part in (
        "## job-a",
        "a cpu, 2 cores",
        "| holdfast-memory/floor | 0.75 | 0.90 0.60 |",
        "| NO |",
        "| holdfast-memory | 100 | 350 | 200 | 4 | 3.50 |",
        "| holdfast-memory | 4 | 1,100 | 1,200 | 1,200 | 1,200 | 1.1 | 1,000 |",
        "| floor | state server | 100 | 90 | 80 |",
        "| floor | 3.00 | 2.00 | 1.00 | 0.50 |",
        "| floor | - | 100 | 200 | 4 | - |",
    ):
        assert part in text
    assert "Filling" not in text


def test_markdown_says_how_long_filling_took() -> None:
    job = JobB(batches=3, warmup=1, keys=32, fill_rows=16, rows=16)
    run = a_run(1.0) | {"batch_ms": [1500, 2500, 700, 7, 7], "phases_ms": [{"get": 3, "commit": 4}] * 5}
    text = report.markdown(document("job-b", {"x": Entry("x", job)}, {"x": [run]}, FACTS))
    assert "| x | 32 | 2 | 4.0 |" in text
    assert "| x: commit | 2 | 4.0 |" in text


def test_latencies_are_percentiles_of_all_counted_batches() -> None:
    job = JobA(batches=102, warmup=1)
    run = a_run(1.0) | {"batch_ms": [9999, *range(101)], "phases_ms": [{}] * 102}
    text = report.markdown(document("job-a", {"x": Entry("x", job)}, {"x": [run]}, FACTS))
    assert "| x | 101 | 50.0 | 95.0 | 99.0 | 100 | 2.0 | 0.0 |" in text


def test_scaling_says_what_limits_it() -> None:
    found = a_document("scaling", ("2 slots", "1 slots"))
    assert "2 slots is 0.75 times as fast as 1 slots" in report.what_limits(found)
    assert "What a micro-batch uses" in report.markdown(found)


def test_folder_bytes_counts_a_linked_file_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "below").mkdir()
    os.link(tmp_path / "a", tmp_path / "below" / "b")
    (tmp_path / "c").write_bytes(b"123")
    assert folder_bytes(tmp_path) == 8
    assert folder_bytes(tmp_path / "absent") == 0


def test_spans_are_means_over_the_counted_batches(tmp_path: Path) -> None:
    lines = [{"batch": batch, "spans": {"pack": [2, 0.2, 0.1]}} for batch in (0, 1, 2, 3)]
    (tmp_path / "4711.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert spans.collect(tmp_path, range(1, 3)) == {"pack": {"calls": 2.0, "ms": 200.0, "cpu_ms": 100.0}}


def test_a_generator_is_not_charged_for_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(spans, "_now", lambda: np.array([0.0, clock[0], 0.0]))
    monkeypatch.setattr(spans, "_times", {})

    def slow_input() -> Any:
        for i in range(3):
            clock[0] += 10
            yield i

    def work(items: Any) -> Any:
        for item in items:
            clock[0] += 1
            yield item

    assert list(spans._timed_generator("work", work)(slow_input())) == [0, 1, 2]
    assert spans._times["work"][1] == 3
    assert spans._times["work: wait for input"][1] == 30


def test_every_span_names_something_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    for _, module, attribute in (*spans.SPANS, *spans.GENERATORS):
        owner: Any = importlib.import_module(module if module.startswith("pyspark") else f"holdfast.{module}")
        for part in attribute.split("."):
            owner = getattr(owner, part)
        assert callable(owner)


def test_engines_share_their_base_settings() -> None:
    for job in (JobA(), JobB(), DropIn(), Timers()):
        for name in engines_for(type(job)):
            settings = settings_of(name, job)
            assert job.settings().items() <= settings.items()
            assert settings["spark.local.dir"] == "/disk/spark"


def test_as_many_timeouts_are_due_in_each_counted_batch() -> None:
    """What the bench of timers says that it measures."""
    job = Timers(rows=4, keys=40, fill_rows=20, due=2, batches=6)
    tester = PandasWithStateTester(
        job.one_key, "key", "key long, v long, at timestamp", job.output, job.state, "EventTimeTimeout", eventTime="at"
    )
    fired = []
    for batch in range(job.all_batches):
        at = dt.datetime.fromtimestamp(1_700_000_000 + 60 * batch, dt.UTC)
        if batch:
            fired.append(len(tester.setWatermark(int(at.timestamp() - 60) * 1000)))
        fills = batch < job.fill_batches
        keys = range(batch * 20, batch * 20 + 20) if fills else range(20 + batch * 4, 24 + batch * 4)
        assert len(tester.test([(20 + key % 20 if not fills else key, 1, at) for key in keys])) == len(keys)
    assert fired[job.counted.start - 1 :] == [job.due] * len(job.counted)
    assert sum(fired) == fired[job.fill_batches + 1] + job.due * len(job.counted)


def test_every_drop_in_batch_touches_as_many_keys_as_said() -> None:
    job = DropIn(rows=8, keys=12, touched=4, batches=6, warmup=0)
    tester = PandasWithStateTester(job.one_key, "key", "key long, v long", job.output, job.state)
    for _ in range(3):
        found = tester.test([(i % job.touched, 2) for i in range(job.rows)])
        assert len(found) == job.touched
    assert (found[0].n, found[0].s) == (6, 12)


def settings_of(engine: str, job: SparkJob) -> dict[str, str]:
    found = ENGINES[engine]
    assert isinstance(found, SparkEngine)
    return found.settings(job, Places(Path("/disk"), Path("/memory")))


@pytest.mark.parametrize(("backend", "place"), [("memory", "/memory"), ("filesystem", "/disk"), ("rocksdb", "/disk")])
def test_local_state_lies_where_its_backend_keeps_it(backend: str, place: str) -> None:
    settings = settings_of(f"holdfast-{backend}", JobA())
    assert settings["spark.holdfast.backend"] == backend
    assert settings["spark.holdfast.local.dir"].startswith(place)


def test_both_kinds_of_rocksdb_get_the_same_budget() -> None:
    spark = settings_of("spark-agg-rocksdb", JobB(memory_mb=300))
    assert spark["spark.sql.streaming.stateStore.rocksdb.boundedMemoryUsage"] == "true"
    assert spark["spark.sql.streaming.stateStore.rocksdb.maxMemoryUsageMB"] == "300"
    assert settings_of("holdfast-rocksdb", JobB(memory_mb=300))["spark.holdfast.rocksdb.memory"] == "300m"
    assert not [key for key in settings_of("spark-agg-rocksdb", JobA()) if "emory" in key and "rocksdb" in key]


def test_no_snapshot_falls_into_job_b() -> None:
    job = JobB()
    settings = settings_of("holdfast-rocksdb", job)
    for key in ("spark.holdfast.snapshot.maxCommits", "spark.sql.streaming.stateStore.minDeltasForSnapshot"):
        assert int(settings[key]) > job.all_batches


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (JobA, {"rows": 0}),
        (JobA, {"warmup": 8}),
        (JobA, {"slots": 0}),
        (JobA, {"memory_mb": 0}),
        (JobB, {"skew": 0.5}),
        (JobB, {"fill_rows": 8}),
        (DropIn, {"touched": 50_000}),
        (Timers, {"keys": 30_000}),
        (Timers, {"warmup": 2}),
        (Commits, {"keys": 10**9}),
        (Commits, {"value_bytes": 15}),
    ],
)
def test_impossible_jobs_are_refused(kind: type[Job], wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        kind(**wrong)


@pytest.mark.parametrize("engines", ["nothing", "floor,floor", "", "store-memory"])
def test_unknown_or_repeated_engines_are_refused(engines: str) -> None:
    result = CliRunner().invoke(bench, ["job-a", "--engines", engines])
    assert isinstance(result.exception, InvalidArgumentError)


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(BenchError, match="KeyError: 'no such engine'"):
        run_engine("no such engine", JobA())


def test_a_process_that_has_ended_still_counts(tmp_path: Path) -> None:
    work = (
        "import os, sys; held = bytearray(os.urandom(48 << 20)); file = open(sys.argv[1], 'wb'); file.write(held)\n"
        "os.fsync(file.fileno()); print('holds', flush=True)\n"
        "input(); del held; print('free', flush=True); input()"
    )
    children: set[int] = set()
    # Not all that is below: other tests of this process have left a Spark there.
    processes = Processes(lambda p: store_kind(p) if p.pid in {os.getpid(), *children} else None)
    command = [sys.executable, "-c", work, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        children.add(child.pid)
        assert child.stdout.readline() == "holds\n"
        processes.look()
        print(file=child.stdin, flush=True)
        assert child.stdout.readline() == "free\n"
        processes.look()
        child.communicate("\n")
    processes.look()
    peak = processes.peak()
    assert 48 * MIB < peak["background"]["anonymous"] <= peak["background"]["pss"] <= peak["background"]["rss"]
    assert processes.written()["background"] >= 48 * MIB
    assert 0 < processes.seconds()["background"] < 60
    assert "store" in peak


def test_an_orphan_stays_below_the_run_that_started_it() -> None:
    work = """
import psutil, subprocess, sys
from holdfast.benches.processes import adopt_orphans
adopt_orphans()
orphan = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdout=2).pid)"
pid = int(subprocess.run([sys.executable, "-c", orphan], stdout=-1, check=True).stdout)
assert pid in [process.pid for process in psutil.Process().children(recursive=True)]
"""
    assert subprocess.run([sys.executable, "-c", work], input="", text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("command", "kind"),
    [([], "python"), (["-m", "holdfast.spark_integration.server.state_server"], "server")],
)
def test_processes_of_a_query_are_told_apart(command: list[str], kind: str) -> None:
    run = [sys.executable, "-c", "print('up', flush=True); input()", *command]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert spark_kind(psutil.Process(child.pid)) == kind
        child.communicate(b"\n")
    assert spark_kind(psutil.Process()) is None


@pytest.mark.parametrize("value_bytes", [16, 17, 100, 1000])
def test_rows_of_the_store_benches_are_as_wide_as_said(value_bytes: int) -> None:
    table = rows.table_of(value_bytes)
    keys = rows.keys_of(table, np.arange(1000))
    values = rows.values_of(table, 1000, value_bytes, np.random.default_rng(0))
    assert len(Run.build(table, keys, values)) == 1000, "no two keys are equal"
    assert len(np.unique(keys.hashes >> np.uint64(56))) > 200, "hashes are spread over the shard"
    assert keys.columns.nbytes == 1000 * (16 + 8)
    assert sum(column.nbytes for column in values.columns) == 1000 * (value_bytes + (value_bytes > 16) * 8)


def test_commits_write_every_key_and_touch_old_ones() -> None:
    job = Commits(rows=10, keys=35, batches=7, warmup=1)
    touched = [job.numbers(batch, np.random.default_rng(batch)) for batch in range(job.batches)]
    assert sorted(set(np.concatenate(touched).tolist())) == list(range(35))
    assert [int(numbers.max()) for numbers in touched] == [4, 9, 14, 19, 24, 29, 34]
    assert all(len(numbers) > 5 for numbers in touched[1:]), "some are old"


@pytest.mark.parametrize("backend", backend_names())
def test_stalls_of_every_backend_are_measured(backend: str, tmp_path: Path) -> None:
    job = Commits(rows=200, keys=1000, batches=12, warmup=2)
    found = job.measure(backend, {}, Places(tmp_path, tmp_path))
    assert len(found.batch_ms) == 12
    assert set(found.phases_ms[0]) == {"begin", "get", "commit"}
    assert all(total > 0 for total in found.batch_ms)
    assert found.state_bytes["local_peak"] >= found.state_bytes["local_final"] > 1000 * 32
    assert found.memory["store"]["rss"] > 0


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
    text = micro_report.markdown({"benchmarks": measured, "machine_info": info, "datetime": "2026-01-02T03:04:05"})
    assert "| operation | keys | bytes of a value | memory | rocksdb |" in text
    assert "| get | 1,000 | 16 | 2.0 (1.0 to 4.0) | 0.10 (0.05 to 0.20) |" in text
    assert "| put | 1,000 | 16 | 250 (125 to 500) | - |" in text
    assert "| pack | 10.0 (5.0 to 20.0) | 3 |" in text
    assert "a-host" not in text


@pytest.mark.slow
def test_the_smallest_micro_benchmarks_run(tmp_path: Path) -> None:
    file = tmp_path / "micro.json"
    run = [sys.executable, "-m", "pytest", "benches", "-o", "python_files=micro_backend.py", "-k", "1000x100-memory"]
    # Tests may run side by side, but benchmarks refuse to.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*run, f"--benchmark-json={file}"], cwd=ROOT, env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = CliRunner().invoke(bench, ["report", str(file)], catch_exceptions=False).output
    for operation in ("get", "scan", "put", "commit", "rollback", "restore"):
        assert f"| {operation} | 1,000 | 100 |" in shown


def test_timers_of_the_bench_fire_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transaction fires the earliest ones, sets as many later ones, and knows which is the next."""
    monkeypatch.setattr(micro_timers, "TIMERS", 3_000)
    shard = micro_timers.TimerShard("memory", tmp_path)
    for _ in range(4):
        shard.fire()
        shard.merge_sometimes()
        shard.find_earliest()
    assert (shard.earliest_ms, shard.end_ms) == (4_000, 7_000)
    with shard.store.read_at(shard.pointer) as view:
        assert view.count(micro_timers.TABLE) == 3_000
