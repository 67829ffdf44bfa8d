"""The open components of one shard in the running task: its backend, its commits, the store that joins them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast import clock
from holdfast.backends.base import Backend, Pointer, View
from holdfast.backends.registry import find_backend
from holdfast.errors import HoldfastError, UnavailableError
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.operator_record import OperatorRecord, shard_prefix
from holdfast.snapshotter.snapshot_policy import SnapshotPolicy
from holdfast.spark_integration import local_dirs, state_client, task
from holdfast.spark_integration.open_shards import open_backend
from holdfast.spark_integration.remote_backend import RemoteBackend
from holdfast.spark_integration.state_messages import ShardAddress
from holdfast.spark_integration.stateful_operator import Operator

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardStore:
    """The open components of one shard during one call."""

    shard: ShardAddress
    executor_directory: Path
    prefix: str
    backend: Backend
    log: ObjectCommitLog | None
    record: OperatorRecord | None
    store: VersionedStore
    policy: SnapshotPolicy
    retained_versions: int

    def begin(self, pointer: Pointer | None, version: int) -> Transaction:
        """Begin at the pointer that the query has accepted, and forget what came before it."""
        transaction = self.store.begin(pointer, version)
        try:
            if pointer is not None:
                # Now, not after the commit: so the new version takes the place of the oldest.
                self.store.prune(pointer)
        except BaseException:
            transaction.abort()
            raise
        return transaction

    def declare(self) -> None:
        """See to it that the checkpoint directory tells whose state it is, before there is any."""
        if self.log is not None and self.record is not None:
            task.declare_once(self.log.storage, self.record)

    def carried(self, pointer: Pointer) -> bytes | None:
        """Return the commit of a version where the pointer's row must carry it."""
        return None if self.log is None else self.log.carried.get(pointer)


def bound_chain(operator: Operator, opened: ShardStore, pointer: Pointer, view: View | None) -> None:
    """Wait for a snapshot of the version that the query has accepted, where its chain of commits is too long.

    So restoring stays quick, and a storage that takes no snapshots is felt before it costs much.

    Raises
    ------
    UnavailableError
        The chain is far too long, and no snapshot can be written.
    """
    if opened.log is None or view is None:
        return
    lineage = Lineage.of(view.properties)
    if opened.policy.is_overdue(lineage):  # else notes, which can only shorten the chain, need not be read
        lineage = opened.log.snapshots.notes.apply_to(lineage)
    if not opened.policy.is_overdue(lineage):
        return
    _log.warning("%s waits for a snapshot: %d commits since the last one", opened.prefix, len(lineage.commits))
    try:
        state_client.snapshot_now(operator, opened, pointer)
    except HoldfastError as exc:
        if opened.policy.is_full(lineage):
            raise UnavailableError(
                f"no snapshot can be written, and {len(lineage.commits)} commits have been made since the last one: "
                f"make room and speed in spark.holdfast.checkpoint.dir, then start the query again ({exc.message})",
                shard=opened.prefix,
            ) from exc
        _log.warning("%s goes on without a snapshot: %s", opened.prefix, exc)


def open_shard(
    operator: Operator, shard: int, streaming: task.StreamingTask, carried: Mapping[Pointer, bytes]
) -> ShardStore:
    """Open the store of one shard in the running task.

    Parameters
    ----------
    carried : mapping of Pointer to bytes
        The commit that came with the query's pointer, if any.
    """
    settings = operator.settings
    tables = dict(operator.function.tables())
    backend_class = find_backend(settings.backend)
    root = local_dirs.choose_root(settings.local_dir, in_memory=backend_class.in_memory)
    executor_directory = local_dirs.executor_directory(root)
    state_directory = local_dirs.state_directory(executor_directory, in_memory=backend_class.in_memory)
    operator_directory = state_directory / streaming.query_id / operator.name
    task.require_one_definition(operator_directory, streaming.run_id, operator.definition_id)
    directory = operator_directory / local_dirs.shard_name(
        shard, len(operator.routes), settings.backend, settings.checkpoint_dir
    )
    address = ShardAddress.of(directory, settings.backend, settings.backend_options, tables)
    backend: Backend
    if backend_class.has_one_owner:
        backend = RemoteBackend(state_client.client_of(executor_directory), address, tables, clock.new_id)
    else:
        backend = open_backend(address, tables, executor_directory)
    storage = task.checkpoint_storage(settings)
    prefix = shard_prefix(operator.name, shard)
    log, record, retained_versions = None, None, settings.retained_versions
    if storage is not None:
        record = OperatorRecord.of(
            operator.name,
            streaming.query_id,
            operator.definition_id,
            streaming.run_id,
            len(operator.routes),
            tables,
            settings.retained_versions,
        )
        held = task.keep_claim(storage, record, operator_directory, streaming.batch_id, settings.application)
        retained_versions = held.retained(settings.retained_versions, streaming.batch_id)
        log = ObjectCommitLog(
            storage,
            prefix,
            tables,
            task.io_executor(),
            directory,
            settings.backend,
            settings.carried_bytes,
            dict(carried),
        )
    policy = SnapshotPolicy(
        settings.snapshot_max_commits, settings.snapshot_max_bytes, settings.snapshot_interval_seconds
    )
    store = VersionedStore(backend, log)
    return ShardStore(address, executor_directory, prefix, backend, log, record, store, policy, retained_versions)
