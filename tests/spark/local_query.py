"""A query in an application of its own, which ends: what it leaves locally is there for the next one.

Started as a program with a folder that holds ``input``, the name of a backend, and settings (``key=value``); prints the
output by micro-batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.spark.application import start_spark
from tests.spark.conftest import Lab

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def main(folder: Path, backend: str, *more: str) -> None:
    settings = {"spark.holdfast.backend": backend, "spark.holdfast.commit.carriedBytes": "0"}
    spark = start_spark(folder, settings | dict(setting.split("=") for setting in more))
    print("RESULT", json.dumps(outputs(spark, folder, "query")))
    spark.stop()


def outputs(spark: SparkSession, folder: Path, query: str) -> list[list[Any]]:
    """Run a query on what it has not read yet, and return its output by micro-batch."""
    lab = Lab(spark, folder, folder / "local")
    return [sorted((list(row.values()) for row in batch), key=repr) for batch in lab.run(lab.totals(), query)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
