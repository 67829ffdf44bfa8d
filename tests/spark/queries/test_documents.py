"""The code that the documents show runs as it stands on Spark, and gives what they say.

`tests/test_shown_code.py` runs what needs no Spark.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

import holdfast
from holdfast.settings import Settings
from tests.pages import block_with

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_the_function_by_key_of_the_guide_gives_right_totals(spark: SparkSession, tmp_path: Path) -> None:
    """What somebody copies who comes from Spark's own operator."""
    events = spark.createDataFrame([("ann", 5.0), ("ann", 7.0), ("bob", 1.0)], "user string, amount double")
    events.coalesce(1).write.parquet(str(tmp_path / "events"))
    names: dict[str, Any] = {"pd": pd, "holdfast": holdfast}
    names["df"] = spark.readStream.schema(events.schema).parquet(str(tmp_path / "events"))
    spark.conf.set("spark.holdfast.state.dir", str(tmp_path / "app"))
    try:
        exec(block_with("docs/operators.md", "def running("), names)  # the document is ours
        writer = names["out"].writeStream.outputMode("update").format("memory").queryName("by_key")
        location = str(tmp_path / "query")
        writer.option("checkpointLocation", location).trigger(availableNow=True).start().awaitTermination(120)
        rows = {tuple(row) for row in spark.table("by_key").collect()}
        reading = block_with("docs/operators.md", "read_state").replace("/data/app-spark", location)
        exec(reading.replace('"totals"', '"running"'), names | {"spark": spark}, names)
    finally:
        spark.conf.unset("spark.holdfast.state.dir")
    assert rows == {("ann", 2, 12.0), ("bob", 1, 1.0)}
    assert {row["user"]: row["n"] for row in names["table"].to_pylist()} == {"ann": 2, "bob": 1}


def test_the_vectorised_operator_of_the_guide_runs(spark: SparkSession) -> None:
    """What a newcomer to vectorised operators copies: groups, state, a delete; on a batch DataFrame."""
    legs = [("N1", "BOS", 1), ("N1", "DCA", 2), ("N2", "ORD", 1)]
    names: dict[str, Any] = {"df": spark.createDataFrame(legs, "aircraft string, airport string, departed long")}
    exec(block_with("docs/operators.md", "def sessions("), names)  # the document is ours
    assert {tuple(row) for row in names["out"].collect()} == {("N1", 2, "DCA"), ("N2", 1, "ORD")}


@pytest.mark.parametrize("document", ["docs/backends.md", "examples/parquet_backend/README.md"])
def test_backends_are_chosen_as_the_guides_show(document: str, spark: SparkSession) -> None:
    """Names of backends and options in the guides are those that exist."""
    known = {"parquet": {"compression": "snappy"}, "rocksdb": {"memory": "1g"}}
    try:
        exec(block_with(document, '"spark.holdfast.backend"'), {"spark": spark})
        settings = Settings.parse(dict(spark.conf.getAll), known)
    finally:
        for name in dict(spark.conf.getAll):
            if name.startswith("spark.holdfast."):
                spark.conf.unset(name)
    assert settings.backend_options == known[settings.backend]
