"""The query of `test_partitions` in an application of its own.

Started as a program with a folder that holds ``input``, and a number of shuffle partitions; prints keys and counts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tests.spark.conftest import Lab


def main(folder: Path, partitions: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.holdfast.checkpoint.dir": str(folder / "durable"),
        "spark.holdfast.local.dir": str(folder / "local"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": partitions,
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder.master("local[2]").appName("other partitions")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    lab = Lab(spark, folder, folder / "local")
    (counted,) = lab.run(lab.totals())
    print("RESULT", json.dumps(sorted([row["key"], row["n"]] for row in counted)))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
