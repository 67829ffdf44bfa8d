"""The tables and columns that an operator's state may hold, as declared by all its runs.

::

    <operator>/operator                       the record: tables of the first run
    <operator>/schemas/00000000000000000001   all tables and columns, after a later run declared new ones, or dropped or
                                              renamed columns

Stored tables and columns only grow (`holdfast.backends.evolution`), under names that are never reused
(`holdfast.backends.column_names`). So a run that leaves out a table changes nothing, and a run that declares it again
finds its rows. An object is written before the first state that needs it: if its writer then dies, or Spark drops the
micro-batch, the object harmlessly lists more than state holds.

The objects are a fence (`holdfast.snapshotter.fence`) whose newest object is complete, so old objects are deleted.
Overlapping runs build on each other's declarations, or fail before they write state.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Self

from holdfast.backends.column_names import ColumnChanges, Names, named, with_columns
from holdfast.backends.evolution import evolved, evolved_tables
from holdfast.backends.run import Run, under_names
from holdfast.backends.schema import TableSchema, encode_schemas
from holdfast.errors import ConflictError, SchemaMismatchError
from holdfast.snapshotter.fence import TypedFence, looks
from holdfast.snapshotter.fields import NOT_STORED, Coding, Fields, Stored, coding_of_tables
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.storage.object_storage import ObjectStorage

FOLDER = "schemas"
_TableNames = Annotated[frozenset[str], Coding(list[str], frozenset, sorted)]


def _sorted(by_table: Mapping[str, Any]) -> dict[str, Any]:
    """Sort a mapping by key, so that all tasks of a run store the same bytes."""
    return dict(sorted(by_table.items()))


_Tables = Annotated[
    Mapping[str, TableSchema],
    replace(coding_of_tables(), encode=lambda tables: encode_schemas(_sorted(tables))),
]


@dataclass(frozen=True)
class StoredTables(Stored):
    #: All tables that state may hold, with all their columns under stored names; `not_null` lists the columns that are
    #: null in no stored row, because every run that declared the table forbade it
    held: _Tables
    #: The same tables with the columns that were declared last, under their current names
    latest: _Tables
    last: _TableNames  #: The tables that the last run declared
    #: By table, the columns that a run may declare and find again, with their stored names
    names: Annotated[Mapping[str, Names], Coding(Mapping[str, Mapping[str, str]], dict, _sorted)]
    left_out: _TableNames = frozenset()  #: Held tables that some run did not declare
    #: By table, column changes that are not yet stored
    made: Annotated[Mapping[str, ColumnChanges], NOT_STORED] = field(default_factory=dict, compare=False)

    @classmethod
    def of_first_run(cls, declared: Mapping[str, TableSchema]) -> Self:
        names = {name: {column: column for column in schema.value.names} for name, schema in declared.items()}
        return cls(declared, declared, frozenset(declared), names)

    @property
    def declared(self) -> dict[str, TableSchema]:
        """The tables that the last run declared, as it declared them."""
        return {name: self.latest[name] for name in self.last}

    @property
    def is_continuous(self) -> bool:
        """Whether all runs have declared these tables since they were first declared."""
        return self.left_out.isdisjoint(self.last)

    @cached_property
    def live(self) -> dict[str, TableSchema]:
        """All tables without dropped columns, under the columns' current names; `not_null` is as in `held`."""
        declared = {name: {stored: column for column, stored in names.items()} for name, names in self.names.items()}
        return {name: named(schema, declared[name]) for name, schema in self.held.items()}

    @property
    def never_null(self) -> dict[str, frozenset[str]]:
        """By table, the stored columns without nulls, which a comparison of schemas ignores."""
        return {name: schema.not_null for name, schema in self.held.items()}

    def shown(self, run: Run, schema: TableSchema) -> Run:
        """Return stored rows in `schema`, which has the columns' current names."""
        return under_names(run, schema, self.names[schema.name])

    def with_changes(self, changes: Mapping[str, ColumnChanges]) -> Self:
        """Return the tables with these column changes; those already made have no effect."""
        found = {name: change.effective(self.names[name]) for name, change in changes.items() if name in self.names}
        new = {name: change for name, change in found.items() if change}
        if not new:
            return self
        names = {name: change.applied(self.names[name], name) for name, change in new.items()}
        latest = {
            name: named(
                self.latest[name], {c: change.rename.get(c, c) for c in self.names[name] if c not in change.drop}
            )
            for name, change in new.items()
        }
        made = {**self.made, **new}
        return replace(self, names={**self.names, **names}, latest={**self.latest, **latest}, made=made)

    def with_declared(self, declared: Mapping[str, TableSchema]) -> Self:
        """Return the stored tables after a run declares `declared`. Raises `SchemaMismatchError`."""
        names = {name: self._with_columns(name, schema) for name, schema in declared.items()}
        stored = {name: named(schema, names[name]) for name, schema in declared.items()}
        held = evolved_tables(self.held, stored)
        for name, schema in stored.items():
            before = self.held.get(name, schema)
            held[name] = replace(held[name], not_null=before.not_null & schema.not_null)
        return replace(
            self,
            held=held,
            latest={**self.latest, **declared},
            last=frozenset(declared),
            names={**self.names, **names},
            left_out=self.left_out | (self.held.keys() - declared.keys()),
        )

    def _with_columns(self, table: str, declared: TableSchema) -> Names:
        stored = self.held[table].value.names if table in self.held else []
        return with_columns(self.names.get(table, {}), stored, declared.value.names)

    def places(self, declared: Mapping[str, TableSchema]) -> dict[str, dict[str, str]]:
        """Return the stored names of the columns that a run declares, by table."""
        return {
            name: {column: self.names[name][column] for column in schema.value.names}
            for name, schema in declared.items()
        }

    def require(self, header: Fields) -> None:
        is_one = self.latest.keys() == self.held.keys() == self.names.keys()
        if not is_one or not self.last | self.left_out <= self.held.keys():
            header.refuse("lists different tables than it holds")
        for table, schema in self.held.items():
            if not _holds(schema, self.latest[table], self.names[table]):
                header.refuse("lists columns that its table does not hold", table=table)


@dataclass(frozen=True, kw_only=True)
class _Header(StoredTables, kind="schemas"):
    operator: str
    query_id: str
    number: int


def _holds(held: TableSchema, latest: TableSchema, names: Names) -> bool:
    """Return whether a table holds each column, as declared last, under a distinct name."""
    stored = {*names.values()}
    if len(stored) < len(names) or not (stored <= {*held.value.names} and {*latest.value.names} <= names.keys()):
        return False
    try:
        return evolved(held, named(latest, names)) == held
    except SchemaMismatchError:
        return False


def stored_tables(storage: ObjectStorage, record: OperatorRecord) -> StoredTables:
    """Return the tables that an operator's state may hold. Raises `CorruptionError`."""
    return _newest(_fence(storage, record), record)[1]


def declare_tables(storage: ObjectStorage, record: OperatorRecord, planned: StoredTables) -> None:
    """Store a run's `planned` tables and column changes, unless the stored tables have them already."""
    fence = _fence(storage, record)
    for _ in looks(storage.url):
        number, stored = _newest(fence, record)
        after = _after(planned, stored, record, storage.url)
        if (after, after.never_null) == (stored, stored.never_null):
            return
        tables = after.held, after.latest, after.last, after.names, after.left_out
        header = _Header(*tables, operator=record.operator, query_id=record.query_id, number=number + 1)
        with suppress(ConflictError):  # another run was faster: read its declaration
            fence.replace(number + 1, header)
            return


def _after(planned: StoredTables, stored: StoredTables, record: OperatorRecord, url: str) -> StoredTables:
    """Return the stored tables with a run's planned changes. Raises `ConflictError` if these no longer fit."""
    conflict = ConflictError(
        "another run of this query has changed the tables since this run began: restart the query, one run at a time",
        operator=record.operator,
        storage=url,
    )
    try:
        after = stored.with_changes(planned.made).with_declared(planned.declared)
    except SchemaMismatchError as exc:
        raise conflict from exc
    is_moved = after.places(planned.declared) != planned.places(planned.declared)
    if is_moved or any(after.names[table] != planned.names[table] for table in planned.made):
        raise conflict
    return after


def _fence(storage: ObjectStorage, record: OperatorRecord) -> TypedFence[_Header]:
    folder = f"{record.operator}/{FOLDER}"
    return TypedFence(storage, folder, _Header, operator=record.operator, query_id=record.query_id)


def _newest(fence: TypedFence[_Header], record: OperatorRecord) -> tuple[int, StoredTables]:
    number, found = fence.newest_value()
    if found is None:
        return 0, StoredTables.of_first_run(record.tables)
    return number, StoredTables(found.held, found.latest, found.last, found.names, found.left_out)
