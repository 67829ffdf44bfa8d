"""Shard functions that join two streams; `holdfast.spark_integration.operators.joining` defines the joins.

``join(…, within=…)``: pairs of rows with equal keys and times at most `within` apart::

    left    ──────────●──────────────▶ time     a row waits for matches from the other side until the watermark has
    right        [────┴────)                    passed the row's time by more than `within`
                 └ within ┘

    j.left                                     j.right
    order   at      number   amount            order   paid    number   method   matched
    7       09:00   …        12.5              7       09:03   …        "card"   true

State stores the waiting rows. `matched` is stored only for a side whose unmatched rows are output.

``asof_join(…)``: each left row with the latest right row at or before its time::

    left    ─────────────●──▶ time      a left row waits until the watermark reaches its time: earlier right rows may
    right   ──●──●─────●───●─           still arrive. A right row waits until `tolerance` after its own time
                       └─┘

    j.left                                     s.right
    currency   at      number   amount         currency   at      rate
    "EUR"      09:00   …        12.5           "EUR"      08:58   1.1

If several right rows have the same key and time, the last to arrive replaces the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from holdfast import clock
from holdfast.backends.arrow.rows import (
    BoolArray,
    IntArray,
    from_columns,
    order_numbers,
    order_rows,
    storage_type,
    take,
    take_rows,
    to_bools,
)
from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.spark_integration.operators.places import Places
from holdfast.spark_integration.processor.state.variable_tables import free_name
from holdfast.spark_integration.shard.operator import ShardInput
from holdfast.spark_integration.spark_types import conform_output
from holdfast.spark_integration.tables.entry_rows import EntryRows, Ranges
from holdfast.spark_integration.tables.restarting import OperatorFunction
from holdfast.spark_integration.timers import AT_ONCE_BYTES, KeysAtOnce
from holdfast.spark_integration.ttl.ends import Ends, due_of, microseconds, microseconds_or_0
from holdfast.spark_integration.vectorised.arrays import shown_keys, without_views

#: Input columns for a row's side and time.
IS_LEFT, AT = "__holdfast_is_left", "__holdfast_at"


@dataclass(frozen=True)
class JoinSide:
    table: str
    key_types: pa.Schema
    time: pa.Field
    value_types: pa.Schema  #: The columns other than key and time
    is_numbered: bool = True  #: Whether to keep all rows with the same key and time; else only the last to arrive
    #: Whether the last state column records if a row has matched
    records_matches: bool = False

    @cached_property
    def state(self) -> TableSchema:
        """The state table of the side's waiting rows."""
        names = pa.schema([*self.key_types, self.time, *self.value_types])
        number = [pa.field(free_name("number", names), pa.int64())] if self.is_numbered else []
        matched = [pa.field(free_name("matched", names), pa.bool_())] if self.records_matches else []
        key, value = [*self.key_types, self.time, *number], [*self.value_types, *matched]
        return TableSchema.of(self.table, pa.schema(key), pa.schema(value))

    @cached_property
    def types(self) -> pa.Schema:
        """The side's columns without the key."""
        return pa.schema([self.time, *self.value_types])


@dataclass
class SideRows:
    """One side's rows in a call."""

    side: JoinSide
    key: IntArray  #: Index of each row's key in the call's keys
    at: pa.Array
    values: pa.RecordBatch
    can_match: IntArray  #: Indices of rows with a time and no null in the key: as in SQL, null keys never match
    has_matched: BoolArray  #: Set for each row that has matched

    @cached_property
    def at_us(self) -> IntArray:
        """The times in microseconds; 0 for a null."""
        return microseconds_or_0(self.at)

    @property
    def times(self) -> KeyedTimes:
        """Keys and times of the rows that can match."""
        return KeyedTimes(self.key[self.can_match], self.at_us[self.can_match])

    @property
    def row_bytes(self) -> int:
        return int(self.values.nbytes) // max(1, len(self.key))

    def shown(self, rows: IntArray) -> list[pa.Array]:
        """Return the time and value columns of the given rows."""
        return [self.at.take(pa.array(rows)), *take(self.values, rows).columns]


class Waiting(NamedTuple):
    """Waiting rows of one side, each with its end time."""

    new: SideRows
    rows: IntArray
    end_us: IntArray


@dataclass(frozen=True)
class Sides:
    key_types: pa.Schema
    left: JoinSide
    right: JoinSide
    output_types: pa.Schema

    @cached_property
    def grouping(self) -> TableSchema:
        """The key columns, which determine a row's shard."""
        return self.left.state.prefix(len(self.key_types))

    @cached_property
    def _index_key(self) -> pa.Schema:
        """The key of a row of either side, and its side."""
        own = {"at": self.left.time.type, "number": pa.int64(), "is_left": pa.bool_()}
        return pa.schema([*self.key_types, *((free_name(name, self.key_types), t) for name, t in own.items())])

    def tables(self) -> Mapping[str, TableSchema]:
        return {side.table: side.state for side in (self.left, self.right)} | dict(Ends.tables(self._index_key))

    def rows_of(self, batch: ShardInput) -> tuple[Keys, SideRows, SideRows]:
        """Return the call's distinct keys and the rows of each side."""
        keys, order = batch.distinct_keys(self.grouping)
        batch.counts.keys += len(keys)
        of_row = order.key_of_row
        is_whole = ~np.logical_or.reduce([to_bools(column.is_null()) for column in keys.columns.columns])
        is_left = to_bools(batch.rows.column(IS_LEFT))
        found = []
        for side, is_own in ((self.left, is_left), (self.right, ~is_left)):
            rows = order.rows[is_own[order.rows]]
            own = take_rows(batch.rows.select([AT, *side.value_types.names]).to_batches(), rows)
            at = _stored(own.select([AT]), pa.schema([side.time.with_name(AT)])).column(0)
            values = _stored(own.drop_columns([AT]), side.value_types)
            can_match = np.flatnonzero(is_whole[of_row[rows]] & to_bools(at.is_valid()))
            found.append(SideRows(side, of_row[rows], at, values, can_match, np.zeros(len(rows), np.bool_)))
        return keys, found[0], found[1]

    def keep(self, waiting: Iterable[Waiting], keys: Keys, transaction: Transaction, ends: Ends) -> None:
        """Store waiting rows and their end times."""
        entries, end_us = zip(*((self._entries(one, keys, transaction), one.end_us) for one in waiting), strict=True)
        ends.add(Keys.concat(entries), np.concatenate(end_us))

    def _entries(self, waiting: Waiting, keys: Keys, transaction: Transaction) -> Keys:
        """Store rows of one side; return their keys in the index of end times."""
        new, rows = waiting.new, waiting.rows
        grouping, n = keys.take(new.key[rows]), len(rows)
        of_time = [*grouping.columns.columns, new.at.take(pa.array(rows))]
        numbers = pa.array((int(clock.new_id(), 16) >> 2) + np.arange(n)) if new.side.is_numbered else None
        own = of_time if numbers is None else [*of_time, numbers]
        stored = Keys(grouping.hashes, from_columns(own, new.side.state.key, n))
        self.put(new.side, stored, take(new.values, rows).columns, new.has_matched[rows], transaction)
        (index,) = Ends.tables(self._index_key).values()
        of_side = [pa.nulls(n, pa.int64()) if numbers is None else numbers, pa.repeat(new.side is self.left, n)]
        return Keys(grouping.hashes, from_columns([*of_time, *of_side], index.key, n))

    def put(
        self, side: JoinSide, keys: Keys, values: list[pa.Array], has_matched: BoolArray, transaction: Transaction
    ) -> None:
        """Write rows of one side, given their full state keys and their columns."""
        columns = [*values, pa.array(has_matched)] if side.records_matches else values
        transaction.put(side.table, keys, from_columns(columns, side.state.value, len(keys)))

    def by_side(self, over: Keys) -> Iterator[tuple[JoinSide, Keys]]:
        """Yield each side, left first, with the full keys of its rows among the given index keys."""
        is_left = to_bools(over.columns.columns[-1])
        for side, is_own in ((self.left, is_left), (self.right, ~is_left)):
            keys, own = over.take(np.flatnonzero(is_own)), side.state.key
            yield side, Keys(keys.hashes, from_columns(keys.columns.columns[: len(own)], own, len(keys)))

    def grouping_of(self, keys: Keys) -> Keys:
        """Return the grouping keys of rows, given their full keys."""
        columns = keys.columns.columns[: len(self.key_types)]
        return Keys(keys.hashes, from_columns(columns, self.grouping.key, len(keys)))

    def time_of(self, keys: Keys) -> pa.Array:
        """Return the times of rows, given their full keys."""
        return keys.columns.column(len(self.key_types))

    def shown(self, keys: Keys, columns: Mapping[str, list[pa.Array]], operator: str) -> pa.RecordBatch:
        """Build output rows from time and value columns by table name; a missing side is null."""
        shown = shown_keys(keys, self.key_types)
        for side in (self.right, self.left):  # the left side wins a shared name
            nulls = [pa.nulls(len(keys), field.type) for field in side.types]
            shown |= dict(zip(side.types.names, columns.get(side.table, nulls), strict=False))
        output = {name: shown[name] for name in self.output_types.names}
        return conform_output(pa.table(output), self.output_types, operator)


def _stored(rows: pa.Table, types: pa.Schema) -> pa.RecordBatch:
    """Convert columns to their storage types."""
    columns = [without_views(rows.column(field.name)) for field in types]
    stored = [column.cast(storage_type(field.type)) for column, field in zip(columns, types, strict=True)]
    schema = pa.schema([pa.field(field.name, storage_type(field.type)) for field in types])
    return from_columns(stored, schema, rows.num_rows)


#: A row of time t may match a row at the watermark, so it ends a millisecond after t + within, as in Spark.
BEYOND_MS = 1


@dataclass(frozen=True)
class Join(OperatorFunction):
    """The `ShardFunction` of a join."""

    sides: Sides  #: `records_matches` is set for sides whose unmatched rows are output
    within_us: int

    def tables(self) -> Mapping[str, TableSchema]:
        return self.sides.tables()

    def configuration(self) -> Mapping[str, str]:
        left, right = self.sides.left.records_matches, self.sides.right.records_matches
        how = ("full" if right else "left") if left else ("right" if right else "inner")
        return {"operator": "join", "kind of join": how, "join's within": f"{self.within_us} microseconds"}

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        ends = Ends(transaction, batch.times)
        if batch.rows.num_rows:
            yield from _Call(self, batch, transaction, ends).output()
        with transaction.deleting() as delete:
            for some in ends.over(batch.counts):
                for side, keys in self.sides.by_side(some):
                    delete(side.table, keys)
                    if side.records_matches:
                        yield self._alone(side, keys, transaction, batch.operator)
        return ends.earliest_ms()

    def _alone(self, side: JoinSide, keys: Keys, transaction: Transaction, operator: str) -> pa.RecordBatch:
        """Return the rows that never matched."""
        found = transaction.get(side.table, keys)
        rows = np.flatnonzero(found.exists & ~to_bools(found.values.columns[-1]))
        alone, values = keys.take(rows), take(found.values, rows).columns
        columns = {side.table: [self.sides.time_of(alone), *values]}
        return self.sides.shown(self.sides.grouping_of(alone), columns, operator)


class _Call:
    """Joins a call's rows with each other and with waiting rows, then stores them to wait."""

    def __init__(self, join: Join, batch: ShardInput, transaction: Transaction, ends: Ends) -> None:
        self._join, self._sides = join, join.sides
        self._batch = batch
        self._transaction = transaction
        self._ends = ends
        self._keys, self._left, self._right = join.sides.rows_of(batch)

    def output(self) -> Iterator[pa.RecordBatch]:
        within_us, keys = self._join.within_us, len(self._keys)
        near_left, near_right = (Near(new.times, within_us, keys) for new in (self._left, self._right))
        yield from self._matched(self._left, self._right, near_right)
        yield from self._matched_waiting(self._sides.left, self._right, near_right)
        yield from self._matched_waiting(self._sides.right, self._left, near_left)
        left = yield from self._waiting(self._left)
        right = yield from self._waiting(self._right)
        self._sides.keep((left, right), self._keys, self._transaction, self._ends)

    def _matched_waiting(self, side: JoinSide, new: SideRows, near: Near) -> Iterator[pa.RecordBatch]:
        entries = EntryRows(self._transaction, side.state, len(self._sides.key_types), None)
        for some in entries.scan(self._keys, near.ranges(self._join.within_us)):
            every, has_matched = np.arange(len(some)), np.zeros(len(some), np.bool_)
            waiting = SideRows(side, some.places, some.own_keys.column(0), some.values, every, has_matched)
            yield from self._matched(waiting, new, near)
            if side.records_matches:
                first = np.flatnonzero(has_matched & ~to_bools(some.values.columns[-1]))
                keys = entries.keys_of(self._keys.take(waiting.key[first]), take(some.own_keys, first))
                values = take(some.values, first).columns[:-1]
                self._sides.put(side, keys, values, has_matched[first], self._transaction)

    def _matched(self, rows: SideRows, new: SideRows, near: Near) -> Iterator[pa.RecordBatch]:
        """Yield the joined pairs of `rows` and nearby `new` rows."""
        for of_rows, of_new in near.pairs(rows.times, rows.row_bytes + new.row_bytes):
            row, other = rows.can_match[of_rows], new.can_match[of_new]
            rows.has_matched[row] = True
            new.has_matched[other] = True
            columns = {rows.side.table: rows.shown(row), new.side.table: new.shown(other)}
            yield self._sides.shown(self._keys.take(rows.key[row]), columns, self._batch.operator)

    def _waiting(self, new: SideRows) -> Generator[pa.RecordBatch, None, Waiting]:
        """Return the rows to store; for an outer side, yield unmatched rows that can no longer match."""
        end_us = new.at_us + self._join.within_us + BEYOND_MS * 1000
        waits = to_bools(new.at.is_valid()) & (due_of(end_us) >= (self._batch.times.watermark_ms or 0))
        if new.side.records_matches:
            alone = np.flatnonzero(~waits & ~new.has_matched)
            keys = self._keys.take(new.key[alone])
            yield self._sides.shown(keys, {new.side.table: new.shown(alone)}, self._batch.operator)
            rows = np.flatnonzero(waits)
        else:
            rows = new.can_match[waits[new.can_match]]
        return Waiting(new, rows, end_us[rows])


@dataclass(frozen=True)
class AsofJoin(OperatorFunction):
    """The `ShardFunction` of an as-of join; its output contains only the left side's time."""

    sides: Sides  #: The right side is not numbered
    tolerance_us: int

    def tables(self) -> Mapping[str, TableSchema]:
        return self.sides.tables()

    def configuration(self) -> Mapping[str, str]:
        # The tolerance may change: stored right rows keep their end times.
        return {"operator": "asof_join"}

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        ends = Ends(transaction, batch.times)
        if batch.rows.num_rows:
            yield self._kept(batch, transaction, ends)
        at_once = KeysAtOnce()
        with transaction.deleting() as delete:
            for left in self._over(ends.over(batch.counts), delete):
                yield from self._matched(left, transaction, at_once, batch.operator)
        return ends.earliest_ms()

    def _kept(self, batch: ShardInput, transaction: Transaction, ends: Ends) -> pa.RecordBatch:
        """Store the rows that can match; return the left rows that cannot."""
        keys, left, right = self.sides.rows_of(batch)
        both = (left, 0), (right, self.tolerance_us)
        waiting = [Waiting(new, new.can_match, new.at_us[new.can_match] + wait_us) for new, wait_us in both]
        self.sides.keep(waiting, keys, transaction, ends)
        alone = np.setdiff1d(np.arange(len(left.key)), left.can_match)
        return self.sides.shown(keys.take(left.key[alone]), {left.side.table: left.shown(alone)}, batch.operator)

    def _over(self, over: Iterator[Keys], delete: Callable[[str, Keys], None]) -> Iterator[Keys]:
        """Delete the ended rows of both sides; yield the keys of the left rows in large groups."""
        waiting: list[Keys] = []
        for some in over:
            (left, keys), (right, others) = self.sides.by_side(some)
            delete(left.table, keys)
            delete(right.table, others)
            waiting.append(keys)
            if sum(map(len, waiting)) >= _AT_ONCE:
                yield Keys.concat(waiting)
                waiting = []
        if any(map(len, waiting)):
            yield Keys.concat(waiting)

    def _matched(
        self, left: Keys, transaction: Transaction, at_once: KeysAtOnce, operator: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield left rows, each with the latest right row at its time."""
        place, right = self._latest(left, transaction)
        start = 0
        while start < len(left):
            rows = slice(start, start + at_once.count)
            some, start = left.slice(rows.start, rows.stop), rows.stop
            values = transaction.get(self.sides.left.table, some).values
            matches = right.take(pa.array(place[rows], mask=place[rows] < 0))
            columns = {
                self.sides.left.table: [self.sides.time_of(some), *values.columns],
                self.sides.right.table: [pa.nulls(len(some), self.sides.right.time.type), *matches.columns],
            }
            shown = self.sides.shown(self.sides.grouping_of(some), columns, operator)
            at_once.learn(len(some), shown.nbytes)
            yield shown

    def _latest(self, left: Keys, transaction: Transaction) -> tuple[IntArray, pa.Table]:
        """Return the index of each row's match, or -1, and the table of matches."""
        grouping = self.sides.grouping_of(left)
        order = order_rows(grouping.hashes, grouping.columns)
        keys = grouping.take(order.rows[order.first])
        rows = KeyedTimes(order.key_of_row, microseconds(self.sides.time_of(left)))
        best = np.full(len(left), np.iinfo(np.int64).min)
        pieces: list[pa.RecordBatch] = []
        place, at_place = np.full(len(left), -1), 0  # index of the best row across all pieces
        entries = EntryRows(transaction, self.sides.right.state, len(keys.columns.columns), None)
        for some in entries.scan(keys, Near(rows, self.tolerance_us, len(keys)).ranges(0)):
            own = np.flatnonzero(np.isin(rows.key, some.places))
            of_piece = KeyedTimes(some.places, microseconds(some.own_keys.column(0)))
            found = Near(of_piece, self.tolerance_us, len(keys)).latest(rows.take(own))
            is_better = (found >= 0) & (of_piece.at[found] > best[own])
            own, found = own[is_better], found[is_better]
            each, which = np.unique(found, return_inverse=True)  # several rows may share a match
            best[own], place[own] = of_piece.at[found], at_place + which
            pieces.append(take(some.values, each))
            at_place += len(each)
        return place, pa.Table.from_batches(pieces, self.sides.right.state.value).combine_chunks()


#: The maximum number of pairs per output batch, as a row may have millions; also the group size for matching rows.
_AT_ONCE = 65_536


@dataclass(frozen=True)
class KeyedTimes:
    key: IntArray  #: Index of each row's key in the call's keys
    at: IntArray  #: Time in microseconds

    def __len__(self) -> int:
        return len(self.key)

    def take(self, rows: IntArray) -> KeyedTimes:
        return KeyedTimes(self.key[rows], self.at[rows])


class Near:
    """Finds pairs of rows with the same key (a number below `keys`) whose times differ by at most `within_us`."""

    def __init__(self, rows: KeyedTimes, within_us: int, keys: int) -> None:
        self._rows = rows
        self._within_us = within_us
        self._places = Places(rows.at, keys)
        places = self._places.of(rows.key, rows.at)
        self._order = order_numbers(places.view(np.uint64))
        self._sorted = places[self._order]

    def ranges(self, after_us: int) -> Ranges:
        """Return the time ranges near the rows: from `within_us` before a row to `after_us` after it."""
        key, at = self._rows.key[self._order], self._rows.at[self._order]
        is_first, is_last = np.ones((2, len(key)), np.bool_)
        is_first[1:] = (key[1:] != key[:-1]) | (at[1:] - at[:-1] > self._within_us + after_us)
        is_last[:-1] = is_first[1:]
        return Ranges(key[is_first], at[is_first] - self._within_us, at[is_last] + after_us)

    def pairs(self, others: KeyedTimes, pair_bytes: int) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield index pairs (of `others`, of rows) that are near each other, in batches of bounded size."""
        first = np.searchsorted(self._sorted, self._places.of(others.key, others.at - self._within_us))
        end = np.searchsorted(self._sorted, self._places.of(others.key, others.at + self._within_us, "right"))
        so_far = np.cumsum(end - first)
        total = int(so_far[-1]) if len(so_far) else 0
        at_once = max(1, min(_AT_ONCE, AT_ONCE_BYTES // max(1, pair_bytes)))
        for start in range(0, total, at_once):
            pair = np.arange(start, min(start + at_once, total))
            other = np.searchsorted(so_far, pair, side="right")
            yield other, self._order[end[other] - (so_far[other] - pair)]

    def latest(self, others: KeyedTimes) -> IntArray:
        """Return, for each of `others`, the index of the latest near row at or before its time, or -1."""
        if not len(self._order):
            return np.full(len(others), -1)
        found = self._order[np.searchsorted(self._sorted, self._places.of(others.key, others.at, "right")) - 1]
        row = self._rows.take(found)
        is_near = (row.key == others.key) & (row.at <= others.at) & (row.at >= others.at - self._within_us)
        return np.where(is_near, found, -1)
