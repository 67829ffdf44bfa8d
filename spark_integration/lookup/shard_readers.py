"""Readers of a query's shards, each open while it is used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from holdfast import clock
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.commit_objects import Commit
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, find_operator, read_operator, shard_prefix
from holdfast.snapshotter.ownership.stored_tables import StoredTables, stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.version_reader import At, VersionReader
from holdfast.spark_integration.executor.takeover import own_directory
from holdfast.spark_integration.shard.pointer_row import PointerRow, require_state_of

_KEPT_READERS = 16
_KNOWN_MS = 3_000


class ShardReaders:
    """See the module; to be closed. Safe for many threads, which take turns at a shard.

    `executor`: must not run the caller.
    """

    def __init__(
        self, storage: ObjectStorage, executor: Executor, monotonic_ms: Callable[[], int] = clock.monotonic_ms
    ) -> None:
        self._storage, self._executor = storage, executor
        #: Those that nobody uses, by shard; and who uses each.
        self._readers: OrderedDict[str, VersionReader] = OrderedDict()
        self._turns: dict[str, threading.Lock] = {}
        self._records: dict[str, tuple[int, OperatorRecord | None, StoredTables | None]] = {}
        self._monotonic_ms = monotonic_ms
        self._lock = threading.Lock()

    def record(self, directory: str) -> OperatorRecord | None:
        """Return the record of an operator's directory; None if there is none. Raises CorruptionError."""
        return self._known(directory)[0]

    def tables(self, directory: str) -> StoredTables:
        """Return the current tables of an operator's directory. Raises `NotFoundError`, `CorruptionError`."""
        record, stored = self._known(directory)
        if record is None or stored is None:
            read_operator(self._storage, directory)  # says what is missing
            return self.tables(directory)
        return stored

    def require(self, directory: str, rows: Sequence[PointerRow]) -> int:
        """Check that pointers are of an operator's directory, and return how many shards the operator has.

        Raises `NotFoundError` or `SchemaMismatchError` if they are not.
        """
        record = self.record(directory) or read_operator(self._storage, directory)
        require_state_of(rows, record, self._storage.url)
        return record.shards

    def find(self, directory: str, row: PointerRow, stored: StoredTables, table: TableSchema, prefixes: Keys) -> Run:
        """Return the rows of some keys in a shard at its pointer; `table` is as they are shown."""
        with self._reader(directory, row, stored) as reader:
            return stored.shown(reader.find(_at(row), table.name, prefixes), table)

    def first_rows(
        self, directory: str, row: PointerRow, stored: StoredTables, table: TableSchema, first_hash: int, most: int
    ) -> list[Run]:
        """Return at least `most` rows from a hash on, if there are as many, ascending by hash."""
        with self._reader(directory, row, stored) as reader:
            try:
                return _taken(reader.scan(_at(row), table.name, first_hash), stored, table, most)
            except CorruptionError:  # of the snapshot, perhaps: the second scan goes around it
                return _taken(reader.scan(_at(row), table.name, first_hash), stored, table, most)

    def all_rows(self, directory: str, row: PointerRow, stored: StoredTables, table: TableSchema) -> Run:
        """Return all rows of a table in a shard at its pointer."""
        runs = self.first_rows(directory, row, stored, table, 0, np.iinfo(np.int64).max)
        return merge_runs(runs, drop_deletes=True) if runs else no_rows(table)

    def written_between(
        self, directory: str, one: PointerRow, other: PointerRow, stored: StoredTables, table: str
    ) -> Keys | None:
        """Return the keys written in a shard from one version to another; None if the latter does not build on it."""
        assert one.pointer is not None
        held = stored.held[table]
        found: list[Run] = []
        with self._reader(directory, other, stored) as reader:
            commit = reader.newest(_at(other))
            while commit.pointer != one.pointer:
                run = commit.run_of(held)
                if run is not None:
                    found.append(run)
                if one.pointer in commit.lineage.since:
                    break  # the earlier version was carried, and this commit holds its writes, too
                last = commit.lineage.last
                if last is None or last.version < one.pointer.version:
                    return None
                before = self._commit(reader, last)
                if before is None:
                    return None
                commit = before
        keys = merge_runs([no_rows(held), *found], drop_deletes=False)
        return Keys(keys.hashes, keys.keys)

    def _commit(self, reader: VersionReader, entry: ChainEntry) -> Commit | None:
        try:
            return reader.commit(entry)
        except CorruptionError as exc:
            if isinstance(exc.__cause__, NotFoundError):
                return None  # cleaned up
            raise

    def _known(self, directory: str) -> tuple[OperatorRecord | None, StoredTables | None]:
        """Return an operator's record and its tables; what a run declares is seen within seconds."""
        with self._lock:
            at_ms, record, stored = self._records.get(directory, (-_KNOWN_MS, None, None))
        now_ms = self._monotonic_ms()
        if record is None or now_ms - at_ms >= _KNOWN_MS:
            record = find_operator(self._storage, directory)
            stored = None if record is None else stored_tables(self._storage, record)
            with self._lock:
                self._records[directory] = now_ms, record, stored
        return record, stored

    @contextmanager
    def _reader(self, directory: str, row: PointerRow, stored: StoredTables) -> Iterator[VersionReader]:
        shard = shard_prefix(directory, row.shard)
        with self._lock:
            turn = self._turns.setdefault(shard, threading.Lock())
        with turn:
            with self._lock:
                reader = self._readers.pop(shard, None)
            if reader is not None and reader.tables != stored.held:
                reader.close()  # a run has declared more since
                reader = None
            reader = reader or VersionReader(self._storage, shard, stored.held, self._executor, own_directory)
            try:
                yield reader
            finally:
                self._keep(shard, reader)

    def _keep(self, shard: str, reader: VersionReader) -> None:
        with self._lock:
            self._readers[shard] = reader
            while len(self._readers) > _KEPT_READERS:
                self._readers.popitem(last=False)[1].close()

    def close(self) -> None:
        """Remove what was read."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].close()


def _taken(rows: Iterator[Run], stored: StoredTables, table: TableSchema, most: int) -> list[Run]:
    """Return the first rows as shown, at least so many."""
    runs: list[Run] = []
    count = 0
    for run in rows:
        runs.append(stored.shown(run, table))
        count += len(run)
        if count >= most:
            break
    return runs


def no_rows(table: TableSchema) -> Run:
    """Return a run of a table without rows."""
    return Run(table, pa.RecordBatch.from_pylist([], schema=table.columns))


def _at(row: PointerRow) -> At:
    if row.pointer is None:
        raise InvalidArgumentError("the shard has no state", shard=row.shard)
    return At(row.pointer, row.carried)
