"""``groupBy(…).session(…).agg(…)``: aggregates each key's sessions, which merge when a row bridges the gap.

::

    rows        [──) [──)       [──)        each row starts as a session from its time to the end of the gap
    stored  [──────)
            ─────────────────── time        sorted by key and start, a session begins where no earlier one reaches
    now     [───────────)       [──)

State stores one row per open session, by key and start::

    user   session_start   session_end   n
    "ann"  09:00           09:40         3
    "ann"  11:00           11:30         1
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField

from holdfast.backends.arrow.rows import BoolArray, IntArray, RowOrder, order_numbers, take
from holdfast.backends.run import Keys, TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.mvcc import Transaction
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.operators.accumulators import (
    Accumulator,
    lifted,
    reduced,
    require_same_aggregates,
    results,
    state_types,
)
from holdfast.spark_integration.operators.aggregates import Aggregate
from holdfast.spark_integration.operators.aggregation import (
    WINDOW_END,
    WINDOW_START,
    Aggregated,
    aggregated,
    into_window,
    require_free,
)
from holdfast.spark_integration.operators.places import Places
from holdfast.spark_integration.plan.arguments import has_no_result
from holdfast.spark_integration.plan.definition import BEHIND_ANOTHER, KeyedRows, operator_plan
from holdfast.spark_integration.plan.grouping_keys import Grouping
from holdfast.spark_integration.processor.state.variable_tables import SEVERAL
from holdfast.spark_integration.shard.operator import ShardInput
from holdfast.spark_integration.spark_types import conform_output, types_of_keys
from holdfast.spark_integration.tables.entry_rows import Entries, EntryRows, Ranges
from holdfast.spark_integration.tables.restarting import OperatorFunction
from holdfast.spark_integration.ttl.ends import Ends, microseconds, microseconds_or_0, timestamps
from holdfast.spark_integration.vectorised.arrays import shown_keys

#: The last key column, and the first value column.
SESSION_START, SESSION_END = "session_start", "session_end"
# The first search for the session before a new one reaches back this many times the longest new session.
_FIRST_REACH, _REACH_GROWTH = 64, 4
_LARGEST_REACH_US = 1 << 60


@dataclass(frozen=True)
class Sessions(OperatorFunction):
    """The `ShardFunction` of sessions."""

    key_types: pa.Schema  #: The key columns, followed by `SESSION_START`
    accumulators: tuple[Accumulator, ...]
    output_types: pa.Schema
    column: str  #: The output column for the session: a struct of start and end
    is_streaming: bool  #: Whether sessions wait for the watermark; else all are output at once

    @cached_property
    def _state(self) -> TableSchema:
        end = self.key_types.field(SESSION_START).with_name(SESSION_END)
        values = pa.schema([end, *state_types(self.accumulators)])
        return TableSchema.of(SEVERAL, self.key_types, values)

    @property
    def _grouping(self) -> TableSchema:
        return self._state.prefix(len(self.key_types) - 1)

    def tables(self) -> Mapping[str, TableSchema]:
        return {SEVERAL: self._state, **Ends.tables(self.key_types)}

    def configuration(self) -> Mapping[str, str]:
        # The gap may change: stored sessions keep their end times.
        return {"operator": "session"}

    def require_same_columns(self, stored: StoredTables) -> None:
        require_same_aggregates(stored, self.tables())

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        ends = Ends(transaction, batch.times)
        if batch.rows.num_rows:
            keys, sessions = self._with_rows(batch, transaction, ends)
            batch.counts.keys += len(keys)
            if not self.is_streaming:
                yield self._shown(keys, sessions, batch.operator)
        yield from self._over(ends, batch, transaction)
        return ends.earliest_ms()

    def _with_rows(self, batch: ShardInput, transaction: Transaction, ends: Ends) -> tuple[Keys, pa.Table]:
        """Merge rows into their keys' sessions; return the changed sessions."""
        keys, by_key = batch.distinct_keys(self._grouping)
        of_row = by_key.key_of_row
        entries = EntryRows(transaction, self._state, len(self._grouping.key), None)
        row_start, row_end = microseconds(batch.rows[WINDOW_START]), microseconds(batch.rows[WINDOW_END])
        merged = _Merged.of(of_row, row_start, row_end, len(of_row))
        stored = _stored(merged, entries, keys)

        own = [lifted(self.accumulators, batch.rows)]
        own += [pa.Table.from_batches([some.values.select(own[0].schema.names)]) for some in stored]
        states = pa.concat_tables(own)
        key = np.concatenate([of_row, *(some.places for some in stored)])
        start = np.concatenate([row_start, *(microseconds(some.own_keys.column(0)) for some in stored)])
        end = np.concatenate([row_end, *(microseconds(some.values.column(0)) for some in stored)])
        if len(key) > len(of_row):
            merged = _Merged.of(key, start, end, len(of_row))

        kept = np.flatnonzero(merged.has_rows)
        whole = self._keys_of(entries, keys, merged.key[kept], merged.start[kept])
        gone = merged.gone
        if len(gone):
            transaction.delete(SEVERAL, self._keys_of(entries, keys, key[gone], start[gone]))
        time = self.key_types.field(SESSION_START).type
        found = reduced(self.accumulators, states, merged.order).take(pa.array(kept))
        sessions = found.add_column(0, SESSION_END, timestamps(merged.end[kept], time))
        transaction.put(SEVERAL, whole, sessions)
        new = np.flatnonzero(~merged.was_stored[kept])
        ends.add(whole.take(new), merged.end[kept][new])
        return whole, sessions

    def _keys_of(self, entries: EntryRows, keys: Keys, key: IntArray, start: IntArray) -> Keys:
        time = self.key_types.field(SESSION_START).type
        return entries.keys_of(keys.take(key), pa.table({SESSION_START: timestamps(start, time)}))

    def _over(self, ends: Ends, batch: ShardInput, transaction: Transaction) -> Iterator[pa.RecordBatch]:
        """Delete and yield ended sessions; sessions that have grown wait for their new end."""
        with transaction.deleting() as delete:
            for keys in ends.over(batch.counts):
                found = transaction.get(SEVERAL, keys)
                end_us = np.where(found.exists, microseconds_or_0(found.values.column(0)), 0)
                rows = np.flatnonzero(found.exists & ~ends.go_on(keys, end_us))
                ended, sessions = keys.take(rows), pa.Table.from_batches([take(found.values, rows)])
                delete(SEVERAL, ended)
                yield self._shown(ended, sessions, batch.operator)

    def _shown(self, keys: Keys, sessions: pa.Table, operator: str) -> pa.RecordBatch:
        columns = shown_keys(keys, self.key_types)
        into_window(columns, self.column, microseconds(sessions.column(SESSION_END)))
        columns |= results(self.accumulators, sessions.drop_columns([SESSION_END]))
        return conform_output(pa.table(columns), self.output_types, operator)


@dataclass(frozen=True)
class _Merged:
    """Sessions merged from parts: new rows and stored sessions."""

    order: RowOrder  #: The order of the parts by session
    places: Places
    key: IntArray
    start: IntArray
    end: IntArray
    has_rows: BoolArray  #: Whether the session contains a new row; else it is unchanged
    was_stored: BoolArray  #: Whether a session was stored under the same key and start
    gone: IntArray  #: The stored parts whose start is no longer the start of a session

    @classmethod
    def of(cls, key: IntArray, start: IntArray, end: IntArray, rows: int) -> _Merged:
        """Merge parts that touch or overlap; the first `rows` parts are new rows."""
        places = Places(np.concatenate([start, end]), int(key.max()) + 1)
        is_row = np.arange(len(key)) < rows
        starts = places.of(key, start)
        # At equal starts, stored sessions sort first, so that `was_stored` is set.
        order = order_numbers((2 * starts + is_row).view(np.uint64))
        is_stored = ~is_row[order]
        # The largest end so far of each key: all places of a key precede those of the next key.
        last = np.maximum.accumulate(places.of(key, end)[order])
        first = np.ones(len(order), np.bool_)
        first[1:] = starts[order[1:]] > last[:-1]
        begins = np.flatnonzero(first)
        of_part = np.cumsum(first) - 1
        has_rows = np.zeros(len(begins), np.bool_)
        has_rows[of_part[~is_stored]] = True
        found = key[order[begins]]
        return cls(
            RowOrder(order, first),
            places,
            found,
            start[order[begins]],
            places.times(found, last[np.append(begins[1:], len(order)) - 1]),
            has_rows,
            is_stored[begins],
            order[is_stored & ~first],
        )

    @cached_property
    def _ends(self) -> IntArray:
        return self.places.of(self.key, self.end)

    def touching(self, entries: Iterable[Entries]) -> list[Entries]:
        """Return the stored sessions that touch or overlap a session of this object, usually few per key."""
        ends = self._ends
        found = []
        for some in entries:
            start, end = microseconds(some.own_keys.column(0)), microseconds(some.values.column(0))
            # For each stored session, find the first merged one that does not end before its start.
            first = np.searchsorted(ends, self.places.of(some.places, start))
            near = np.minimum(first, len(ends) - 1)
            is_near = (first < len(ends)) & (self.key[near] == some.places) & (self.start[near] <= end)
            found.append(some.take(np.flatnonzero(is_near)))
        return found


def _stored(merged: _Merged, entries: EntryRows, keys: Keys) -> list[Entries]:
    """Return the stored sessions that touch `merged`; of keys with many sessions, only those near it are read."""
    found: list[Entries] = []
    are_many, is_left = entries.are_many(keys), np.ones(len(keys), np.bool_)
    while len(few := np.flatnonzero(is_left & ~are_many)):
        is_left = np.zeros(len(keys), np.bool_)
        for some in entries.scan(keys.take(few)):
            found += merged.touching([replace(some, places=few[some.places])])
            are_many = entries.are_many(keys)
            if are_many[few].any():  # as this scan has shown; all keys of smaller hashes are done
                is_left = keys.hashes >= keys.hashes[few[some.places]].max(initial=0)
                break
        if are_many.any():
            is_done = ~(is_left | are_many)
            found = [some.take(np.flatnonzero(is_done[some.places])) for some in found]
    new = np.flatnonzero(are_many[merged.key])
    if len(new):
        found += merged.touching(_near(merged.key[new], merged.start[new], merged.end[new], entries, keys))
    return found


def _near(key: IntArray, start: IntArray, end: IntArray, entries: EntryRows, keys: Keys) -> Iterator[Entries]:
    """Yield the stored sessions that start within the sorted new sessions, and the last one before each.

    Stored sessions do not touch, so none before that one reaches further. The search goes back in growing steps, down
    to the previous new session, whose own search covers earlier times.
    """
    behind = np.full(len(key), np.iinfo(np.int64).min)
    behind[1:] = np.where(key[1:] == key[:-1], end[:-1] + 1, behind[1:])
    reach_us, last = _FIRST_REACH * max(1, int((end - start).max())), end
    while len(key):
        first = np.maximum(start - reach_us, behind) if reach_us < _LARGEST_REACH_US else behind
        found = list(entries.scan(keys, Ranges(key, first, last)))
        yield from found
        goes_on = first > behind
        if found:
            of = np.concatenate([some.places for some in found])
            at = np.concatenate([microseconds(some.own_keys.column(0)) for some in found])
            places = Places(np.concatenate([at, first, start]), len(keys))
            stored = np.sort(places.of(of, at))
            up_to_start = np.searchsorted(stored, places.of(key, start, "right"))
            goes_on &= up_to_start == np.searchsorted(stored, places.of(key, first))
        key, start, behind, last = key[goes_on], start[goes_on], behind[goes_on], first[goes_on] - 1
        reach_us *= _REACH_GROWTH


def by_session(found: Aggregated, name: str) -> DataFrame:
    """Define ``groupBy(…).session(…).agg(…)``. Raises `InvalidArgumentError`, for example without a watermark."""
    if found.df.isStreaming and not found.is_timed:
        raise InvalidArgumentError(
            "sessions are output once they end, which needs a watermark on their time column: "
            f"df.withWatermark('at', '10 seconds'){BEHIND_ANOTHER}"
        )
    start = found.df.schema[WINDOW_START]
    named_start = StructField(SESSION_START, start.dataType)
    for key in found.keys:
        require_free(key.field.name, SESSION_START)
    function = Sessions(
        types_of_keys([*(key.field for key in found.keys), named_start]),
        found.accumulators,
        found.output_types,
        found.output.fields[len(found.keys)].name,
        found.df.isStreaming,
    )
    rows = KeyedRows(found.df, found.keys, function)
    return operator_plan(rows, found.output, "append", name, is_timed=found.is_timed)


@dataclass(frozen=True)
class SessionStream:
    """A DataFrame grouped by key and by sessions; see `GroupedStream.session`."""

    df: DataFrame
    grouping: Grouping
    session: Column

    if not TYPE_CHECKING:  # type checkers report it themselves

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that suggests calling `agg`."""
            raise has_no_result(self, name, "groupBy(…).session(…).agg(n=holdfast.count())")

    def agg(self, *aggregates: Aggregate, name: str = "session", **named: Aggregate) -> DataFrame:
        """Aggregate each key's sessions, as ``groupBy(…, F.session_window(…)).agg(…)`` does, in append mode.

        Parameters
        ----------
        *aggregates : Aggregate
            Named as in Spark, such as ``max(delay)``, or by `Aggregate.alias`.
        name : str
            The operator's name, unique in the query; identifies its state permanently.
        **named : Aggregate
            Aggregates by output column.

        Returns
        -------
        pyspark.sql.DataFrame
            The keys, ``session_window`` with ``start`` and ``end``, and the aggregates, in Spark's types. Each
            session is output once, after the watermark has passed its end.

        Raises
        ------
        AnalysisException
            As in Spark: no such column, or a column of the wrong type.
        InvalidArgumentError
            No aggregate, no watermark, or an invalid name or setting. Raised before anything runs.
        """
        return by_session(aggregated(self.df, self.grouping, self.session, aggregates, named), name)


def by_sessions(df: DataFrame, grouping: Grouping, timeColumn: str | Column, gap: str | Column) -> SessionStream:
    """Group by sessions, like Spark's `session_window`. Raises `InvalidArgumentError` unless the gap is positive."""
    if isinstance(gap, str):
        end = F.lit("1970-01-01 00:00:00 UTC").cast("timestamp") + F.lit(gap).try_cast("interval")
        [[end_us]] = df.sparkSession.sql("SELECT * FROM VALUES (1) AS one(n)").select(F.unix_micros(end)).collect()
        if end_us is None or end_us <= 0:
            raise InvalidArgumentError("gap must be a positive duration, such as '5 minutes'", given=repr(gap))
    return SessionStream(df, grouping, F.session_window(timeColumn, gap))
