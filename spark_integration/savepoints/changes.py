"""Changes that a restore makes to a saved query: renamed, resharded, skipped, reset and migrated operators.

A `Migration` wraps a user function that changes a table's value columns in ways that a restart cannot. Tasks call the
function with batches of the table's rows: key columns, then value columns, in their stored types. It returns the same
rows and key columns, with the value columns that the new operator declares. The driver first calls it with an empty
batch to learn the new columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import pyarrow as pa

from holdfast.backends.arrow.rows import from_columns, one_chunk
from holdfast.backends.options import did_you_mean
from holdfast.backends.run import Keys, Run, TableSchema, join_runs
from holdfast.backends.schema import KEY_SIDE, VALUE_SIDE
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.settings import MOST_SHARDS
from holdfast.snapshotter.savepoints.manifest import NAME, SHARDS_LIMIT, SavedOperator, Savepoint
from holdfast.spark_integration.lookup.keys import shown_columns
from holdfast.spark_integration.processor.state.variable_tables import tables_called
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, STATE_VARIABLES
from holdfast.spark_integration.timers import TIMERS, is_by_time
from holdfast.spark_integration.ttl.expiry import EXPIRES, index_of

Migrate = Callable[[pa.RecordBatch], pa.RecordBatch]
# Limits of a batch.
_ROWS, _BYTES = 1_000_000, 64 << 20
_NO_CHARACTER = re.compile("[\ud800-\udfff]")
_MODES = {"timeMode": "None", "outputMode": "update"}
_KNOWN_MODES = {"none", "processingtime", "eventtime", "append", "update", "complete"}
Sources = Literal["saved", "fresh"]


@dataclass(frozen=True)
class Migration:
    """The migration of one state table."""

    function: Migrate
    #: The table's schema in the savepoint and in the new query
    before: TableSchema
    after: TableSchema
    is_expiring: bool  #: Whether holdfast added an expiry column, hidden from the function
    returned: tuple[str, ...]  #: The function's names for the value columns, in the order of `after`

    def __call__(self, run: Run) -> Run:
        """Return the rows with their new value columns. Raises `InvalidArgumentError`, `SchemaMismatchError`."""
        return join_runs([self._of(chunk) for chunk in run.chunks(_ROWS, _BYTES)])

    def _of(self, run: Run) -> Run:
        before, after = _seen(self.before, self.is_expiring), _seen(self.after, self.is_expiring)
        shown, n = shown_columns(before), len(before.key)
        values = [run.values.column(field.name) for field in before.value]
        returned = _call(self.function, from_columns([*run.keys.columns, *values], shown, len(run)), before)
        if sorted(returned.schema.names) != sorted([*shown.names[:n], *self.returned]):
            raise _wrong(before, "it returned different columns than for an empty batch", columns=returned.schema.names)
        if any(not returned.column(name).equals(run.keys.column(i)) for i, name in enumerate(shown.names[:n])):
            raise _wrong(before, "it changed the keys or the order of the rows")
        columns = [returned.column(name) for name in self.returned]
        found = pa.schema([pa.field(f.name, c.type) for f, c in zip(after.value, columns, strict=True)])
        keys = Keys(run.hashes, run.keys)
        columns = after.conform(from_columns(columns, found, len(run)), "value", keys).columns
        made = zip(after.value, columns, strict=True)
        null = [f.name for f, c in made if c.null_count and VALUE_SIDE + f.name in self.after.not_null]
        if null:
            raise _wrong(before, "it returned nulls in columns that it declared without nulls", columns=null)
        columns += [run.values.column(EXPIRES)] if self.is_expiring else []
        first = run.batch.columns[: 2 + n]
        return Run(self.after, pa.RecordBatch.from_arrays([*first, *columns], schema=self.after.columns))


def migrations_of(operator: SavedOperator, given: Any) -> dict[str, Migration]:
    """Return the user's migrations by table; a lone function applies to the only table."""
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
    """Return the operator with migrated schemas and its pieces unchanged."""
    after = {name: migration.after for name, migration in migrations.items()}
    declared = dict(operator.declared)
    for name in after.keys() & declared.keys():
        # Columns that only old rows have stay undeclared.
        hidden = set(operator.tables[name].value.names) - set(declared[name].value.names)
        shown = [field for field in after[name].value if field.name not in hidden]
        declared[name] = replace(after[name], value=pa.schema(shown))
    return replace(operator, tables={**operator.tables, **after}, declared=declared)


def _after(function: Migrate, table: TableSchema, is_expiring: bool) -> tuple[TableSchema, tuple[str, ...]]:
    """Return a table's migrated schema and the function's names for the value columns."""
    before = _seen(table, is_expiring)
    shown = shown_columns(before)
    returned = _call(function, from_columns([pa.array([], field.type) for field in shown], shown, 0), before)
    keys = shown.names[: len(before.key)]
    if missing := [name for name in keys if name not in returned.schema.names]:
        raise _wrong(before, "it dropped key columns", missing=missing)
    names = dict(zip(shown.names[len(keys) :], before.value.names, strict=True))
    fields = [f.with_name(names.get(f.name, f.name)) for f in returned.schema if f.name not in keys]
    if is_expiring and EXPIRES in [f.name for f in fields]:
        raise _wrong(before, f"holdfast keeps the column {EXPIRES!r} itself: leave it out")
    fields += [table.value.field(EXPIRES)] if is_expiring else []
    after = TableSchema.of(before.name, before.key, pa.schema(fields))
    not_null = after.not_null | {name for name in table.not_null if name.startswith(KEY_SIDE)}
    return replace(after, not_null=not_null), tuple(f.name for f in returned.schema if f.name not in keys)


def _seen(table: TableSchema, is_expiring: bool) -> TableSchema:
    value = pa.schema([f for f in table.value if not (is_expiring and f.name == EXPIRES)])
    return TableSchema(table.name, table.key, value)


def _call(function: Migrate, rows: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    try:
        returned = function(rows)
    except HoldfastError:
        raise
    except Exception as exc:  # a user function may raise anything
        raise _wrong(table, f"it failed: {type(exc).__name__}: {exc}", rows=rows.num_rows) from exc
    if not isinstance(returned, pa.RecordBatch | pa.Table):
        raise _wrong(table, "it did not return a pyarrow.RecordBatch", returned=type(returned).__name__)
    if returned.num_rows != rows.num_rows:
        raise _wrong(table, "it changed the number of rows", given=rows.num_rows, returned=returned.num_rows)
    if len(set(returned.schema.names)) < len(returned.schema.names):
        raise _wrong(table, "it returned two columns of the same name", columns=returned.schema.names)
    columns = [one_chunk(column) for column in returned.columns]
    schema = pa.schema([field.with_type(c.type) for field, c in zip(returned.schema, columns, strict=True)])
    return from_columns(columns, schema, rows.num_rows)


def _wrong(table: TableSchema, why: str, **facts: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"the migration of a state table is invalid: {why}", table=table.name, **facts)


@dataclass(frozen=True)
class Changes:
    """The changes that a restore makes to a saved query; see `holdfast.savepoints.restore`."""

    shards: int | None = None
    partitions: int | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()
    reset: frozenset[str] = frozenset()
    sources: Sources = "saved"
    migrate: Mapping[str, Migrate | Mapping[str, Migrate]] = field(default_factory=dict)
    continue_sinks: bool = False

    def __post_init__(self) -> None:
        if self.sources not in get_args(Sources):
            raise InvalidArgumentError("sources must be 'saved' or 'fresh'", sources=self.sources)
        require_counts(shards=self.shards, partitions=self.partitions)
        if self.continue_sinks and self.sources == "fresh":
            raise InvalidArgumentError("continue_sinks needs sources='saved': fresh sources would show results twice")
        twice = self.skip & (self.reset | self.rename.keys() | self.migrate.keys())
        if twice:
            raise InvalidArgumentError(
                "an operator cannot be skipped and renamed, reset or migrated", operator=min(twice)
            )


def require_counts(**counts: int | None) -> None:
    """Check optional shard or partition counts. Raises `InvalidArgumentError`."""
    for what, count in counts.items():
        most = MOST_SHARDS if what == "shards" else SHARDS_LIMIT - 1
        if count is not None and (type(count) is not int or not 1 <= count <= most):
            raise InvalidArgumentError(f"{what} must be a whole number from 1 to {most}", given=count)


def require_comment(comment: object) -> None:
    """Check a savepoint's comment. Raises `InvalidArgumentError`."""
    if not isinstance(comment, str) or _NO_CHARACTER.search(comment):
        raise InvalidArgumentError("comment must be a string of valid characters", comment=ascii(comment))


@dataclass(frozen=True)
class Plan:
    """How to restore an operator that is not skipped."""

    saved: SavedOperator
    name: str  #: In the new query
    shards: int
    is_reset: bool  #: Whether it starts without state, by choice or because it had none
    migrations: Mapping[str, Migration]  #: By table


def plans_of(savepoint: Savepoint, changes: Changes) -> list[Plan]:
    """Return a `Plan` for each operator that is not skipped, in order of number."""
    operators = sorted(savepoint.operators, key=lambda operator: operator.number)
    names = {operator.name for operator in operators}
    for what, given, known in (
        ("rename", changes.rename.keys(), names),
        ("skip", changes.skip, {*names, *savepoint.left_out}),
        ("reset", changes.reset, names),
        ("migrate", changes.migrate.keys(), names),
    ):
        unknown = set(given) - known
        if unknown:
            raise NotFoundError(
                f"the savepoint has no operator of this name to {what}{did_you_mean(min(unknown), known)}",
                operator=min(unknown),
                operators=", ".join(sorted(known)),
            )
    _require_whole(savepoint, changes, [operator.number for operator in operators])
    kept = [operator for operator in operators if operator.name not in changes.skip]
    if not kept:
        raise InvalidArgumentError("no operator is left to restore", skip=", ".join(sorted(changes.skip)))
    nameless = [operator.name for operator in kept if operator.is_unnamed and operator.name not in changes.rename]
    if nameless:
        raise InvalidArgumentError(
            "an operator had no rows when the query was saved, so its name is unknown: name it, as in --rename "
            f"{nameless[0]}=alerts, or skip it if the new query does not have it",
            operators=", ".join(nameless),
        )
    for operator in kept:
        modes = [operator.configuration.get(name, default) for name, default in _MODES.items()]
        if operator.host not in (GROUP_STATE, STATE_VARIABLES) or any(
            mode.lower() not in _KNOWN_MODES for mode in modes
        ):
            raise CorruptionError("the savepoint has an operator of an unknown kind", operator=operator.name)
    plans = [
        Plan(
            of,
            changes.rename.get(of.name, of.name),
            changes.shards or of.shards,
            of.name in changes.reset or of.is_unnamed,
            migrations_of(of, changes.migrate[of.name]) if of.name in changes.migrate else {},
        )
        for of in kept
    ]
    if any(plan.shards > MOST_SHARDS for plan in plans if not plan.is_reset):
        raise InvalidArgumentError(
            f"an operator has at most {MOST_SHARDS} shards, and a saved operator has more: set shards",
            shards=max(plan.shards for plan in plans if not plan.is_reset),
        )
    new_names = [plan.name for plan in plans]
    for new in new_names:
        if not NAME.fullmatch(new) or new_names.count(new) > 1:
            raise InvalidArgumentError("each operator needs its own name, as in a query", name=new)
    return plans


def _require_whole(savepoint: Savepoint, changes: Changes, numbers: list[int]) -> None:
    """Check that every saved operator has a place in the new query or is skipped."""
    left_out = sorted(set(savepoint.left_out) - changes.skip)
    if left_out:
        raise InvalidArgumentError(
            "the saved query had more stateful operators, and in a restored location they cannot start without state: "
            "skip them if the new query does not have them",
            left_out=", ".join(left_out),
        )
    if numbers != (sorted(set(numbers)) if savepoint.left_out else list(range(len(numbers)))):
        raise CorruptionError("the savepoint numbers its operators differently from Spark", numbers=str(numbers))
