"""Calls a shard, once per micro-batch: begins at the pointer, runs the operator, commits, returns the new pointer.

::

    ShardGroup ──pointer──▶ begin ─▶ group rows ─▶ the user's function ─▶ commit ──new pointer──▶ ShardGroup
                              │                     state.get / put           │
                              ▼                                               ▼
                       local versions, or restored                 durable first, then local

Spark sees each shard as a group of a stateful operator of Spark, the host, which keeps the shard's pointer as the
group's state; see `holdfast.spark_integration.hosts`.

The function is called after all rows of the shard and micro-batch have been gathered: in memory or, if they exceed
`MEMORY_BYTES`, in an unlinked file on a local disk, whose pages the operating system can evict.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.ipc as ipc

from holdfast import clock
from holdfast.backends import local_files
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, HoldfastError, SchemaMismatchError, StateLostError
from holdfast.mvcc.transaction import ChangedRows, Measures
from holdfast.snapshotter.lineage import Lineage
from holdfast.spark_integration.client.measures import CallMeasures
from holdfast.spark_integration.client.messages import MeasuredBatch
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.shard import task
from holdfast.spark_integration.shard.operator import INITIAL_VERSION, BatchTimes, CallCounts, Operator, ShardInput
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.shard.task import StreamingTask, noted
from holdfast.spark_integration.shard.timeout import TIMERS_TABLE
from holdfast.spark_integration.shard_call import claiming
from holdfast.spark_integration.shard_call.announcing import announce, bound_chain, reported
from holdfast.spark_integration.shard_call.store import ShardStore, open_shard
from holdfast.spark_integration.transport.output import Output
from holdfast.spark_integration.transport.packed import PackedTransport, Received
from holdfast.spark_integration.transport.python_stage import ImmediateAcks, freeze_modules
from holdfast.spark_integration.transport.routes import hash_of_route, shard_of_route

MEMORY_BYTES = 128 << 20
_log = logging.getLogger(__name__)
#: Output up to this size is held until the commit, so that the whole call can be repeated.
HELD_BACK_BYTES = 32 << 20


def gather_rows(tables: Iterable[pa.Table], schema: pa.Schema, root: Path) -> pa.Table:
    """Concatenate tables, consumed one at a time, in memory or in a mapped file below `root`."""
    tables = iter(tables)
    held: list[pa.Table] = []
    held_bytes = 0
    for table in tables:
        held.append(table)
        held_bytes += table.nbytes
        if held_bytes > MEMORY_BYTES:
            released = (held.pop(0) for _ in range(len(held)))
            return _mapped(itertools.chain(released, tables), table.schema, root)
    return pa.concat_tables(held).combine_chunks() if held else schema.empty_table()


def _mapped(tables: Iterable[pa.Table], schema: pa.Schema, root: Path) -> pa.Table:
    directory = local_dirs.user_directory(root)
    with local_files.writing(directory), tempfile.TemporaryFile(dir=directory) as file:
        with ipc.new_file(file, schema) as writer:
            for table in tables:
                writer.write_table(table.combine_chunks())
        file.flush()
        return ipc.open_file(pa.memory_map(f"/dev/fd/{file.fileno()}")).read_all()


class ShardGroup(Protocol):
    """The host's view of a shard during one call."""

    @property
    def batch_ms(self) -> int:
        """When the micro-batch was planned: Spark's processing time, in ms since 1970."""

    @property
    def watermark_ms(self) -> int:
        """The event-time watermark, in ms since 1970; read only if the input has a watermark."""

    def remembered(self) -> PointerRow | None:
        """Return the row that the previous call stored; None in the first call."""

    def remember(self, row: PointerRow) -> None:
        """Store a row for the next call and have the host call the shard when its earliest timer is due."""


@dataclass(frozen=True)
class ShardStep(ImmediateAcks):
    """The part of a step's definition that its shards need; sent to the workers."""

    operator: Operator
    transport: PackedTransport
    output: Output

    def shard_of(self, key: tuple[Any, ...]) -> int:
        """Return the shard number of a group's key."""
        return shard_of_route(int(key[0]), self.operator.shards)

    def received(self, chunks: Iterable[pd.DataFrame]) -> Received:
        """Gather all rows that a shard receives in a micro-batch."""
        root = local_dirs.choose_root(self.operator.settings.local_dir, in_memory=False)
        return self.transport.receive(chunks, lambda tables: gather_rows(tables, self.transport.arrow_schema, root))


def call_shard(
    step: ShardStep, key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], group: ShardGroup
) -> Iterator[pd.DataFrame]:
    """Run a shard's call, yield its output, and store its new pointer after the commit."""
    with noted(step.operator.name, f"shard {step.shard_of(key)}"):
        yield from _called(step, key, chunks, group)


def _called(
    step: ShardStep, key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], group: ShardGroup
) -> Iterator[pd.DataFrame]:
    operator, output, remembered = step.operator, step.output, group.remembered()
    if remembered is not None:
        remembered.require(operator.name, hash_of_route(int(key[0])), operator.shards)
    batch_ms = group.batch_ms
    streaming = StreamingTask.current(operator.definition_id, remembered.query if remembered else None, batch_ms)
    if remembered is None:
        require_number_of_shards(operator, streaming)
        streaming = as_restored(operator, streaming)
    else:
        require_own_state(operator, streaming, remembered)
    times = _own_times(operator, group)
    batch = operator.input_of(step.received(chunks), step.shard_of(key), streaming.batch_id, times)
    attempt = _Attempt(operator, batch, streaming, remembered)
    frames = _held_back(attempt.run(), output)
    try:
        first = next(frames)
    except CorruptionError as exc:
        # A second attempt restores damaged files. Spark also retries the task, but not in local mode.
        _log.warning("shard %d of %r restarts its micro-batch: %s", batch.shard, operator.name, exc)
        attempt = _Attempt(operator, batch, streaming, remembered)
        frames = _held_back(attempt.run(), output)
        first = next(frames)
    yield from first
    for further in frames:
        yield from further
    opened, row, measures = attempt.ended()
    group.remember(row)
    if row.pointer is not None:
        # Initial state arrives in the micro-batch of the first rows and has no micro-batch of its own.
        is_batch = row.pointer.version != INITIAL_VERSION
        measured = MeasuredBatch(batch.batch_id, batch_ms, measures.announced()) if is_batch else None
        accepted = remembered.pointer if remembered else None
        if accepted is not None and accepted.version == INITIAL_VERSION:
            accepted = None  # Spark commits the initial version only with this micro-batch
        news = announce(operator, opened, accepted=accepted, committed=row.pointer, measured=measured)
        if news is None:
            measures = replace(measures, unanswered=1)
        else:
            measures = measures.with_news(news.age_ms, news.stored_bytes, news.failures)
    yield from output.send_measures(measures)


def _own_times(operator: Operator, group: ShardGroup) -> BatchTimes:
    """Return the times of a call on the operator's clock, which may lag behind Spark's."""
    remembered = group.remembered()
    earliest_ms = remembered.earliest_timer_ms if remembered else None
    return BatchTimes(
        processing_ms=group.batch_ms,
        watermark_ms=None if operator.watermark is None else group.watermark_ms - operator.held_back_ms,
        earliest_timer_ms=None if earliest_ms is None else earliest_ms - operator.wake_delay_ms,
        previous_ms=remembered.batch_ms if remembered else None,
    )


class _Attempt:
    """One attempt at a shard's call."""

    def __init__(
        self, operator: Operator, batch: ShardInput, streaming: StreamingTask, remembered: PointerRow | None
    ) -> None:
        self._operator = operator
        self._batch = batch
        self._streaming = streaming
        self._remembered = remembered
        self._ended: tuple[ShardStore, PointerRow, CallMeasures] | None = None

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the operator's output, then commit."""
        watch = _Watch()
        opened = open_shard(self._operator, self._batch.shard, self._streaming, self._remembered)
        freeze_modules()
        with opened.backend, reported(opened.log, self._batch.batch_id):
            try:
                yield from self._run(opened, watch)
            except StateLostError as exc:
                if self._last_directory is not None:
                    exc.facts["last_used"] = self._last_directory
                raise

    @property
    def _last_directory(self) -> str | None:
        """The query's previous state directory, if it differs from the current one."""
        last = self._remembered.state_dir if self._remembered else None
        return None if last == self._operator.settings.state_dir else last

    def _run(self, opened: ShardStore, watch: _Watch) -> Iterator[pa.RecordBatch]:
        pointer, batch_id = self._remembered.pointer if self._remembered else None, self._streaming.batch_id
        if self._remembered is None:
            opened.require_no_history(batch_id)
        version = self._operator.first_version if pointer is None else None
        version = version if batch_id is None else batch_id + self._operator.first_version
        with opened.begin(pointer, version) as transaction:
            if pointer is not None:
                watch.lineage = bound_chain(self._operator, opened, pointer, transaction.view)
                opened.require_stored(pointer, watch.lineage, self._last_directory)
            batch = replace(self._batch, counts=CallCounts())
            batch = batch if opened.tables.is_continuous else batch.without_previous_call()
            due_ms = yield from self._operator.function.run(batch, transaction)
            opened.declare()
            committed = transaction.commit()
        row = PointerRow(
            query=self._streaming.query_id,
            directory=opened.operator_directory,
            shard=self._batch.shard,
            shards=self._operator.shards,
            pointer=committed,
            carried=None if committed is None else opened.carried(committed),
            earliest_timer_ms=None if due_ms is None else due_ms + self._operator.wake_delay_ms,
            batch_ms=self._batch.times.processing_ms,
            state_dir=self._operator.settings.state_dir,
        )
        self._ended = opened, row, watch.ended(batch, transaction.measures, opened, committed)

    def ended(self) -> tuple[ShardStore, PointerRow, CallMeasures]:
        """Return the store, the row to store in Spark and the call's measures; call it after `run`."""
        assert self._ended is not None
        return self._ended


def require_number_of_shards(operator: Operator, streaming: StreamingTask) -> None:
    """Check the number of shards of a new shard, if only Spark's pinned number of partitions determines it."""
    settings, pinned = operator.settings, streaming.partitions
    if settings.shards is None and settings.state_dir is None and pinned not in (None, operator.shards):
        raise SchemaMismatchError(
            "the query started with a different number of shuffle partitions, which is its number of shards: set "
            f"spark.holdfast.shards to {pinned}, or set spark.holdfast.state.dir, where the number is stored",
            operator=operator.name,
            began_with=pinned,
            defined_for=operator.shards,
        )


def as_restored(operator: Operator, streaming: StreamingTask) -> StreamingTask:
    """Return the task with the id of the original query if a new shard's query is a clone."""
    storage = task.state_storage(operator.settings)
    if storage is None or streaming.batch_id == 0:
        return streaming
    origin = claiming.origin_once(storage, streaming.query_id)
    if origin is None:
        return streaming
    claiming.require_restored(origin, operator.name, operator.settings.allow_new)
    return replace(streaming, query_id=origin.state_id)


def require_own_state(operator: Operator, streaming: StreamingTask, remembered: PointerRow) -> None:
    """Raise `ConflictError` if the pointers belong to a different query of which this query is not a clone."""
    if streaming.spark_id is None or streaming.spark_id == remembered.query:
        return
    storage = task.state_storage(operator.settings)
    if storage is not None and remembered.directory is not None:
        claiming.require_clone_once(storage, streaming.spark_id, remembered.query, remembered.directory)


def _held_back(batches: Iterator[pa.RecordBatch], output: Output) -> Iterator[list[pd.DataFrame]]:
    """Yield output before the commit only if it exceeds `HELD_BACK_BYTES`; yield the rest after the commit."""
    held: list[pa.RecordBatch] = []
    held_bytes = 0
    for batch in batches:
        held.append(batch)
        held_bytes += batch.nbytes
        if held_bytes > HELD_BACK_BYTES:
            yield list(output.send_at_once(held))
            held, held_bytes = [], 0
    yield list(output.send(held))


@dataclass
class _Watch:
    """Measures one attempt at a call and never fails it: unknown values are omitted."""

    #: Lineage of the version that the call reads; None without a version or durable storage
    lineage: Lineage | None = None
    monotonic_ns: Callable[[], int] = clock.monotonic_ns
    _started_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self._started_ns = self.monotonic_ns()

    def ended(
        self, batch: ShardInput, measures: Measures, opened: ShardStore, committed: Pointer | None
    ) -> CallMeasures:
        """Return the call's measures; call it after the commit."""
        call_ns = self.monotonic_ns() - self._started_ns
        # Tables of timers and expiry times, which have unsigned values, are not user state.
        held = [one for one in opened.tables.held.values() if pa.uint64() not in one.value.types]
        tables = {schema.name for schema in held if schema.name != TIMERS_TABLE}
        changes = sum((of for table, of in measures.changes.items() if table in tables), ChangedRows())
        rows, size_bytes = _local_size(opened, tables)
        return CallMeasures(
            shard=batch.shard,
            rows=batch.rows.num_rows,
            keys=batch.counts.keys,
            keys_new=changes.new,
            keys_removed=changes.removed,
            state_rows_put=changes.put,
            state_rows_deleted=changes.deleted,
            timers_due=batch.counts.timers_due,
            call_us=call_ns // 1_000,
            look_up_us=measures.look_up_ns // 1_000,
            commit_us=measures.commit_ns // 1_000,
            commit_bytes=measures.commit_bytes,
            stored_bytes=measures.stored_bytes,
            state_rows=rows,
            state_bytes=size_bytes,
            snapshot_lag_versions=self._lag_versions(opened, committed),
            rows_late=batch.late,
        )

    def _lag_versions(self, opened: ShardStore, committed: Pointer | None) -> int | None:
        if opened.log is None or committed is None:
            return None
        return (self.lineage or Lineage()).behind(committed.version)


def _local_size(opened: ShardStore, tables: set[str]) -> tuple[int | None, int | None]:
    """Return the newest version's number of rows in the given tables, and the shard's local bytes."""
    try:
        found = opened.backend.statistics()
    except HoldfastError as exc:
        _log.info("the size of %s is unknown: %s", opened.prefix, exc)
        return None, None
    return sum(rows for table, rows in found.rows.items() if table in tables), found.local_bytes
