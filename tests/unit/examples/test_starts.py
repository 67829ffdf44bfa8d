"""What the demo says of a start: Spark's part ends, and ours begins, with the first directory of local state."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from holdfast import clock
from holdfast.examples.flights import report
from holdfast.examples.flights.starts import Start, StartWatch, note_session


def test_a_start_is_told_in_its_parts() -> None:
    """Each figure is a duration of its own: they add up to the whole."""
    shown = str(Start(session_ms=9000, first_call_ms=12500, commit_ms=14000))
    assert shown == "9.0 s until Spark was up, 3.5 s until its workers called holdfast, 1.5 s until Spark had committed"


def test_the_first_call_is_seen_in_the_local_state_of_this_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier executor has left, or another query, is no call of this start."""
    now_ms = [0]
    monkeypatch.setattr(clock, "monotonic_ms", lambda: now_ms[0])
    user = tmp_path / f"holdfast-{os.getuid()}"
    (tmp_path / "query").mkdir()
    (tmp_path / "query" / "metadata").write_text(json.dumps({"id": "mine"}))
    (user / "executor-1-1" / "disk" / "mine").mkdir(parents=True)
    now_ms[0] = 1000
    watch = StartWatch(tmp_path, tmp_path)
    for ms, place in ((4000, None), (5000, "executor-2-2/disk/another"), (6000, "executor-2-2/memory/mine")):
        now_ms[0] = ms
        if place is None:
            note_session(tmp_path)
        else:
            (user / place).mkdir(parents=True)
        watch.look()
    now_ms[0] = 9000
    watch.look()
    assert watch.committed() == Start(session_ms=3000, first_call_ms=5000, commit_ms=8000)


def test_a_query_that_has_not_begun_has_called_nothing(tmp_path: Path) -> None:
    """Spark writes the query's id some time after the watch has begun."""
    watch = StartWatch(tmp_path, tmp_path)
    watch.look()
    note_session(tmp_path)
    start = watch.committed()
    assert start.session_ms <= start.first_call_ms == start.commit_ms


def test_figures_tell_both_starts_in_their_parts(tmp_path: Path) -> None:
    """Nobody is to take the start of a JVM for holdfast's recovery."""
    (tmp_path / "progress.jsonl").write_text(json.dumps({"batch": 0, "rows": 1, "ms": 700}))
    sizes = {"state_rows": 3, "state_bytes": 100, "read_ms": 5, "durable_bytes": 2_000, "durable_objects": 4}
    (tmp_path / "result.json").write_text(json.dumps({**sizes, "restarts": 0}))
    console = Console(width=200, file=io.StringIO())
    starts = [Start(9000, 12_500, 14_000), Start(20_000, 28_000, 30_500)]
    report.show_figures(console, tmp_path, starts, report.Kill(2, 31_000, "local files"))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "first start      9.0 s until Spark was up, 3.5 s until" in shown
    assert "recovery         31.0 s from kill to next commit: 20.0 s until Spark was up, 8.0 s until" in shown
