"""State tables with several rows per key: the elements of lists and the entries of maps.

A row's key starts with the grouping key; all rows of a grouping key have its hash::

    l.visits                             m.counts
    user   seq            page           user   entry.page   n
    "ann"  8589934592     "/"            "ann"  "/"          3
    "ann"  8589934593     "/cart"        "ann"  "/cart"      1

So one prefix scan reads all entries of many keys, and an entry is read and written by its full key.

Element numbers only grow, so that an append need not read the list. An element's number is the version that the
micro-batch commits, times 2³², plus a count within the shard's call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import BoolArray, IntArray, filter_rows, from_columns, inverse, take
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.backends.schema import KeyRanges
from holdfast.errors import CorruptionError
from holdfast.mvcc import Transaction
from holdfast.spark_integration.ttl.expiry import EXPIRES, Expiry, KeyRows, expires_of, open_rows

_NUMBERS_PER_VERSION = 1 << 32


def first_number(version: int) -> int:
    """Return the number of the first element that a version appends."""
    return version * _NUMBERS_PER_VERSION


def renumbered(run: Run, versions: int) -> Run:
    """Renumber list elements or their index entries as if written `versions` earlier: a restored query counts anew."""
    place = 1 + len(run.schema.key)  # the number is the last key column; hash and deletion mark come first
    if run.batch.column(place).type != pa.int64():
        raise CorruptionError("the table of a list has no element numbers", table=run.schema.name)
    try:
        numbers = pc.subtract_checked(run.batch.column(place), pa.scalar(first_number(versions), pa.int64()))
    except (OverflowError, pa.ArrowInvalid) as exc:
        raise CorruptionError(
            "list elements have impossible numbers", table=run.schema.name, versions=versions
        ) from exc
    return Run(run.schema, run.batch.set_column(place, run.batch.schema.field(place), numbers))


@dataclass(frozen=True)
class Entries:
    places: IntArray  #: Index of each entry's key among the requested keys
    own_keys: pa.RecordBatch
    values: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.places)

    @property
    def size_bytes(self) -> int:
        return int(self.own_keys.nbytes + self.values.nbytes)

    def take(self, rows: IntArray) -> Entries:
        return Entries(self.places[rows], take(self.own_keys, rows), take(self.values, rows))


class Ranges(NamedTuple):
    """Ranges of times in microseconds, or of numbers; the ranges of a key do not overlap."""

    key: IntArray  #: Index of each range's key among the requested keys
    first: IntArray
    last: IntArray  #: Inclusive


class EntryRows:
    """The entries of a table in a transaction, by the first `grouping` key columns; not thread-safe."""

    def __init__(self, transaction: Transaction, schema: TableSchema, grouping: int, expiry: Expiry | None) -> None:
        self._transaction = transaction
        self._schema = schema
        self._prefix = TableSchema(schema.name, schema.prefix(grouping).key, pa.schema([]))
        self._own = pa.schema(list(schema.key)[grouping:])
        self._values = pa.schema([field for field in schema.value if expiry is None or field.name != EXPIRES])
        self._expiry = expiry

    @property
    def own_key_types(self) -> pa.Schema:
        """The key columns after the grouping key."""
        return self._own

    @property
    def value_types(self) -> pa.Schema:
        return self._values

    def scan(self, keys: Keys, near: Ranges | None = None) -> Iterator[Entries]:
        """Yield the unexpired entries of distinct grouping keys, in the order of their hashes.

        `near` limits them to entries whose first own key column is in a range of their grouping key; skipped entries
        cost almost nothing.
        """
        wanted = keys
        if near is not None:
            own = keys.take(near.key)
            wanted = KeyRanges(own.hashes, own.columns, near.first, near.last)
        if not len(wanted):
            return
        sorted_keys = Run.build(self._prefix, keys, None)
        place_of = inverse(sorted_keys.find(keys))
        share_hashes = bool((sorted_keys.hashes[1:] == sorted_keys.hashes[:-1]).any())
        width = len(self._prefix.key)
        for run in self._transaction.scan_prefix(self._schema.name, wanted):
            rows = self._live(run)
            prefixes = from_columns(rows.keys.columns[:width], self._prefix.key, len(rows))
            # The hash identifies a row's grouping key unless two keys share a hash.
            found = (
                sorted_keys.find(Keys(rows.hashes, prefixes))
                if share_hashes
                else np.searchsorted(sorted_keys.hashes, rows.hashes)
            )
            own = from_columns(rows.keys.columns[width:], self._own, len(rows))
            yield Entries(
                place_of[found], own, from_columns(rows.values.columns[: len(self._values)], self._values, len(rows))
            )

    def are_many(self, keys: Keys) -> BoolArray:
        """Return which keys are known to have too many entries to read all of them."""
        return np.isin(keys.hashes, self._transaction.crowded(self._schema.name))

    def _live(self, run: Run) -> Run:
        if self._expiry is None:
            return run
        return Run(run.schema, filter_rows(run.batch, expires_of(run.values) > self._expiry.now_ms))

    def keys_of(self, keys: Keys, own_keys: pa.RecordBatch | pa.Table) -> Keys:
        """Return the full keys of entries; row i belongs to grouping key i."""
        own = TableSchema(self._schema.name, self._own, pa.schema([])).conform(own_keys, "key")
        columns = [*keys.columns.columns, *own.columns]
        return Keys(keys.hashes, from_columns(columns, self._schema.key, len(keys)))

    def at(self, keys: Keys) -> KeyRows:
        """Return the rows of full keys, to read and write."""
        return open_rows(self._transaction, self._schema.name, self._expiry, keys)

    def delete_all(self, keys: Keys) -> None:
        """Remove all entries of the given grouping keys."""
        if len(keys):
            self._transaction.delete_prefix(self._schema.name, keys)
