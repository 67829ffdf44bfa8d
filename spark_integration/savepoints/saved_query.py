"""What a savepoint takes over of a query from Spark's logs: its positions, its watermark, and what Spark pinned."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from urllib.parse import quote

import xxhash

from holdfast import clock
from holdfast.errors import NotFoundError, UnavailableError
from holdfast.snapshotter.savepoints.manifest import (
    PlannedBatch,
    SavedQuery,
    SavedSink,
    SavedSource,
    SourceLog,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.spark_state.query_location import LoggedBatch, QueryLocation

_log = logging.getLogger(__name__)


def saved_query(
    location: QueryLocation, query_id: str, batch: LoggedBatch, folder: ObjectStorage, sinks: Iterable[SavedSink]
) -> SavedQuery:
    """Return a query as it was after a micro-batch; warn of what its sinks show that is not saved.

    Raises `UnavailableError` if Spark has cleaned up meanwhile.

    Parameters
    ----------
    folder : ObjectStorage
        The savepoint's, into which what Spark keeps of the sources is copied.
    sinks : iterable of SavedSink
        Found before: so what they have decided was planned.
    """
    logged = (batch.batch_id, batch.offsets_version, batch.batch, batch.next_watermark_ms)
    sources = _saved_sources(location, batch.sources, folder, {})
    planned = _planned(location, batch.batch_id + 1, sources, folder)
    query = SavedQuery(query_id, *logged, sources, planned, tuple(sinks))
    for sink in query.uncommitted:
        _log.warning(
            "sink %r has decided micro-batch %d, and the savepoint is of micro-batch %d, the last one that Spark had "
            "committed: %s",
            sink.sink,
            sink.batch_id,
            query.batch_id,
            "restore it with continue_sinks (--continue-sinks), which shows nothing twice"
            if sink.batch_id == query.batch_id + 1 and planned
            else "the query goes on. Only a savepoint of its end can be restored with continue_sinks",
        )
    return query


def _planned(
    location: QueryLocation, batch_id: int, saved: Iterable[SavedSource], folder: ObjectStorage
) -> PlannedBatch | None:
    """Return a micro-batch if Spark has planned it; also copy the source files that it needs."""
    planned = location.planned(batch_id)
    if planned is None:
        return None
    there = {source.name: {log.name for log in source.logs} for source in saved}
    sources = _saved_sources(location, planned.sources, folder, there)
    return PlannedBatch(planned.offsets_version, planned.batch, sources)


def _saved_sources(
    location: QueryLocation,
    sources: Sequence[tuple[str, str]],
    folder: ObjectStorage,
    there: Mapping[str, Collection[str]],
) -> tuple[SavedSource, ...]:
    ends = dict(location.kept_sources(sources))
    logs = {name: _logs(location, folder, name, end, there.get(name, ())) for name, end in ends.items()}
    return tuple(SavedSource(name, offset, logs.get(name, ())) for name, offset in sources)


def _logs(
    location: QueryLocation, folder: ObjectStorage, source: str, offset: str, there: Collection[str]
) -> tuple[SourceLog, ...]:
    logs = []
    for file in location.source_logs(source, offset):
        if file in there:
            continue
        try:
            data = location.source_log(source, file)
        except NotFoundError as exc:
            raise UnavailableError("Spark has cleaned up what it keeps of a source: try again", source=source) from exc
        key = f"sources/{source}/{quote(file, safe='')}-{clock.new_id()}"
        folder.put(key, data)
        logs.append(SourceLog(key, file, len(data), xxhash.xxh3_128_hexdigest(data)))
    return tuple(logs)
