"""Which tables and columns an operator's state may hold: those of its record, and those that later runs declared.

::

    <operator>/operator                       the record: tables of the run that began
    <operator>/schemas/000001-<digest>        tables of a later run that declares others, or with other columns

What state holds only grows (`holdfast.backends.evolution`), so a run that leaves out a table changes nothing here, and
one that declares it again finds it. An object is written before the first state that needs it: if its writer then dies,
or Spark drops the micro-batch, it says more than state holds, which does no harm.

Objects are read in the order of their names. Two runs of a query exclude each other by their claims; should they
overlap all the same, and declare what cannot both be, the first object holds, and the other's writer, who reads back
what it has written, is told before it writes state; but for a gap of one request, which decision 0030 describes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from holdfast.backends import stored_file
from holdfast.backends.evolution import evolved_tables
from holdfast.backends.schema import TableSchema
from holdfast.backends.stored_schema import decode_schemas, encode_schemas
from holdfast.errors import ConflictError, NotFoundError, SchemaMismatchError
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "schemas"
FOLDER = "schemas"
_FIELDS = ("operator", "query_id", "schemas")
_DIGITS = 6
_NAME = re.compile(rf"[0-9]{{{_DIGITS}}}-[0-9a-f]{{16}}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredTables:
    """The tables of stored state.

    Attributes
    ----------
    held : mapping of str to TableSchema
        All tables that it may hold, with all columns of each.
    latest : mapping of str to TableSchema
        The same tables with the columns that were declared last.
    last : frozenset of str
        The tables that the last run declared.
    never_null : mapping of str to frozenset of str
        By table the columns, as in `TableSchema.not_null`, that no stored row has a null in: every run that declared
        the table wanted none.
    left_out : frozenset of str
        The tables that some run did not declare, although they were held.
    """

    held: Mapping[str, TableSchema]
    latest: Mapping[str, TableSchema]
    last: frozenset[str]
    never_null: Mapping[str, frozenset[str]]
    left_out: frozenset[str] = frozenset()

    @classmethod
    def of_first_run(cls, declared: Mapping[str, TableSchema]) -> Self:
        """Return the tables of state that begins with these."""
        return cls(declared, declared, frozenset(declared), _not_null(declared))

    @property
    def declared(self) -> dict[str, TableSchema]:
        """The tables that the last run declared, as it did."""
        return {name: self.latest[name] for name in self.last}

    @property
    def is_continuous(self) -> bool:
        """Whether all runs have declared these tables since they were first declared."""
        return self.left_out.isdisjoint(self.last)

    def with_declared(self, declared: Mapping[str, TableSchema]) -> Self:
        """Return what the state may hold once a run has declared these tables.

        Raises
        ------
        SchemaMismatchError
            Stored rows cannot be read with what is declared.
        """
        held = evolved_tables(self.held, declared)
        left_out = self.left_out | (self.held.keys() - declared.keys())
        not_null = _not_null(declared)
        still = {name: found & self.never_null.get(name, found) for name, found in not_null.items()}
        return replace(
            self,
            held=held,
            latest={**self.latest, **declared},
            last=frozenset(declared),
            never_null={**self.never_null, **still},
            left_out=left_out,
        )


def _not_null(declared: Mapping[str, TableSchema]) -> dict[str, frozenset[str]]:
    return {name: schema.not_null for name, schema in declared.items()}


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
    folder = _folder(storage, record)
    return _read_all(folder, _names(folder), record)


def _read_all(folder: PrefixedStorage, names: Sequence[str], record: OperatorRecord) -> StoredTables:
    stored = StoredTables.of_first_run(decode_schemas(record.schemas))
    for name in names:
        try:
            stored = stored.with_declared(_read(folder, name, record))
        except NotFoundError:
            continue  # deleted, with all of the operator
        except SchemaMismatchError as exc:
            _log.warning("%s/%s is not used, as it does not go with earlier ones: %s", folder.url, name, exc)
    return stored


def declare_tables(storage: ObjectStorage, record: OperatorRecord, declared: Mapping[str, TableSchema]) -> None:
    """Store which tables a run declares, unless they were the last ones that were declared.

    Parameters
    ----------
    record : OperatorRecord
        The stored one.

    Raises
    ------
    SchemaMismatchError
        Stored rows cannot be read with what is declared.
    ConflictError
        Another run of the query declares other tables at this moment.
    """
    folder = _folder(storage, record)
    names = _names(folder)
    while True:
        stored = _read_all(folder, names, record)
        if stored.with_declared(declared) == stored:
            return
        seen, names = names, _names(folder)
        if names == seen:
            break
    # In one order, so that all tasks of a run write one object.
    schemas = encode_schemas(dict(sorted(declared.items())))
    header = {"operator": record.operator, "query_id": record.query_id, "schemas": schemas}
    data, digest = stored_file.encode(KIND, header)
    number = 1 + max((int(name[:_DIGITS]) for name in names), default=0)
    folder.put(f"{number:0{_DIGITS}d}-{digest[:16]}", data)
    stored = stored_tables(storage, record)
    try:
        is_held = stored.with_declared(declared) == stored
    except SchemaMismatchError:
        is_held = False
    if not is_held:
        raise ConflictError(
            "another run of this query declared other state under the same names at the same moment: restart the "
            "query, one run at a time",
            operator=record.operator,
            storage=storage.url,
        )


def _folder(storage: ObjectStorage, record: OperatorRecord) -> PrefixedStorage:
    return PrefixedStorage(storage, f"{record.operator}/{FOLDER}")


def _names(folder: PrefixedStorage) -> list[str]:
    return [info.key for info in folder.list("") if _NAME.fullmatch(info.key)]


def _read(folder: PrefixedStorage, name: str, record: OperatorRecord) -> dict[str, TableSchema]:
    source = f"{folder.url}/{name}"
    stored = stored_file.decode(folder.get(name), source=source, kind=KIND, plain_bytes_max=0)
    fields = Fields(stored.header, source, *_FIELDS)
    whose = fields.text("operator"), fields.text("query_id")
    if whose != (record.operator, record.query_id):
        fields.refuse("belongs elsewhere: it was moved or copied", operator=whose[0], query_id=whose[1])
    schemas = fields.mapping("schemas")
    return decode_schemas(
        {t: Fields({"schemas": s}, source, "schemas").texts("schemas", 2) for t, s in schemas.items()}
    )
