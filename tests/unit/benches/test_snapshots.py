"""Benches of snapshots: what they measure is there, and a restore that brings back less is no result."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.backends.registry import backend_names
from holdfast.benches.instruments.measured import Measured, Places
from holdfast.benches.jobs import shard
from holdfast.benches.jobs.shard import FULL_BYTES, NEW_BYTES, Restore, Snapshots
from holdfast.benches.report.results import Target, document
from holdfast.benches.runs.paired import Entry, summarize
from holdfast.errors import CorruptionError
from tests.unit.benches.test_report import FACTS, a_document

pytestmark = [pytest.mark.all, pytest.mark.slow]

_SMALL = Restore(rows=3000, batches=3, warmup=1)


def run_of(found: Measured, job: Snapshots | Restore) -> dict[str, object]:
    return vars(found) | summarize(found.batch_ms, job) | {"busy_before_cores": 0.0}


@pytest.mark.parametrize("backend", backend_names())
def test_a_snapshot_sends_what_changed(backend: str, tmp_path: Path) -> None:
    job = Snapshots(rows=20, keys=2000, batches=6, warmup=2)
    found = job.measure(backend, {}, Places(tmp_path, tmp_path))
    assert [set(phases) for phases in found.phases_ms] == [{"commit", "maintain", "snapshot"}] * 6
    assert found.batch_ms == [phases["snapshot"] for phases in found.phases_ms]
    assert 0 < found.storage[NEW_BYTES] < found.storage[FULL_BYTES]
    assert found.storage[FULL_BYTES] > 4 * 2000 * 50, "four counted snapshots of letters that hardly shrink"
    assert not [path for path in (tmp_path / "durable").rglob("*") if path.is_file()]


@pytest.mark.parametrize("backend", backend_names())
def test_a_restore_is_held_against_a_download(backend: str, tmp_path: Path) -> None:
    found = _SMALL.measure(backend, {}, Places(tmp_path, tmp_path))
    runs = {"store-rocksdb": [run_of(found, _SMALL)]}
    stored = document(
        "restore",
        {"store-rocksdb": Entry("store-rocksdb", _SMALL)},
        runs,
        FACTS,
        [Target("restore store-rocksdb", at_most=1.5)],
    )
    ratios = sorted(phases["restore"] / phases["plain download"] for phases in found.phases_ms[1:])
    assert [(t["what"], t["measured"]) for t in stored["targets"]] == [
        ("restore store-rocksdb", round(sum(ratios) / 2, 2))
    ]


def test_less_state_than_was_stored_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = shard.Shard.fill
    monkeypatch.setattr(shard.Shard, "fill", lambda one, keys: fill(one, keys // 2))
    with pytest.raises(CorruptionError, match="not the one that was stored"):
        _SMALL.measure("memory", {}, Places(tmp_path, tmp_path))


def test_the_longest_micro_batch_may_have_a_target() -> None:
    targets = [Target("with snapshots/without", at_least=0.95), Target("longest with snapshots", at_most=2.0)]
    found = a_document(("with snapshots", "without"), targets)
    assert {t["what"]: t["measured"] for t in found["targets"]} == {
        "with snapshots/without": 0.75,
        "longest with snapshots": 1.09,
    }
