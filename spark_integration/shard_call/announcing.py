"""Announces commits to the executor's state server, waits for overdue snapshots, and reports failed calls.

The server replies immediately, then drops old versions, merges runs and writes snapshots. A micro-batch waits for the
server only if the chain of commits is too long, until a snapshot shortens the chain.

A failed call is reported in the state directory, for observers outside the query. A successful call reports nothing.
Spark may retry a failed call: the report expires once the micro-batch is committed.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast import clock
from holdfast.backends.base import Pointer, View
from holdfast.errors import ConflictError, HoldfastError, UnavailableError
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.upkeep.troubles import of_batch, report_trouble
from holdfast.spark_integration.client.connection import client_of
from holdfast.spark_integration.client.messages import Committed, MeasuredBatch, SnapshotNews
from holdfast.spark_integration.shard.operator import Operator
from holdfast.spark_integration.shard.task import storage_options
from holdfast.spark_integration.shard_call.store import ShardStore

ANNOUNCE_TIMEOUT_SECONDS = 2.0
#: How long a micro-batch waits for a snapshot if the chain of commits is too long.
SNAPSHOT_TIMEOUT_SECONDS = 30.0

_log = logging.getLogger(__name__)


def announcement(
    operator: Operator,
    opened: ShardStore,
    accepted: Pointer | None,
    committed: Pointer,
    measured: MeasuredBatch | None = None,
) -> Committed:
    """Return the message that announces a commit to the state server."""
    settings = operator.settings
    return Committed(
        shard=opened.shard,
        accepted=accepted,
        committed=committed,
        prefix=opened.prefix,
        state_dir=settings.state_dir,
        storage_options=storage_options(settings),
        policy=opened.policy,
        retained_versions=opened.retained_versions,
        upload_bandwidth_bytes=settings.upload_bandwidth_bytes,
        measured=measured,
        metrics_port=settings.metrics_port,
        metrics_address=settings.metrics_address,
    )


def announce(
    operator: Operator,
    opened: ShardStore,
    *,
    accepted: Pointer | None,
    committed: Pointer,
    measured: MeasuredBatch | None = None,
) -> SnapshotNews | None:
    """Announce a commit to the state server and return its reply; if none replies, start a server and return None."""
    client = client_of(opened.executor_directory)
    message = announcement(operator, opened, accepted, committed, measured)
    if client.has_just_timed_out:
        return None
    try:
        answer = client.call("committed", message.encode(), ANNOUNCE_TIMEOUT_SECONDS)
        return SnapshotNews.read(answer, "the state server's answer")
    except HoldfastError as exc:
        _log.info("%s", exc)
    try:
        client.start_server()
    except HoldfastError as exc:
        _log.warning("cannot start a state server; will retry later: %s", exc)
    return None


def bound_chain(operator: Operator, opened: ShardStore, pointer: Pointer, view: View | None) -> Lineage | None:
    """Return the accepted version's lineage; first wait for a snapshot if its chain of commits is too long."""
    if opened.log is None or view is None:
        return None
    lineage = Lineage.of(view.properties)
    if opened.policy.is_overdue(lineage):  # notes only shorten the chain: read them only if it seems too long
        lineage = opened.log.snapshots.notes.apply_to(lineage)
    if not opened.policy.is_overdue(lineage):
        return lineage
    _log.warning("%s waits for a snapshot: %d commits since the last one", opened.prefix, len(lineage.commits))
    try:
        client = client_of(opened.executor_directory)
        client.require_server()
        message = announcement(operator, opened, pointer, pointer)
        client.call("snapshot", message.encode(), SNAPSHOT_TIMEOUT_SECONDS)
    except HoldfastError as exc:
        if opened.policy.is_full(lineage):
            raise UnavailableError(
                f"no snapshot can be written, and {len(lineage.commits)} commits have accumulated since the last: free "
                f"space in spark.holdfast.state.dir or make its storage faster, then restart the query ({exc.message})",
                shard=opened.prefix,
            ) from exc
        _log.warning("%s continues without a snapshot: %s", opened.prefix, exc)
    return lineage


@contextmanager
def reported(
    log: ObjectCommitLog | None, batch_id: int | None, now_ms: Callable[[], int] = clock.now_ms
) -> Iterator[None]:
    """Report an error inside the ``with`` block in the shard's log, if any; re-raise it."""
    try:
        yield
    except Exception as exc:
        # The end of a replaced run is not a failure, and unreachable storage cannot store a report.
        is_no_failure = isinstance(exc, ConflictError) or (isinstance(exc, HoldfastError) and exc.retryable)
        if log is not None and batch_id is not None and not is_no_failure:
            _report(log, batch_id, exc, now_ms())
        raise


def _report(log: ObjectCommitLog, batch_id: int, error: Exception, now_ms: int) -> None:
    try:
        report_trouble(log.objects, of_batch(batch_id), error, 1, socket.gethostname(), now_ms)
    except HoldfastError as unrecorded:
        _log.warning("cannot record the failure of micro-batch %d: %s", batch_id, unrecorded)
