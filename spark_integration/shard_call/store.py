"""Opens a shard in the running task: its backend, its commit log and the versioned store on top of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.backends.base import Backend, Pointer
from holdfast.backends.registry import find_backend
from holdfast.errors import InvalidArgumentError, StateLostError
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.ownership.claims import Tenure
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, find_operator, shard_prefix
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.spark_integration.client.messages import ShardAddress
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.executor.takeover import open_backend
from holdfast.spark_integration.shard import task
from holdfast.spark_integration.shard.operator import INITIAL_VERSION, Operator
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.shard.task import StreamingTask
from holdfast.spark_integration.shard_call import claiming


@dataclass(frozen=True)
class ShardStore:
    """The open components of one shard during one call."""

    shard: ShardAddress
    executor_directory: Path
    prefix: str
    backend: Backend
    log: ObjectCommitLog | None
    record: OperatorRecord | None
    tables: StoredTables
    store: VersionedStore
    policy: SnapshotPolicy
    retained_versions: int

    @property
    def operator_directory(self) -> str | None:
        """The operator's directory below the state directory; None without a state directory."""
        return None if self.record is None else self.record.operator

    def begin(self, pointer: Pointer | None, version: int | None) -> Transaction:
        """Begin a transaction at the accepted pointer that commits `version` or the next; prune older versions."""
        transaction = self.store.begin(pointer, version)
        try:
            # Initial state belongs to this micro-batch, which a second attempt may run concurrently.
            if pointer is not None and pointer.version != INITIAL_VERSION:
                # Before the commit, so that the new version can reuse the space of the oldest.
                self.store.prune(pointer)
        except BaseException:
            transaction.abort()
            raise
        return transaction

    def require_no_history(self, batch_id: int | None) -> None:
        """Check with one listing that a shard without a pointer is new, apart from attempts at this micro-batch."""
        if batch_id == 0:
            return
        found = self.backend.versions()
        if self.log is not None:
            listed = list_shard(self.log.objects).versions
            found += [stored.pointer for stored in listed if stored.pointer is not None]
        history = [p for p in found if (p.version <= batch_id if batch_id is not None else p.version > 1)]
        if history:
            raise StateLostError(
                "Spark's state has no pointer to this shard, which has state from earlier micro-batches: start the "
                "query from its own, complete checkpoint location. Only if it was rewound to before the shard's first "
                "micro-batch, or repeated a failed micro-batch with different input: delete the shard's files in the "
                "state directory and on the executors",
                shard=self.prefix,
                on_executors=self.shard.directory,
                micro_batch=batch_id,
                newest=max(history),
            )

    def require_stored(self, pointer: Pointer, lineage: Lineage | None, last_directory: str | None) -> None:
        """Check that the state directory holds the shard's base version; see `claiming.require_stored_once`."""
        if self.log is not None and self.record is not None and lineage is not None:
            claiming.require_stored_once(self.log, self.record, pointer, lineage, last_directory)

    def declare(self) -> None:
        """Record the state's owner, tables and columns before storing any state."""
        if self.log is not None and self.record is not None:
            claiming.declare_once(self.log.storage, self.record, self.tables)

    def carried(self, pointer: Pointer) -> bytes | None:
        """Return a version's commit if the pointer row must carry it, else None."""
        return None if self.log is None else self.log.carried.get(pointer)


def open_shard(operator: Operator, shard: int, streaming: StreamingTask, remembered: PointerRow | None) -> ShardStore:
    """Open the store of one shard in the running task. Raises `InvalidArgumentError`, `HoldfastError`."""
    settings = operator.settings
    if settings.state_dir is None and remembered is not None and remembered.directory:
        raise InvalidArgumentError(
            "the query has durable state, but no state directory is set: set spark.holdfast.state.dir to the "
            "directory that holds the state before you define the query",
            operator_directory=remembered.directory,
            shard=remembered.shard,
        )
    stored = StoredTables.of_first_run(operator.function.tables())
    backend_class = find_backend(settings.backend)
    root = local_dirs.choose_root(settings.local_dir, in_memory=backend_class.in_memory)
    executor_directory = local_dirs.executor_directory(root)
    shards_directory = local_dirs.shards_directory(executor_directory, in_memory=backend_class.in_memory)
    of_query = shards_directory / streaming.query_id
    claiming.require_one_definition(of_query / operator.name, streaming.run_id, operator.definition_id)
    storage = task.state_storage(settings)
    name, record, retained_versions = operator.name, None, settings.retained_versions
    if storage is not None:
        name, tenure = _claimed_directory(operator, streaming, remembered, storage, of_query)
        record = _record(operator, streaming, name)
        stored = claiming.tables_once(storage, record, operator.function)
        if tenure is not None and remembered is not None and remembered.pointer is not None:
            retained_versions = tenure.retained(retained_versions, remembered.pointer.version)
    directory = of_query / name / local_dirs.shard_name(shard, operator.shards, settings.backend, settings.state_dir)
    tables = stored.held
    address = ShardAddress.of(directory, settings.backend, settings.backend_options, tables)
    backend = open_backend(settings.backend, directory, tables, settings.backend_options, executor_directory)
    prefix = shard_prefix(name, shard)
    log = None
    if storage is not None:
        log = ObjectCommitLog(
            storage,
            prefix,
            tables,
            task.io_executor(),
            directory,
            settings.backend,
            settings.carried_bytes,
            dict(remembered.carried_commits) if remembered else {},
        )
    policy = SnapshotPolicy(
        settings.snapshot_max_commits, settings.snapshot_max_bytes, settings.snapshot_interval_seconds
    )
    store = VersionedStore(backend, log, stored.declared, stored.names)
    return ShardStore(
        address, executor_directory, prefix, backend, log, record, stored, store, policy, retained_versions
    )


def require_kept_shards(stored: OperatorRecord | None, operator: str, shards: int) -> None:
    """Check the number of shards against the operator's record, for a task that cannot write a record itself."""
    if stored is None or stored.shards != shards:
        raise InvalidArgumentError(
            "the number of shards cannot be stored, because Spark does not pass the query's id to this task: set "
            "spark.holdfast.shards and never change it, or evaluate the micro-batch in Spark's own thread first. "
            "foreachBatch needs this over Connect before Spark 4.3, in threads on 4.0, and when it evaluates an RDD",
            operator=operator,
            shards=shards,
            stored=None if stored is None else stored.shards,
        )


def _record(operator: Operator, streaming: StreamingTask, directory: str) -> OperatorRecord:
    return OperatorRecord(
        directory,
        streaming.query_id,
        operator.definition_id,
        streaming.run_id,
        operator.shards,
        operator.function.tables(),
        operator.settings.retained_versions,
        operator.function.configuration(),
    )


def _claimed_directory(
    operator: Operator, streaming: StreamingTask, remembered: PointerRow | None, storage: ObjectStorage, local: Path
) -> tuple[str, Tenure | None]:
    """Return the shard's directory, from its pointer or newly chosen, and the run's claim; None for an unknown run."""

    def claim(directory: str) -> Tenure | None:
        record = _record(operator, streaming, directory)
        # Check first, so that a run that cannot continue the state leaves no trace. An unknown run makes no claim.
        claiming.tables_once(storage, record, operator.function)
        if streaming.is_run_known:
            return claiming.keep_claim(storage, record, local / directory, streaming.batch_id, operator.settings)
        return None

    directory = remembered.directory if remembered else None
    if directory is None:
        if not streaming.is_run_known and operator.settings.shards is None:
            require_kept_shards(find_operator(storage, operator.name), operator.name, operator.shards)
        return claiming.begin_directory(
            storage, operator.name, streaming.query_id, claim, is_run_known=streaming.is_run_known
        )
    return directory, claim(directory)
