"""Reads a query's operators, the pointers of their shards after a micro-batch, and the shards."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast import clock
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, find_operator, read_operator, shard_prefix
from holdfast.snapshotter.ownership.stored_tables import StoredTables, stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.version_reader import At, VersionReader, no_rows
from holdfast.spark_integration.executor.takeover import working_directory
from holdfast.spark_integration.processor.state.variable_tables import grouping_columns, is_of_entry
from holdfast.spark_integration.shard.pointer_row import PointerRow, require_state_of
from holdfast.spark_integration.spark_state.pointers import (
    StateOperator,
    StateOperators,
    StateStores,
    read_pointers,
)
from holdfast.spark_integration.spark_state.query_location import LoggedBatch, QueryLocation
from holdfast.spark_integration.timers import TIMERS

_KEPT_READERS = 16
_KNOWN_MS = 3_000
#: A value for each grouping column of the operator: ``{"user": "ann"}``.
Key = Mapping[str, Any]
#: A shard's directory and pointer.
ShardAt = tuple[str, PointerRow]
_KEPT_BATCHES = 128


class ShardReaders:
    """Reads a query's shards, each in one thread at a time. The caller must not run in `executor`."""

    def __init__(self, storage: ObjectStorage, executor: Executor) -> None:
        self._storage, self._executor = storage, executor
        #: Idle readers and locks, by shard.
        self._readers: OrderedDict[str, VersionReader] = OrderedDict()
        self._turns: dict[str, threading.Lock] = {}
        self._records: dict[str, tuple[int, OperatorRecord | None, StoredTables | None]] = {}
        self._lock = threading.Lock()

    def record(self, directory: str) -> OperatorRecord | None:
        """Return the record of an operator's directory, or None without a record. Raises `CorruptionError`."""
        return self._known(directory)[0]

    def tables(self, directory: str) -> StoredTables:
        """Return the current tables of an operator's directory. Raises `NotFoundError`, `CorruptionError`."""
        record, stored = self._known(directory)
        if record is None or stored is None:
            read_operator(self._storage, directory)  # raises an error that says what is missing
            return self.tables(directory)
        return stored

    def require(self, directory: str, rows: Sequence[PointerRow]) -> int:
        """Return the number of shards of the pointers' operator. Raises `NotFoundError`, `SchemaMismatchError`."""
        record = self.record(directory) or read_operator(self._storage, directory)
        require_state_of(rows, record, self._storage.url)
        return record.shards

    def find(self, shard: ShardAt, table: TableSchema, prefixes: Keys) -> Run:
        """Return the rows of keys in a shard at its pointer, in the shown schema `table`."""
        stored, at = self._held(shard, table)
        if stored is None or at is None:
            return no_rows(table)
        with self._reader(shard, stored) as reader:
            return stored.shown(reader.find(at, table.name, prefixes), table)

    def first_rows(self, shard: ShardAt, table: TableSchema, first_hash: int, most: int) -> list[Run]:
        """Return at least `most` rows with `first_hash` or greater hashes, ascending; fewer at the shard's end."""
        stored, at = self._held(shard, table)
        if stored is None or at is None:
            return []
        with self._reader(shard, stored) as reader:
            try:
                return _taken(reader.scan(at, table.name, first_hash), stored, table, most)
            except CorruptionError:  # a second scan avoids a damaged snapshot
                return _taken(reader.scan(at, table.name, first_hash), stored, table, most)

    def all_rows(self, shard: ShardAt, table: TableSchema) -> Run:
        runs = self.first_rows(shard, table, 0, np.iinfo(np.int64).max)
        return merge_runs(runs, drop_deletes=True) if runs else no_rows(table)

    def written_between(self, before: PointerRow, shard: ShardAt, table: TableSchema) -> Keys | None:
        """Return the keys written in a shard since the pointer `before`, or None if the shard does not build on it."""
        stored, at = self._held(shard, table)
        if stored is None or at is None or before.pointer is None:
            return None
        held = stored.held[table.name]
        found: list[Run] = []
        with self._reader(shard, stored) as reader:
            commit = reader.newest(at)
            while commit.pointer != before.pointer:
                run = commit.run_of(held)
                if run is not None:
                    found.append(run)
                if before.pointer in commit.lineage.since:
                    break  # the earlier version was carried; this commit includes its writes
                last = commit.lineage.last
                if last is None or last.version < before.pointer.version:
                    return None
                try:
                    commit = reader.commit(last)
                except CorruptionError as exc:
                    if isinstance(exc.__cause__, NotFoundError):
                        return None  # deleted by a clean-up
                    raise
        keys = merge_runs([no_rows(held), *found], drop_deletes=False)
        return Keys(keys.hashes, keys.keys)

    def _held(self, shard: ShardAt, table: TableSchema) -> tuple[StoredTables | None, At | None]:
        """Return the tables in a shard's directory and the shard's version; (None, None) if it lacks the table."""
        directory, row = shard
        if row.pointer is None or table.name not in (stored := self.tables(directory)).held:
            return None, None
        return stored, At(row.pointer, row.carried)

    def _known(self, directory: str) -> tuple[OperatorRecord | None, StoredTables | None]:
        """Return an operator's record and tables, cached for `_KNOWN_MS`."""
        with self._lock:
            at_ms, record, stored = self._records.get(directory, (-_KNOWN_MS, None, None))
        now_ms = clock.monotonic_ms()
        if record is None or now_ms - at_ms >= _KNOWN_MS:
            record = find_operator(self._storage, directory)
            stored = None if record is None else stored_tables(self._storage, record)
            with self._lock:
                self._records[directory] = now_ms, record, stored
        return record, stored

    @contextmanager
    def _reader(self, shard: ShardAt, stored: StoredTables) -> Iterator[VersionReader]:
        prefix = shard_prefix(shard[0], shard[1].shard)
        with self._lock:
            turn = self._turns.setdefault(prefix, threading.Lock())
        with turn:
            with self._lock:
                reader = self._readers.pop(prefix, None)
            if reader is not None and reader.tables != stored.held:
                reader.close()  # a run has declared more tables
                reader = None
            reader = reader or VersionReader(self._storage, prefix, stored.held, self._executor, working_directory)
            try:
                yield reader
            finally:
                with self._lock:
                    self._readers[prefix] = reader
                    while len(self._readers) > _KEPT_READERS:
                        self._readers.popitem(last=False)[1].close()

    def close(self) -> None:
        """Close all idle readers."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].close()


def _taken(rows: Iterator[Run], stored: StoredTables, table: TableSchema, most: int) -> list[Run]:
    """Return the first rows, at least `most`, in the shown schema."""
    runs: list[Run] = []
    count = 0
    for run in rows:
        runs.append(stored.shown(run, table))
        count += len(run)
        if count >= most:
            break
    return runs


@dataclass(frozen=True)
class StoredOperator:
    """An operator of holdfast after a micro-batch."""

    name: str
    batch_id: int
    number: int  #: The number of Spark's operator that holds the pointers
    host: str  #: The name of Spark's operator
    shards: int  #: The operator's number of shards
    tables: Mapping[str, TableSchema]  #: The tables shown to users, with their currently declared columns
    #: By directory below the state directory, ascending by shard. A shard that never had rows is absent; the attribute
    #: ``pointer`` of a shard without state is None.
    pointers: Mapping[str, tuple[PointerRow, ...]]

    @cached_property
    def grouping(self) -> tuple[str, ...]:
        return grouping_of(self.tables)

    @cached_property
    def places(self) -> dict[int, ShardAt]:
        """The directory and pointer of each shard."""
        return {row.shard: (directory, row) for directory, rows in self.pointers.items() for row in rows}


def grouping_of(tables: Mapping[str, TableSchema]) -> tuple[str, ...]:
    """Return an operator's grouping columns, given the tables shown to users."""
    if certain := next(filter(None, (grouping_columns(tables, name) for name in tables)), ()):
        return certain
    # The processor has only maps or timers, whose key columns follow the grouping columns.
    if TIMERS in tables:
        return tuple(tables[TIMERS].key.names[:-1])
    names: list[str] = next((schema.key.names for schema in tables.values()), [])
    own = (place for place, name in enumerate(names) if place and is_of_entry(name))
    return tuple(names[: next(own, len(names))])


@dataclass(frozen=True)
class KeyVersion:
    """A key's rows since a micro-batch."""

    batch_id: int  #: The first retained micro-batch after which the key had these rows
    batch_ms: int  #: Time at which the micro-batch was planned, in ms since 1970
    is_oldest: bool  #: Whether nothing older is retained, so the rows may be older
    tables: Mapping[str, pa.Table]  #: The key's rows by table, as `StoredQuery.get` returns them


@dataclass(frozen=True)
class Page:
    """A page of a shard's rows, ordered by hash."""

    rows: pa.Table  #: The key columns, then the value columns
    after: str | None  #: Argument for the next page; None on the last page


@dataclass(frozen=True)
class Held:
    """An operator of Spark, and the pointers that it holds."""

    operator: StateOperator
    rows: tuple[PointerRow, ...]


class QueryPointers:
    """Reads a query's pointers. Thread-safe. The caller must not run in `executor`."""

    def __init__(self, location: ObjectStorage, executor: Executor) -> None:
        self._storage, self._executor = location, executor
        self.log = QueryLocation(location)
        self._operators = StateOperators(location)
        self._lock = threading.Lock()
        self._batches: OrderedDict[int, tuple[LoggedBatch, StateStores, list[StateOperator]]] = OrderedDict()
        self._query_id: str | None = None

    @property
    def query_id(self) -> str:
        """The query's id. Raises `InvalidArgumentError` if the location is not a query's."""
        if self._query_id is None:  # not a `cached_property`, whose lock in Python 3.11 is shared by all queries
            self._query_id = self.log.query_id()
        return self._query_id

    @property
    def url(self) -> str:
        """The checkpoint location."""
        return self._storage.url

    def batch(self, batch_id: int | None) -> LoggedBatch:
        """Return Spark's log of a micro-batch, by default the last committed. Raises `NotFoundError`."""
        number = batch_id
        if number is None:
            committed = self.log.committed()
            if not committed:
                raise NotFoundError("the query has not committed a micro-batch yet", location=self._storage.url)
            number = committed[-1]
        return self._of(number)[0]

    def held(self, batch_id: int, partitions: Collection[int] | None = None) -> list[Held]:
        """Return the operators with holdfast's pointers after a micro-batch, read from all or the given partitions."""
        _, stores, operators = self._of(batch_id)
        found = []
        for operator in operators:
            wanted = None if partitions is None else [n for n in partitions if n < operator.partitions]
            rows = read_pointers(self._storage, stores, operator, self._operators, self._executor, wanted)
            if rows is not None:
                found.append(Held(operator, tuple(rows)))
        return found

    def of_shards(self, batch_id: int, shards: Iterable[int]) -> list[Held]:
        """Like `held`, but may omit pointers of other shards. Raises the errors of `held`."""
        wanted = set(shards)
        _, _, operators = self._of(batch_id)
        numbers = {operator.partitions for operator in operators if operator.partitions}
        return self.held(batch_id, sorted({shard % number for shard in wanted for number in numbers}))

    def _of(self, batch_id: int) -> tuple[LoggedBatch, StateStores, list[StateOperator]]:
        with self._lock:
            if batch_id in self._batches:
                return self._batches[batch_id]
        try:
            batch = self.log.logged(batch_id)
        except NotFoundError:
            batch = self.log.batch(batch_id)  # raises an error that lists the micro-batches
        found = batch, StateStores.of(batch, self._storage.url), self._operators.at(batch_id)
        with self._lock:
            self._batches[batch_id] = found
            while len(self._batches) > _KEPT_BATCHES:
                self._batches.popitem(last=False)
        return found
