"""Text that is not UTF-8, which Spark makes of any bytes by ``CAST(value AS STRING)``: kept, restored and read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from tests.spark.conftest import Lab
from tests.tiers import cases

pytestmark = pytest.mark.spark

RAW = [b"\xff\xfe", b"caf\xe9", "café".encode(), b"", None]


def keep_text(batch: holdfast.ShardBatch) -> pa.Table:
    """Count each key, and keep its text as a value, too."""
    n = pc.add(pc.coalesce(batch.state.get()["n"], 0), batch.groups.count())
    batch.state.put(n=n, seen=batch.keys["name"])
    seen = batch.state.get()["seen"]
    return pa.table({"name": batch.keys["name"], "seen": seen, "n": n})


@pytest.mark.slow
@pytest.mark.parametrize("backend", cases(["memory", "rocksdb"]))
def test_text_that_is_not_utf8_survives_the_loss_of_the_executor(lab: Lab, backend: str) -> None:
    """In keys, values and output; the second run finds nothing locally."""
    lab.configure({"backend": backend, "commit.carriedBytes": "0"})

    def run() -> list[Any]:
        lab.feed(pa.table({"raw": pa.array(RAW, pa.binary())}))
        source = lab.source("raw binary").select(F.expr("cast(raw as string)").alias("name"))
        kept = (
            holdfast.stream(source)
            .groupBy("name")
            .applyInArrowWithState(
                keep_text, "name string, seen string, n long", "n long, seen string", "update", name="texts"
            )
            .selectExpr("cast(name as binary)", "cast(seen as binary)", "n")
        )
        (rows,) = lab.run(kept)
        return sorted((tuple(row.values()) for row in rows), key=repr)

    assert run() == sorted(((raw, raw, 1) for raw in RAW), key=repr)
    lab.lose_local_state()
    assert run() == sorted(((raw, raw, 2) for raw in RAW), key=repr)
    state = holdfast.read_state(lab.spark, lab.folder / "query", "texts")
    names = state["name"].combine_chunks().cast(pa.large_binary()).to_pylist()
    assert sorted(names, key=repr) == sorted(RAW, key=repr)
    assert set(state["n"].to_pylist()) == {2}
