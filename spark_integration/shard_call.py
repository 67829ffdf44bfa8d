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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError
from holdfast.mvcc import Transaction
from holdfast.spark_integration import local_dirs, state_client, task
from holdfast.spark_integration.output import Output
from holdfast.spark_integration.pointer_row import PointerRow
from holdfast.spark_integration.received_rows import gather_rows
from holdfast.spark_integration.shard_store import ShardStore, bound_chain, open_shard
from holdfast.spark_integration.shard_timeout import set_shard_timeout
from holdfast.spark_integration.state_messages import ServerLostError
from holdfast.spark_integration.stateful_operator import BatchTimes, Operator, ShardInput
from holdfast.spark_integration.transport import Transport
from holdfast.spark_integration.worker_garbage import freeze_modules

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

_log = logging.getLogger(__name__)

#: Output up to this size is kept until the commit, so that the whole call can begin again.
HELD_BACK_BYTES = 32 << 20


def call_shard(
    operator: Operator,
    transport: Transport,
    output: Output,
    key: tuple[Any, ...],
    chunks: Iterable[pd.DataFrame],
    state: GroupState,
) -> Iterator[pd.DataFrame]:
    """Run one shard of one micro-batch; what ``applyInPandasWithState`` calls."""
    streaming = task.StreamingTask.current()
    assert streaming is not None
    remembered = PointerRow.read(state.get) if state.exists else None
    if state.hasTimedOut and remembered is not None and remembered.batch_id == streaming.batch_id:
        return  # it had rows, and has fired what was due; a timer stays that is due again in the next micro-batch
    times = BatchTimes(
        processing_ms=state.getCurrentProcessingTimeMs(),
        watermark_ms=state.getCurrentWatermarkMs() if operator.has_watermark else None,
        earliest_timer_ms=remembered.earliest_timer_ms if remembered else None,
    )
    shard = operator.routes.index(int(key[0]))
    received = gather_rows(transport.receive(chunks), transport.arrow_schema, _disk_of(operator))
    batch = operator.input_of(received, shard, streaming.batch_id, times)
    attempt = _Attempt(operator, batch, streaming, remembered)
    frames = _held_back(attempt.run(), output)
    try:
        first = next(frames)
    except (ServerLostError, CorruptionError) as exc:
        # What was lost or damaged is restored by beginning again. Spark would do so too, but not in local mode.
        _log.warning("shard %d of %r begins its micro-batch again: %s", shard, operator.name, exc)
        attempt = _Attempt(operator, batch, streaming, remembered)
        frames = _held_back(attempt.run(), output)
        first = next(frames)
    yield from first
    for further in frames:
        yield from further
    if attempt.committed is not None:
        opened, row = attempt.committed
        # Always put the pointer back: Spark keeps an old timeout when a call updates nothing.
        state.update(row.columns())
        set_shard_timeout(state, operator.timeout_conf, row.earliest_timer_ms)
        accepted = remembered.pointer if remembered else None
        state_client.announce(operator, opened, accepted=accepted, committed=row.pointer)


class _Attempt:
    """One attempt at a shard's call.

    Attributes
    ----------
    committed : tuple of ShardStore and PointerRow, or None
        The store and what to remember of it, once `run` has ended; None where the shard has no state.
    """

    def __init__(
        self, operator: Operator, batch: ShardInput, streaming: task.StreamingTask, remembered: PointerRow | None
    ) -> None:
        self._operator = operator
        self._batch = batch
        self._streaming = streaming
        self._remembered = remembered
        self.committed: tuple[ShardStore, PointerRow] | None = None

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the operator's output, and commit."""
        pointer = self._remembered.pointer if self._remembered else None
        carried = self._remembered.carried_commits if self._remembered else {}
        opened = open_shard(self._operator, self._batch.shard, self._streaming, carried)
        freeze_modules()
        with opened.begin(pointer, self._streaming.batch_id + 1) as transaction:
            if pointer is not None:
                bound_chain(self._operator, opened, pointer, transaction.view)
            earliest_timer_ms = yield from self._operator.function.run(self._batch, transaction)
            opened.declare()
            committed = transaction.commit()
        if committed is not None:
            carried_commit = opened.carried(committed)
            row = PointerRow(committed, carried_commit, earliest_timer_ms, self._streaming.batch_id)
            self.committed = opened, row


def _held_back(batches: Iterator[pa.RecordBatch], output: Output) -> Iterator[list[pd.DataFrame]]:
    """Yield frames to send: the output once it is more than `HELD_BACK_BYTES`, what is left after the commit."""
    held: list[pa.RecordBatch] = []
    held_bytes = 0
    for batch in batches:
        held.append(batch)
        held_bytes += batch.nbytes
        if held_bytes > HELD_BACK_BYTES:
            yield list(output.send_at_once(held))
            held, held_bytes = [], 0
    yield list(output.send(held))


def call_batch_shard(
    operator: Operator, transport: Transport, output: Output, key: tuple[Any, ...], rows: pd.DataFrame
) -> pd.DataFrame:
    """Run one shard of a batch query; what ``applyInPandas`` calls. State is empty before, and dropped after."""
    # Not told by the task's properties: a batch query inside foreachBatch has those of the streaming query around it.
    shard = operator.routes.index(int(key[0]))
    received = gather_rows(transport.receive([rows]), transport.arrow_schema, _disk_of(operator))
    batch = operator.input_of(received, shard, None, BatchTimes(clock.now_ms(), None, None))
    transaction = Transaction(None, 1, None, operator.function.tables(), _keep_nothing)
    frames = list(output.send(operator.function.run(batch, transaction)))
    return pd.concat(frames) if frames else pd.DataFrame()


def _disk_of(operator: Operator) -> Path:
    return local_dirs.choose_root(operator.settings.local_dir, in_memory=False)


def _keep_nothing(transaction: Transaction, runs: object) -> Pointer:
    raise AssertionError("a batch query has no state to commit")
