"""`holdfast.explain` on what Spark really raises; over Connect, tests/spark/queries/test_connect.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from tests.spark.conftest import Lab

pytestmark = pytest.mark.spark


def explained(lab: Lab, frame: DataFrame, query: str = "query") -> list[str]:
    """Return the lines of what a query fails with; the exception that it keeps must say the same."""
    with pytest.raises(StreamingQueryException) as caught:
        lab.run(frame, query)
    return holdfast.explain(caught.value).splitlines()


def raises_for_b(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    if key == ("b",):
        raise ValueError("no b here")
    yield pd.DataFrame({"key": [key[0]]})


def test_a_function_that_raises_for_a_key(lab: Lab) -> None:
    """The key, the micro-batch and the user's own line are named."""
    lab.feed([("a", 1)])
    lab.feed([("b", 1)])
    grouped = holdfast.stream(lab.source()).groupBy("key")
    frame = grouped.applyInPandasWithState(raises_for_b, "key string", "n long", "update", "NoTimeout")
    place = f"raises_for_b (test_failures.py, line {raises_for_b.__code__.co_firstlineno + 2})"
    assert explained(lab, frame) == [
        "what:        ValueError: no b here",
        "operator:    raises_for_b",
        "key:         ('b',)",
        "micro-batch: 1",
        f"to do:       correct {place}, and start the query again: nothing of this micro-batch was kept",
    ]


def test_state_that_is_lost(lab: Lab) -> None:
    lab.configure({"commit.carriedBytes": "0"})
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    lab.lose_local_state()
    for commit in lab.commits():
        commit.unlink()
    lab.feed([("a", 10)])
    lines = explained(lab, lab.totals())
    assert lines[0].startswith("what:        StateLostError: ")
    assert lines[1] == "operator:    totals"
    assert lines[2].startswith("shard:       ")
    assert lines[3] == "micro-batch: 1"
    assert "go back to an earlier micro-batch" in lines[4]


def test_state_of_other_columns(lab: Lab) -> None:
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    lab.feed([("a", 10)])

    def never(batch: holdfast.ShardBatch) -> pa.Table:
        raise AssertionError

    with pytest.warns(UserWarning, match="cannot continue the state"):
        frame = lab.totals(func=never, stateStructType="n string, total long")
    lines = explained(lab, frame)
    assert lines[0].startswith("what:        SchemaMismatchError: ")
    assert [line.split(":")[0] for line in lines] == ["what", "operator", "shard", "micro-batch", "to do"]


@pytest.mark.since("4.1")
def test_a_foreach_batch_that_takes_a_part(lab: Lab) -> None:
    """Spark says only "Exception thrown in awaitResult"; we say why, and what reads all rows."""
    lab.feed([("a", 1), ("b", 2), ("c", 3), ("d", 4)])
    writer = lab.totals().writeStream.foreachBatch(lambda rows, _: rows.first()).outputMode("update")
    writer = writer.trigger(availableNow=True).option("checkpointLocation", str(lab.folder / "query"))
    query = writer.start()
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination()
    kept = query.exception()
    assert kept is not None
    for error in (caught.value, kept):
        lines = holdfast.explain(error).splitlines()
        assert lines[0].startswith("what:        foreachBatch read only a part of the micro-batch")
        assert lines[1] == "micro-batch: 0"
        assert "count() or collect()" in lines[2]


def test_an_error_of_sparks_own(lab: Lab) -> None:
    """One line, Spark's innermost cause."""
    lab.feed([("a", 1)])
    frame = lab.source().select(F.raise_error(F.lit("sql says no")).alias("key"))
    (line,) = explained(lab, frame)
    assert "sql says no" in line
