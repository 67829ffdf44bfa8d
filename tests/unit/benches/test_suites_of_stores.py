"""The suites `durability` and `growth`: what they plan can be run, is told apart, and is stored as it was planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.backends.registry import backend_names
from holdfast.benches.instruments.measured import Places
from holdfast.benches.jobs.by_name import read_job
from holdfast.benches.jobs.shard import COLD_MS, FEW, FULL_BYTES, RESTORE_MS, Size
from holdfast.benches.runs.by_name import ENGINES
from holdfast.benches.runs.paired import Entry, run_engine
from holdfast.benches.suites.measurement import Measurement, Profile, Shape
from holdfast.benches.suites.suites import durability, growth

SUITES = (durability, growth)
FAR = Shape(keys=5000, rows=1000, shards=8, store_latency_ms=20)


@pytest.mark.parametrize("suite", SUITES)
def test_what_is_planned_can_be_run(suite: Callable[[Profile], list[Measurement]]) -> None:
    """A plan that fails after an hour of measuring is found here."""
    for found in (*suite(Profile()), *suite(Profile(quick=True, shape=FAR))):
        assert found.question.endswith("?")
        assert len(found.entries) > 1
        assert found.baseline in ("", *found.entries)
        for entry in found.entries.values():
            assert isinstance(entry.job, ENGINES[entry.engine].runs)
            assert read_job(json.loads(json.dumps(entry.job.stored()))) == entry.job


@pytest.mark.parametrize("suite", SUITES)
def test_a_curve_has_different_places_on_its_axis(suite: Callable[[Profile], list[Measurement]]) -> None:
    for found in (one for one in suite(Profile()) if one.along):
        places: dict[str, list[float]] = {}
        for entry in found.entries.values():
            places.setdefault(entry.engine, []).append(getattr(entry.job, found.along))
        assert max(map(len, places.values())) > 1
        assert all(len(set(of)) == len(of) for of in places.values()), found.name


@pytest.mark.parametrize("suite", SUITES)
def test_names_are_of_their_suite_and_once(suite: Callable[[Profile], list[Measurement]]) -> None:
    """Each measurement is a file: DIR/<suite>/<name>.json."""
    plan = suite(Profile())
    assert len({found.name for found in plan}) == len(plan)
    assert {found.suite for found in plan} == {plan[0].suite}
    assert sum(found.minutes for found in plan) <= 20


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
