"""Engines and paired runs: which engines there are, their settings, ratios within pairs, and how a run fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.benches.command import bench
from holdfast.benches.commands import single
from holdfast.benches.instruments.measured import Places
from holdfast.benches.jobs.by_key import DropIn
from holdfast.benches.jobs.job import SparkJob
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.runs.by_name import ENGINES, engines_for
from holdfast.benches.runs.child_process import BenchError
from holdfast.benches.runs.engines import SparkEngine
from holdfast.benches.runs.paired import Entry, ratios, run_engine, summarize
from holdfast.errors import InvalidArgumentError
from tests.unit.benches.tiny_run import a_run


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


def test_engines_share_their_base_settings() -> None:
    for job in (JobA(), JobB(), DropIn()):
        for name in engines_for(type(job)):
            settings = settings_of(name, job)
            assert job.settings().items() <= settings.items()
            assert settings["spark.local.dir"] == "/disk/spark"


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


@pytest.mark.parametrize("engines", ["nothing", "floor,floor", "", "store-memory"])
def test_unknown_or_repeated_engines_are_refused(engines: str) -> None:
    result = CliRunner().invoke(bench, ["job-a", "--engines", engines])
    assert isinstance(result.exception, InvalidArgumentError)


@pytest.mark.slow(1)
def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(BenchError, match="KeyError: 'no such engine'"):
        run_engine(Entry("no such engine", JobA()))


def test_plain_files_are_a_choice_of_any_engine() -> None:
    """Whether Spark forks for its checkpoint files must be the only difference between the runs compared."""
    usual = settings_of("spark-agg-rocksdb", JobA())
    plain = settings_of("spark-agg-rocksdb", JobA(plain_files=True))
    assert {key.rpartition(".")[2] for key in plain.keys() - usual.keys()} == {"checkpointFileManagerClass"}
    assert usual.items() <= plain.items()


def test_a_job_varies_in_one_field_and_each_variant_is_an_entry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether a setting costs anything is a pair of runs, whatever the setting is."""
    ran: list[Entry] = []

    def run(entry: Entry, **_: object) -> dict[str, object]:
        ran.append(entry)
        return a_run(100.0)

    monkeypatch.setattr(single, "run_engine", run)
    size = ["--rows", "10", "--batches", "3", "--warmup", "1", "--repeats", "1", "--json", str(tmp_path / "found")]
    given = ["job-a", "--engines", "holdfast-memory", "--vary", "plain-files=true,false", *size]
    assert CliRunner().invoke(bench, given, catch_exceptions=False).exit_code == 0
    assert [entry.job.plain_files for entry in ran] == [True, False]  # type: ignore[attr-defined]
    found = json.loads((tmp_path / "found").read_text())
    assert list(found["engines"]) == ["holdfast-memory, plain-files true", "holdfast-memory, plain-files false"]
    assert "--vary plain-files=true,false" in found["command"]


@pytest.mark.parametrize("vary", ["speed=1,2", "slots", "slots="])
def test_what_cannot_vary_is_refused(vary: str) -> None:
    result = CliRunner().invoke(bench, ["job-a", "--vary", vary])
    assert isinstance(result.exception, InvalidArgumentError)
