"""State variables of a processor, and the tables that hold them.

::

    variable                                   table       key            value
    getValueState("total", "n long")           v.total     k…             n
    getListState("visits", "page string")      l.visits    k…, seq        page
    getMapState("seen", "id long", "n long")   m.seen      k…, entry.id   n

A variable with a TTL has the column ``expires_ms`` besides, and an index: `holdfast.spark_integration.tables.key_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from pyspark.sql.types import StructType

from holdfast.backends.run import TableSchema
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.spark_integration.spark_types import arrow_schema, require_key_types
from holdfast.spark_integration.tables.key_rows import EXPIRES, expiring_tables
from holdfast.spark_integration.tables.key_timers import TIMERS
from holdfast.spark_integration.tables.timers import is_by_time

Kind = Literal["value", "list", "map"]
KINDS: tuple[Kind, ...] = ("value", "list", "map")

_SEQUENCE, _ENTRY = "seq", "entry."


def table_of(kind: Kind, name: str) -> str:
    """Return the name of the table that holds a variable; with it, a variable cannot be called like other tables."""
    return f"{kind[0]}.{name}"


def is_of_elements(table: str) -> bool:
    """Tell whether a table has the elements of a list, or the index of their expiry; no other table is called so."""
    return table.startswith(table_of("list", ""))


@dataclass(frozen=True)
class StateVariable:
    """What a processor declares by ``getValueState``, ``getListState`` or ``getMapState``.

    Attributes
    ----------
    name : str
    kind : {"value", "list", "map"}
    schema : StructType
        Of the value, an element, or an entry's value.
    user_key : StructType or None
        Of a map's keys.
    ttl_ms : int or None
        How long a value, element or entry lives after it was last written; None for ever.
    """

    name: str
    kind: Kind
    schema: StructType
    user_key: StructType | None = None
    ttl_ms: int | None = None

    @property
    def table(self) -> str:
        """Name of the table that holds it."""
        return table_of(self.kind, self.name)

    @property
    def what(self) -> str:
        """What to call its schema in an error."""
        return f"{self.kind} state {self.name!r}"

    def tables(self, key_types: pa.Schema) -> Mapping[str, TableSchema]:
        """Return the schemas of its tables, for grouping keys of these types.

        Raises
        ------
        InvalidArgumentError
            A type cannot be stored, or a column has a name of holdfast's own.
        """
        values = arrow_schema(self.schema, self.what, keep_not_null=True)
        keys = pa.schema([*key_types, *self._own_key_types(key_types)])
        if self.ttl_ms is None:
            return {self.table: TableSchema.of(self.table, keys, values)}
        if EXPIRES in values.names:
            raise InvalidArgumentError(f"{self.what}: with a TTL, {EXPIRES!r} is a column of holdfast's own: rename it")
        return expiring_tables(self.table, keys, values)

    def _own_key_types(self, key_types: pa.Schema) -> pa.Schema:
        if self.kind == "list":
            return pa.schema([pa.field(free_name(_SEQUENCE, key_types), pa.int64())])
        if self.user_key is None:
            return pa.schema([])
        require_key_types(list(self.user_key))
        types = arrow_schema(self.user_key, f"the key of {self.what}", keep_not_null=True)
        return pa.schema([field.with_name(free_name(_ENTRY + field.name, key_types)) for field in types])


def is_of_entry(column: str) -> bool:
    """Tell whether a key column of a map's table is of an entry's key, and not one of the grouping columns."""
    return column.lstrip("_").startswith(_ENTRY)


def free_name(name: str, key_types: pa.Schema) -> str:
    """Return a name for a key column beside the grouping columns, which may have any names."""
    while name in key_types.names:
        name = f"_{name}"
    return name


def find_shown(tables: Mapping[str, TableSchema], name: str) -> str:
    """Return a table that users see, by its name or by that of the processor's variable which it holds.

    Raises
    ------
    NotFoundError
        There is none.
    """
    shown = [table for table, schema in tables.items() if not is_by_time(schema)]
    for table in (name, *(table_of(kind, name) for kind in KINDS)):
        if table in shown:
            return table
    if not shown:
        raise NotFoundError("the operator has no tables: it had had no rows", table=name)
    raise NotFoundError("no such table: choose one by the option table", table=name, tables=", ".join(shown))


def grouping_columns(tables: Mapping[str, TableSchema], name: str) -> tuple[str, ...]:
    """Return the columns that the operator is grouped by, of which a row's hash is; none where that is not certain.

    Parameters
    ----------
    tables : mapping of str to TableSchema
        All that the operator has: lists, maps and timers have key columns of their own, other tables have none.
    """
    names = tables[name].key.names
    plain = [schema.key.names for table, schema in tables.items() if table != TIMERS and not _has_own_keys(table)]
    if plain:
        shortest = min(plain, key=len)
        return tuple(shortest) if names[: len(shortest)] == shortest else ()
    return tuple(names[:-1]) if is_of_elements(name) else ()


def _has_own_keys(table: str) -> bool:
    return any(table.startswith(table_of(kind, "")) for kind in KINDS if kind != "value")
