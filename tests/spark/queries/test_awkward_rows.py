"""Rows pass through a query as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.awkward_rows import INPUT, SCHEMA, exact

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_a_streaming_query_loses_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """In a zone whose clocks go back; chunks of two rows, so that some have nulls and others have none."""
    import holdfast

    (tmp_path / "in").mkdir()
    (tmp_path / "seen").mkdir()
    pq.write_table(pa.concat_tables([INPUT, INPUT.slice(0, 1), INPUT.slice(3, 1)]), tmp_path / "in" / "rows.parquet")
    seen = str(tmp_path / "seen")

    def keep(batch: holdfast.ShardBatch) -> pa.Table:
        with pa.OSFile(f"{seen}/{batch.shard}.arrow", "wb") as file, pa.ipc.new_file(file, batch.rows.schema) as writer:
            writer.write_table(batch.rows)
        return batch.rows

    settings = {
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "2",
        "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
        "spark.holdfast.state.dir": str(tmp_path / "durable"),
        "spark.holdfast.local.dir": str(tmp_path / "local"),
    }
    before = {key: spark.conf.get(key, None) for key in settings}
    try:
        for key, value in settings.items():
            spark.conf.set(key, value)
        events = spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "in"))
        output = (
            holdfast.stream(events).groupBy("v 4`").applyInArrowWithState(keep, SCHEMA, "n long", "update", name="kept")
        )
        writer = output.writeStream.format("memory").queryName("awkward_rows").outputMode("update")
        writer.trigger(availableNow=True).start().awaitTermination()
        returned = spark.table("awkward_rows").toArrow()
    finally:
        for key, value in before.items():
            spark.conf.unset(key) if value is None else spark.conf.set(key, value)
    received = [pa.ipc.open_file(str(path)).read_all() for path in sorted((tmp_path / "seen").iterdir())]
    wanted = exact(pa.concat_tables([INPUT, INPUT.slice(0, 1), INPUT.slice(3, 1)]))
    assert sorted(row for table in received for row in exact(table)) == wanted
    assert exact(returned) == wanted
