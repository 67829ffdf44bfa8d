"""The run, holdfast's only data format: a sorted, immutable Arrow table with rows of one state table.

A run holds one row per key::

    hash     deleted   key.user   value.n   value.total
    uint64   bool      …          …         …
    0x01…    false     "ann"      3         7.5
    0x1f…    true      "bob"      null      null         ← bob's state was deleted
    0x8c…    false     "cem"      null      2.0          ← a null is a value: cem has state

* **sorted**: by (hash, key); every key occurs once.
* **immutable**: a write makes a new run, whose rows hide those of older runs.
* **typed**: columns are stored in the types of the table's schema, variable-width columns as large types.

Commits, versions (on local disk or in shared memory) and savepoints all hold these bytes; FORMAT.md section 2 specifies
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from holdfast.backends.arrow import rows as arrow_rows
from holdfast.backends.arrow import streams as arrow_stream
from holdfast.backends.arrow.crowds import Crowds, Limits, crowded
from holdfast.backends.arrow.rows import (
    BoolArray,
    HashArray,
    IntArray,
    filter_rows,
    find_sorted,
    from_columns,
    numbers_of,
    order_rows,
    take,
)
from holdfast.backends.column_names import Names, named, with_columns
from holdfast.backends.evolution import evolved, project, require_readable
from holdfast.backends.schema import KeyRanges, Keys, TableSchema
from holdfast.errors import CorruptionError, InvalidArgumentError

__all__ = ["Keys", "Run", "TableSchema", "join_runs", "merge_runs", "read_stretches", "schema_of", "write_stretches"]


@dataclass(frozen=True)
class Run:
    """Rows of one table, sorted, each key once; safe for many threads."""

    schema: TableSchema
    batch: pa.RecordBatch  #: The columns of `TableSchema.columns`, sorted, each key once.
    crowds: Crowds = field(default_factory=Crowds, compare=False, repr=False)  #: Shared with slices

    @classmethod
    def build(
        cls, schema: TableSchema, keys: Keys, values: pa.RecordBatch | None, deleted: BoolArray | None = None
    ) -> Run:
        """Sort a batch of writes into a run; the last write to a key wins.

        Row i of `values` is the value of key i, in storage types, and ignored if `deleted` is true; `values` is None if
        all rows are deletes.
        """
        n = len(keys)
        if deleted is None:
            deleted = np.full(n, values is None)
        if values is None:
            values = arrow_rows.null_rows(schema.value, n)
        elif deleted.any():
            values = take(values, pa.array(np.arange(n), mask=deleted))
        columns = [pa.array(keys.hashes), pa.array(deleted), *keys.columns.columns, *values.columns]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema.columns)
        if n and (keys.hashes[1:] > keys.hashes[:-1]).all():
            return cls(schema, batch)
        return cls(schema, _newest(batch, keys))

    def __len__(self) -> int:
        return self.batch.num_rows

    @cached_property
    def hashes(self) -> HashArray:
        """The hashes, ascending, shape (n,); a view."""
        hashes: HashArray = self.batch.column(0).to_numpy()
        return hashes

    @cached_property
    def deleted(self) -> BoolArray:
        """Shape (n,); True where the key's state was deleted."""
        deleted: BoolArray = self.batch.column(1).to_numpy(zero_copy_only=False)
        return deleted

    def deleted_at(self, rows: IntArray) -> BoolArray:
        """Return which of `rows` are deletes, without reading other rows."""
        return arrow_rows.to_bools(self.batch.column(1).take(pa.array(rows)))

    def values_at(self, rows: IntArray) -> pa.RecordBatch:
        """Return the values of `rows`, which may be in any order."""
        return take(self.values, rows)

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last hash; the run must not be empty."""
        return int(self.hashes[0]), int(self.hashes[-1])

    @property
    def parts(self) -> list[Run]:
        """The run as its only stretch; see `holdfast.backends.stretched_run`."""
        return [self]

    @cached_property
    def keys(self) -> pa.RecordBatch:
        """The key columns under their own names."""
        return self._side(2, self.schema.key)

    @cached_property
    def values(self) -> pa.RecordBatch:
        """The value columns under their own names."""
        return self._side(2 + len(self.schema.key), self.schema.value)

    def _side(self, start: int, schema: pa.Schema) -> pa.RecordBatch:
        columns = self.batch.columns[start : start + len(schema)]
        return arrow_rows.from_columns(columns, schema, len(self))

    @property
    def size_bytes(self) -> int:
        """Bytes of the columns, uncompressed."""
        return int(self.batch.nbytes)

    def find(self, keys: Keys) -> IntArray:
        """Return each key's row or -1, by one binary search per key; sorted keys are several times faster."""
        if not keys.is_sorted:
            order = np.argsort(keys.hashes)  # an unstable sort is cheaper, and equal hashes may be in any order
            found = np.empty(len(keys), np.int64)
            found[order] = self.find(keys.take(order))
            return found
        return find_sorted(self.hashes, self.keys, keys.hashes, keys.columns, self._rows_near)

    @cached_property
    def crowded(self) -> HashArray:
        """The hashes that very many rows share, ascending."""
        return crowded(self.hashes)

    def with_prefixes(self, prefixes: Keys) -> Run:
        """Return the rows whose hash and first key columns match one of `prefixes`, within its range if it has one."""
        if not len(prefixes):
            return Run(self.schema, self.batch.slice(0, 0))
        cut = self.schema.prefix(prefixes.columns.num_columns)
        columns = from_columns(self.keys.columns[: len(cut.key)], cut.key, len(self))
        asked = Run.build(cut, prefixes, None)
        found = asked.find(Keys(self.hashes, columns))
        is_found = found >= 0
        if isinstance(prefixes, KeyRanges):
            at = self.keys.column(len(cut.key))
            numbers = numbers_of(at)
            if numbers is None:
                raise InvalidArgumentError("a range needs an int64 or a timestamp", table=cut.name, type=at.type)
            is_each_once = bool((prefixes.hashes[1:] > prefixes.hashes[:-1]).all())
            key_of_range = np.arange(len(prefixes)) if is_each_once else asked.find(prefixes)
            is_found = prefixes.hold(key_of_range, found, numbers) & arrow_rows.to_bools(at.is_valid())
        return Run(self.schema, filter_rows(self.batch, is_found))

    def near(self, prefixes: Keys) -> Run:
        """Return the rows with the hash of one of the ascending `prefixes`; from a crowd, only rows in their ranges."""
        limits = _limits_of(prefixes) if isinstance(prefixes, KeyRanges) else None
        found = self.crowds.find((self.hashes, self.keys), prefixes.hashes, limits)
        total = found.total
        if total and total == found.ends.max() - found.starts.min():
            return Run(self.schema, self.batch.slice(int(found.starts.min()), total), self.crowds)
        return Run(self.schema, take(self.batch, found.rows))

    def _rows_near(self, hashes: HashArray, keys: pa.RecordBatch) -> IntArray:
        """Return the rows with one of the ascending `hashes`; from a crowd, only rows whose number is in `keys`."""

        def limits(column: int, asked: slice) -> Limits | None:
            numbers = numbers_of(keys.column(column)[asked].drop_null())
            return None if numbers is None else Limits(column, numbers, numbers)

        return self.crowds.find((self.hashes, self.keys), hashes, limits).rows

    def projected(self, schema: TableSchema) -> Run:
        """Return the run with the value columns of another schema of its table; see `holdfast.backends.evolution`."""
        if schema is self.schema or (schema == self.schema and self.batch.schema.equals(schema.columns)):
            return self
        first = self.batch.columns[: 2 + len(schema.key)]
        values = project(self.values, schema.value)
        return Run(schema, pa.RecordBatch.from_arrays([*first, *values.columns], schema=schema.columns))

    def relabelled(self, schema: TableSchema) -> Run:
        """Return the run with its value columns under the names in `schema`, which has the same order."""
        if schema is self.schema:
            return self
        return Run(schema, pa.RecordBatch.from_arrays(self.batch.columns, schema=schema.columns))

    def slice(self, first_hash: int, last_hash: int) -> Run:
        """Return the rows whose hash is in [first_hash, last_hash], without copying."""
        start = int(np.searchsorted(self.hashes, np.uint64(first_hash), side="left"))
        end = int(np.searchsorted(self.hashes, np.uint64(last_hash), side="right"))
        return Run(self.schema, self.batch.slice(start, end - start), self.crowds)

    def chunks(self, rows: int, size_bytes: int) -> Iterator[Run]:
        """Yield the run in consecutive chunks, limited in rows and in average bytes, without copying."""
        if size_bytes < self.size_bytes:
            rows = max(1, min(rows, size_bytes * len(self) // self.size_bytes))
        for start in range(0, len(self), rows):
            yield Run(self.schema, self.batch.slice(start, rows))

    def stretches(self, size_bytes: int) -> Iterator[Run]:
        """Yield the run in consecutive stretches of about `size_bytes`; rows with the same hash stay together."""
        rows = max(1, len(self) * size_bytes // max(1, self.size_bytes))
        start = 0
        while start < len(self):
            end = min(start + rows, len(self))
            end = int(np.searchsorted(self.hashes, self.hashes[end - 1], side="right"))
            yield Run(self.schema, self.batch.slice(start, end - start))
            start = end

    def write(self, file: pa.NativeFile, *, compression: str | None = None) -> None:
        """Write the run as an Arrow IPC stream; its buffers can be memory-mapped unless `compression` is "lz4"."""
        write_stretches(file, self.schema, [self], compression=compression)

    @classmethod
    def read(
        cls,
        section: pa.Buffer,
        schema: TableSchema,
        *,
        source: str,
        trusted: bool = False,
        plain_bytes: int | None = None,
    ) -> Run:
        """Read a run from an Arrow IPC stream, without copying uncompressed buffers."""
        runs = read_stretches(section, schema, source=source, trusted=trusted, plain_bytes=plain_bytes)
        if len(runs) != 1:
            raise CorruptionError(f"{source} must hold one batch", table=schema.name, batches=len(runs))
        return runs[0].projected(schema)


def _limits_of(ranges: KeyRanges) -> Callable[[int, slice], Limits | None]:
    column = ranges.columns.num_columns

    def limits(differing: int, asked: slice) -> Limits | None:
        if differing < column:  # rows of several keys share the hash
            return None
        return Limits(column, ranges.first[asked], ranges.last[asked])

    return limits


def under_names(stored: Run, schema: TableSchema, names: Names) -> Run:
    """Return stored rows with the columns of `schema`, whose stored names are in `names`; a missing column is null."""
    known = with_columns(names, stored.schema.value.names, schema.value.names)
    return stored.projected(named(schema, known)).relabelled(schema)


def write_stretches(
    file: pa.NativeFile, schema: TableSchema, runs: Iterable[Run], *, compression: str | None = None
) -> None:
    """Write runs of ascending hash ranges as consecutive batches of one Arrow IPC stream."""
    # Waking Arrow's threads, of which a worker has one, takes longer than compressing a small commit.
    options = ipc.IpcWriteOptions(compression=compression, use_threads=False)
    columns = schema.columns.with_metadata({"holdfast.table": schema.name})
    with ipc.new_stream(file, columns, options=options) as writer:
        for run in runs:
            writer.write_batch(run.batch)


def read_stretches(
    section: pa.Buffer, schema: TableSchema, *, source: str, trusted: bool = False, plain_bytes: int | None = None
) -> list[Run]:
    """Read the runs that `write_stretches` wrote, with their original columns; see `Run.read`."""
    own = schema

    def accept(columns: pa.Schema) -> None:
        nonlocal own
        own = schema_of(columns, schema, source=source)

    batches = arrow_stream.read_accepted(
        section, accept, source=source, table=schema.name, trusted=trusted, plain_bytes=plain_bytes
    )
    runs = [Run(own, pa.RecordBatch.from_arrays(batch.columns, schema=own.columns)) for batch in batches]
    for run in () if trusted else runs:
        if run.batch.column(0).null_count or run.batch.column(1).null_count:
            raise CorruptionError(f"{source} holds a run whose rows lack a hash or a delete mark", table=schema.name)
        if not (run.hashes[1:] >= run.hashes[:-1]).all():
            raise CorruptionError(f"{source} holds a run that is not sorted", table=schema.name)
    return runs


def schema_of(columns: pa.Schema, held: TableSchema, *, source: str) -> TableSchema:
    """Return the schema of a run with these columns, whose values must fit `held`, the table's current schema."""
    if columns.equals(held.columns):
        return held
    own = TableSchema.of_columns(held.name, columns)
    if len(set(columns.names)) < len(columns) or not own.columns.equals(columns):
        raise CorruptionError(f"{source} holds no readable run: its columns are not those of a run", table=held.name)
    require_readable(own, held, source=source)
    return own


def _newest(batch: pa.RecordBatch, keys: Keys) -> pa.RecordBatch:
    """Return the last row of each key, ordered by (hash, key); `keys` holds the key of each row."""
    order = order_rows(keys.hashes, keys.columns)
    last = np.ones(len(order.first), np.bool_)
    last[:-1] = order.first[1:]
    rows = order.rows[last]
    is_in_order = len(rows) == len(batch) and bool((rows[1:] > rows[:-1]).all())
    return batch if is_in_order else take(batch, rows)


def merge_runs(runs: Sequence[Run], *, drop_deletes: bool) -> Run:
    """Merge one or more runs of a table, oldest first, keeping each key's newest row; 15 ns per row and column.

    `drop_deletes` is valid only if no older run lies below.
    """
    schema = reduce(evolved, (run.schema for run in runs))
    if len(runs) == 1:
        merged = Run(schema, runs[0].batch)
    else:
        parts = [run.projected(schema) for run in runs]
        del runs  # frees a large commit's writes before its rows are sorted
        together = Run(schema, _concatenate(parts))
        merged = Run(schema, _newest(together.batch, Keys(together.hashes, together.keys)))
    if drop_deletes and merged.deleted.any():
        merged = Run(schema, arrow_rows.filter_rows(merged.batch, ~merged.deleted))
    return merged


def join_runs(runs: list[Run]) -> Run:
    """Join runs of one schema and ascending hash ranges into one run, without sorting; empties the list."""
    schema = runs[0].schema
    return runs.pop() if len(runs) == 1 else Run(schema, _concatenate(runs))


def _concatenate(runs: list[Run]) -> pa.RecordBatch:
    """Concatenate runs column by column; empties the list, so that each column of the runs is freed in turn."""
    schema, columns = runs[0].schema.columns, [list(c) for c in zip(*(r.batch.columns for r in runs), strict=True)]
    runs.clear()
    return pa.RecordBatch.from_arrays([pa.concat_arrays(columns.pop(0)) for _ in schema], schema=schema)
