"""Checks the changes to state tables at a restart.

Columns are matched by name. A restart may add, reorder and widen columns. An omitted column stays hidden in stored rows
and can be declared again. Renames and drops need `ColumnChanges`, which `StoredTables.with_changes` applies before
these checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.evolution import is_readable_as, key_changes, value_changes
from holdfast.backends.schema import NEW_QUERY, VALUE_SIDE, TableSchema
from holdfast.errors import SchemaMismatchError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.timers import TIMERS, TIMERS_BY_DUE
from holdfast.spark_integration.ttl.expiry import EXPIRES, index_of

_Fields = Iterable[pa.Field]


def require_same_api(stored: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise `SchemaMismatchError` if the configurations show that a different kind of operator wrote the state."""
    if _kind(stored) != _kind(now):
        raise SchemaMismatchError(
            "the state was written by another kind of operator: define a processor (transformWithState), a function "
            f"(apply…WithState) or the operator, such as agg, as before, {NEW_QUERY}",
            stored=_kind(stored),
            defined=_kind(now),
        )


def _kind(configuration: Mapping[str, str]) -> str:
    if "operator" in configuration:
        return configuration["operator"]
    return "a processor's" if configuration else "a function's"


def require_readable_tables(stored: StoredTables, declared: Mapping[str, TableSchema]) -> None:
    """Check that an operator can continue its stored tables. Raises `SchemaMismatchError`."""
    before, after = (tables[TIMERS].value.names if TIMERS in tables else [] for tables in (stored.held, declared))
    if before != after:
        raise SchemaMismatchError(
            "the stored timers do not fit the operator: only one of them has timers, or their clocks differ "
            f"('due_processing_ms' is processing time). Set timeMode or timeoutConf back, {NEW_QUERY}",
            stored=before,
            declared=after,
        )
    own = {index_of(name) for name in {*stored.held, *declared}} | {TIMERS, TIMERS_BY_DUE}
    tables = [name for name in declared if name not in own]
    new, gone = ([n for n in tables if n not in stored.held], sorted(stored.last - own - {*tables}))
    if new and gone:
        raise SchemaMismatchError(
            "state tables cannot be renamed: some tables are new, and would start empty, while others are missing. "
            "Declare the old names; to replace tables, omit the old tables at one restart and add the new tables at a "
            "later restart",
            new=new,
            missing=gone,
        )
    for name in tables:
        if name in stored.held:
            _require_readable(stored, declared, name, None if len(tables) == 1 else name)


def _require_readable(stored: StoredTables, declared: Mapping[str, TableSchema], name: str, within: str | None) -> None:
    live, table = stored.live[name], declared[name]
    keys = key_changes(live, table)
    if keys:
        raise SchemaMismatchError(
            f"the key columns of stored state cannot change: group by columns of the same names and types, {NEW_QUERY}",
            table=name,
            changed=keys,
            stored=described(live.key),
            declared=described(table.key),
        )
    why = [f"{change}: stored values cannot be converted" for change in value_changes(live, table, exact=True)]
    why += misread_columns(stored, table, within, has_ttl=index_of(name) in declared)
    if why:
        raise SchemaMismatchError(
            f"stored state cannot be read with the columns that the operator declares ({'; '.join(why)}). Declare the "
            "stored columns with the same or wider types, give a column with a new type a new name, migrate the state "
            f"with savepoints.restore(…, migrate=…), {NEW_QUERY}",
            table=name,
            stored=described(stored.latest[name].value),
            declared=described(table.value),
        )


def misread_columns(
    stored: StoredTables, declared: TableSchema, within: str | None, *, has_ttl: bool, only_fitting: bool = False
) -> list[str]:
    """Explain which stored values would be lost or misread, although each type is readable as declared."""
    live, latest = stored.live[declared.name], stored.latest[declared.name]
    why = [
        *_ambiguous_changes(live, latest, declared, within, only_fitting=only_fitting),
        *_renamed_fields(live.value, latest.value, declared.value),
        *_newly_not_null(live, declared),
    ]
    if EXPIRES in live.value.names and EXPIRES in declared.value.names:
        had_ttl = index_of(declared.name) in stored.held
        why += [f"{EXPIRES}: a user's column in one run and the time to live in another"] if had_ttl != has_ttl else []
    return why


def _ambiguous_changes(
    live: TableSchema, latest: TableSchema, declared: TableSchema, within: str | None, *, only_fitting: bool
) -> list[str]:
    """Explain how to rename, drop or hide columns of `latest` if a restart omits columns and adds others."""
    known, now = {field.name: field.type for field in live.value}, set(declared.value.names)
    new = [f for f in declared.value if f.name not in known and f.name != EXPIRES]
    gone = [name for name in latest.value.names if name not in now and name != EXPIRES]
    rename: dict[str, str] = {}
    for name in gone:
        fitting = [f.name for f in new if f.name not in rename.values() and is_readable_as(known[name], f.type)]
        rename |= {name: fitting[0]} if fitting else {}
    if not new or not gone or (only_fitting and not rename):
        return []
    ways = [f"to rename, pass {_as_argument({'rename': rename}, within)}"] if rename else []
    ways.append(f"to delete the values, pass {_as_argument({'drop': gone}, within)}")
    names = ", ".join(f.name for f in new), ", ".join(gone)
    ways.append("to keep them hidden in stored rows, make the changes in two restarts")
    return [f"{names[0]} added and {names[1]} omitted at the same restart: {'; '.join(ways)}"]


def _as_argument(changes: dict[str, object], within: str | None) -> str:
    return f"stateChanges={changes if within is None else {within: changes}}"


def _renamed_fields(held: _Fields, latest: _Fields, declared: _Fields, within: str = "") -> list[str]:
    """List nested fields that may be renamed: a field is missing, and a new field has a fitting type."""
    was_held, was, now = ({field.name: field.type for field in fields} for fields in (held, latest, declared))
    gone = [name for name in was if name not in now]
    new = [name for name in now if name not in was_held]
    found = [
        f"{within}{before} → {within}{after}: a renamed field loses its values; to drop one field and add the other, "
        "use two restarts"
        for before in gone
        for after in new
        if within and is_readable_as(was[before], now[after])
    ]
    for name in was.keys() & was_held.keys() & now.keys():
        inner = [_fields_in(types[name]) for types in (was_held, was, now)]
        found += _renamed_fields(inner[0], inner[1], inner[2], f"{within}{name}.")
    return found


def _fields_in(t: pa.DataType) -> list[pa.Field]:
    """Return the fields of a struct, or of the structs in a list or in a map's values."""
    if pa.types.is_struct(t):
        return list(t)
    if pa.types.is_map(t):
        return _fields_in(t.item_type)
    return _fields_in(t.value_type) if pa.types.is_large_list(t) else []


def _newly_not_null(live: TableSchema, declared: TableSchema) -> list[str]:
    """List the columns that are declared NOT NULL although stored rows may have nulls."""
    return [
        f"{name.partition('.')[2]}: it is NOT NULL, but stored rows may have null there; declare it nullable"
        for name in sorted(declared.not_null - live.not_null, key=lambda name: (name.startswith(VALUE_SIDE), name))
    ]


def described(columns: Iterable[pa.Field]) -> str:
    """Format columns for an error message."""
    return ", ".join(f"{field.name} {field.type}" for field in columns)


class StateFunction(ShardFunction):
    """A `ShardFunction` that calls a user's function, on tables whose columns the user declares, drops and renames."""

    def configuration(self) -> Mapping[str, str]:
        return {}

    def require_restartable(self, stored: StoredTables, configuration: Mapping[str, str]) -> None:
        require_same_api(configuration, self.configuration())
        require_readable_tables(stored, self.tables())


class OperatorFunction(ShardFunction):
    """A `ShardFunction` that continues the same operator's tables; users cannot drop or rename their columns."""

    def changes(self) -> Mapping[str, ColumnChanges]:
        return {}

    def require_restartable(self, stored: StoredTables, configuration: Mapping[str, str]) -> None:
        require_same_api(configuration, self.configuration())
        for name, value in self.configuration().items():  # such as windows, or a ranking
            if configuration.get(name, value) != value:
                raise SchemaMismatchError(
                    f"the {name} has changed, and stored rows need the old value: set it back, {NEW_QUERY}",
                    stored=configuration[name],
                    defined=value,
                )
        self.require_same_columns(stored)
        require_readable_tables(stored, self.tables())

    def require_same_columns(self, stored: StoredTables) -> None:
        """Check stored columns beyond names and types; by default, check nothing."""
