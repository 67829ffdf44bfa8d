"""The query of `test_partitions` in an application of its own.

Started as a program with a folder that holds ``input``, and a number of shuffle partitions; prints keys and counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.spark.application import start_spark
from tests.spark.conftest import Lab


def main(folder: Path, partitions: str) -> None:
    spark = start_spark(folder, {"spark.sql.shuffle.partitions": partitions})
    lab = Lab(spark, folder, folder / "local")
    (counted,) = lab.run(lab.totals())
    print("RESULT", json.dumps(sorted([row["key"], row["n"]] for row in counted)))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
