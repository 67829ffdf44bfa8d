"""An application that makes a savepoint beside its query, or restores one, and is made to be killed.

Started as a program with a folder, what to do, and the settings of its Spark as JSON. The folder holds ``input``, and
the query's ``query`` and ``durable``. It prints ``BEGIN`` and ``END`` around what it is to do;
before the latter it leaves a file ``ended``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from holdfast import savepoints
from tests.spark.application import start_spark
from tests.spark.savepoints.totals import start

SHARDS = 3
ENDED = "ended"


def main(folder: Path, what: str, settings: str) -> None:
    spark = start_spark(folder, json.loads(settings))
    query = None
    if what != "restore":
        query = start(spark, folder)
        query.processAllAvailable()
    print("BEGIN", flush=True)
    target = folder / "savepoints"
    if what == "create":
        savepoints.create(spark, folder / "query", target, "one")
    elif what == "stop":
        assert query is not None
        savepoints.stop(spark, query, folder / "query", target, "one")
    else:
        spark.conf.set("spark.holdfast.state.dir", str(folder / "durable-again"))
        savepoints.restore(spark, target, "one", folder / "again", shards=SHARDS)
    (folder / ENDED).touch()
    print("END", flush=True)
    if query is not None and query.isActive:
        query.processAllAvailable()
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
