"""Tables as users see them: key columns, then value columns, under distinct names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa

from holdfast.backends.rocksdb.codec.rows import encode_values
from holdfast.backends.run import Run
from holdfast.backends.schema import TableSchema


def shown_columns(schema: TableSchema) -> pa.Schema:
    """Return the columns of a table as users see them: one whose name is taken is called ``key.…`` or ``value.…``.

    A name is taken by one that differs only in case, too: Spark, SQL and files of tables do not tell them apart.
    """
    names: list[str] = []
    for side, prefix in ((schema.key, "key."), (schema.value, "value.")):
        for name in side.names:
            names.append(free_name(name, names, prefix))
    return pa.schema([f.with_name(n) for f, n in zip([*schema.key, *schema.value], names, strict=True)])


def free_name(name: str, taken: Collection[str], prefix: str) -> str:
    """Return a name, with a prefix as often as it takes for no other one to be the same in another case."""
    folded = {other.casefold() for other in taken}
    while name.casefold() in folded:
        name = prefix + name
    return name


def as_table(schema: TableSchema, runs: Sequence[Run]) -> pa.Table:
    """Return runs of a schema as one table."""
    columns = shown_columns(schema)
    batches = [pa.RecordBatch.from_arrays([*r.keys.columns, *r.values.columns], schema=columns) for r in runs]
    return pa.Table.from_batches(batches, schema=columns)


def same_rows(one: Mapping[str, pa.Table], other: Mapping[str, pa.Table]) -> bool:
    """Tell whether tables hold the same values in the same order: NaN, which Arrow finds unequal to itself, is."""
    return one.keys() == other.keys() and all(_content(one[name]).equals(_content(other[name])) for name in one)


def _content(table: pa.Table) -> pa.Array:
    columns = [column.combine_chunks() for column in table.columns]
    return encode_values(pa.RecordBatch.from_arrays(columns, schema=table.schema))
