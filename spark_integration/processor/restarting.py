"""What a processor may change at a restart: variables come and go, and the columns of their values, names decide.

What is refused has Spark's error class in the text. Spark checks in the first micro-batch of a run, and so does
holdfast: which query a definition will belong to, and so which state, is known only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import pyarrow as pa

from holdfast.backends.evolution import is_readable_as, key_changes, value_changes
from holdfast.backends.schema import TableSchema
from holdfast.errors import SchemaMismatchError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.processor.state.variables import KINDS, StateVariable, table_of
from holdfast.spark_integration.tables.key_rows import EXPIRES, index_of
from holdfast.spark_integration.tables.key_timers import TIMERS
from holdfast.spark_integration.tables.timers import timers_schema

_Fields = Sequence[pa.Field]
_NEW_OPERATOR = "or start with a new operator name"


def require_same_configuration(stored: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Check what no run may change: time mode and output mode.

    Raises
    ------
    SchemaMismatchError
        It was changed.
    """
    for name, value in now.items():
        if stored.get(name) != value:
            _refuse(
                "STATE_STORE_INVALID_CONFIG_AFTER_RESTART",
                f"the query began with another {name}: set it back, {_NEW_OPERATOR}",
                stored=stored.get(name),
                asked=value,
            )


def require_same_grouping(stored: StoredTables, grouping: pa.Schema) -> None:
    """Check the grouping columns of stored state.

    Parameters
    ----------
    grouping : pyarrow.Schema
        In storage types.

    Raises
    ------
    SchemaMismatchError
        They differ.
    """
    for name, table in stored.held.items():
        own = 1 if name.startswith("l.") or name == TIMERS else 0
        width = len(grouping) if name.startswith("m.") else len(table.key) - own
        before = pa.schema(list(table.key)[:width])
        if not before.equals(grouping):
            _refuse(
                "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
                f"the state was grouped by other columns: group by those, under the same names, {_NEW_OPERATOR}",
                stored=_shown(before),
                asked=_shown(grouping),
            )


def require_same_kind(variable: StateVariable, stored: StoredTables) -> None:
    """Check that no variable of another kind had the name.

    Raises
    ------
    SchemaMismatchError
        One had.
    """
    for kind in KINDS:
        table = table_of(kind, variable.name)
        if kind != variable.kind and table in stored.held and not _is_index(table, stored):
            _refuse(
                "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE",
                f"{variable.name!r} was a {kind} state, and its stored values are there still: give the new variable "
                f"another name, {_NEW_OPERATOR}",
                stored=kind,
                asked=variable.kind,
            )
    index = index_of(variable.table)
    if _is_index(variable.table, stored) or (variable.ttl_ms and index in stored.held and not _is_index(index, stored)):
        _refuse(
            "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE",
            f"{variable.what} shares a table with an earlier variable, as the name of one is that of the other and "
            f"'.expiring', where a TTL has its index: give the new variable another name, {_NEW_OPERATOR}",
            tables=[variable.table, *([index] if variable.ttl_ms else [])],
        )


def require_readable_values(variable: StateVariable, declared: TableSchema, stored: StoredTables) -> None:
    """Check that what is stored of a variable can be read as it is declared now.

    Raises
    ------
    SchemaMismatchError
        Its keys changed, or its columns did in a way that would lose values.
    """
    held, latest = stored.held.get(declared.name), stored.latest.get(declared.name)
    if held is None or latest is None:
        return
    if key_changes(held, declared):
        _refuse(
            "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
            f"the key of {variable.what} has other columns or types than its stored entries: declare the stored ones, "
            f"give it another name, {_NEW_OPERATOR}",
            stored=_shown(held.key),
            asked=_shown(declared.key),
        )
    renamed = _renamed(_without_time(held), _without_time(latest), _without_time(declared))
    why = [*value_changes(held, declared), *renamed, *_not_null(declared, stored)]
    if (EXPIRES in held.value.names) and (EXPIRES in declared.value.names):
        was_ours, is_ours = index_of(declared.name) in stored.held, variable.ttl_ms is not None
        why += [f"{EXPIRES}: a column of the user's and the time to live"] if was_ours != is_ours else []
    if why:
        _refuse(
            "STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION",
            f"Schema evolution is not possible: stored values of {variable.what} cannot be read as it declares them "
            f"({'; '.join(why)}): columns that may be null can be added, columns removed, and numbers widened. Declare "
            f"the stored columns, give the variable another name, {_NEW_OPERATOR}",
            stored=_shown(latest.value),
            asked=_shown(declared.value),
        )


def _renamed(held: _Fields, latest: _Fields, declared: _Fields, within: str = "") -> list[str]:
    """Name columns, and fields in them, that look renamed: one is gone, one new, and their types would go together."""
    was_held, was, now = ({field.name: field.type for field in fields} for fields in (held, latest, declared))
    gone = [name for name in was if name not in now]
    new = [name for name in now if name not in was_held]
    found = [
        f"{within}{before} → {within}{after}: what is renamed loses its values; to drop the one and add the other, do "
        "it in two restarts"
        for before in gone
        for after in new
        if is_readable_as(was[before], now[after])
    ]
    for name in was.keys() & now.keys():
        was_within, now_within = _fields_in(was[name]), _fields_in(now[name])
        found += _renamed(_fields_in(was_held[name]), was_within, now_within, f"{within}{name}.")
    return found


def _fields_in(t: pa.DataType) -> list[pa.Field]:
    """Return the fields of a struct, or of those that are the elements of a list or the values of a map."""
    if pa.types.is_struct(t):
        return list(t)
    if pa.types.is_map(t):
        return _fields_in(t.item_type)
    return _fields_in(t.value_type) if pa.types.is_large_list(t) else []


def _without_time(table: TableSchema) -> list[pa.Field]:
    return [field for field in table.value if field.name != EXPIRES]


def _not_null(declared: TableSchema, stored: StoredTables) -> list[str]:
    may_be = declared.not_null - stored.never_null[declared.name]
    return [
        f"{name.partition('.')[2]}: it is NOT NULL, and rows may be stored that have null there; declare it nullable"
        for name in sorted(may_be)
    ]


def _is_index(table: str, stored: StoredTables) -> bool:
    """Tell whether a table is the index of one whose rows expire, and not a variable with such a name."""
    held = stored.held.get(table)
    return held is not None and held.value.equals(timers_schema(table, held.key).value)


def _shown(columns: Sequence[pa.Field] | pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in columns)


def _refuse(condition: str, message: str, **facts: object) -> NoReturn:
    raise SchemaMismatchError(f"[{condition}] {message}", **facts)
