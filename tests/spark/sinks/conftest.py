"""A session whose state is durable, and a way to let Spark run a micro-batch again that it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession


@pytest.fixture
def session(spark: SparkSession, tmp_path: Path) -> Iterator[SparkSession]:
    """Return the session with a state directory; what a test configures is taken back."""
    before = dict(spark.conf.getAll)
    spark.conf.set("spark.holdfast.state.dir", str(tmp_path / "durable"))
    yield spark
    for name in dict(spark.conf.getAll).keys() - before.keys():
        spark.conf.unset(name)


def forget_the_last_end(query: Path) -> None:
    """Let Spark repeat a query's last micro-batch, as after a crash just before it noted its end."""
    commits = query / "commits"
    last = max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    for path in (last, commits / f".{last.name}.crc"):
        path.unlink(missing_ok=True)
