"""``groupBy(…).top(3, by="price")``: the first rows of each key in a ranking.

::

    rows ──────────────────┐
                           ├─▶ ranked by key ─▶ the first n ─▶ state ─▶ list: the changed lists
    the stored lists ──────┘                        │
                                                    └─▶ changes: rows that left or entered the list

State has one row per key and place::

    item   place   price   bidder
    "tea"  1       30      "bob"
    "tea"  2       25      "dan"

A row pushed out of the list is gone: it does not come back when the rows ahead of it expire.

``groupBy(…).latest(by="at")`` keeps one row per key, stored under the key alone::

    rows ─▶ the newest per key ─────┐
                                    ├─▶ the newer row ─▶ state ─▶ the changed rows
    the stored rows of these keys ──┘
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import AtomicType, IntegerType, NullType, StringType, StructField, StructType

from holdfast.backends.arrow.rows import (
    BoolArray,
    IntArray,
    RowOrder,
    inverse,
    null_rows,
    order_rows,
    storage_type,
    take,
    take_rows,
)
from holdfast.backends.run import Keys, TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.mvcc import Transaction
from holdfast.spark_integration.plan.arguments import checked_mode, duration_us
from holdfast.spark_integration.plan.definition import KeyedRows, operator_plan
from holdfast.spark_integration.plan.event_time import time_column_of
from holdfast.spark_integration.plan.grouping_keys import Grouping
from holdfast.spark_integration.plan.session import name_folding
from holdfast.spark_integration.processor.state.variable_tables import SEVERAL
from holdfast.spark_integration.shard.operator import STATE_TABLE, ShardFunction, ShardInput
from holdfast.spark_integration.spark_types import arrow_schema, conform_output, types_of_keys
from holdfast.spark_integration.tables.entry_rows import Entries, EntryRows
from holdfast.spark_integration.tables.restarting import OperatorFunction
from holdfast.spark_integration.transport.packed import HASH, quoted
from holdfast.spark_integration.ttl.ends import (
    NEVER,
    UNTIL,
    Ends,
    Ttl,
    forget_rows,
    until_us,
    with_until,
)
from holdfast.spark_integration.vectorised.arrays import best_rows, comparable, ranks, shown_keys, without_views

#: The last key column, counted from 1; output with lists.
PLACE = "place"
#: The column with a row's change; output with changes.
CHANGE_TYPE = "change_type"
Emits = Literal["list", "changes"]


@dataclass(frozen=True)
class Top(OperatorFunction):
    """The `ShardFunction` of ``top``."""

    #: The types of the grouping keys, and of the other columns
    key_types: pa.Schema
    value_types: pa.Schema
    output_types: pa.Schema
    ranking: Ranking
    places: int  #: The number of rows kept per key
    emits: Emits
    ttl: Ttl | None  #: Time to live of a key after its list's newest row; None for ever

    @cached_property
    def _state(self) -> TableSchema:
        key_types = self.key_types.append(pa.field(PLACE, pa.int32()))
        return TableSchema.of(SEVERAL, key_types, with_until(self.value_types, self.ttl))

    @property
    def _grouping(self) -> TableSchema:
        return self._state.prefix(len(self.key_types))

    def tables(self) -> Mapping[str, TableSchema]:
        return {SEVERAL: self._state, **(Ends.tables(self.key_types) if self.ttl else {})}

    def configuration(self) -> Mapping[str, str]:
        # The number of places may change: a longer list fills with the next rows.
        return {"operator": "top", "ranking": self.ranking.definition}

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        ends = None if self.ttl is None else self.ttl.ends(transaction, batch.times)
        entries = EntryRows(transaction, self._state, len(self.key_types), None)
        if ends is not None:
            self._forget(ends, entries, batch, transaction)
        if batch.rows.num_rows:
            yield from self._with_rows(batch, transaction, entries, ends)
        return None if self.ttl is None or ends is None else self.ttl.next_call_ms(ends)

    def _forget(self, ends: Ends, entries: EntryRows, batch: ShardInput, transaction: Transaction) -> None:
        """Remove expired lists."""
        with transaction.deleting() as delete:
            for keys in ends.over(batch.counts):
                order = order_rows(keys.hashes, keys.columns)
                each = keys.take(order.rows[order.first])
                stored = _Listed.of(entries.scan(each), self._state)
                is_gone = ~ends.go_on(each, stored.until_us(len(each), without_rows=0))
                delete(SEVERAL, stored.whole_keys(entries, each, np.flatnonzero(is_gone[stored.key])))

    def _with_rows(
        self, batch: ShardInput, transaction: Transaction, entries: EntryRows, ends: Ends | None
    ) -> Iterator[pa.RecordBatch]:
        """Rank the rows among their keys' stored rows; yield the changes."""
        keys, by_key = batch.distinct_keys(self._grouping)
        batch.counts.keys += len(keys)
        stored = _Listed.of(entries.scan(keys), self._state)
        key = np.concatenate([stored.key, by_key.key_of_row])  # among equal rows, stored rows come first
        order = self.ranking.order(key, pa.Table.from_batches([stored.values]), batch.rows)
        begins = np.flatnonzero(order.first)
        place = np.arange(1, len(order.rows) + 1) - begins[np.cumsum(order.first) - 1]
        in_list = place <= self.places
        source = order.rows[in_list]
        left = np.ones(len(stored), np.bool_)
        left[source[source < len(stored)]] = False
        changed = np.zeros(len(keys), np.bool_)
        changed[key[source[source >= len(stored)]]] = True
        changed[stored.key[left]] = True
        if not changed.any():
            return
        chosen = changed[key[source]]
        now = self._listed(batch, stored, key, source[chosen], place[in_list][chosen])
        self._store(transaction, entries, keys, stored, now)
        if ends is not None:
            until, before = now.until_us(len(keys)), stored.until_us(len(keys))
            ends.move(keys.take(np.flatnonzero(changed)), until[changed], before[changed])
        yield self._shown(batch, keys, stored, left, now)

    def _listed(self, batch: ShardInput, stored: _Listed, key: IntArray, source: IntArray, place: IntArray) -> _Listed:
        """Return the new lists; `source` numbers the stored rows first, then the micro-batch's rows."""
        is_new = source >= len(stored)
        rows = take_rows(batch.rows.to_batches(), source[is_new] - len(stored))
        own = rows.select(self.value_types.names)
        if self.ttl is not None:
            own = own.append_column(UNTIL, self.ttl.until(rows, batch.times))
        before = np.zeros(len(source), np.int64)
        before[~is_new] = stored.place[source[~is_new]]
        values = pa.concat_batches([take(stored.values, source[~is_new]), self._state.conform(own, "value")])
        at = inverse(np.concatenate([np.flatnonzero(~is_new), np.flatnonzero(is_new)]))
        return _Listed(key[source], place, before, take(values, at))

    def _store(self, transaction: Transaction, entries: EntryRows, keys: Keys, stored: _Listed, now: _Listed) -> None:
        """Write rows whose place changed, and delete places beyond the end of a list."""
        moved = np.flatnonzero(now.place != now.before)
        transaction.put(SEVERAL, now.whole_keys(entries, keys, moved), take(now.values, moved))
        size = np.bincount(now.key, minlength=len(keys))[stored.key]
        gone = np.flatnonzero((size > 0) & (stored.place > size))
        if len(gone):
            transaction.delete(SEVERAL, stored.whole_keys(entries, keys, gone))

    def _shown(self, batch: ShardInput, keys: Keys, stored: _Listed, left: BoolArray, now: _Listed) -> pa.RecordBatch:
        if self.emits == "list":
            key, values, own = now.key, now.values, {PLACE: pa.array(now.place, pa.int32())}
        else:
            gone, new = np.flatnonzero(left), np.flatnonzero(now.before == 0)
            key = np.concatenate([stored.key[gone], now.key[new]])
            values = pa.concat_batches([take(stored.values, gone), take(now.values, new)])
            own = {CHANGE_TYPE: pa.array(np.repeat(["delete", "insert"], [len(gone), len(new)]))}
        shown = shown_keys(keys.take(key), self.key_types) | own
        shown |= {name: values.column(name) for name in self.value_types.names}
        return conform_output(pa.table(shown), self.output_types, batch.operator)


@dataclass(frozen=True)
class _Listed:
    """Rows in the lists of several keys."""

    key: IntArray  #: The number of each row's key
    #: Each row's place, and its former place or 0
    place: IntArray
    before: IntArray
    values: pa.RecordBatch  #: As stored

    def __len__(self) -> int:
        return len(self.key)

    @classmethod
    def of(cls, entries: Iterable[Entries], schema: TableSchema) -> Self:
        found = list(entries)
        places = [some.own_keys.column(0).to_numpy().astype(np.int64) for some in found]
        place = np.concatenate([np.zeros(0, np.int64), *places])
        key = np.concatenate([np.zeros(0, np.int64), *(some.places for some in found)])
        return cls(key, place, place, pa.concat_batches([null_rows(schema.value, 0), *(some.values for some in found)]))

    def whole_keys(self, entries: EntryRows, keys: Keys, rows: IntArray) -> Keys:
        return entries.keys_of(keys.take(self.key[rows]), pa.table({PLACE: pa.array(self.place[rows], pa.int32())}))

    def until_us(self, keys: int, *, without_rows: int = NEVER) -> IntArray:
        """Return each key's expiry."""
        until = np.full(keys, -1)
        np.maximum.at(until, self.key, until_us(self.values.column(UNTIL.name)))
        return np.where(until < 0, without_rows, until)


@dataclass(frozen=True)
class Latest(OperatorFunction):
    """The `ShardFunction` of ``latest``."""

    #: The types of the keys, and of the other columns
    key_types: pa.Schema
    value_types: pa.Schema
    output_types: pa.Schema
    ranking: Ranking  #: Ranks a key's newest row first
    ttl: Ttl | None  #: None to keep keys for ever

    @cached_property
    def state(self) -> TableSchema:
        return TableSchema.of(STATE_TABLE, self.key_types, with_until(self.value_types, self.ttl))

    def tables(self) -> Mapping[str, TableSchema]:
        return {STATE_TABLE: self.state, **(Ends.tables(self.key_types) if self.ttl else {})}

    def configuration(self) -> Mapping[str, str]:
        return {"operator": "latest", "ranking": self.ranking.definition}

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        ends = None if self.ttl is None else self.ttl.ends(transaction, batch.times)
        if ends is not None:
            forget_rows(ends, batch, transaction)
        if batch.rows.num_rows:
            yield from self._with_rows(batch, transaction, ends)
        return None if self.ttl is None or ends is None else self.ttl.next_call_ms(ends)

    def _with_rows(self, batch: ShardInput, transaction: Transaction, ends: Ends | None) -> Iterator[pa.RecordBatch]:
        """Store and yield the rows that are newer than the stored rows."""
        keys, by_key = batch.distinct_keys(self.state)
        batch.counts.keys += len(keys)
        found = transaction.get(STATE_TABLE, keys)
        stored = pa.Table.from_batches([take(found.values, np.flatnonzero(found.exists))])
        # Among equal rows, the stored row comes first.
        newest = self.ranking.newest(by_key.with_stored(found.exists), batch.rows, stored)
        new = np.flatnonzero(newest < batch.rows.num_rows)
        if not len(new):
            return
        changed, rows = keys.take(new), take_rows(batch.rows.to_batches(), newest[new])
        own = rows.select(self.value_types.names)
        values = own
        if self.ttl is not None and ends is not None:
            until = self.ttl.until(rows, batch.times)
            before = found.values.column(UNTIL.name).take(pa.array(new))
            ends.move(changed, until_us(until), until_us(before))
            values = own.append_column(UNTIL, until)
        transaction.put(STATE_TABLE, changed, values)
        shown = shown_keys(changed, self.key_types) | dict(zip(own.schema.names, own.columns, strict=True))
        yield conform_output(pa.table(shown), self.output_types, batch.operator)


@dataclass(frozen=True)
class NewestRows:
    """The `Combiner` of `Latest`."""

    state: TableSchema
    key_columns: tuple[str, ...]  #: The key columns of the rows
    ranking: Ranking

    def received(self, sent: pa.Schema) -> pa.Schema:
        return sent

    def spread(self, batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        return batches

    def partial(self, rows: pa.Table) -> pa.Table:
        return rows

    def combined(self, rows: pa.Table) -> pa.Table:
        shown = rows.select(self.key_columns).rename_columns(self.state.key.names)
        keys = Keys.of(self.state, rows.column(HASH).combine_chunks().to_numpy(), shown.combine_chunks())
        newest = self.ranking.newest(order_rows(keys.hashes, keys.columns), rows)
        return rows.take(pa.array(newest))


@dataclass(frozen=True)
class Ranking:
    columns: tuple[str, ...]
    ascending: tuple[bool, ...]  #: Per column, whether the smallest value comes first

    @property
    def definition(self) -> str:
        """The definition that a restart must not change."""
        pairs = zip(self.columns, self.ascending, strict=True)
        return ", ".join(f"{name} {'asc' if ascends else 'desc'}" for name, ascends in pairs)

    def newest(self, order: RowOrder, *rows: pa.Table) -> IntArray:
        """Return each key's first-ranked row, given the order of rows by key; among equal rows, the first."""
        for column, ascends in zip(self._taken(*rows).columns, self.ascending, strict=True):
            order = best_rows(order, comparable(column), largest=not ascends)
        return order.rows[order.first]

    def order(self, key: IntArray, *rows: pa.Table) -> RowOrder:
        """Return the order of rows by key, then by rank. `key` is the number of each row's key."""
        signs = [1 if ascends else -1 for ascends in self.ascending]
        by = [sign * ranks(column) for column, sign in zip(self._taken(*rows).columns, signs, strict=True)]
        order = np.lexsort([*reversed(by), key])
        first = np.ones(len(order), np.bool_)
        first[1:] = key[order[1:]] != key[order[:-1]]
        return RowOrder(order, first)

    def _taken(self, *rows: pa.Table) -> pa.Table:
        """Return the ranking columns of several tables, concatenated."""
        tables = []
        for some in rows:
            columns = [without_views(some.column(name)) for name in self.columns]
            tables.append(pa.table([column.cast(storage_type(column.type)) for column in columns], [*self.columns]))
        return pa.concat_tables(tables)


#: The output column that the operator adds, by `emit`.
_SHOWN = {"list": StructField(PLACE, IntegerType(), False), "changes": StructField(CHANGE_TYPE, StringType(), False)}
_MOST_PLACES = 1_000_000


@dataclass(frozen=True)
class _Ranked:
    """The input of ``top`` or ``latest``: rows with keys and other columns."""

    df: DataFrame
    grouping: Grouping
    others: StructType  #: The columns that are not keys
    ttl: Ttl | None

    @classmethod
    def of(cls, df: DataFrame, grouping: Grouping, ttl: str | None) -> _Ranked:
        keys = {key.field.name for key in grouping.keys}
        others = StructType([StructField(f.name, f.dataType) for f in df.schema if f.name not in keys])
        if ttl is None or not df.isStreaming:
            return cls(df, grouping, others, None)
        time = time_column_of(df)
        return cls(df, grouping, others, Ttl(duration_us(df, ttl), None if time is None else time.field.name))

    @property
    def key_types(self) -> pa.Schema:
        return types_of_keys([key.field for key in self.grouping.keys])

    @property
    def value_types(self) -> pa.Schema:
        return arrow_schema(self.others, "the input")

    def output(self, *own: StructField) -> StructType:
        """Return the keys, the operator's own columns, and the input's other columns."""
        keys = [StructField(key.field.name, key.field.dataType) for key in self.grouping.keys]
        return StructType([*keys, *own, *self.others])

    def require_free(self, *names: str) -> None:
        taken = [*self.others.names, *(key.field.name for key in self.grouping.keys)]
        for name in [*names, *([UNTIL.name] if self.ttl else [])]:
            if name in taken:
                raise InvalidArgumentError(
                    "an input column is named like a column that the operator adds: rename it, as in "
                    "df.withColumnRenamed('a', 'b')",
                    column=name,
                )

    def ranking(self, by: object, ascending: object) -> Ranking:
        given = [by] if isinstance(by, str) else by
        if not isinstance(given, Sequence) or not given or not all(isinstance(name, str) for name in given):
            raise InvalidArgumentError("by must be a column name or a list of names", given=repr(by))
        directions = [ascending] * len(given) if isinstance(ascending, bool) else ascending
        if not isinstance(directions, Sequence) or [type(one) for one in directions] != [bool] * len(given):
            raise InvalidArgumentError(
                "ascending must be True or False, or a list with one for each column of by", given=repr(ascending)
            )
        return Ranking(tuple(map(self._ranked_by, given)), tuple(directions))

    def _ranked_by(self, name: str) -> str:
        """Return the input's spelling of the name of a ranking column."""
        _ = self.df.select(quoted(name)).schema  # raises if there is no such column
        fold = name_folding(self.df)
        found = [f for f in self.others if f.name == name] or [f for f in self.others if fold(f.name) == fold(name)]
        if not found:
            raise InvalidArgumentError(
                "by names a grouping column, which cannot rank the rows of a key: name another column", column=name
            )
        t = found[0].dataType
        is_plain = isinstance(t, AtomicType) and not isinstance(t, NullType)
        if not is_plain or (isinstance(t, StringType) and t != StringType()):
            raise InvalidArgumentError(
                "rows can be ranked by numbers, text, bytes, booleans, dates and times: add such a column, as in "
                "df.withColumn('rank', …)",
                column=name,
                type=t.simpleString(),
            )
        return found[0].name

    @property
    def is_timed(self) -> bool:
        """Whether the watermark expires keys, so that late rows are dropped."""
        return self.ttl is not None and self.ttl.event_time is not None

    def rows(self, function: ShardFunction) -> KeyedRows:
        return KeyedRows(self.df, self.grouping.keys, function)


def top_rows(
    df: DataFrame,
    grouping: Grouping,
    places: object,
    by: str | Sequence[str],
    ascending: bool | Sequence[bool],
    emit: object,
    ttl: str | None,
    outputMode: object,
    name: str,
) -> DataFrame:
    """Define ``groupBy(…).top(…)``. Raises `AnalysisException` if a column is missing, else `InvalidArgumentError`."""
    if type(places) is not int or not 0 < places <= _MOST_PLACES:
        raise InvalidArgumentError(f"top takes a number of rows from 1 to {_MOST_PLACES}", given=repr(places))
    if emit not in ("list", "changes"):
        raise InvalidArgumentError("emit must be 'list' or 'changes'", given=repr(emit))
    ranked = _Ranked.of(df, grouping, ttl)
    ranked.require_free(PLACE, CHANGE_TYPE)
    output = ranked.output(_SHOWN[emit])
    types = arrow_schema(output, "the output", keep_not_null=True)
    ranking = ranked.ranking(by, ascending)
    function = Top(ranked.key_types, ranked.value_types, types, ranking, places, emit, ranked.ttl)
    return operator_plan(ranked.rows(function), output, checked_mode(outputMode), name, is_timed=ranked.is_timed)


def latest_rows(
    df: DataFrame, grouping: Grouping, by: str | Sequence[str], ttl: str | None, outputMode: object, name: str
) -> DataFrame:
    """Define ``groupBy(…).latest(…)``; raises the errors of `top_rows`."""
    ranked = _Ranked.of(df, grouping, ttl)
    ranked.require_free()
    output = ranked.output()
    ranking = ranked.ranking(by, ascending=False)
    types = arrow_schema(output, "the output", keep_not_null=True)
    function = Latest(ranked.key_types, ranked.value_types, types, ranking, ranked.ttl)
    rows = ranked.rows(function)
    if not ranked.is_timed:  # otherwise the newest row may be late while an older row is not
        columns = tuple(key.column for key in grouping.keys)
        rows = replace(rows, combiner=NewestRows(function.state, columns, ranking))
    return operator_plan(rows, output, checked_mode(outputMode), name, is_timed=ranked.is_timed)
