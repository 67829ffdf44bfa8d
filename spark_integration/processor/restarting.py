"""What a processor may change at a restart: variables come and go, and the columns of their values, names decide.

What is refused has Spark's error class in the text. Spark checks in the first micro-batch of a run, and so does
holdfast: which query a definition will belong to, and so which state, is known only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import pyarrow as pa

from holdfast.backends.evolution import key_changes, value_changes
from holdfast.backends.schema import NEW_QUERY, TableSchema
from holdfast.errors import SchemaMismatchError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.processor.state.variable_tables import KINDS, table_of
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.tables.key_rows import EXPIRES, index_of
from holdfast.spark_integration.tables.key_timers import TIMERS
from holdfast.spark_integration.tables.restarting import (
    no_longer_null,
    renamed_fields,
    shown,
    unconsented,
)
from holdfast.spark_integration.tables.timers import timers_schema


def require_same_configuration(stored: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Check what no run may change: time mode and output mode. Raises `SchemaMismatchError` if it was changed."""
    for name, value in now.items():
        if stored.get(name) != value:
            _refuse(
                "STATE_STORE_INVALID_CONFIG_AFTER_RESTART",
                f"the query began with another {name}: set it back, {NEW_QUERY}",
                stored=stored.get(name),
                asked=value,
            )


def require_same_grouping(stored: StoredTables, grouping: pa.Schema) -> None:
    """Check the grouping columns of stored state.

    Raises `SchemaMismatchError` if they differ.

    `grouping`: in storage types.
    """
    for name, table in stored.held.items():
        own = 1 if name.startswith("l.") or name == TIMERS else 0
        width = len(grouping) if name.startswith("m.") else len(table.key) - own
        before = pa.schema(list(table.key)[:width])
        if not before.equals(grouping):
            _refuse(
                "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
                f"the state was grouped by other columns: group by those, under the same names, {NEW_QUERY}",
                stored=shown(before),
                asked=shown(grouping),
            )


def require_same_kind(variable: StateVariable, stored: StoredTables) -> None:
    """Check that no variable of another kind had the name. Raises `SchemaMismatchError` if one had."""
    for kind in KINDS:
        table = table_of(kind, variable.name)
        if kind != variable.kind and table in stored.held and not _is_index(table, stored):
            _refuse(
                "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE",
                f"{variable.name!r} was a {kind} state, and its stored values are there still: give the new variable "
                f"another name, {NEW_QUERY}",
                stored=kind,
                asked=variable.kind,
            )
    index = index_of(variable.table)
    if _is_index(variable.table, stored) or (variable.ttl_ms and index in stored.held and not _is_index(index, stored)):
        _refuse(
            "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE",
            f"{variable.what} shares a table with an earlier variable, as the name of one is that of the other and "
            f"'.expiring', where a TTL has its index: give the new variable another name, {NEW_QUERY}",
            tables=[variable.table, *([index] if variable.ttl_ms else [])],
        )


def require_readable_values(variable: StateVariable, declared: TableSchema, stored: StoredTables) -> None:
    """Check that a variable's stored values can be read as its new declaration says.

    Raises `SchemaMismatchError` if its keys changed, or its columns did in a way that would lose values.
    """
    if declared.name not in stored.held:
        return
    live, latest = stored.live[declared.name], stored.latest[declared.name]
    if key_changes(live, declared):
        _refuse(
            "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
            f"the key of {variable.what} has other columns or types than its stored entries: declare the stored ones, "
            f"give it another name, {NEW_QUERY}",
            stored=shown(live.key),
            asked=shown(declared.key),
        )
    why = [
        *value_changes(live, declared),
        # Where no column can be the other one renamed, Spark asks nothing.
        *unconsented(live, latest, declared, variable.name, only_fitting=True),
        *renamed_fields(live.value, latest.value, declared.value),
        *no_longer_null(live, declared),
    ]
    if (EXPIRES in live.value.names) and (EXPIRES in declared.value.names):
        was_ours, is_ours = index_of(declared.name) in stored.held, variable.ttl_ms is not None
        why += [f"{EXPIRES}: a column of the user's and the time to live"] if was_ours != is_ours else []
    if why:
        _refuse(
            "STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION",
            f"Schema evolution is not possible: stored values of {variable.what} cannot be read as it declares them "
            f"({'; '.join(why)}): columns that may be null can be added, columns removed, and numbers widened. Declare "
            f"the stored columns, give the variable another name, {NEW_QUERY}",
            stored=shown(latest.value),
            asked=shown(declared.value),
        )


def _is_index(table: str, stored: StoredTables) -> bool:
    """Tell whether a table is the index of one whose rows expire, and not a variable with such a name."""
    held = stored.held.get(table)
    return held is not None and held.value.equals(timers_schema(table, held.key).value)


def _refuse(condition: str, message: str, **facts: object) -> NoReturn:
    raise SchemaMismatchError(f"[{condition}] {message}", **facts)
