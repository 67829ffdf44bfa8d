"""What a micro-batch survives without Spark's help: the session has one attempt for each task."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException

import holdfast
from tests.spark.conftest import OUTPUT, STATE, Lab, count_and_sum
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

pytestmark = [pytest.mark.spark, pytest.mark.slow]

FIRST = [("a", 1), ("b", 2), ("a", 3), (None, 4)]
SECOND = [("a", 10), ("c", 20), (None, 30)]
AFTER_BOTH = {"a": (3, 14), "b": (1, 2), "c": (1, 20), None: (2, 34)}
Function = Callable[[holdfast.ShardBatch], pa.Table]


def told(calls: Path, call: Function) -> Function:
    """Return the function, which now also notes each of its calls."""

    def function(batch: holdfast.ShardBatch) -> pa.Table:
        with calls.open("a") as file:
            file.write(f"{batch.batch_id}\n")
        return call(batch)

    return function


def kill_server_once(local: Path, notes: Path) -> None:
    """Kill the state server of the executors below a directory, unless that was noted before."""
    from holdfast.spark_integration.client.connection import client_of
    from holdfast.spark_integration.executor.local_dirs import LOCK_NAME

    if not notes.exists():
        for lock in local.glob(f"**/{LOCK_NAME}"):
            os.kill(client_of(lock.parent).call("statistics")["pid"], signal.SIGKILL)
            notes.touch()


def killing(local: Path, notes: Path, *, before: bool) -> Function:
    """Return a function that kills the state server in the second micro-batch, before it reads or before it commits."""

    def function(batch: holdfast.ShardBatch) -> pa.Table:
        if batch.batch_id == 1 and before:
            kill_server_once(local, notes)
        output = count_and_sum(batch)
        if batch.batch_id == 1 and not before:
            kill_server_once(local, notes)
        return output

    return function


@pytest.mark.parametrize("before", cases([False, True]), ids=lambda it: "read" if it else "commit")
def test_a_state_server_that_dies_in_the_middle(lab: Lab, tmp_path: Path, before: bool) -> None:
    """No micro-batch notices: none reads or writes through it."""
    lab.configure({"backend": "rocksdb", "shards": "1"})
    calls, notes = tmp_path / "calls", tmp_path / "killed"
    lab.feed(FIRST)
    lab.feed(SECOND)
    batches = lab.run(lab.totals(func=told(calls, killing(lab.local, notes, before=before))))
    assert notes.exists()
    assert calls.read_text().split() == ["0", "1"]
    assert {row["key"]: (row["n"], row["total"]) for row in batches[1]} == {key: AFTER_BOTH[key] for key, _ in SECOND}
    assert lab.state() == AFTER_BOTH


@pytest.mark.all
def test_a_state_server_that_dies_while_keys_are_called(lab: Lab, tmp_path: Path) -> None:
    """Each key is called once."""
    calls, notes = tmp_path / "calls", tmp_path / "killed"
    local = lab.local

    def totals(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n, total = state.getOption or (0, 0)
        for chunk in chunks:
            n, total = n + len(chunk), total + int(chunk["v"].sum())
        state.update((n, total))
        with calls.open("a") as file:
            file.write(f"{key[0]} ")
        if n == 3:
            kill_server_once(local, notes)
        yield pd.DataFrame({"key": [key[0]], "n": [n], "total": [total]})

    lab.configure({"backend": "rocksdb", "shards": "1"})
    lab.feed(FIRST)
    lab.feed(SECOND)
    stream = holdfast.stream(lab.source()).groupBy("key")
    frame = stream.applyInPandasWithState(totals, OUTPUT, STATE, "update", "NoTimeout", name="totals")
    batches = lab.run(frame)
    assert notes.exists()
    assert calls.read_text().split() == ["None", "a", "b", "None", "a", "c"]
    assert [(row["key"], row["n"], row["total"]) for row in batches[1]] == [(None, 2, 34), ("a", 3, 14), ("c", 1, 20)]
    assert lab.state() == AFTER_BOTH


def test_local_files_that_are_damaged(lab: Lab, tmp_path: Path) -> None:
    """They are set aside, and the version is restored from durable commits in the same task."""
    lab.configure({"backend": "filesystem", "shards": "1"})
    calls = tmp_path / "calls"
    lab.feed(FIRST)
    lab.run(lab.totals())
    runs = list(lab.local.glob("*/*/disk/*/totals/*/versions/*/*.arrow"))
    cut = [os.truncate(path, path.stat().st_size - 1) for path in runs if path.stat().st_nlink]
    assert cut
    lab.feed(SECOND)
    lab.run(lab.totals(func=told(calls, count_and_sum)))
    assert calls.read_text().split() == ["1"], "the function was not called on a damaged state"
    assert lab.state() == AFTER_BOTH


# Any other error of a function: `test_faults.py`.
@pytest.mark.parametrize(
    "error",
    [pytest.param(ZeroDivisionError, marks=pytest.mark.all), holdfast.UnavailableError],
    ids=lambda e: e.__name__,
)
def test_errors_of_the_function_are_its_own(lab: Lab, tmp_path: Path, error: Any) -> None:
    """It may have effects elsewhere: it is called again only where holdfast itself has lost something."""
    lab.configure({"backend": "rocksdb", "shards": "1"})
    calls = tmp_path / "calls"

    def broken(batch: holdfast.ShardBatch) -> pa.Table:
        count_and_sum(batch)
        raise error("a mistake of the user's")

    lab.feed(FIRST)
    with pytest.raises(StreamingQueryException, match="a mistake of the user's"):
        lab.run(lab.totals(func=told(calls, broken)))
    assert calls.read_text().split() == ["0"]
