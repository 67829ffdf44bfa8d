"""Maps a processor's state variables to tables, and interprets names of tables and key columns, without Spark.

See `holdfast.spark_integration.processor.state.variables`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pyarrow as pa

from holdfast.backends.options import did_you_mean
from holdfast.backends.run import TableSchema
from holdfast.errors import NotFoundError
from holdfast.spark_integration.timers import TIMERS, TIMERS_BY_DUE, is_by_time
from holdfast.spark_integration.ttl.expiry import index_of

Kind = Literal["value", "list", "map"]
KINDS: tuple[Kind, ...] = ("value", "list", "map")

SEQUENCE, ENTRY = "seq", "entry."
#: The table of an operator with several rows per key, which differ in the last key column, such as a session's start.
SEVERAL = "s.state"
#: The tables of a join; their keys are the join key, the row's time and a number.
JOINED_LEFT, JOINED_RIGHT = "j.left", "j.right"
#: The table of an as-of join's right side, which has one row per key and time.
LATEST_RIGHT = "s.right"
#: The number of key columns after the grouping columns, by the prefix of the table's name.
_OWN_KEYS = {"s.": 1, "j.": 2}


def table_of(kind: Kind, name: str) -> str:
    """Return the unique name of a variable's table."""
    return f"{kind[0]}.{name}"


def tables_called(name: str) -> tuple[str, ...]:
    """Return the tables that a user's name may mean: itself, a processor's variable, or an operator's table."""
    return name, *(table_of(kind, name) for kind in KINDS), *(f"{start}{name}" for start in _OWN_KEYS)


def is_of_elements(table: str) -> bool:
    """Return whether a table, by its name, holds a list's elements or their expiry index."""
    return table.startswith(table_of("list", ""))


def is_of_entry(column: str) -> bool:
    """Return whether a key column of a map's table belongs to the entry's key, and not to the grouping key."""
    return column.lstrip("_").startswith(ENTRY)


def free_name(name: str, key_types: pa.Schema) -> str:
    """Return a name for a key column that differs from all grouping columns."""
    while name in key_types.names:
        name = f"_{name}"
    return name


def find_shown(tables: Mapping[str, TableSchema], name: str) -> str:
    """Find a table by the name shown to users or by its variable's name. Raises `NotFoundError`."""
    shown = [table for table, schema in tables.items() if not is_by_time(schema)]
    for table in tables_called(name):
        if table in shown:
            return table
    if not shown:
        raise NotFoundError("the operator has no tables, because it has received no rows", table=name)
    if name == TIMERS_BY_DUE or name in map(index_of, shown):
        raise NotFoundError(
            "this table is an index of another table by time: choose that table",
            table=name,
            tables=", ".join(shown),
        )
    near = did_you_mean(name, [*shown, *(table.partition(".")[2] for table in shown)])
    raise NotFoundError(f"no such table: choose one with the option table{near}", table=name, tables=", ".join(shown))


def grouping_columns(tables: Mapping[str, TableSchema], name: str) -> tuple[str, ...]:
    """Return the operator's grouping columns, whose values are hashed; empty if they cannot be determined."""
    names = tables[name].key.names
    if own := _OWN_KEYS.get(name[:2]):
        return tuple(names[:-own])
    with_own_keys = (table_of("list", ""), table_of("map", ""))
    plain = [
        schema.key.names for table, schema in tables.items() if table != TIMERS and not table.startswith(with_own_keys)
    ]
    if plain:
        shortest = min(plain, key=len)
        return tuple(shortest) if names[: len(shortest)] == shortest else ()
    return tuple(names[:-1]) if is_of_elements(name) else ()
