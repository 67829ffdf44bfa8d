"""Stored names of a table's value columns: renaming or dropping a column touches no row.

::

    a run                                   declared → stored           rows have
    declares n, m                           n → n, m → m                n, m
    renames n to total                      total → n, m → m            n, m
    drops m                                 total → n                   n; rows not written since keep m
    declares total and a new m              total → n, m → m#2          n, m#2, …

A stored name is never reused, so dropped data is never read again. Only stored names reach backends, commits and
snapshots; transactions translate them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from holdfast.backends.arrow.rows import from_columns
from holdfast.backends.schema import VALUE_SIDE, TableSchema
from holdfast.errors import SchemaMismatchError

#: Maps each declared column name to its stored name.
Names = Mapping[str, str]


@dataclass(frozen=True)
class ColumnChanges:
    """Columns of one table to drop and to rename, by declared name."""

    drop: frozenset[str] = frozenset()  #: Never read again
    #: New name by old name. No column is both dropped and renamed, and no new name is another column's old name.
    rename: Mapping[str, str] = field(default_factory=dict)

    def effective(self, names: Names) -> ColumnChanges:
        """Return the changes that apply to `names`, without those to unknown columns."""
        rename = {old: new for old, new in self.rename.items() if old in names}
        return ColumnChanges(self.drop & names.keys(), rename)

    def __bool__(self) -> bool:
        return bool(self.drop or self.rename)

    def applied(self, names: Names, table: str) -> Names:
        """Return the names after these changes; a change made earlier has no effect."""
        clashes = [f"{old} → {new}" for old, new in self.rename.items() if old in names and new in names]
        if clashes:
            raise SchemaMismatchError(
                "cannot rename a state column to the name of a stored column: first drop the stored column, in a run "
                "that declares neither column under this name",
                table=table,
                rename=clashes,
            )
        return {self.rename.get(name, name): stored for name, stored in names.items() if name not in self.drop}


def with_columns(names: Names, stored: Collection[str], declared: Iterable[str]) -> Names:
    """Return a stored name for each declared column; a new column's is not in `stored`, all names ever used."""
    taken, found = {*stored, *names.values()}, dict(names)
    for name in declared:
        if name not in found:
            found[name] = _free(name, taken)
            taken.add(found[name])
    return found


def _free(name: str, taken: Collection[str]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


def named(schema: TableSchema, names: Mapping[str, str]) -> TableSchema:
    """Return the schema with only the value columns in `names`, renamed accordingly."""
    value = pa.schema([f.with_name(names[f.name]) for f in schema.value if f.name in names])
    not_null = [c.removeprefix(VALUE_SIDE) for c in schema.not_null if c.startswith(VALUE_SIDE)]
    still = {VALUE_SIDE + names[name] for name in not_null if name in names}
    return TableSchema(schema.name, schema.key, value, schema.not_null - {VALUE_SIDE + n for n in not_null} | still)


def relabelled(values: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns under the names in `schema`, which has the same order; copies nothing."""
    return values if values.schema.equals(schema) else from_columns(values.columns, schema, values.num_rows)
