"""What a savepoint takes over of a query from Spark's logs: its positions, its watermark, and what Spark pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import xxhash

from holdfast import clock, distribution
from holdfast.errors import NotFoundError, UnavailableError
from holdfast.snapshotter.savepoints.manifest import SavedQuery, SavedSource, SourceLog
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.spark_state.query_location import LoggedBatch, QueryLocation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def versions_of(spark: SparkSession) -> dict[str, str]:
    """Return the releases that make a savepoint."""
    return {"holdfast": distribution.VERSION, "spark": spark_versions.version_of(spark)}


def saved_query(query_id: str, batch: LoggedBatch, sources: tuple[SavedSource, ...]) -> SavedQuery:
    """Return the query as it was after a micro-batch."""
    return SavedQuery(query_id, batch.batch_id, batch.offsets_version, batch.batch, batch.next_watermark_ms, sources)


def saved_sources(location: QueryLocation, batch: LoggedBatch, folder: ObjectStorage) -> tuple[SavedSource, ...]:
    """Copy what Spark keeps of the sources into a savepoint's folder, and return where they were.

    Raises
    ------
    UnavailableError
        Spark has cleaned up meanwhile.
    """
    return tuple(SavedSource(name, offset, _logs(location, folder, name, offset)) for name, offset in batch.sources)


def _logs(location: QueryLocation, folder: ObjectStorage, source: str, offset: str) -> tuple[SourceLog, ...]:
    logs = []
    for file in location.source_logs(source, offset):
        try:
            data = location.source_log(source, file)
        except NotFoundError as exc:
            raise UnavailableError("Spark has cleaned up what it keeps of a source: try again", source=source) from exc
        key = f"sources/{source}/{quote(file, safe='')}-{clock.new_id()}"
        folder.put(key, data)
        logs.append(SourceLog(key, file, len(data), xxhash.xxh3_128_hexdigest(data)))
    return tuple(logs)
