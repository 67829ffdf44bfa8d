"""The pure parts of the benches: ratios, targets, tables, sizes; and that a tiny run fills the whole document."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from holdfast.benches import report, spans
from holdfast.benches.command import bench
from holdfast.benches.engines import ENGINES
from holdfast.benches.job_a import Job
from holdfast.benches.paired import BenchError, Entry, ratios, run_engine, summarize
from holdfast.benches.results import Target, document, usage
from holdfast.benches.spark_run import folder_bytes
from holdfast.errors import InvalidArgumentError

FACTS = {
    "command": "holdfast bench job-a",
    "started": "2026-01-02T03:04:05+00:00",
    "machine": {"cpu": "a cpu", "cores": 2, "memory_gb": 8.0, "os": "Linux"},
    "versions": {"holdfast": "0.1.0", "python": "3.11"},
}


def a_run(rows_per_second: float, state: dict[str, Any] | None = None) -> dict[str, Any]:
    phases = {"triggerExecution": 1000, "addBatch": 800}
    return {
        "batch_ms": [5000, 1000, 1200],
        "phases_ms": [phases] * 3,
        "cpu": {"wall": 2.0, "jvm": 1.5, "python": 1.0, "server": 0.5},
        "settings": {"spark.master": "local[2]"},
        "state_bytes": state,
        "rows_per_second": rows_per_second,
        "median_batch_ms": 1100,
        "load_before": 0.1,
    }


def a_state(ratio: float) -> dict[str, Any]:
    return {"live_arrow": 100, "local_peak": 300, "local_final": 200, "ratio": ratio, "after_batch": []}


def a_document(bench_name: str = "job-a", labels: tuple[str, str] = ("holdfast-memory", "floor")) -> dict[str, Any]:
    first, second = labels
    entries = {label: Entry(first, Job(rows=10, batches=3, warmup=1)) for label in labels}
    runs = {first: [a_run(90.0, a_state(2.5)), a_run(60.0, a_state(3.5))], second: [a_run(100.0), a_run(100.0)]}
    return document(bench_name, entries, runs, FACTS)


def test_summary_leaves_the_warm_up_and_batches_beyond_the_last_out() -> None:
    job = Job(rows=100, batches=4, warmup=2)
    assert summarize([9000, 9000, 100, 300, 7], job) == {"rows_per_second": 500.0, "median_batch_ms": 200}


def test_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_medians() -> None:
    runs = {"a": [{"rows_per_second": r} for r in (10, 40, 30)], "b": [{"rows_per_second": r} for r in (10, 10, 20)]}
    assert ratios(runs) == {"ratios": {"a/b": 1.5}, "ratios_by_pair": {"a/b": [1.0, 4.0, 1.5]}}


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


def test_usage_is_by_counted_batch() -> None:
    found = usage(a_document(), "floor")
    assert found["wall_s"] == 1.0
    assert found["cpu_s"] == 1.5
    assert found["cores"] == 1.5
    assert found["outside_ms"] == 200.0


def test_markdown_shows_every_table() -> None:
    text = report.markdown(a_document())
    for part in ("## job-a", "a cpu, 2 cores", "| holdfast-memory/floor | 0.75 | 0.90 0.60 |", "| NO |", "| 3.50 |"):
        assert part in text


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
    from holdfast.benches.engines import Places, SparkEngine

    job = Job()
    for engine in ENGINES.values():
        assert isinstance(engine, SparkEngine)
        settings = engine.all_settings(job, Places(Path("/disk"), Path("/memory")))
        assert job.base_settings().items() <= settings.items()
        assert settings["spark.local.dir"] == "/disk/spark"


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"warmup": 8}, {"slots": 0}])
def test_impossible_jobs_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        Job(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("engines", ["nothing", "floor,floor", ""])
def test_unknown_or_repeated_engines_are_refused(engines: str) -> None:
    result = CliRunner().invoke(bench, ["job-a", "--engines", engines])
    assert isinstance(result.exception, InvalidArgumentError)


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(BenchError, match="KeyError: 'no such engine'"):
        run_engine("no such engine", Job())


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_tiny_run_fills_the_document(java_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    size = ["--rows", "1000", "--keys", "100", "--batches", "3", "--warmup", "1", "--repeats", "1"]
    run = ["job-a", "--engines", "holdfast-memory,spark-aiwps-count", "--profile", "--json", str(file)]
    result = CliRunner().invoke(bench, [*run, *size], catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(file.read_text())
    for engine in found["engines"].values():
        assert len(engine["runs"][0]["batch_ms"]) == 3
        assert engine["rows_per_second"] > 0
        assert engine["runs"][0]["cpu"]["jvm"] > 0
    assert set(found["ratios"]) == {"holdfast-memory/spark-aiwps-count"}
    state = found["state_bytes"]["holdfast-memory"]
    assert state["live_arrow"] == 100 * 24, "keys and two sums of 8 bytes"
    assert state["local_peak"] >= state["local_final"] > 0
    assert found["engines"]["holdfast-memory"]["runs"][0]["spans"]["commit"]["calls"] == 2
    assert "spark.master" in found["settings"]["spark"]["holdfast-memory"]
    assert CliRunner().invoke(bench, ["report", str(file)]).output.startswith("## job-a")
