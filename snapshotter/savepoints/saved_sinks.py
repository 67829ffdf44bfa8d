"""Which sinks a query writes to when it is saved, and how the query that is restored continues them.

::

    the saved query's    17 A decides 5    ╷                          A's next put is of number 18, and fails
    sink log                               ╰── 18 B continues, and 5 stands for its micro-batch 1

B is restored after micro-batch 4, which Spark had committed. Spark had planned 5, and it is what B runs first; its rows
are dropped, because the sink shows those of A's attempt. Had Spark committed 5, or the sink not decided it, the entry
would stand for nothing (-1), and the rows of B's first micro-batch would be shown.

Invariants
----------
* **for good**: the entry ends the query that was saved, whatever it does at this moment: the log is a fence.
* **nothing twice**: what the log has decided is in the savepoint, or is the micro-batch that the new query runs first.
* **again**: a restore that was stopped after its entry keeps no later one from continuing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from holdfast import clock
from holdfast.errors import ConflictError, InvalidArgumentError
from holdfast.snapshotter.fence import looks
from holdfast.snapshotter.savepoints.manifest import SavedQuery, SavedSink
from holdfast.snapshotter.sink_log import FOLDER, Entry, SinkLog, stored_sinks
from holdfast.snapshotter.storage.object_storage import ObjectStorage


def sinks_of(storage: ObjectStorage, query_id: str) -> tuple[SavedSink, ...]:
    """Return the sinks that a query writes to, and what it has decided to show there.

    `storage`: the query's state directory.
    """
    return tuple(_sinks_of(storage, query_id))


def _sinks_of(storage: ObjectStorage, query_id: str) -> Iterator[SavedSink]:
    for stored in stored_sinks(storage.list(f"{FOLDER}/")):
        entry, decision = SinkLog(storage, stored.sink).latest()
        batch_id = None if entry is None else entry.newest_batch(decision, query_id)
        if entry is not None and batch_id is not None:
            yield SavedSink(stored.sink, entry.decided, batch_id)


def require_sinks(storage: ObjectStorage, query: SavedQuery) -> None:
    """Check that the sinks of a saved query can be continued from where it was saved, without taking them.

    Raises `InvalidArgumentError` if the query had no sinks, or they are in another state directory; `ConflictError` if
    they show what the savepoint does not hold, or another query writes to them.

    `storage`: the new query's state directory.
    """
    if not query.sinks:
        raise InvalidArgumentError(
            "the savepoint names no sink of holdfast's that its query wrote to, so none can be continued: leave out "
            "continue_sinks. A query that exactly_once knows by query_name, as over Spark Connect, has none here",
            query=query.query_id,
        )
    for saved in query.sinks:
        _found(SinkLog(storage, saved.sink), storage, query, saved)


def continue_sinks(storage: ObjectStorage, query: SavedQuery, query_id: str, driver: str) -> None:
    """Let a restored query continue the sinks of the one that was saved, which is ended for good.

    Raises `InvalidArgumentError` or `ConflictError`: as `require_sinks`: somebody has gone on meanwhile.

    `storage`: the state directory of both; `query_id`: the restored query's; `driver`: a random id.
    """
    for saved in query.sinks:
        _continue(storage, query, saved, query_id, driver)


def _continue(storage: ObjectStorage, query: SavedQuery, saved: SavedSink, query_id: str, driver: str) -> None:
    log = SinkLog(storage, saved.sink)
    for _ in looks(storage.url):
        found, batch_id = _found(log, storage, query, saved)
        # Of all of these something may be left that nobody has ended.
        ending = {query.query_id, found.query_id, *found.ending} - {query_id}
        stands_for = batch_id - query.batch_id if batch_id > query.batch_id else -1
        entry = Entry(saved.sink, found.number + 1, query_id, driver, found.decided, tuple(sorted(ending)))
        with suppress(ConflictError):  # also where it stands, and others have gone on since: look what they say
            log.append(replace(entry, at_ms=clock.now_ms(), stands_for=stands_for))
            return


def _found(log: SinkLog, storage: ObjectStorage, query: SavedQuery, saved: SavedSink) -> tuple[Entry, int]:
    """Return the newest entry of a sink's log, and the newest micro-batch of the saved query that it shows."""
    entry, decision = log.latest()
    facts = {"sink": saved.sink, "query": query.query_id, "storage": storage.url}
    if entry is None:
        raise InvalidArgumentError(
            "a sink that is to be continued has its log in another state directory: restore into the one of the query "
            "that was saved",
            **facts,
        )
    batch_id = entry.newest_batch(decision, query.query_id)
    if batch_id is None and query.query_id in entry.ending and entry.decided == saved.number:
        batch_id = saved.batch_id  # another restore has continued it, and has shown nothing yet
    if batch_id is None:
        raise ConflictError(
            "another query has continued this sink since the savepoint was made: save that one",
            **facts,
            other_query=entry.query_id,
        )
    if batch_id > query.batch_id + (query.planned is not None):
        raise ConflictError(
            "the sink shows more than the savepoint holds, because the query went on: end it, and make another "
            "savepoint to continue its sinks from",
            **facts,
            saved=query.batch_id,
            shown=batch_id,
        )
    planned = query.planned if batch_id > query.batch_id else None
    if planned and decision and not decision.is_of_plan(planned.plan):
        raise ConflictError(
            "the sink shows its newest micro-batch, and the savepoint holds another plan for it: the checkpoint "
            "location that was saved is older than the sink. Save the one that the query ran with, or restore without "
            "continue_sinks and give the sink another name",
            **facts,
            batch=batch_id,
        )
    return entry, batch_id
