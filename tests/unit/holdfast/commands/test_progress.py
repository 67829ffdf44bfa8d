"""Long work says how far it has come on a terminal, and nothing anywhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.commands import progress


class Tracker:
    """Spark's, of two stages one after the other."""

    def __init__(self) -> None:
        self.looks = 0

    def getActiveStageIds(self) -> list[int]:  # noqa: N802
        self.looks += 1
        return [] if self.looks == 1 else [7 if self.looks < 4 else 8]

    def getStageInfo(self, stage: int) -> Any:  # noqa: N802
        return SimpleNamespace(stageId=stage, numTasks=40, numCompletedTasks=self.looks)


def shown() -> None:
    with progress.things_shown("deleting", 2_000) as on_done:
        on_done(1_000)
    with progress.bytes_shown("reading", 5_000_000) as on_done:
        on_done(4_000_000)


def test_nothing_is_shown_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs and pipes stay as they are."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    shown()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_how_much_how_fast_and_how_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, so that what a program reads stays clean."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown()
    out, err = capsys.readouterr()
    assert out == ""
    assert "deleting" in err
    assert "1000/2000" in err
    assert "4.0/5.0 MB" in err


def test_tasks_of_spark_are_followed_from_stage_to_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore is stages of tasks; its thread ends with the context."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LOOKS", 0.02)
    tracker = Tracker()
    spark = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))
    with progress.tasks_shown(cast("Any", spark)):
        while tracker.looks < 8:
            pass
    looks = tracker.looks
    assert "/40" in capsys.readouterr().err
    assert tracker.looks == looks
