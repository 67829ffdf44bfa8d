"""Which state servers are asked for the last micro-batches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.spark_integration.client import recent
from holdfast.spark_integration.executor import local_dirs


def test_executors_in_ram_and_on_disk_are_asked_whatever_is_free_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks cannot know how much of the shared memory was free when an executor began."""
    monkeypatch.setattr(local_dirs, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "disk"))
    (tmp_path / "shm").mkdir()
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    asked: list[Path] = []

    def ask(directory: Path, timeout_seconds: float) -> list[recent.RecentBatch]:
        asked.append(directory)
        return []

    monkeypatch.setattr(recent, "_ask", ask)
    executors = {tmp_path / root / local_dirs.user_name() / f"executor-{root}" for root in ("disk", "shm")}
    for executor in executors:
        executor.mkdir(parents=True)
    assert recent.recent_batches() == []
    assert set(asked) == executors
    assert len(asked) == 2
