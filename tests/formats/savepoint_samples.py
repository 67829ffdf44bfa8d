"""Writes the savepoints that every later release must restore, of each API, made by the Spark that runs this.

::

    make setup SPARK=4.0.5
    .venv-spark-4.0.5/bin/python -m tests.formats.savepoint_samples

writes ``tests/formats/savepoints-1`` anew. The oldest Spark makes them, since the tests restore them on every one.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import savepoints
from holdfast.spark_integration.java import ensure_java
from tests.spark.application import start_spark
from tests.spark.conftest import Lab, configured
from tests.spark.savepoints import waiting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SAMPLES = Path(__file__).with_name("savepoints-1")
CASES = {
    "vectorised": waiting.Case("vectorised", "EventTime", ("counts", "kept", "lost")),
    "by-key": waiting.Case("by key", "EventTime", ("state",)),
    "processor": waiting.Case("processor", "EventTime", ("counts", "kept", "lost")),
}


def keys(spark: SparkSession) -> DataFrame:
    """Return the stream that the queries read: all keys at second 10, and then another one at second 20, for ever."""
    number = len(waiting.KEYS)
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", number).load()
    key = f"if(value < {number}, substring('{waiting.KEYS}', int(value) + 1, 1), 'z') as key"
    return rows.selectExpr(key, f"timestamp_seconds(if(value < {number}, 10, 20)) as at")


def main() -> None:
    ensure_java()
    shutil.rmtree(SAMPLES, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        spark = start_spark(Path(folder), {"spark.sql.adaptive.enabled": "false"})
        for name, case in CASES.items():
            lab = Lab(spark, Path(folder) / name, Path(folder) / "local")
            lab.folder.mkdir()
            for setting, value in case.settings.items():
                spark.conf.set(setting, value)
            with configured(lab):
                waiting.run_once(lab, case, "query", "durable", keys(spark))
                savepoints.create(spark, lab.folder / "query", SAMPLES, name, comment=f"{case}")
        spark.stop()


if __name__ == "__main__":
    main()
