"""What goes wrong while a query runs: the query fails with an error that says why, and no state changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException

import holdfast
from tests.spark.conftest import Lab, count_and_sum
from tests.spark.running_tasks import wait_for_tasks
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("own_file_manager")]

FIRST = [("a", 1), ("b", 2), ("a", 3), (None, 4)]
SECOND = [("a", 10), ("c", 20), (None, 30), ("", 40)]
AFTER_FIRST = {"a": (2, 4), "b": (1, 2), None: (1, 4)}
AFTER_BOTH = {"a": (3, 14), "b": (1, 2), "c": (1, 20), None: (2, 34), "": (1, 40)}


def fails(lab: Lab, expected: str, query: str = "query", **options: Any) -> None:
    """Run the query and check its error; the state must be as before."""
    with pytest.raises(StreamingQueryException, match=expected):
        lab.run(lab.totals(**options), query=query)
    wait_for_tasks(lab.spark)


def begun(lab: Lab) -> None:
    lab.feed(FIRST)
    lab.run(lab.totals())
    lab.feed(SECOND)


def test_a_function_that_fails_changes_nothing(lab: Lab) -> None:
    def broken(batch: holdfast.ShardBatch) -> pa.Table:
        count_and_sum(batch)
        if "c" in batch.keys["key"].to_pylist():
            raise ZeroDivisionError("a mistake of the user's")
        return count_and_sum(batch)

    lab.feed(FIRST)
    lab.run(lab.totals())
    lab.feed(SECOND)
    fails(lab, "a mistake of the user's", func=broken)
    assert lab.state() == AFTER_FIRST
    lab.run(lab.totals())
    assert lab.state() == AFTER_BOTH


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def replaced(path: Path) -> None:
    other = next(p for p in path.parent.iterdir() if p != path)
    shutil.copy(other, path)


# tests/unit/snapshotter/commits/test_commits.py breaks each object in each way; here Spark stops, and goes on.
BREAKS: list[tuple[str, Callable[[Path], None], str]] = [
    ("oldest", damaged, r"CorruptionError.*{path}"),
    ("newest", Path.unlink, r"StateLostError.*{path}"),
    ("newest", damaged, r"CorruptionError.*{path}"),
    ("oldest", cut, r"CorruptionError.*{path}"),
    ("newest", replaced, r"CorruptionError.*{path}"),
    ("oldest", Path.unlink, r"CorruptionError.*{path}"),
]


@pytest.mark.parametrize(("which", "break_it", "expected"), cases(BREAKS))
def test_a_broken_commit_object_stops_the_query_until_it_is_back(
    lab: Lab, break_it: Callable[[Path], None], expected: str, which: str, tmp_path: Path
) -> None:
    lab.configure({"shards": "1", "commit.carriedBytes": "0"})
    lab.feed([("a", 1)])
    lab.feed([("a", 3), ("b", 2), (None, 4)])
    lab.run(lab.totals())
    lab.feed(SECOND)
    commits = lab.commits()
    assert len(commits) == 2
    chosen = commits[0 if which == "oldest" else 1]
    shutil.copy(chosen, tmp_path / "kept")
    break_it(chosen)
    before = objects(lab)
    lab.lose_local_state()
    fails(lab, "(?s)" + expected.format(path=chosen.relative_to(lab.folder / "durable")))
    assert objects(lab) == before
    shutil.copy(tmp_path / "kept", chosen)
    assert lab.state() == AFTER_FIRST
    lab.run(lab.totals())
    assert lab.state() == AFTER_BOTH


def objects(lab: Lab) -> set[Path]:
    """Return what the shards have stored, without the reports of their failures."""
    return {path for path in lab.folder.glob("durable/*/shard-*/**/*") if "troubles" not in path.parts}


@pytest.mark.parametrize("setting", cases(["state.dir", "local.dir"]))
def test_a_directory_that_cannot_be_written(lab: Lab, setting: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    lab.configure({setting: str(tmp_path / "file" / "state")})
    lab.feed(FIRST)
    said = rf"(?=.*{tmp_path / 'file'})(?=.*spark\.holdfast\.{setting})"
    fails(lab, rf"(?s){said}.*(UnavailableError|InvalidArgumentError)")


def test_without_a_state_directory_state_is_not_durable_and_that_is_said(lab: Lab) -> None:
    lab.spark.conf.unset("spark.holdfast.state.dir")
    lab.feed(FIRST)
    with pytest.warns(UserWarning, match=r"not durable.*spark\.holdfast\.state\.dir"):
        totals = lab.totals()
    lab.run(totals)
    lab.feed(SECOND)
    output = lab.run(totals)
    assert {row["key"]: row["n"] for rows in output for row in rows} == {"a": 3, "c": 1, None: 2, "": 1}
    lab.feed(SECOND)
    lab.lose_local_state()
    with pytest.raises(StreamingQueryException, match=r"(?s)StateLostError.*spark\.holdfast\.state\.dir"):
        lab.run(totals)
