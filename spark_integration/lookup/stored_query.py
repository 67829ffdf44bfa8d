"""Reads a query's stored state: its operators, the pointers of their shards, and their rows.

::

    checkpointLocation                          spark.holdfast.state.dir
        offsets/7, commits/7                        <operator>/operator, schemas/…
        state/0/3/…  ──pointer──▶                   <operator>/shard-0003/commits/…, snapshots/…, files/…
        └─ read without Spark ─┘                    └─ only objects with wanted keys ───┘

Reading writes nothing and starts no JVM; the query may be running, on any machine. A micro-batch can be read as long as
the query could return to it.

Two versions of a table are compared by the writes between them if known, else as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import HashArray, IntArray, take, to_bools
from holdfast.backends.arrow.values import python_rows
from holdfast.backends.evolution import evolved_tables
from holdfast.backends.options import did_you_mean
from holdfast.backends.rocksdb.codec.rows import encode_values
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError, StateLostError
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.version_reader import no_rows
from holdfast.spark_integration.lookup.keys import as_table, keys_of, same_rows
from holdfast.spark_integration.lookup.places import places_of
from holdfast.spark_integration.lookup.query_pointers import (
    Held,
    Key,
    KeyVersion,
    Page,
    QueryPointers,
    ShardAt,
    ShardReaders,
    StoredOperator,
    grouping_of,
)
from holdfast.spark_integration.processor.state.variable_tables import find_shown
from holdfast.spark_integration.shard.pointer_row import PointerRow, directory_of_query
from holdfast.spark_integration.spark_state.pointers import by_operator
from holdfast.spark_integration.spark_state.query_location import LoggedBatch, LoggedTimes
from holdfast.spark_integration.timers import is_by_time
from holdfast.spark_integration.transport.routes import shards_of

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
#: Upper limit of keys per look-up.
KEYS_MAX = 10_000
_PAGE_ROWS_MAX = 100_000
#: The start of a page: a hash, and the number of the hash's rows already shown.
_PLACE = re.compile(r"([0-9a-f]{16})\+([0-9]{1,12})")
_THREADS = 16
_ATTEMPTS = 4
_T = TypeVar("_T")
_Gone = (NotFoundError, StateLostError, CorruptionError)


@dataclass(frozen=True)
class RowChange:
    """The change of a key's row."""

    kind: str
    key: dict[str, Any]  #: The key columns
    #: The value columns; None without a row
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class Differing(NamedTuple):
    """The rows of two runs that differ."""

    removed: IntArray  #: Rows of the first run
    #: Rows of the first and the second run
    changed: IntArray
    changed_to: IntArray
    added: IntArray  #: Rows of the second run
    equal: int  #: The number of equal rows


def differing(before: Run, after: Run) -> Differing:
    """Compare two runs with the same schema key by key, by the stored bytes of values: -0.0 differs from 0.0."""
    at = after.find(Keys(before.hashes, before.keys))
    in_both = np.flatnonzero(at >= 0)
    values = [encode_values(take(r.values, pa.array(n))) for r, n in ((before, in_both), (after, at[in_both]))]
    changed = in_both[to_bools(pc.not_equal(*values))]
    is_new = np.ones(len(after), np.bool_)
    is_new[at[in_both]] = False
    equal = len(in_both) - len(changed)
    return Differing(np.flatnonzero(at < 0), changed, at[changed], np.flatnonzero(is_new), equal)


@dataclass
class TableChanges:
    """The changes of a table: numbers of keys, and a sample of rows."""

    table: str
    added: int = 0
    removed: int = 0
    changed: int = 0
    rows: list[RowChange] = field(default_factory=list)

    def take(self, before: Run, after: Run, rows_max: int) -> None:
        """Compare two runs with the same schema: count the differences, and keep up to `rows_max` rows."""
        found = differing(before, after)
        self.removed += len(found.removed)
        self.changed += len(found.changed)
        self.added += len(found.added)
        old, new = {CHANGED: found.changed, REMOVED: found.removed}, {CHANGED: found.changed_to, ADDED: found.added}
        for kind in (CHANGED, ADDED, REMOVED):
            room = max(0, rows_max - len(self.rows))
            sides = [
                (_rows(run.keys, rows[kind][:room]), _rows(run.values, rows[kind][:room])) if kind in rows else None
                for run, rows in ((before, old), (after, new))
            ]
            keys = next(side[0] for side in sides if side is not None)
            values = [side[1] if side is not None else [None] * len(keys) for side in sides]
            self.rows += [RowChange(kind, *facts) for facts in zip(keys, *values, strict=True)]


def _rows(columns: pa.RecordBatch, rows: IntArray) -> list[dict[str, Any]]:
    return python_rows(take(columns, pa.array(rows)))


def compare(
    readers: ShardReaders,
    changes: TableChanges,
    table: TableSchema,
    one: ShardAt | None,
    other: ShardAt | None,
    rows_max: int,
) -> None:
    """Add the differences of a shard's table to `changes`. Raises if a version cannot be read."""
    if one and other and one[1].pointer == other[1].pointer:
        return
    keys = readers.written_between(one[1], other, table) if one and other and one[0] == other[0] else None
    if one and other and keys is not None and len(keys) <= KEYS_MAX:
        changes.take(readers.find(one, table, keys), readers.find(other, table, keys), rows_max)
        return
    before, after = (readers.all_rows(shard, table) if shard else no_rows(table) for shard in (one, other))
    changes.take(before, after, rows_max)


class StoredQuery:
    """A query's stored state, opened by `open_query`. Close it, preferably by a ``with`` statement.

    Safe for many threads, which take turns at a shard. Immutable objects are cached within a budget, so a history costs
    little more than a look-up.
    """

    def __init__(self, location: ObjectStorage, storage: ObjectStorage, executor: ThreadPoolExecutor) -> None:
        # `close` closes the checkpoint location, the state directory and the executor.
        self._location, self._storage, self._executor = location, storage, executor
        self._pointers = QueryPointers(location, executor)
        self._readers = ShardReaders(storage, executor)

    @property
    def query_id(self) -> str:
        """The query's id.

        Raises
        ------
        InvalidArgumentError
            If this is not a query's checkpoint location.
        """
        return self._pointers.query_id

    def batches(self) -> list[int]:
        """Return the committed, logged micro-batches, ascending; Spark may be purging the oldest."""
        return self._pointers.log.committed()

    def operators(self, batch_id: int | None = None) -> list[StoredOperator]:
        """Return holdfast's operators after a micro-batch, by default the last committed.

        Raises
        ------
        InvalidArgumentError
            If this is not a query's checkpoint location, or its state cannot be read without Spark.
        NotFoundError
            If the micro-batch is not committed or was purged; names the oldest readable micro-batch.
        """
        number = self._batch(batch_id).batch_id
        return [found for held in self._pointers.held(number) for found in self._of(number, held)]

    def directories(self) -> Mapping[str, str]:
        """Return the query by operator directory, as named by the pointers. Raises the errors of `operators`."""
        rows = [row for held in self._pointers.held(self._batch(None).batch_id) for row in held.rows]
        of_operators = by_operator(rows, self._pointers.url).values()
        return {directory: found[0].query for of in of_operators for directory, found in of.items()}

    def times(self) -> list[LoggedTimes]:
        """Return the planning and commit times of logged micro-batches, even incomplete, ascending."""
        return self._pointers.log.times()

    def operator(self, name: str, batch_id: int | None = None) -> StoredOperator:
        """Return an operator. Raises the errors of `operators`, and `NotFoundError` for an unknown name."""
        return self._one(name, self._batch(batch_id).batch_id)

    def get(
        self, operator: str, keys: Key | Sequence[Key], *, table: str | None = None, batch_id: int | None = None
    ) -> dict[str, pa.Table]:
        """Return the rows of keys after a micro-batch.

        Parameters
        ----------
        keys : mapping, or sequence of mappings
            At most `KEYS_MAX`.
        table : str, optional
            A table of the operator, a variable of a processor, or "timers"; by default all tables shown to users.
        batch_id : int, optional
            By default the last committed micro-batch.

        Returns
        -------
        dict of str to pyarrow.Table
            The key and value columns by table, as in `holdfast.read_state`. A key without state has no
            rows.

        Raises
        ------
        InvalidArgumentError
            If a key lacks a column, has an extra column, or has a value of the wrong type.
        NotFoundError
            If there is no such operator, table or micro-batch.
        StateLostError, CorruptionError, UnavailableError
            If an object is missing or damaged, or the storage does not respond.
        """
        wanted = sequence_of(keys)
        for attempt in range(_ATTEMPTS):
            number = self._batch(batch_id).batch_id
            try:
                return self._with_oldest(number, lambda at: self._get(operator, wanted, table, at))
            except _Gone:
                # A running query commits newer micro-batches and deletes old objects.
                if batch_id is not None or attempt == _ATTEMPTS - 1 or self._batch(None).batch_id == number:
                    raise
        raise AssertionError("unreachable")

    def history(
        self, operator: str, key: Key, *, table: str | None = None, batch_id: int | None = None
    ) -> Iterator[KeyVersion]:
        """Yield a key's versions over the retained micro-batches, newest first. Raises the errors of `get`.

        Parameters
        ----------
        batch_id : int, optional
            Start with the version after this micro-batch.
        """
        last = self._batch(batch_id).batch_id
        numbers = [number for number in self.batches() if number <= last]
        since, held = last, self.get(operator, key, table=table, batch_id=last)
        for number in reversed(numbers[:-1]):
            try:
                found = self._get(operator, sequence_of(key), table, number)
            except _Gone as exc:
                if not _is_gone(exc):
                    raise
                break
            if not same_rows(found, held):
                yield KeyVersion(since, self._planned_ms(since), False, held)
                held = found
            since = number
        yield KeyVersion(since, self._planned_ms(since), True, held)

    def page(
        self,
        operator: str,
        table: str,
        shard: int,
        *,
        batch_id: int | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Return a page of a shard's rows, after the previous page. Raises the errors of `get`.

        Parameters
        ----------
        after : str, optional
            The previous page's `Page.after`.
        limit : int
            The largest number of rows.
        """
        if type(limit) is not int or not 0 < limit <= _PAGE_ROWS_MAX:
            raise InvalidArgumentError(f"limit must be a whole number from 1 to {_PAGE_ROWS_MAX}", limit=limit)
        number = self._batch(batch_id).batch_id
        found = self.operator(operator, number)
        if type(shard) is not int or not 0 <= shard < found.shards:
            raise InvalidArgumentError("the operator has no such shard", shard=shard, shards=found.shards)
        name, (first_hash, skipped) = find_shown(found.tables, table), _read_place(after)
        runs = self._first_rows(found, name, shard, first_hash, skipped + limit + 1)
        rows = as_table(found.tables[name], runs).slice(skipped, limit)
        return Page(rows, _next_place(_hashes(runs)[skipped:], limit, first_hash, skipped))

    def rows(
        self, operator: str, table: str, *, batch_id: int | None = None, at_once: int = 1
    ) -> tuple[TableSchema, Iterator[tuple[int, Run]]]:
        """Return a table's columns, and iterate over its rows shard by shard. Raises the errors of `get`.

        Parameters
        ----------
        at_once : int
            The number of shards read in parallel or held in memory.
        """
        found = self.operator(operator, self._batch(batch_id).batch_id)
        schema = found.tables[find_shown(found.tables, table)]

        def read(shard: int) -> tuple[int, Run]:
            return shard, self._readers.all_rows(found.places[shard], schema)

        def of_shards() -> Iterator[tuple[int, Run]]:
            shards = sorted(found.places)
            with ThreadPoolExecutor(at_once) as threads, closing(ahead(threads, read, shards, at_once)) as rows:
                yield from rows

        return schema, of_shards()

    def row_count(
        self, operator: str, table: str, shard: int, *, batch_id: int | None = None, read: int = 1_000
    ) -> int:
        """Return a shard's number of rows, counted if small, else estimated. Raises the errors of `get`.

        Parameters
        ----------
        read : int
            The number of rows to read. Hashes are uniform, so the last hash read determines the estimate.
        """
        found = self.operator(operator, self._batch(batch_id).batch_id)
        hashes = _hashes(self._first_rows(found, find_shown(found.tables, table), shard, 0, read + 1))
        if len(hashes) <= read:
            return len(hashes)
        first, following = (-(-(number << 64) // found.shards) for number in (shard, shard + 1))
        return read * (following - first) // max(int(hashes[read]) - first, 1)

    def diff(
        self, operator: str, before: int, after: int, *, table: str | None = None, rows_each: int = 20
    ) -> list[TableChanges]:
        """Return the differences of an operator's state between two micro-batches.

        Parameters
        ----------
        before, after : int
            The micro-batches.
        table : str, optional
            As in `get`.
        rows_each : int
            The largest number of differing keys to return per table.

        Raises
        ------
        NotFoundError, InvalidArgumentError, StateLostError, CorruptionError, UnavailableError
            As in `get`.

        Notes
        -----
        If the later micro-batch builds on the earlier, this reads the commits between them and the written keys; else
        it reads all shards that differ, one at a time.
        """
        one, other = (self._with_oldest(n, lambda at: self.operator(operator, at)) for n in (before, after))
        names = [name for name in other.tables if table is None or name == find_shown(other.tables, table)]
        found = []
        for name in names:
            changes = TableChanges(name)
            for shard in sorted({*one.places, *other.places}):
                sides = one.places.get(shard), other.places.get(shard)
                compare(self._readers, changes, other.tables[name], *sides, rows_each)
            found.append(changes)
        return found

    def close(self) -> None:
        """Release connections and temporary files."""
        self._readers.close()
        self._executor.shutdown(cancel_futures=True)
        self._location.close()
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Operators.

    def _one(self, name: str, batch_id: int) -> StoredOperator:
        all_held = self._pointers.held(batch_id)
        for held in all_held:
            for operator in self._of(batch_id, held, name):
                return operator
        for held in all_held:
            if not held.rows and (found := self._without_rows(name, batch_id, held)) is not None:
                return found
        known = sorted({one for held in all_held for one in by_operator(held.rows, self._pointers.url)})
        raise NotFoundError(
            f"the query has no state of this operator: check its name, and that it has received rows"
            f"{did_you_mean(name, known)}",
            operator=name,
            operators=", ".join(known) or "none",
            location=self._pointers.url,
        )

    def _of_keys(self, name: str, keys: Sequence[Key], batch_id: int) -> StoredOperator:
        """Return an operator with at least the pointers of the keys' shards. Raises the errors of `operator`."""
        record = self._readers.record(name)
        if record is not None and record.query_id == self.query_id and keys:
            schemas = self._readers.tables(name).latest
            shown = {table: schema for table, schema in schemas.items() if not is_by_time(schema)}
            hashes = keys_of(next(iter(shown.values())), grouping_of(shown), keys).hashes
            wanted = set(shards_of(hashes, record.shards).tolist())
            for held in self._pointers.of_shards(batch_id, wanted):
                for found in self._of(batch_id, held, name):
                    if found.shards == record.shards and wanted <= set(found.places):
                        return found
        return self._one(name, batch_id)

    def _of(self, batch_id: int, held: Held, name: str | None = None) -> list[StoredOperator]:
        """Return the operators whose pointers an operator of Spark holds, or only the operator `name`."""
        by_name = by_operator(held.rows, self._pointers.url)
        return [self._operator(one, batch_id, held, by_name[one]) for one in sorted(by_name) if name in (None, one)]

    def _operator(
        self, name: str, batch_id: int, held: Held, pointers: Mapping[str, list[PointerRow]]
    ) -> StoredOperator:
        shards = 0
        tables: dict[str, TableSchema] = {}
        for directory, rows in sorted(pointers.items()):
            shards = max(shards, self._readers.require(directory, rows))
            latest = self._readers.tables(directory).latest
            tables = evolved_tables(tables, {name: one for name, one in latest.items() if not is_by_time(one)})
        ordered = {
            directory: tuple(sorted(rows, key=lambda row: row.shard)) for directory, rows in sorted(pointers.items())
        }
        return StoredOperator(name, batch_id, held.operator.number, held.operator.host, shards, tables, ordered)

    def _without_rows(self, name: str, batch_id: int, held: Held) -> StoredOperator | None:
        """Return an operator without rows after a micro-batch, or None without a record for this query."""
        for directory in (name, directory_of_query(name, self.query_id)):
            record = self._readers.record(directory)
            if record is not None and record.query_id == self.query_id:
                return self._operator(name, batch_id, held, {directory: []})
        return None

    # Look-ups.

    def _batch(self, batch_id: int | None) -> LoggedBatch:
        if batch_id is not None and (type(batch_id) is not int or batch_id < 0):
            raise InvalidArgumentError("a micro-batch must be a whole number, 0 or more", batch_id=batch_id)
        _ = self.query_id  # raises a clear error if there is no query
        return self._pointers.batch(batch_id)

    def _planned_ms(self, batch_id: int) -> int:
        planned = json.loads(self._batch(batch_id).batch).get("batchTimestampMs", 0)
        return planned if type(planned) is int else 0

    def _get(self, name: str, keys: Sequence[Key], table: str | None, batch_id: int) -> dict[str, pa.Table]:
        operator = self._of_keys(name, keys, batch_id)
        wanted = list(operator.tables) if table is None else [find_shown(operator.tables, table)]
        return {one: self._rows(operator, operator.tables[one], keys) for one in wanted}

    def _first_rows(self, operator: StoredOperator, table: str, shard: int, first_hash: int, most: int) -> list[Run]:
        """Return at least `most` rows of a shard, starting at `first_hash`; fewer at the shard's end."""
        if shard not in operator.places:
            return []
        return self._readers.first_rows(operator.places[shard], operator.tables[table], first_hash, most)

    def _rows(self, operator: StoredOperator, table: TableSchema, keys: Sequence[Key]) -> pa.Table:
        prefixes = keys_of(table, operator.grouping, keys)
        of_shard = shards_of(prefixes.hashes, operator.shards)
        runs = [
            self._readers.find(operator.places[shard], table, prefixes.take(np.flatnonzero(of_shard == shard)))
            for shard in np.unique(of_shard).tolist()
            if shard in operator.places
        ]
        return as_table(table, runs)

    def _with_oldest(self, batch_id: int, read: Callable[[int], _T]) -> _T:
        """Call `read` for a micro-batch; if it was purged, raise an error that names the oldest."""
        try:
            return read(batch_id)
        except _Gone as exc:
            if not _is_gone(exc):
                raise
            later = [number for number in self.batches() if number > batch_id]
            oldest = next((number for number in later if self._can(read, number)), None)
            if oldest is None:
                raise
            raise NotFoundError(
                "the state after this micro-batch is no longer retained", batch_id=batch_id, oldest=oldest
            ) from exc

    def _can(self, read: Callable[[int], object], batch_id: int) -> bool:
        with suppress(HoldfastError):
            read(batch_id)
            return True
        return False


def _hashes(runs: Sequence[Run]) -> HashArray:
    return np.concatenate([run.hashes for run in runs]) if runs else np.empty(0, np.uint64)


def _read_place(after: str | None) -> tuple[int, int]:
    """Return the first hash of a page, and the number of the hash's rows already shown."""
    found = _PLACE.fullmatch(after or f"{0:016x}+0")
    if found is None:
        raise InvalidArgumentError("after must be the previous page's Page.after", after=ascii(after)[:80])
    return int(found[1], 16), int(found[2])


def _next_place(hashes: HashArray, limit: int, first_hash: int, skipped: int) -> str | None:
    """Return the start of the page after `limit` rows, or None at the end."""
    if len(hashes) <= limit:
        return None
    shown = int((hashes[:limit] == hashes[limit]).sum())
    return f"{int(hashes[limit]):016x}+{shown + (skipped if int(hashes[limit]) == first_hash else 0)}"


def sequence_of(keys: Key | Sequence[Key]) -> Sequence[Key]:
    """Return keys as a list. Raises `InvalidArgumentError` if they are not keys or too many."""
    found = [keys] if isinstance(keys, Mapping) or not isinstance(keys, Iterable) else list(keys)
    if len(found) > KEYS_MAX or not all(isinstance(key, Mapping) for key in found):
        raise InvalidArgumentError('pass one key such as {"user": "ann"}, or a list of keys', most=KEYS_MAX)
    return found


def _is_gone(exc: BaseException) -> bool:
    """Return whether an error reports a missing object, not a damaged object."""
    return isinstance(exc, (NotFoundError, StateLostError)) or isinstance(exc.__cause__, NotFoundError)


def open_query(
    location: str | Path, state_dir: str | Path | None = None, options: Mapping[str, str] | None = None
) -> StoredQuery:
    """Open the state of a query for reading, without Spark.

    Parameters
    ----------
    location : str or pathlib.Path
        The query's ``checkpointLocation``, as a path or as a URL of any supported storage. Or the state directory, if
        it has only one query and records the query's location.
    state_dir : str or pathlib.Path, optional
        The query's ``spark.holdfast.state.dir``; by default the directory that its pointers name.
    options : mapping of str to str, optional
        The query's settings ``spark.holdfast.storage.<name>``, used for both directories.

    Returns
    -------
    StoredQuery
        Close it, preferably by a ``with`` statement.

    Raises
    ------
    InvalidArgumentError
        If a URL or an option is invalid, or the state directory cannot be determined.
    NotFoundError
        If the state directory that the pointers name does not have the query's state.

    Examples
    --------
    >>> with holdfast.open_query("s3://bucket/queries/totals") as query:
    ...     query.get("totals", {"user": "ann"})["state"].to_pylist()
    """
    options = options or {}
    location, state_dir = places_of(location, state_dir, options)
    opened = open_storage(location, options)
    try:
        storage = open_storage(state_dir, options)
    except HoldfastError:
        opened.close()
        raise
    return StoredQuery(opened, storage, ThreadPoolExecutor(_THREADS, "holdfast-look-up"))
