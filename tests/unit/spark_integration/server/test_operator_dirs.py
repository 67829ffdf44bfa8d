"""What an operator leaves in its local directory goes: notes of former runs, and folders without shards."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.spark_integration.executor.local_dirs import CLAIM_SUFFIX, RUNS
from holdfast.spark_integration.server.housekeeping import remove_if_empty, remove_old_runs


def test_the_notes_of_former_runs_go(tmp_path: Path) -> None:
    """A query that is started again and again leaves two files each time."""
    runs = tmp_path / "totals" / RUNS
    runs.mkdir(parents=True)
    for i in range(5):
        for name in (f"run-{i}", f"run-{i}{CLAIM_SUFFIX}"):
            (runs / name).write_text("")
            os.utime(runs / name, (i, i))
    os.utime(runs / f"run-1{CLAIM_SUFFIX}", (99, 99))  # a long run: its claim was renewed just now
    remove_old_runs(tmp_path)
    assert {p.name.removesuffix(CLAIM_SUFFIX) for p in runs.iterdir()} == {"run-1", "run-4"}
    remove_old_runs(tmp_path / "absent")


def test_an_operator_without_shards_leaves_no_folder(tmp_path: Path) -> None:
    operator, other = tmp_path / "query" / "totals", tmp_path / "query" / "other"
    (operator / RUNS).mkdir(parents=True)
    (operator / RUNS / "run-1").write_text("")
    (other / "shard-0000-aa").mkdir(parents=True)
    remove_if_empty(other)
    remove_if_empty(operator)
    assert [p.name for p in (tmp_path / "query").iterdir()] == ["other"]
    assert (other / "shard-0000-aa").is_dir()


def test_a_query_without_shards_leaves_no_folder(tmp_path: Path) -> None:
    """One that was second keeps its shards in a directory of its own, and has notes in the first one's, too."""
    first, own = tmp_path / "query" / "totals", tmp_path / "query" / "totals@query"
    for operator in (first, own):
        (operator / RUNS).mkdir(parents=True)
        for run in ("run-1", "run-2", "run-3"):
            (operator / RUNS / run).write_text("")
    shard = own / "shard-0000-aa"
    shard.mkdir()
    remove_old_runs(own.parent)
    assert [len(list((operator / RUNS).iterdir())) for operator in (first, own)] == [2, 2]
    shard.rmdir()
    remove_if_empty(own)
    assert not any(tmp_path.iterdir())
