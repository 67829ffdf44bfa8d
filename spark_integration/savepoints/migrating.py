"""A function of the user's that gives state tables other columns as a savepoint is restored: for what no restart can.

The function gets the rows of a table in batches, in tasks: key columns, then value columns, in the types that they are
stored in. It returns the same rows, with the same key columns, and whatever value columns the operator declares from
then on. Which these are, it is asked on the driver, with a batch of no rows, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from holdfast.backends.arrow.rows import from_columns, one_chunk
from holdfast.backends.run import Keys, Run, TableSchema, join_runs
from holdfast.backends.schema import KEY_SIDE, VALUE_SIDE
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.savepoints.manifest import SavedOperator
from holdfast.spark_integration.lookup.shown import shown_columns
from holdfast.spark_integration.processor.state.variable_tables import tables_called
from holdfast.spark_integration.timers import TIMERS, is_by_time
from holdfast.spark_integration.ttl.expiry import EXPIRES, index_of

Migrate = Callable[[pa.RecordBatch], pa.RecordBatch]
# Of one batch.
_ROWS, _BYTES = 1_000_000, 64 << 20


@dataclass(frozen=True)
class Migration:
    """What becomes of one state table."""

    function: Migrate
    #: The table as it was saved, and as it is restored
    before: TableSchema
    after: TableSchema
    is_expiring: bool  #: Whether the column of expiry times is holdfast's own, which the function does not see
    returned: tuple[str, ...]  #: What the function calls the value columns, in the order of `after`

    def __call__(self, run: Run) -> Run:
        """Return the rows with their new value columns. Raises `InvalidArgumentError`, `SchemaMismatchError`."""
        return join_runs([self._of(chunk) for chunk in run.chunks(_ROWS, _BYTES)])

    def _of(self, run: Run) -> Run:
        before, after = _seen(self.before, self.is_expiring), _seen(self.after, self.is_expiring)
        shown, n = shown_columns(before), len(before.key)
        values = [run.values.column(field.name) for field in before.value]
        returned = _called(self.function, from_columns([*run.keys.columns, *values], shown, len(run)), before)
        if sorted(returned.schema.names) != sorted([*shown.names[:n], *self.returned]):
            raise _wrong(before, "it returned other columns than for no rows", columns=returned.schema.names)
        if any(not returned.column(name).equals(run.keys.column(i)) for i, name in enumerate(shown.names[:n])):
            raise _wrong(before, "it returned other keys, or the same in another order")
        columns = [returned.column(name) for name in self.returned]
        found = pa.schema([pa.field(f.name, c.type) for f, c in zip(after.value, columns, strict=True)])
        keys = Keys(run.hashes, run.keys)
        columns = after.conform(from_columns(columns, found, len(run)), "value", keys).columns
        null = [f.name for f, c in zip(after.value, columns, strict=True) if self._not_null(f.name, c)]
        if null:
            raise _wrong(before, "it returned nulls in columns that it says have none", columns=null)
        columns += [run.values.column(EXPIRES)] if self.is_expiring else []
        first = run.batch.columns[: 2 + n]
        return Run(self.after, pa.RecordBatch.from_arrays([*first, *columns], schema=self.after.columns))

    def _not_null(self, name: str, column: pa.Array) -> bool:
        return VALUE_SIDE + name in self.after.not_null and bool(column.null_count)


def migrations_of(operator: SavedOperator, given: Any) -> dict[str, Migration]:
    """Return by table what becomes of an operator's state. Raises `InvalidArgumentError`, `NotFoundError`.

    `given`: for the operator's only state table; or by table, or by a processor's variable.
    """
    tables = [name for name, schema in operator.tables.items() if name != TIMERS and not is_by_time(schema)]
    if callable(given):
        if len(tables) != 1:
            raise InvalidArgumentError(
                "the operator has several state tables: give migrate functions by table",
                operator=operator.name,
                tables=tables,
            )
        given = {tables[0]: given}
    if not isinstance(given, Mapping) or not all(callable(function) for function in given.values()):
        raise InvalidArgumentError("migrate takes one function for an operator, or functions by table", given=given)
    found = {}
    for name, function in given.items():
        table = next((t for t in tables_called(name) if t in tables), None)
        if table is None:
            raise NotFoundError("no such table to migrate", operator=operator.name, table=name, tables=tables)
        before = operator.tables[table]
        is_expiring = EXPIRES in before.value.names and index_of(table) in operator.tables
        after, returned = _after(function, before, is_expiring)
        found[table] = Migration(function, before, after, is_expiring, returned)
    return found


def migrated(operator: SavedOperator, migrations: Mapping[str, Migration]) -> SavedOperator:
    """Return what an operator is like once its rows are migrated; its pieces are still those that were saved."""
    after = {name: migration.after for name, migration in migrations.items()}
    declared = {
        name: _without(after[name], _hidden(operator.tables[name], schema)) if name in after else schema
        for name, schema in operator.declared.items()
    }
    return replace(operator, tables={**operator.tables, **after}, declared=declared)


def _hidden(table: TableSchema, declared: TableSchema) -> set[str]:
    """Return the columns that some rows have, and the query's last run did not declare."""
    return set(table.value.names) - set(declared.value.names)


def _without(table: TableSchema, hidden: set[str]) -> TableSchema:
    return replace(table, value=pa.schema([field for field in table.value if field.name not in hidden]))


def _after(function: Migrate, table: TableSchema, is_expiring: bool) -> tuple[TableSchema, tuple[str, ...]]:
    """Return the schema that a function gives a table, and what the function calls its value columns."""
    before = _seen(table, is_expiring)
    shown = shown_columns(before)
    returned = _called(function, from_columns([pa.array([], field.type) for field in shown], shown, 0), before)
    keys = shown.names[: len(before.key)]
    if missing := [name for name in keys if name not in returned.schema.names]:
        raise _wrong(before, "it returned no key columns", missing=missing)
    names = dict(zip(shown.names[len(keys) :], before.value.names, strict=True))
    fields = [f.with_name(names.get(f.name, f.name)) for f in returned.schema if f.name not in keys]
    if is_expiring and EXPIRES in [f.name for f in fields]:
        raise _wrong(before, f"{EXPIRES!r} is holdfast's own, and kept")
    fields += [table.value.field(EXPIRES)] if is_expiring else []
    after = TableSchema.of(before.name, before.key, pa.schema(fields))
    not_null = after.not_null | {name for name in table.not_null if name.startswith(KEY_SIDE)}
    return replace(after, not_null=not_null), tuple(f.name for f in returned.schema if f.name not in keys)


def _seen(table: TableSchema, is_expiring: bool) -> TableSchema:
    """Return a table with the columns that a function sees."""
    value = pa.schema([f for f in table.value if not (is_expiring and f.name == EXPIRES)])
    return TableSchema(table.name, table.key, value)


def _called(function: Migrate, rows: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    try:
        returned = function(rows)
    except HoldfastError:
        raise
    except Exception as exc:  # whatever a function of the user's raises
        raise _wrong(table, f"it failed: {type(exc).__name__}: {exc}", rows=rows.num_rows) from exc
    if not isinstance(returned, pa.RecordBatch | pa.Table):
        raise _wrong(table, "it returned no pyarrow.RecordBatch", returned=type(returned).__name__)
    if returned.num_rows != rows.num_rows:
        raise _wrong(table, "it returned another number of rows", given=rows.num_rows, returned=returned.num_rows)
    if len(set(returned.schema.names)) < len(returned.schema.names):
        raise _wrong(table, "it returned two columns of one name", columns=returned.schema.names)
    columns = [one_chunk(column) for column in returned.columns]
    schema = pa.schema([field.with_type(c.type) for field, c in zip(returned.schema, columns, strict=True)])
    return from_columns(columns, schema, rows.num_rows)


def _wrong(table: TableSchema, why: str, **facts: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"the function that migrates a state table is wrong: {why}", table=table.name, **facts)
