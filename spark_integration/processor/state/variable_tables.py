"""Which table holds a state variable of a processor, and what the names of tables and key columns tell; no Spark.

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
#: The table of an operator that keeps several rows a key, by the last key column: of sessions, by their start.
SEVERAL = "s.state"
#: The tables of a join; a row's key is its own, its time and a number.
JOINED_LEFT, JOINED_RIGHT = "j.left", "j.right"
#: The table of the right side of an as-of join, which has one row for each key and time.
LATEST_RIGHT = "s.right"
#: By the beginning of a table's name, how many key columns of their own its rows have behind those of the group.
_OWN_KEYS = {"s.": 1, "j.": 2}


def table_of(kind: Kind, name: str) -> str:
    """Return the name of a variable's table, which no other table has."""
    return f"{kind[0]}.{name}"


def tables_called(name: str) -> tuple[str, ...]:
    """Return the tables that a name may mean to users: that table, a processor's variable, an operator's table."""
    return name, *(table_of(kind, name) for kind in KINDS), *(f"{start}{name}" for start in _OWN_KEYS)


def is_of_elements(table: str) -> bool:
    """Tell by its name whether a table holds a list's elements or their expiry index."""
    return table.startswith(table_of("list", ""))


def is_of_entry(column: str) -> bool:
    """Tell whether a key column of a map's table belongs to the entry's key, not to the grouping columns."""
    return column.lstrip("_").startswith(ENTRY)


def free_name(name: str, key_types: pa.Schema) -> str:
    """Return a name for a key column beside the grouping columns, which may have any names."""
    while name in key_types.names:
        name = f"_{name}"
    return name


def find_shown(tables: Mapping[str, TableSchema], name: str) -> str:
    """Return a table by its shown name, or its variable's. Raises `NotFoundError`."""
    shown = [table for table, schema in tables.items() if not is_by_time(schema)]
    for table in tables_called(name):
        if table in shown:
            return table
    if not shown:
        raise NotFoundError("the operator has no tables, because it has had no rows", table=name)
    if name == TIMERS_BY_DUE or name in map(index_of, shown):
        raise NotFoundError(
            "this table is an index: it has the keys of another one in the order of their times, so choose that one",
            table=name,
            tables=", ".join(shown),
        )
    near = did_you_mean(name, [*shown, *(table.partition(".")[2] for table in shown)])
    raise NotFoundError(f"no such table: choose one with the option table{near}", table=name, tables=", ".join(shown))


def grouping_columns(tables: Mapping[str, TableSchema], name: str) -> tuple[str, ...]:
    """Return the operator's grouping columns, which a row is hashed by; empty if they are not certain."""
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
