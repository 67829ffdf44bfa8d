"""A state directory that somebody has emptied is noticed at the next start, while executors still have the state."""

from __future__ import annotations

import shutil

import pytest
from pyspark.errors import StreamingQueryException

from tests.spark.conftest import Lab

pytestmark = pytest.mark.spark


def test_a_query_whose_state_directory_was_emptied_stops(lab: Lab) -> None:
    """It would go on with the executor's copies, and lose all state with the executor."""
    lab.configure({"commit.carriedBytes": "0"})
    lab.feed([("a", 1), ("b", 2)])
    lab.run(lab.totals())
    shutil.move(lab.folder / "durable", lab.folder / "kept")
    lab.feed([("a", 3)])
    with pytest.raises(StreamingQueryException, match="the state directory has nothing of the state"):
        lab.run(lab.totals())
    shutil.rmtree(lab.folder / "durable")
    shutil.move(lab.folder / "kept", lab.folder / "durable")
    (rows,) = lab.run(lab.totals())
    assert rows == [{"key": "a", "n": 2, "total": 4}]


def test_state_that_the_pointers_carry_survives_its_directory(lab: Lab) -> None:
    """Of a young query, whose commits are small: it goes on, with a warning in the worker's log."""
    lab.feed([("a", 1), ("b", 2)])
    lab.run(lab.totals())
    shutil.rmtree(lab.folder / "durable")
    lab.lose_local_state()
    lab.feed([("a", 3)])
    (rows,) = lab.run(lab.totals())
    assert rows == [{"key": "a", "n": 2, "total": 4}]
    assert lab.state() == {"a": (2, 4), "b": (1, 2)}
