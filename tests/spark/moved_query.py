"""A query that is saved on one backend and restored on another, in an application of its own.

Started as a program with a folder and the names of two backends. The folder holds ``input``, and in ``later`` what
comes after the savepoint; prints what both queries make of that, by micro-batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from holdfast import savepoints
from tests.spark.application import start_spark
from tests.spark.local_query import outputs


def main(folder: Path, before: str, after: str) -> None:
    settings = {"spark.holdfast.backend": before, "spark.holdfast.commit.carriedBytes": "0"}
    spark = start_spark(folder, settings | {"spark.holdfast.snapshot.maxCommits": "1"})
    outputs(spark, folder, "query")
    savepoints.create(spark, folder / "query", folder / "savepoints", "one")
    for file in (folder / "later").iterdir():
        file.rename(folder / "input" / file.name)
    original = outputs(spark, folder, "query")
    spark.conf.set("spark.holdfast.state.dir", str(folder / "durable-again"))
    spark.conf.set("spark.holdfast.backend", after)
    savepoints.restore(spark, folder / "savepoints", "one", folder / "again", shards=3)
    print("RESULT", json.dumps([original, outputs(spark, folder, "again")]))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
