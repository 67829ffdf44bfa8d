"""Which tables and columns an operator's state may hold: those of its record, and those that later runs declared.

::

    <operator>/operator                       the record: tables of the run that began
    <operator>/schemas/000001-<digest>        tables of a later run that declares others, or with other columns, and
                                              which columns it drops and renames
    <operator>/announced/<digest>.<id>        what a run is about to add to them; deleted when it has

What state holds only grows (`holdfast.backends.evolution`), under names that are given once
(`holdfast.backends.column_names`), so a run that leaves out a table changes nothing here, and
one that declares it again finds it. An object is written before the first state that needs it: if its writer then dies,
or Spark drops the micro-batch, it says more than state holds, which does no harm.

Objects are read in the order of their names. Two runs of a query exclude each other by their claims. Should they
overlap all the same, and declare what cannot both be, at most one of them stores its tables, and the other is told
before it writes state: a writer announces what it will declare, then looks for others who do, then for what they have
stored, stores its own, and withdraws the announcement. Of two, the one who looks later sees the other, by its
announcement or by what it has stored. Both may see each other: then both withdraw, and one is started again.

A writer that was killed leaves its announcement. It counts for `ALIVE_MS`, and a writer that took half of that does not
store any more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import pyarrow as pa

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.column_names import ColumnChanges, Names, named, with_columns
from holdfast.backends.evolution import evolved_tables
from holdfast.backends.run import Run, under_names
from holdfast.backends.schema import TableSchema
from holdfast.backends.stored_schema import decode_schemas, encode_schemas
from holdfast.errors import ConflictError, HoldfastError, NotFoundError, SchemaMismatchError, UnavailableError
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.ownership.claim_listing import ALIVE_MS
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "schemas"
FOLDER, ANNOUNCED = "schemas", "announced"
_FIELDS = ("operator", "query_id", "schemas")
_DIGITS, _DIGEST_DIGITS = 6, 16
_DIGEST = rf"([0-9a-f]{{{_DIGEST_DIGITS}}})"
_NAME = re.compile(rf"[0-9]{{{_DIGITS}}}-{_DIGEST}")
_ANNOUNCEMENT = re.compile(rf"{_DIGEST}\.[^./]+")
_STORED_WITHIN_MS = ALIVE_MS // 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredTables:
    """The tables of stored state.

    Attributes
    ----------
    held : mapping of str to TableSchema
        All tables that it may hold, with all columns of each, under the names that these are stored under.
    latest : mapping of str to TableSchema
        The same tables with the columns that were declared last, as they are called now.
    last : frozenset of str
        The tables that the last run declared.
    never_null : mapping of str to frozenset of str
        By table the stored columns, as in `TableSchema.not_null`, that no stored row has a null in: every run that
        declared the table wanted none.
    names : mapping of str to mapping of str to str
        By table the columns that a run may declare and find again, and under which names they are stored.
    left_out : frozenset of str
        The tables that some run did not declare, although they were held.
    made : mapping of str to ColumnChanges
        By table the changes that were made to what was read from storage, and that are to be stored.
    """

    held: Mapping[str, TableSchema]
    latest: Mapping[str, TableSchema]
    last: frozenset[str]
    never_null: Mapping[str, frozenset[str]]
    names: Mapping[str, Names]
    left_out: frozenset[str] = frozenset()
    made: Mapping[str, ColumnChanges] = field(default_factory=dict, compare=False)

    @classmethod
    def of_first_run(cls, declared: Mapping[str, TableSchema]) -> Self:
        """Return the tables of state that begins with these."""
        names = {name: {column: column for column in schema.value.names} for name, schema in declared.items()}
        return cls(declared, declared, frozenset(declared), _not_null(declared), names)

    @property
    def declared(self) -> dict[str, TableSchema]:
        """The tables that the last run declared, as it did."""
        return {name: self.latest[name] for name in self.last}

    @property
    def is_continuous(self) -> bool:
        """Whether all runs have declared these tables since they were first declared."""
        return self.left_out.isdisjoint(self.last)

    @cached_property
    def live(self) -> dict[str, TableSchema]:
        """All tables with the columns that are not dropped, as they are called now; `not_null` never has a null."""
        return {
            name: named(replace(schema, not_null=self.never_null.get(name, frozenset())), _inverse(self.names[name]))
            for name, schema in self.held.items()
        }

    def shown(self, run: Run, schema: TableSchema) -> Run:
        """Return stored rows as a schema has them whose columns are called as they are now."""
        return under_names(run, schema, self.names[schema.name])

    def with_changes(self, changes: Mapping[str, ColumnChanges]) -> Self:
        """Return what the state holds once these changes are made to its columns; those that are made stay so.

        Raises
        ------
        SchemaMismatchError
            A column cannot have its new name.
        """
        new = self.effective(changes)
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

    def effective(self, changes: Mapping[str, ColumnChanges]) -> dict[str, ColumnChanges]:
        """Return those changes that are not made yet."""
        found = {name: change.effective(self.names[name]) for name, change in changes.items() if name in self.names}
        return {name: change for name, change in found.items() if change}

    def with_declared(self, declared: Mapping[str, TableSchema]) -> Self:
        """Return what the state may hold once a run has declared these tables.

        Raises
        ------
        SchemaMismatchError
            Stored rows cannot be read with what is declared.
        """
        names = {name: self._with_columns(name, schema) for name, schema in declared.items()}
        stored = {name: named(schema, names[name]) for name, schema in declared.items()}
        held = evolved_tables(self.held, stored)
        left_out = self.left_out | (self.held.keys() - declared.keys())
        not_null = _not_null(stored)
        still = {name: found & self.never_null.get(name, found) for name, found in not_null.items()}
        return replace(
            self,
            held=held,
            latest={**self.latest, **declared},
            last=frozenset(declared),
            never_null={**self.never_null, **still},
            names={**self.names, **names},
            left_out=left_out,
        )

    def _with_columns(self, table: str, declared: TableSchema) -> Names:
        stored = self.held[table].value.names if table in self.held else []
        return with_columns(self.names.get(table, {}), stored, declared.value.names)

    def places(self, declared: Mapping[str, TableSchema]) -> dict[str, dict[str, str]]:
        """Return under which names the columns of tables are stored that a run has declared."""
        return {
            name: {column: self.names[name][column] for column in schema.value.names}
            for name, schema in declared.items()
        }


def _not_null(declared: Mapping[str, TableSchema]) -> dict[str, frozenset[str]]:
    return {name: schema.not_null for name, schema in declared.items()}


def _inverse(names: Names) -> Names:
    return {stored: name for name, stored in names.items()}


def stored_tables(storage: ObjectStorage, record: OperatorRecord) -> StoredTables:
    """Return the tables that an operator's state may hold.

    Parameters
    ----------
    record : OperatorRecord
        The stored one.

    Raises
    ------
    CorruptionError
        One of the objects is damaged, or belongs elsewhere.
    """
    folder = _folder(storage, record, FOLDER)
    return _read_all(folder, _names(folder), record)


def _read_all(folder: PrefixedStorage, names: Sequence[str], record: OperatorRecord) -> StoredTables:
    stored = StoredTables.of_first_run(decode_schemas(record.schemas))
    for name in names:
        try:
            declared, changes = _read(folder, name, record)
            stored = stored.with_changes(changes).with_declared(declared)
        except NotFoundError:
            continue  # deleted, with all of the operator
        except SchemaMismatchError as exc:
            _log.warning("%s/%s is not used, as it does not go with earlier ones: %s", folder.url, name, exc)
    return replace(stored, made={})


def declare_tables(
    storage: ObjectStorage,
    record: OperatorRecord,
    planned: StoredTables,
    new_id: Callable[[], str] = clock.new_id,
    now_ms: Callable[[], int] = clock.now_ms,
) -> None:
    """Store which tables a run declares and which columns it changes, unless that is what was stored last.

    Parameters
    ----------
    record : OperatorRecord
        The stored one.
    planned : StoredTables
        What was stored when the run looked, with its changes and what it declares: state is written accordingly.
    new_id, now_ms : callable, optional
        As in `holdfast.clock`.

    Raises
    ------
    SchemaMismatchError
        Stored rows cannot be read with what is declared.
    ConflictError
        Another run of the query declares other tables at this moment.
    UnavailableError
        It took so long that others do not heed it any more; nothing was stored.
    """
    folder, announced = _folder(storage, record, FOLDER), _folder(storage, record, ANNOUNCED)
    names, declared = _names(folder), planned.declared
    stored = _read_all(folder, names, record)
    if _after(planned, stored, record, storage.url) == stored:
        return
    changes = stored.effective(planned.made)
    data, digest = _encoded(record, declared, changes)
    mine, begun_ms = f"{digest[:_DIGEST_DIGITS]}.{new_id()}", now_ms()
    announced.put(mine, data)
    try:
        # Who announces what is stored last was killed after it, or changes nothing any more.
        moot = {digest[:_DIGEST_DIGITS], *(name[-_DIGEST_DIGITS:] for name in names[-1:])}
        old = _refuse_announced(announced, mine, moot, record, declared, is_changed=bool(changes))
        names = _names(folder)
        is_stored = _is_declared(planned, _read_all(folder, names, record), record, storage.url)
        if abs(now_ms() - begun_ms) > _STORED_WITHIN_MS:
            raise UnavailableError("the storage took too long to say what other runs declare: try again")
    except HoldfastError:
        with suppress(HoldfastError):  # it counts for a while only, and what is raised says what to do
            announced.delete([mine])
        raise
    if not is_stored:
        number = 1 + max((int(name[:_DIGITS]) for name in names), default=0)
        # Should this fail, it may be stored all the same, even later: so the announcement stays.
        folder.put(f"{number:0{_DIGITS}d}-{digest[:_DIGEST_DIGITS]}", data)
    announced.delete([mine, *old])


def _encoded(
    record: OperatorRecord, declared: Mapping[str, TableSchema], changes: Mapping[str, ColumnChanges]
) -> tuple[pa.Buffer, str]:
    """Return the object and its digest; in one order, so that all tasks of a run write one object."""
    header: dict[str, object] = {
        "operator": record.operator,
        "query_id": record.query_id,
        "schemas": encode_schemas(dict(sorted(declared.items()))),
    }
    if changes:
        header["changes"] = _encode_changes(changes)
    return stored_file.encode(KIND, header)


def _refuse_announced(
    announced: PrefixedStorage,
    mine: str,
    moot: Collection[str],
    record: OperatorRecord,
    declared: Mapping[str, TableSchema],
    *,
    is_changed: bool,
) -> list[str]:
    """Raise ConflictError if another run announces what cannot be beside `declared`; return announcements of the dead.

    Whichever of the two is stored first: so both are asked. Beside a rename or a drop, nothing can be.
    """
    modified = {info.key: info.modified_ms for info in announced.list("") if _ANNOUNCEMENT.fullmatch(info.key)}
    if mine not in modified:
        raise UnavailableError("the storage does not list what was just stored", key=mine, storage=announced.url)
    old = [key for key, modified_ms in modified.items() if modified[mine] - modified_ms > ALIVE_MS]
    for key in modified.keys() - old:
        if key[:_DIGEST_DIGITS] not in moot:
            try:
                other, changes = _read(announced, key, record)
                evolved_tables(other, declared), evolved_tables(declared, other)
            except NotFoundError:
                continue  # what it has stored, if anything, is seen next
            except SchemaMismatchError as exc:
                raise _conflict(record, announced.url) from exc
            if changes or is_changed:
                raise _conflict(record, announced.url)
    return old


def _is_declared(planned: StoredTables, stored: StoredTables, record: OperatorRecord, url: str) -> bool:
    """Tell whether what is stored says what a run has planned; ConflictError if it cannot be any more."""
    try:
        return _after(planned, stored, record, url) == stored
    except SchemaMismatchError as exc:
        raise _conflict(record, url) from exc


def _after(planned: StoredTables, stored: StoredTables, record: OperatorRecord, url: str) -> StoredTables:
    """Return what is stored with what a run has planned; ConflictError if columns have become others by now."""
    after = stored.with_changes(planned.made).with_declared(planned.declared)
    is_moved = after.places(planned.declared) != planned.places(planned.declared)
    if is_moved or any(after.names[table] != planned.names[table] for table in planned.made):
        raise _conflict(record, url)
    return after


def _conflict(record: OperatorRecord, url: str) -> ConflictError:
    return ConflictError(
        "another run of this query declares other state under the same names at the same moment: restart the query, "
        "one run at a time; a run that was killed while it did so counts for five minutes",
        operator=record.operator,
        storage=url,
    )


def _folder(storage: ObjectStorage, record: OperatorRecord, name: str) -> PrefixedStorage:
    return PrefixedStorage(storage, f"{record.operator}/{name}")


def _names(folder: PrefixedStorage) -> list[str]:
    return [info.key for info in folder.list("") if _NAME.fullmatch(info.key)]


_Said = tuple[dict[str, TableSchema], dict[str, ColumnChanges]]
"""The tables that a run declares, and by table the changes that it makes to columns before."""


def _read(folder: PrefixedStorage, name: str, record: OperatorRecord) -> _Said:
    """Return what an object says, whose name has the beginning of its digest."""
    source = f"{folder.url}/{name}"
    stored = stored_file.decode(folder.get(name), source=source, kind=KIND, plain_bytes_max=0)
    has_changes = "changes" in stored.header
    fields = Fields(stored.header, source, *_FIELDS, *(["changes"] if has_changes else []))
    says = _NAME.fullmatch(name) or _ANNOUNCEMENT.fullmatch(name)
    if says is None or says[1] != stored.digest[:_DIGEST_DIGITS]:
        fields.refuse("is not what its name says: it was replaced", digest=stored.digest)
    whose = fields.text("operator"), fields.text("query_id")
    if whose != (record.operator, record.query_id):
        fields.refuse("belongs elsewhere: it was moved or copied", operator=whose[0], query_id=whose[1])
    schemas = decode_schemas(fields.texts_by_name("schemas", 2))
    return schemas, _read_changes(fields) if has_changes else {}


def _encode_changes(changes: Mapping[str, ColumnChanges]) -> dict[str, object]:
    return {
        table: {"drop": sorted(change.drop), "rename": dict(sorted(change.rename.items()))}
        for table, change in sorted(changes.items())
    }


def _read_changes(fields: Fields) -> dict[str, ColumnChanges]:
    found = {}
    for table, change in fields.mapping("changes").items():
        of_table = Fields(change, fields.source, "drop", "rename")
        drop, rename = of_table.all_texts("drop"), of_table.mapping_of_texts("rename")
        new = list(rename.values())
        if {*drop, *rename} & {*new} or {*drop} & rename.keys() or len({*new}) < len(new):
            fields.refuse("changes one column twice", table=table)
        found[table] = ColumnChanges(frozenset(drop), rename)
    return found
