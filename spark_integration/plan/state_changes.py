"""Changes to state columns that a user declares: ``stateChanges={"drop": ["m"], "rename": {"old": "new"}}``.

Changes may stay in the code once they are made. So that none is made twice, no column that is dropped or renamed is
declared as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.options import did_you_mean
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.ttl.expiry import EXPIRES

#: What the APIs take.
StateChanges = Mapping[str, Any]
_DROP, _RENAME = "drop", "rename"


def changes_of_tables(given: StateChanges | None, tables: Mapping[str, Collection[str]]) -> dict[str, ColumnChanges]:
    """Return the changes to columns, by state table.

    `given` has changes by table or, where `STATE_TABLE` is the only one, its changes as they are. Raises
    `InvalidArgumentError` if they are none, or of other tables.
    """
    known = dict(tables)
    if list(known) == [STATE_TABLE] and isinstance(given, Mapping) and given.keys() & {_DROP, _RENAME}:
        given = {STATE_TABLE: given}
    return {name: _changes(of, name, known[name]) for name, of in _by_table(given, known, "state table").items()}


def changes_of_variables(given: StateChanges | None, variables: Collection[StateVariable]) -> dict[str, ColumnChanges]:
    """Return the changes to columns by table, given by a processor's variables; see `changes_of_tables`."""
    known = {variable.name: variable for variable in variables}
    return {
        known[name].table: _changes(of, name, known[name].schema.names)
        for name, of in _by_table(given, known, "state variable").items()
    }


def _by_table(given: Any, known: Mapping[str, object], what: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        _refuse("it is a mapping", given=given)
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        near = did_you_mean(unknown[0], [*known, _DROP, _RENAME])
        _refuse(f"name a {what} that the operator declares{near}", unknown=unknown, declared=list(known))
    return given


def _changes(given: Any, table: str, declared: Collection[str]) -> ColumnChanges:
    unknown = [str(name) for name in given if name not in (_DROP, _RENAME)] if isinstance(given, Mapping) else [""]
    if unknown:
        near = did_you_mean(unknown[0], (_DROP, _RENAME))
        _refuse(f"it has nothing but 'drop' and 'rename'{near}", table=table, given=given)
    drop, rename = given.get(_DROP, ()), given.get(_RENAME, {})
    if not isinstance(drop, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in drop):
        _refuse("'drop' is a list of column names", table=table, given=drop)
    if not isinstance(rename, Mapping) or not all(isinstance(n, str) for pair in rename.items() for n in pair):
        _refuse("'rename' has new column names by old ones", table=table, given=rename)
    gone = [*drop, *rename]
    if both := sorted({*drop} & {*rename}):
        _refuse("a column is either dropped or renamed", table=table, columns=both)
    if still := sorted({*gone} & {*declared}):
        _refuse(
            "a column is dropped or renamed, and declared as well: where this is done, and another column has the name "
            "by now, take it out of stateChanges",
            table=table,
            columns=still,
        )
    if missing := sorted({*rename.values()} - {*declared}):
        near = did_you_mean(missing[0], declared)
        _refuse(f"a column is renamed to one that is not declared{near}", table=table, columns=missing)
    if len({*rename.values()}) < len(rename):
        _refuse("two columns are renamed to one", table=table, rename=dict(rename))
    if EXPIRES in gone:
        _refuse(f"{EXPIRES!r} may be holdfast's own: it is neither dropped nor renamed", table=table)
    return ColumnChanges(frozenset(drop), dict(rename))


def _refuse(why: str, **facts: object) -> NoReturn:
    raise InvalidArgumentError(
        "stateChanges looks like {'drop': ['m'], 'rename': {'old': 'new'}}, or maps state tables or a "
        f"processor's variables to that: {why}",
        **facts,
    )
