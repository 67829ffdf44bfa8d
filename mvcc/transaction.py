"""One attempt at one micro-batch: reads a version, collects writes, commits them as the next version.

`Measures` count what it read and wrote, and the time it took; only rows that were looked up before they were written
count as new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from holdfast import clock
from holdfast.backends.arrow.rows import BoolArray, HashArray, IntArray
from holdfast.backends.base import MAX_HASH, Found, Pointer, View
from holdfast.backends.column_names import Names, named, relabelled
from holdfast.backends.evolution import project
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs
from holdfast.backends.run_stack import look_up, merge_over
from holdfast.backends.schema import find_table
from holdfast.errors import ClosedError, InvalidArgumentError


@dataclass(frozen=True)
class ChangedRows:
    """Numbers of rows of one table that a transaction has changed."""

    put: int = 0
    deleted: int = 0
    new: int = 0  #: Rows put that a look-up had found absent
    removed: int = 0  #: Rows deleted that a look-up had found

    def __add__(self, other: ChangedRows) -> ChangedRows:
        return ChangedRows(
            self.put + other.put, self.deleted + other.deleted, self.new + other.new, self.removed + other.removed
        )


@dataclass
class Measures:
    """The work of one transaction."""

    look_up_ns: int = 0  #: Time in look-ups and scans
    moved_bytes: int = 0  #: Size of the rows that look-ups and scans returned, and of written rows
    commit_ns: int = 0  #: Time to make the new version, locally and in durable storage
    commit_bytes: int = 0  #: Size of the stored or carried commit; 0 without a commit log
    stored_bytes: int = 0  #: `commit_bytes` if the commit is a separate object; 0 if the query's pointer carries it
    changes: dict[str, ChangedRows] = field(default_factory=dict)  #: By table; filled by the commit
    monotonic_ns: Callable[[], int] = clock.monotonic_ns
    _looked_up: dict[str, list[tuple[Keys, BoolArray]]] = field(default_factory=dict)

    @contextmanager
    def looking_up(self) -> Iterator[None]:
        """Add the duration of the context to `look_up_ns`."""
        started_ns = self.monotonic_ns()
        try:
            yield
        finally:
            self.look_up_ns += self.monotonic_ns() - started_ns

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Add the duration of the context to `commit_ns`."""
        started_ns = self.monotonic_ns()
        try:
            yield
        finally:
            self.commit_ns += self.monotonic_ns() - started_ns

    def scanned(self, runs: Iterator[Run]) -> Iterator[Run]:
        """Yield the runs of a scan; measure their time and size."""
        while True:
            with self.looking_up():
                run = next(runs, None)
            if run is None:
                return
            self.moved_bytes += run.size_bytes
            yield run

    def looked_up(self, table: str, keys: Keys, exists: BoolArray) -> None:
        """Record a look-up's result in the base version, without the transaction's own writes."""
        self._looked_up.setdefault(table, []).append((keys, exists))

    def written(self, runs: Mapping[str, Run], *, is_first: bool) -> None:
        """Record the committed `runs`, by table; with `is_first` there was no earlier version, so all rows are new."""
        for table, run in runs.items():
            deleted = int(np.count_nonzero(run.deleted))
            new, removed = (len(run) - deleted, 0) if is_first else self._known(run, self._looked_up.get(table, []))
            self.changes[table] = ChangedRows(len(run) - deleted, deleted, new, removed)
        self._looked_up.clear()

    @staticmethod
    def _known(run: Run, looked_up: list[tuple[Keys, BoolArray]]) -> tuple[int, int]:
        """Return how many rows of `run` were looked up and absent, and how many existed and are deleted."""
        was_absent, was_there = np.zeros(len(run), np.bool_), np.zeros(len(run), np.bool_)
        for keys, exists in looked_up:
            rows = _rows_of(run, keys)
            found = rows >= 0
            was_absent[rows[found & ~exists]] = True
            was_there[rows[found & exists]] = True
        deleted = run.deleted
        return int(np.count_nonzero(was_absent & ~deleted)), int(np.count_nonzero(was_there & deleted))


def _rows_of(run: Run, keys: Keys) -> IntArray:
    """Return the row of each key, or a negative number; skips the search if the same keys were written."""
    if len(keys) == len(run) and np.array_equal(keys.hashes, run.hashes) and (run.hashes[1:] > run.hashes[:-1]).all():
        return np.arange(len(run))
    return run.find(keys)


class Transaction:
    """Reads of one version plus this attempt's own writes.

    Made by `VersionedStore.begin`. Writes are invisible before `commit`, after `abort`, and if the process
    dies. As a context manager it aborts unless it was committed. If reading the version failed, `commit` fails, too: a
    user's function may have caught the error and continued as if there were no state.

    Attributes
    ----------
    tables : mapping of str to TableSchema
        All tables of the state, with all columns that they hold, under their stored names. Declared tables are read
        and written with their declared columns; see `holdfast.backends.evolution`.
    measures : Measures
        The work of the transaction so far.

    Notes
    -----
    Threads: one at a time. Durability: `commit` returns when the commit log has the writes.
    """

    def __init__(
        self,
        base: Pointer | None,
        version: int,
        view: View | None,
        tables: Mapping[str, TableSchema],
        commit: Callable[[Transaction, Mapping[str, Run]], Pointer],
        declared: Mapping[str, TableSchema] | None = None,
        names: Mapping[str, Names] | None = None,
    ) -> None:
        self.base = base
        self.version = version
        self.tables = tables
        self.measures = Measures()
        self._view = view
        declared, names = declared or {}, names or {}
        self._names = names
        self._declared = {**tables, **declared}
        # The declared columns under their stored names.
        self._stored = {**self._declared, **{t: named(declared[t], names[t]) for t in declared.keys() & names.keys()}}
        self._commit = commit
        self._writes: dict[str, list[Run]] = {}
        self._failure: Exception | None = None
        self._open = True

    @property
    def view(self) -> View | None:
        """The version this transaction reads; None if there is none yet."""
        return self._view

    def reveal(self, table: str, column: str) -> bool:
        """Also read and write an undeclared value column, after the declared ones; return False if none is stored."""
        names = self._names.get(table)
        stored, held = column if names is None else names.get(column), self.tables[table].value
        if stored not in held.names or column in self._declared[table].value.names:
            return False
        field = held.field(stored)
        for schemas, added in ((self._declared, field.with_name(column)), (self._stored, field)):
            schemas[table] = replace(schemas[table], value=schemas[table].value.append(added))
        return True

    def get(self, table: str, keys: Keys) -> Found:
        """Return the values of `keys` as this transaction sees them, its own writes included.

        Parameters
        ----------
        keys : Keys
            Any order, duplicates allowed.
        """
        schema = self._schema(table)
        with self.measures.looking_up():
            found = self._get(table, self.tables[table], keys)
        self.measures.moved_bytes += found.values.nbytes
        return Found(found.exists, relabelled(project(found.values, self._stored[table].value), schema.value))

    def _get(self, table: str, schema: TableSchema, keys: Keys) -> Found:
        view = self._view

        def below(asked: Keys) -> Found:
            assert view is not None
            with self._reading():
                found = view.get(table, asked)
            self.measures.looked_up(table, asked, found.exists)
            return found

        return look_up(self._writes.get(table, []), keys, schema, None if view is None else below)

    def put(self, table: str, keys: Keys, values: pa.Table | pa.RecordBatch) -> None:
        """Set the value of each key; of duplicate keys, the last row wins.

        Raises
        ------
        SchemaMismatchError
            The values do not fit the table; if a single value is at fault, the error names its column and key.
        InvalidArgumentError
            The numbers of keys and of rows differ.
        """
        schema = self._schema(table)
        if values.num_rows != len(keys):
            raise InvalidArgumentError("there must be one row of values per key", rows=values.num_rows, keys=len(keys))
        held = self.tables[table]
        stored = relabelled(schema.conform(values, "value", keys), self._stored[table].value)
        self._write(table, Run.build(held, keys, project(stored, held.value)))

    def delete(self, table: str, keys: Keys) -> None:
        """Remove the state of each key; ignores keys without state."""
        self._write(table, self._removal(table, keys))

    @contextmanager
    def deleting(self) -> Iterator[Callable[[str, Keys], None]]:
        """Yield a `delete` that takes effect when the context ends; look-ups within the context need not search it."""
        removals: list[tuple[str, Run]] = []
        yield lambda table, keys: removals.append((table, self._removal(table, keys)))
        for table, run in removals:
            self._write(table, run)

    def _removal(self, table: str, keys: Keys) -> Run:
        self._require_open()
        # Without the value columns: nulls take as much memory as values.
        of_keys = replace(find_table(self.tables, table), value=pa.schema([]))
        return Run.build(of_keys, keys, None)

    def _write(self, table: str, run: Run) -> None:
        if len(run):
            self.measures.moved_bytes += run.size_bytes
            self._writes.setdefault(table, []).append(run)

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        """Yield the live rows with hashes in the range, in hash order, as this transaction sees them now.

        Notes
        -----
        Cost: rows are read on demand, and the first rows are cheap. Writes made during a scan do not appear in it, so
        rows can be written and deleted while they are scanned. The scan ends with the transaction.
        """
        schema = self._schema(table)
        writes = [run.slice(first_hash, last_hash) for run in self._writes.get(table, [])]
        with self._reading():
            below: Iterable[Run] = () if self._view is None else self._view.scan(table, first_hash, last_hash)
        return self._over(below, writes, schema)

    def _over(self, below: Iterable[Run], writes: Sequence[Run], schema: TableSchema) -> Iterator[Run]:
        with self._reading():
            runs = merge_over(below, writes) if any(map(len, writes)) else below
            for run in self.measures.scanned(iter(runs)):
                yield run.projected(self._stored[schema.name]).relabelled(schema)
                self._require_open()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Record an error raised while reading the version."""
        try:
            yield
        except Exception as exc:
            self._failure = self._failure or exc
            raise

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        """Yield the live rows that begin with one of `prefixes`, as this transaction sees them.

        Parameters
        ----------
        prefixes : Keys
            As for `holdfast.backends.base.View.scan_prefix`.
        """
        schema = self._schema(table)
        writes = [run.with_prefixes(prefixes) for run in self._writes.get(table, [])]
        with self._reading():
            below: Iterable[Run] = () if self._view is None else self._view.scan_prefix(table, prefixes)
        return self._over(below, writes, schema)

    def crowded(self, table: str) -> HashArray:
        """Return hashes that very many rows of a table share: a hint, as of `holdfast.backends.base.View.crowded`."""
        return np.empty(0, np.uint64) if self._view is None else self._view.crowded(table)

    def delete_prefix(self, table: str, prefixes: Keys) -> None:
        """Remove every row that begins with one of `prefixes`, such as all entries of a key's map."""
        for run in self.scan_prefix(table, prefixes):
            self.delete(table, Keys(run.hashes, run.keys))

    def commit(self) -> Pointer | None:
        """Make the writes the next version.

        Returns
        -------
        Pointer or None
            The new version; without writes, the pointer that this transaction began at.

        Raises
        ------
        UnavailableError
            Local or durable storage failed. The transaction is aborted and no version was made.
        StateLostError
            The version this transaction reads was dropped meanwhile and cannot be restored.
        HoldfastError
            Reading the version failed earlier; that error is raised again.
        """
        self._require_open()
        try:
            if self._failure is not None:
                raise self._failure
            with self.measures.committing():
                tables = list(self._writes)
                runs = {
                    t: merge_runs(self._writes.pop(t), drop_deletes=False).projected(self.tables[t]) for t in tables
                }
                pointer = self._commit(self, runs) if runs else self.base
            self.measures.written(runs, is_first=self._view is None)
            return pointer
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop the writes. Safe to call twice, or after `commit`."""
        self._open = False
        self._writes.clear()
        if self._view is not None:
            self._view.close()

    def _schema(self, table: str) -> TableSchema:
        self._require_open()
        return find_table(self._declared, table)

    def _require_open(self) -> None:
        if not self._open:
            raise ClosedError("the transaction has ended: begin a new one", version=self.version)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
