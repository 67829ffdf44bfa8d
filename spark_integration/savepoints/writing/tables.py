"""State tables made of DataFrames: which columns they have, and how their rows reach the tasks that store them.

::

    carrier   n         ──▶   hash   shard   carrier   n     ═shuffle═▶  one task for each shard
    "AA"      42              …      3       "AA"      42

The hash is Spark's ``xxhash64`` of the grouping columns, as a query computes it. A table that another one is sorted by,
such as timers in the order in which they are due, is made from that one: nobody has to give it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, StructType

from holdfast.backends.schema import TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.lookup.shown import free_name, shown_columns
from holdfast.spark_integration.plan.grouping_keys import Grouping, resolve_keys
from holdfast.spark_integration.processor.state.variable_tables import find_shown, grouping_columns, is_of_entry
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode
from holdfast.spark_integration.spark_types import arrow_schema, types_of_keys
from holdfast.spark_integration.timers import TIMERS, TIMERS_BY_DUE, KeyTimers
from holdfast.spark_integration.transport.packed import quoted
from holdfast.spark_integration.transport.routes import route_column, shard_column
from holdfast.spark_integration.ttl.expiry import EXPIRES, expiring_tables, index_of
from holdfast.spark_integration.vectorised.arrow_with_state import require_table_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

HASH, SHARD = "hash", "shard"


@dataclass(frozen=True)
class TableRows:
    """The rows of a table, as a DataFrame has them."""

    schema: TableSchema
    frame: DataFrame  #: The key columns, then the value columns, in the order of the schema; their names do not matter
    grouping: int  #: How many of the key columns are those by which the operator groups
    index: TableSchema | None = None  #: Of the table that has the same keys in the order of a time

    def by_shard(self, shards: int) -> DataFrame:
        """Return the rows with hash and shard before them, each shard in a partition of its own."""
        names = [f"c{place}" for place in range(len(self.frame.columns))]
        frame = self.frame.toDF(*names)
        hashed = frame.select(F.xxhash64(*names[: self.grouping]).alias(HASH), *names)
        routed = hashed.repartition(shards, route_column(F.col(HASH), shards))
        return routed.select(HASH, shard_column(F.col(HASH), shards).alias(SHARD), *names)


def tables_of_frames(
    frames: Mapping[str, DataFrame],
    keys: Sequence[str | Column],
    time_mode: TimeMode,
    expiring: Collection[str] = (),
) -> list[TableRows]:
    """Return the tables of a new operator, whose functions declare their state as these frames have it.

    `frames`: by table: the key columns, and those of the state. In the table "timers" the only other column says when
    the key's timer is due, in ms since 1970; `expiring`: tables with a column `EXPIRES`, a bigint: when a row expires,
    in ms since 1970; null for never.
    """
    found: list[TableRows] = []
    key_types: pa.Schema | None = None
    for name, frame in frames.items():
        if name != TIMERS:
            require_table_name(name)
        grouping = resolve_keys(frame, keys)
        types = types_of_keys([key.field for key in grouping.keys])
        if key_types is not None and not key_types.equals(types):
            raise InvalidArgumentError("all tables of an operator have the same keys", table=name, keys=types.names)
        key_types = types
        if name == TIMERS:
            found.append(_timers(frame, grouping, types, time_mode))
        else:
            found.append(_state(name, frame, grouping, expires=name in expiring))
    unknown = set(expiring) - (frames.keys() - {TIMERS})
    if unknown:
        raise InvalidArgumentError("expiring names a table that is not written", table=min(unknown))
    if time_mode != "None" and TIMERS not in frames:
        found.append(_no_timers(found[0], time_mode))
    return found


def _state(name: str, frame: DataFrame, grouping: Grouping, *, expires: bool) -> TableRows:
    values = [value for value in _others(frame, grouping) if not (expires and value == EXPIRES)]
    if not values:
        raise InvalidArgumentError("a state table needs a column besides its keys", table=name)
    key_types = types_of_keys([key.field for key in grouping.keys])
    own = arrow_schema(StructType([frame.schema[value] for value in values]), name)
    if not expires:
        return TableRows(TableSchema.of(name, key_types, own), _selected(frame, grouping, values), len(key_types))
    if EXPIRES not in frame.columns or not isinstance(frame.schema[EXPIRES].dataType, LongType):
        raise InvalidArgumentError(f"a table whose rows expire needs a bigint column {EXPIRES}", table=name)
    tables = expiring_tables(name, key_types, own)
    return TableRows(
        tables[name], _selected(frame, grouping, [*values, EXPIRES]), len(key_types), tables[index_of(name)]
    )


def _timers(frame: DataFrame, grouping: Grouping, key_types: pa.Schema, time_mode: TimeMode) -> TableRows:
    if time_mode == "None":
        raise InvalidArgumentError("timers need a clock: timeMode is ProcessingTime or EventTime")
    tables = KeyTimers.tables(key_types, TIMEOUT_CONF[time_mode])
    values, expected = _others(frame, grouping), tables[TIMERS].value.names
    if values != expected:
        raise InvalidArgumentError(
            "timers have the keys, and a column that says when one is due", columns=values, expected=expected
        )
    return TableRows(tables[TIMERS], _selected(frame, grouping, values), len(key_types), tables[TIMERS_BY_DUE])


def _no_timers(table: TableRows, time_mode: TimeMode) -> TableRows:
    tables = KeyTimers.tables(table.schema.key, TIMEOUT_CONF[time_mode])
    keys = table.frame.columns[: table.grouping]
    none = table.frame.select(*map(quoted, keys), F.lit(0).cast("long")).limit(0)
    return TableRows(tables[TIMERS], none, table.grouping, tables[TIMERS_BY_DUE])


def _others(frame: DataFrame, grouping: Grouping) -> list[str]:
    keys = {key.column for key in grouping.keys}
    return [name for name in frame.columns if name not in keys]


def _selected(frame: DataFrame, grouping: Grouping, values: list[str]) -> DataFrame:
    return frame.select(*[key.expression for key in grouping.keys], *map(quoted, values))


def edited_tables(frames: Mapping[str, DataFrame], tables: Mapping[str, TableSchema]) -> list[TableRows]:
    """Return tables that take the place of an operator's stored ones.

    Raises `InvalidArgumentError` if a table has other columns; `NotFoundError` if the operator has no such table.

    `frames`: by table, with the columns that `holdfast.savepoints.load` shows, in any order; ``shard`` may be left out.
    """
    found = []
    for name, frame in frames.items():
        table = find_shown(tables, name)
        shown = shown_columns(tables[table]).names
        shard = free_name(SHARD, shown, "_")  # as `load` shows it
        given = [column for column in frame.columns if column != shard]
        if sorted(given) != sorted(shown):
            raise InvalidArgumentError(
                "the columns are not those of the stored table", table=name, columns=given, expected=shown
            )
        places = [f"c{place}" for place in range(len(frame.columns))]
        selected = frame.toDF(*places).select(*[places[frame.columns.index(column)] for column in shown])
        _require_same_keys(tables[table], selected)
        index = TIMERS_BY_DUE if table == TIMERS else index_of(table)
        found.append(TableRows(tables[table], selected, grouping_width(tables[table], tables), tables.get(index)))
    return found


def _require_same_keys(table: TableSchema, frame: DataFrame) -> None:
    """Check the types of the keys: the same number has another hash as another type."""
    fields = StructType(frame.schema.fields[: len(table.key)])
    given = TableSchema.of(table.name, arrow_schema(fields, table.name), pa.schema([])).key
    differ = [
        f"{own.name}: {own.type} → {other.type}"
        for own, other in zip(table.key, given, strict=True)
        if own.type != other.type
    ]
    if differ:
        raise InvalidArgumentError(
            "the keys have different types than the stored ones", table=table.name, changed=differ
        )


def grouping_width(table: TableSchema, tables: Mapping[str, TableSchema]) -> int:
    """Return how many key columns of an operator's table are those by which it groups.

    Lists have the number of an element behind them, and maps the columns of an entry's key.

    `tables`: all of the operator's: others may say it more surely.
    """
    known = grouping_columns(tables, table.name)
    if known:
        return len(known)
    width = next(place for place, name in enumerate(table.key.names) if is_of_entry(name))
    if not width:
        raise InvalidArgumentError(
            "it is not clear which of the key columns the operator groups by: rename those that begin with 'entry.'",
            table=table.name,
            keys=table.key.names,
        )
    return width
