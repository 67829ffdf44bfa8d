"""One call for each shard and micro-batch: begin at the pointer, run the operator, commit, return the pointer.

::

    GroupState ──pointer──▶ begin ─▶ group rows ─▶ the user's function ─▶ commit ──new pointer──▶ GroupState
                              │                     state.get / put           │
                              ▼                                               ▼
                       local versions, or restored                 durable first, then local

Spark commits the pointer together with the micro-batch, so whatever an attempt wrote that Spark did not
accept is never seen again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from holdfast import clock
from holdfast.backends.base import Backend, Pointer, View
from holdfast.backends.registry import find_backend
from holdfast.backends.run import TableSchema
from holdfast.errors import CorruptionError, HoldfastError, UnavailableError
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.settings import Settings
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.operator_record import OperatorRecord, shard_prefix
from holdfast.snapshotter.snapshot_policy import SnapshotPolicy
from holdfast.spark_integration import local_dirs, state_client, task
from holdfast.spark_integration.columns import conform_output
from holdfast.spark_integration.open_shards import open_backend
from holdfast.spark_integration.pointer_row import read_pointer
from holdfast.spark_integration.remote_backend import RemoteBackend
from holdfast.spark_integration.shard_batch import STATE_TABLE, ShardBatch, ShardState, group_rows
from holdfast.spark_integration.state_messages import ServerLostError, ShardAddress
from holdfast.spark_integration.transport import BLOB, HASH, Transport, pack_output
from holdfast.spark_integration.worker_garbage import freeze_modules

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

_log = logging.getLogger(__name__)

ShardFunction = Callable[[ShardBatch], "pa.Table | pa.RecordBatch | None"]


@dataclass(frozen=True)
class Operator:
    """The definition of one stateful step, as it travels to the workers; holds no credentials.

    Attributes
    ----------
    name : str
    definition_id : str
        New for each definition; tells apart two operators of one name.
    function : callable
    routes : list of int
        By shard.
    key_columns : list of str
        Columns of the received table that hold the keys, in the order of `key_types`.
    row_columns : list of str
        Columns of the received table to show to the function as rows.
    key_types, state_types, output_types : pyarrow.Schema
        As the function sees and returns them.
    has_watermark : bool
    settings : Settings
    """

    name: str
    definition_id: str
    function: ShardFunction
    routes: list[int]
    key_columns: list[str]
    row_columns: list[str]
    key_types: pa.Schema
    state_types: pa.Schema
    output_types: pa.Schema
    has_watermark: bool
    settings: Settings

    def tables(self) -> dict[str, TableSchema]:
        """Return the schemas of the operator's state tables."""
        return {STATE_TABLE: TableSchema.of(STATE_TABLE, self.key_types, self.state_types)}


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
    tables = operator.tables()
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
    log, record = None, None
    if storage is not None:
        record = OperatorRecord.of(
            operator.name,
            streaming.query_id,
            operator.definition_id,
            streaming.run_id,
            len(operator.routes),
            tables,
        )
        task.keep_claim(storage, record, operator_directory)
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
    return ShardStore(address, executor_directory, prefix, backend, log, record, store, policy)


def call_shard(
    operator: Operator,
    transport: Transport,
    key: tuple[Any, ...],
    chunks: Iterable[pd.DataFrame],
    state: GroupState,
) -> Iterator[pd.DataFrame]:
    """Run one shard of one micro-batch; what ``applyInPandasWithState`` calls."""
    shard = operator.routes.index(int(key[0]))
    received = transport.receive(chunks)
    streaming = task.StreamingTask.current()
    assert streaming is not None
    watermark_ms = state.getCurrentWatermarkMs() if operator.has_watermark else None
    pointer, carried = read_pointer(state.get) if state.exists else (None, {})

    def attempt() -> tuple[ShardStore, pa.RecordBatch | None, Pointer | None]:
        opened = open_shard(operator, shard, streaming, carried)
        freeze_modules()
        with opened.begin(pointer, streaming.batch_id + 1) as transaction:
            if pointer is not None:
                bound_chain(operator, opened, pointer, transaction.view)
            output = run_function(operator, received, transaction, shard, streaming.batch_id, watermark_ms)
            opened.declare()
            return opened, output, transaction.commit()

    try:
        opened, output, committed = attempt()
    except (ServerLostError, CorruptionError) as exc:
        # What was lost or damaged is restored by beginning again. Spark would do so too, but not in local mode.
        _log.warning("shard %d of %r begins its micro-batch again: %s", shard, operator.name, exc)
        opened, output, committed = attempt()
    if committed is not None:
        # Always put the pointer back: Spark keeps an old timeout when a call updates nothing.
        state.update((*committed, opened.carried(committed)))
        state_client.announce(operator, opened, accepted=pointer, committed=committed)
    if output is not None:
        yield from pack_output(output)


def call_batch_shard(
    operator: Operator, transport: Transport, key: tuple[Any, ...], rows: pd.DataFrame
) -> pd.DataFrame:
    """Run one shard of a batch query; what ``applyInPandas`` calls. State is empty before, and dropped after."""
    # Not told by the task's properties: a batch query inside foreachBatch has those of the streaming query around it.
    shard = operator.routes.index(int(key[0]))
    transaction = Transaction(None, 1, None, operator.tables(), _keep_nothing)
    output = run_function(operator, transport.receive([rows]), transaction, shard, None, None)
    frames = [] if output is None else list(pack_output(output))
    return pd.concat(frames) if frames else pd.DataFrame({BLOB: []})


def _keep_nothing(transaction: Transaction, runs: object) -> Pointer:
    raise AssertionError("a batch query has no state to commit")


def run_function(
    operator: Operator,
    received: pa.Table,
    transaction: Transaction,
    shard: int,
    batch_id: int | None,
    watermark_ms: int | None,
) -> pa.RecordBatch | None:
    """Group the rows, call the user's function and check what it returned."""
    received = received.combine_chunks()
    schema = operator.tables()[STATE_TABLE]
    hashes = received.column(HASH).combine_chunks().to_numpy().view(np.uint64)
    key_columns = schema.conform(
        pa.Table.from_arrays([received.column(c) for c in operator.key_columns], names=schema.key.names),
        "key",
    )
    rows = received.select(operator.row_columns)
    keys, shown, groups = group_rows(rows, key_columns, hashes, operator.key_types)
    batch = ShardBatch(
        rows=rows,
        keys=shown,
        groups=groups,
        state=ShardState(transaction, keys, operator.state_types),
        shard=shard,
        batch_id=batch_id,
        watermark_ms=watermark_ms,
    )
    returned = operator.function(batch)
    return None if returned is None else conform_output(returned, operator.output_types, operator.name)
