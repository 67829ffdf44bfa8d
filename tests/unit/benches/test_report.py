"""The document of a bench: its targets, figures and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.report import tables
from holdfast.benches.report.results import Target, document, memory, usage, written
from holdfast.benches.runs.paired import Entry

FACTS = {
    "command": "holdfast bench job-a",
    "started": "2026-01-02T03:04:05+00:00",
    "machine": {"cpu": "a cpu", "cores": 2, "memory_gb": 8.0, "os": "Linux"},
    "versions": {"holdfast": "0.1.0", "python": "3.11"},
}
MIB = 1 << 20
TARGETS = (Target("holdfast-memory/floor", at_least=0.85), Target("state_bytes holdfast-memory", at_most=3.0))


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
        "busy_before_cores": 0.1,
    }


def a_document(
    labels: tuple[str, str] = ("holdfast-memory", "floor"), targets: Sequence[Target] = TARGETS
) -> dict[str, Any]:
    first, second = labels
    entries = {label: Entry(first, JobA(rows=10, keys=50, batches=3, warmup=1)) for label in labels}
    runs = {first: [a_run(90.0, 2.5), a_run(60.0, 3.5)], second: [a_run(100.0), a_run(100.0)]}
    return document("job-a", entries, runs, FACTS, targets)


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
    job, budget = (
        JobB(batches=3, warmup=1, keys=16, fill_rows=16, rows=16),
        Target("budget holdfast-rocksdb", at_most=1.0),
    )
    runs = {"holdfast-rocksdb": [a_run(1.0), a_run(1.0, server_mib=server_mib), a_run(1.0)]}
    runs = {label: [run | {"batch_ms": [1] * 4, "phases_ms": [{}] * 4} for run in of] for label, of in runs.items()}
    found = document("job-b", {"holdfast-rocksdb": Entry("holdfast-rocksdb", job)}, runs, FACTS, [budget])
    assert [(t["what"], t["met"]) for t in found["targets"]] == [("budget holdfast-rocksdb", met)]
    assert memory(found, "holdfast-rocksdb")["server"]["rss"] == max(server_mib, 100) * MIB


def test_bytes_written_are_those_of_one_counted_batch() -> None:
    assert written(a_document(), "floor") == {"python": 2 * MIB, "server": 1 * MIB, "durable": MIB / 2}


def test_usage_is_by_counted_batch() -> None:
    found = usage(a_document(), "floor")
    assert found["wall_s"] == 1.0
    assert found["cpu_s"] == 1.5
    assert found["cores"] == 1.5
    assert found["outside_ms"] == 200.0


def test_markdown_shows_every_table() -> None:
    text = tables.markdown(a_document())
    for part in (
        "## job-a",
        "a cpu, 2 cores",
        "| holdfast-memory/floor | 0.75 | 0.90 0.60 |",
        "| NO |",
        "| holdfast-memory | state server 90 | 90 | 80 | 0.00 | 4 | 3.50 | - |",
        "| holdfast-memory | 4 | 1,100 | 1,200 | 1,200 | 1,200 | 1.1 | 1,000 |",
        "| 3.00 | 0.50 |",
    ):
        assert part in text


def test_markdown_says_how_long_filling_took() -> None:
    job = JobB(batches=3, warmup=1, keys=32, fill_rows=16, rows=16)
    run = a_run(1.0) | {"batch_ms": [1500, 2500, 700, 7, 7], "phases_ms": [{"get": 3, "commit": 4}] * 5}
    text = tables.markdown(document("job-b", {"x": Entry("x", job)}, {"x": [run]}, FACTS))
    assert "| 4.0 |\n" in text
    assert "| x: commit | 2 | 4.0 |" in text


def test_latencies_are_percentiles_of_all_counted_batches() -> None:
    job = JobA(batches=102, warmup=1)
    run = a_run(1.0) | {"batch_ms": [9999, *range(101)], "phases_ms": [{}] * 102}
    text = tables.markdown(document("job-a", {"x": Entry("x", job)}, {"x": [run]}, FACTS))
    assert "| x | 101 | 50.0 | 95.0 | 99.0 | 100 | 2.0 | 0.0 |" in text
