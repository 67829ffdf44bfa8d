"""Spark's state of a query that begins with pointers, made without Spark.

::

    state/0/_metadata/metadata      the operator, and how many partitions it has
    state/0/0/_metadata/schema      the columns of its keys and values
    state/0/<partition>/1.delta     version 1, that after micro-batch 0: the pointers of the shards that run there

These are the files of ``applyInPandasWithState`` on Spark's default state store; those of RocksDB only Spark makes.
`tests/spark/savepoints/test_new_state.py` compares each byte of them, decompressed, with what each Spark makes.

Source: Spark 4.3's ``FlatMapGroupsWithStateExecHelper``, ``OffsetSeqMetadata`` and ``HDFSBackedStateStoreProvider``,
and locations that 4.0 to 4.3 wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, PointerRow
from holdfast.spark_integration.shard.timeout import TimeMode, TimeoutConf
from holdfast.spark_integration.spark_state.operators import NotKnownError, metadata_of_groups, schema_of_groups
from holdfast.spark_integration.spark_state.pointers import ENCODING, FILES, PROVIDER, ROW_CHECKSUM, store_of
from holdfast.spark_integration.spark_state.row_streams import (
    WRITTEN_CODECS,
    Rows,
    compressed,
    stream_of_rows,
    unsafe_row,
)
from holdfast.spark_integration.transport.routes import route_of_hash

_FORMAT, _KNOWN_FORMAT = "spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion", "2"
#: How rows stand in files that are written here.
PLAIN_ROWS: Mapping[str, str] = {ROW_CHECKSUM: "false", ENCODING: "unsaferow"}
_NO_TIMEOUT = -1


@dataclass(frozen=True)
class PointerOperator:
    """One of Spark's operators with state, as a query begins with it."""

    host: str  #: Spark's name of it, as `stored_steps` returns it
    timeout_conf: TimeoutConf  #: Of ``applyInPandasWithState``
    time_mode: TimeMode  #: Of ``transformWithStateInPandas``
    output_mode: str  #: ``transformWithStateInPandas`` keeps it
    pointers: tuple[PointerRow, ...]


@dataclass(frozen=True)
class NewState:
    """How the state of a query is written."""

    partitions: int
    codec: str

    @classmethod
    def of(cls, pinned: Mapping[str, str], partitions: int, hosts: Iterable[str]) -> NewState:
        """Return how the state of a query is written that pins such settings and has operators of such names.

        Raises `NotKnownError` if only Spark writes such state.
        """
        provider, codec = store_of(pinned)
        if PROVIDER not in pinned:
            raise NotKnownError("a state store that its session chooses")
        if provider != FILES:
            raise NotKnownError(f"the state store {provider}")
        if codec not in WRITTEN_CODECS:
            raise NotKnownError(f"state compressed by {codec}")
        for name, known in PLAIN_ROWS.items():
            if (given := str(pinned.get(name, known))).lower() != known:
                raise NotKnownError(f"state written with {name}={given[:80]}")
        if (version := pinned.get(_FORMAT)) != _KNOWN_FORMAT:
            raise NotKnownError(f"state written with {_FORMAT}={version}")
        for host in hosts:
            if host != GROUP_STATE:
                raise NotKnownError(f"the operator {host}")
        return cls(partitions, codec)

    def files(self, operators: Sequence[PointerOperator]) -> Iterator[tuple[str, bytes]]:
        """Yield the files of operators, by number from 0, and their keys below the checkpoint location."""
        for number, operator in enumerate(operators):
            has_timeout = operator.timeout_conf != "NoTimeout"
            yield f"state/{number}/_metadata/metadata", metadata_of_groups(number, self.partitions)
            yield f"state/{number}/0/_metadata/schema", schema_of_groups(has_timeout=has_timeout)
            rows: list[Rows] = [{} for _ in range(self.partitions)]
            for route, pointer in sorted((route_of_hash(row.shard), row) for row in operator.pointers):
                rows[pointer.shard % self.partitions][unsafe_row(route & 0xFFFFFFFF)] = _value(pointer, has_timeout)
            for partition, mine in enumerate(rows):
                yield f"state/{number}/{partition}/1.delta", compressed(stream_of_rows(mine), self.codec)


def _value(pointer: PointerRow, has_timeout: bool) -> bytes:
    """Return a group's row: its state, and when Spark calls it without data."""
    state = unsafe_row(*pointer.columns())
    if not has_timeout:
        return unsafe_row(state)
    due_ms = pointer.earliest_timer_ms
    if due_ms is None:
        return unsafe_row(state, _NO_TIMEOUT)
    return unsafe_row(state, due_ms - 1 if due_ms == _NO_TIMEOUT else due_ms)  # as overdue, and not the number for none
