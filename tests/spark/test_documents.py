"""The code that the documents show runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]


def python_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.spark
def test_the_quickstart_of_the_readme_gives_right_totals(spark: SparkSession, tmp_path: Path) -> None:
    """What a newcomer copies first works: a streaming query, its state and its output."""
    flights = spark.createDataFrame([("AA", 5.0), ("AA", 7.0), ("UA", None)], "carrier string, delay double")
    flights.coalesce(1).write.parquet(str(tmp_path / "flights"))
    stream = spark.readStream.schema(flights.schema).parquet(str(tmp_path / "flights"))
    (block,) = python_blocks("README.md")
    code = block.replace("/data/app", str(tmp_path / "app")).replace(
        '.format("console").start()', '.format("memory").queryName("quickstart").trigger(availableNow=True).start()'
    )
    names: dict[str, Any] = {"spark": spark, "flights": stream}
    try:
        exec(code, names)  # the document is ours
        for query in spark.streams.active:
            query.awaitTermination(120)
        rows = {tuple(row) for row in spark.table("quickstart").collect()}
    finally:
        spark.conf.unset("spark.holdfast.checkpoint.dir")
    assert rows == {("AA", 2, 7.0), ("UA", 1, None)}


def test_the_embedded_store_of_the_guide_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The store works without Spark as docs/operators.md shows it."""
    block = next(b for b in python_blocks("docs/operators.md") if "VersionedStore" in b)
    exec(block.replace("/tmp/shard", str(tmp_path / "shard")), {})
    assert "[1,2]" in re.sub(r"\s", "", capsys.readouterr().out)
