"""One state table with several rows for each key: the elements of lists, the entries of maps.

A row's key begins with the grouping key, whose hash all rows of one key share::

    l.visits                             m.counts
    user   seq            page           user   entry.page   n
    "ann"  8589934592     "/"            "ann"  "/"          3
    "ann"  8589934593     "/cart"        "ann"  "/cart"      1

So all entries of many keys are read by one scan of their prefixes, and an entry is found and written by its whole key.

A list's element numbers only grow, so appending need not read the list: a number is the version that its micro-batch
commits, times 2³², plus a count within the call of the shard.
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
    """Return elements, or their expiry, renumbered as if written some versions earlier, for a restored query."""
    place = 1 + len(run.schema.key)  # the number is the last key column, behind hash and deletion mark
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
    """Some entries."""

    places: IntArray  #: Which of the keys asked for each belongs to
    own_keys: pa.RecordBatch
    values: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.places)

    @property
    def size_bytes(self) -> int:
        """Bytes of the columns."""
        return int(self.own_keys.nbytes + self.values.nbytes)

    def take(self, rows: IntArray) -> Entries:
        """Return the entries at `rows`, in their order."""
        return Entries(self.places[rows], take(self.own_keys, rows), take(self.values, rows))


class Ranges(NamedTuple):
    """Ranges of a time in microseconds, or of a number; those of one key do not overlap."""

    key: IntArray  #: Which of the keys asked for each belongs to
    first: IntArray
    last: IntArray  #: Inclusive


class EntryRows:
    """The entries of one table in one transaction, by `grouping` key columns; for one thread at a time."""

    def __init__(self, transaction: Transaction, schema: TableSchema, grouping: int, expiry: Expiry | None) -> None:
        self._transaction = transaction
        self._schema = schema
        self._prefix = TableSchema(schema.name, schema.prefix(grouping).key, pa.schema([]))
        self._own = pa.schema(list(schema.key)[grouping:])
        self._values = pa.schema([field for field in schema.value if expiry is None or field.name != EXPIRES])
        self._expiry = expiry

    @property
    def own_key_types(self) -> pa.Schema:
        """The key columns beyond the grouping key."""
        return self._own

    @property
    def value_types(self) -> pa.Schema:
        """The value columns."""
        return self._values

    def scan(self, keys: Keys, near: Ranges | None = None) -> Iterator[Entries]:
        """Yield the unexpired entries of distinct grouping keys, in any order.

        `near`: only those whose first own key column is in a range of their key. Others cost next to nothing.
        """
        asked = keys
        if near is not None:
            own = keys.take(near.key)
            asked = KeyRanges(own.hashes, own.columns, near.first, near.last)
        if not len(asked):
            return
        sorted_keys = Run.build(self._prefix, keys, None)
        place_of = inverse(sorted_keys.find(keys))
        share_hashes = bool((sorted_keys.hashes[1:] == sorted_keys.hashes[:-1]).any())
        width = len(self._prefix.key)
        for run in self._transaction.scan_prefix(self._schema.name, asked):
            rows = self._live(run)
            prefixes = from_columns(rows.keys.columns[:width], self._prefix.key, len(rows))
            # A row begins with one of the keys: with the one of its hash, where no two have the same.
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
        """Return which keys are known to have very many entries, too many to read them all."""
        return np.isin(keys.hashes, self._transaction.crowded(self._schema.name))

    def _live(self, run: Run) -> Run:
        if self._expiry is None:
            return run
        return Run(run.schema, filter_rows(run.batch, expires_of(run.values) > self._expiry.now_ms))

    def keys_of(self, keys: Keys, own_keys: pa.RecordBatch | pa.Table) -> Keys:
        """Return the whole keys of entries; row i belongs to grouping key i."""
        own = TableSchema(self._schema.name, self._own, pa.schema([])).conform(own_keys, "key")
        columns = [*keys.columns.columns, *own.columns]
        return Keys(keys.hashes, from_columns(columns, self._schema.key, len(keys)))

    def at(self, keys: Keys) -> KeyRows:
        """Return the rows of whole keys, to read and write."""
        return open_rows(self._transaction, self._schema.name, self._expiry, keys)

    def delete_all(self, keys: Keys) -> None:
        """Remove all entries of some grouping keys."""
        if len(keys):
            self._transaction.delete_prefix(self._schema.name, keys)
