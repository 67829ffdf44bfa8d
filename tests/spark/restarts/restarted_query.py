"""A program that runs a query by `holdfast.run`, and tells in files how far it is.

::

    <folder>/input/                    what it reads
    <folder>/worker-<micro-batch>      the process of a Python worker that waits to be killed, where ``fails`` is there
    <folder>/shown/<micro-batch>       a micro-batch that was shown
    <folder>/restarts                  a line for each restart
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import holdfast
from holdfast import restart
from tests.spark.application import start_spark
from tests.spark.conftest import Lab, count_and_sum

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery


def main(folder: Path) -> None:
    spark = start_spark(folder, {"spark.holdfast.backend": "memory"})
    restarts = folder / "restarts"
    (folder / "shown").mkdir()

    def totals(batch: holdfast.ShardBatch) -> pa.Table:
        if (folder / "fails").exists():
            (folder / f"worker-{os.getpid()}").touch()
            while True:
                time.sleep(0.05)
        return count_and_sum(batch)

    def show(rows: DataFrame, batch_id: int) -> None:
        found = sorted(tuple(row) for row in rows.collect())
        (folder / "shown" / str(batch_id)).write_text(repr(found))

    def start() -> StreamingQuery:
        table = Lab(spark, folder, folder / "local").totals(func=totals)
        writer = table.writeStream.foreachBatch(show).outputMode("update")
        return writer.option("checkpointLocation", str(folder / "query")).start()

    def told(one: restart.Restart) -> None:
        with restarts.open("a") as file:
            file.write(f"{one.number} {one.delay_s:.1f}\n")

    holdfast.run(start, restart=restart.fixed_delay(5, 0.1), on_restart=told)
    (folder / "ended").write_text(str(len(spark.streams.active)))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
