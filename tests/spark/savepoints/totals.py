"""A query whose state and savepoints tell which files it has read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import savepoints
from tests.spark.conftest import Lab
from tests.spark.savepoints.queries import counts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

COLUMNS = "key string, v long"
KEYS, FILE_ROWS, FILES = 3000, 5000, 3


def totals(spark: SparkSession, folder: Path) -> DataFrame:
    source = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(folder / "input"))
    return counts(source, ["key"], "totals")


def start(spark: SparkSession, folder: Path) -> StreamingQuery:
    """Start the query on what it has not read yet, for ever."""
    writer = totals(spark, folder).writeStream.format("noop").outputMode("update")
    return writer.option("checkpointLocation", str(folder / "query")).start()


def feed(lab: Lab, files: int = FILES) -> None:
    for _ in range(files):
        lab.feed([(str((lab.files * 7919 + row) % KEYS), 1) for row in range(FILE_ROWS)])


def expected(files: Iterable[int]) -> dict[str, tuple[int]]:
    keys = (str((file * 7919 + row) % KEYS) for file in files for row in range(FILE_ROWS))
    return {key: (n,) for key, n in Counter(keys).items()}


def saved(lab: Lab, name: str = "one") -> dict[str, tuple[int]]:
    """Return the state in a savepoint, which must be that after the files that it says were read."""
    target = lab.folder / "savepoints"
    assert savepoints.verify(target, name) == []
    (source,) = savepoints.read(target, name).query.sources
    logged = "\n".join((target / name / log.key).read_text() for log in source.logs)
    files = {int(file) for file in re.findall(r"/input/(\d+)\.parquet", logged)}
    assert files, logged
    found = {row["key"]: (row["n"],) for row in savepoints.load(lab.spark, target, name).collect()}
    assert found == expected(files)
    return found
