"""The sink's table: its columns, keys and constraints, and the rows that it accepts.

A type fits if no value can change: docs/postgres-sink.md lists the types. All others are refused before any write.

`why_staged` depends only on the server's catalogue and the rows' columns, so the driver, which logs the reason, and all
workers get the same result. `read` takes no table locks: an ``ALTER TABLE`` that waits for a prepared transaction
must not keep the driver from ending that transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.sinks.postgres.connecting import Session

# A type's modifier exceeds its length by this.
_LENGTH_OFFSET = 4
_INTEGER_BITS = {"int2": 16, "int4": 32, "int8": 64}
# Bits of the significand: integers of up to this many bits are exact.
_EXACT_BITS = {"float4": 24, "float8": 53}
_DECIMAL_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}
_JSON = {"json", "jsonb"}
# The pg_type categories with corresponding Arrow types: text is not accepted for them.
_NOT_FROM_TEXT = set("ABDNT")
# Types that alter text silently: name and "char" truncate it to 63 bytes and 1 byte, bytea decodes escapes.
_CUTTING = {"name", "char", "bytea"}


@dataclass(frozen=True)
class PgType:
    """A PostgreSQL type; for a domain, its base type."""

    name: str  #: ``pg_type.typname``, such as ``int4`` or ``_text``
    shown: str  #: The type in SQL, such as ``numeric(10,2)``
    category: str  #: ``pg_type.typcategory``
    modifier: int = -1  #: ``atttypmod`` or ``typtypmod``; -1 if there is none
    element: str | None = None  #: The ``typname`` of an array's elements
    element_category: str = "U"


def fits(arrow: pa.DataType, into: PgType) -> bool:
    """Return whether a PostgreSQL type stores every value of an Arrow type unchanged."""
    if pa.types.is_null(arrow):
        return True
    if pa.types.is_list(arrow):
        if into.name in _JSON:
            return True
        element = PgType(into.element or "", into.shown, into.element_category, into.modifier)
        return into.element is not None and (
            # PostgreSQL has a single array type for any number of dimensions.
            fits(arrow.value_type, into if pa.types.is_list(arrow.value_type) else element)
        )
    if pa.types.is_struct(arrow) or pa.types.is_map(arrow):
        return into.name in _JSON
    if pa.types.is_string(arrow):
        return into.category not in _NOT_FROM_TEXT and into.name not in _CUTTING
    if pa.types.is_integer(arrow) or pa.types.is_floating(arrow) or pa.types.is_decimal(arrow):
        return _number_fits(arrow, into)
    return _other_fits(arrow, into)


def require_room(column: pa.Array, name: str, into: PgType) -> None:
    """Raise `SchemaMismatchError` for text that varchar(n) or char(n) would trim or pad with blanks."""
    if into.modifier < 0 or (into.element or into.name) not in ("varchar", "bpchar"):
        return
    while pa.types.is_list(column.type):
        column = column.flatten()
    room = into.modifier - _LENGTH_OFFSET
    lengths = pc.utf8_length(column)
    is_fixed = (into.element or into.name) == "bpchar"
    changed = pc.any(pc.not_equal(lengths, room) if is_fixed else pc.greater(lengths, room)).as_py()
    if changed:
        what = "differs in length from the column, so PostgreSQL would change it" if is_fixed else "is too long"
        raise SchemaMismatchError(
            f"a string {what}: alter the column to text, or change the string in the query",
            column=name,
            table_type=into.shown,
        )


def _other_fits(arrow: pa.DataType, into: PgType) -> bool:
    if pa.types.is_timestamp(arrow):
        return into.name == ("timestamp" if arrow.tz is None else "timestamptz") and into.modifier in (-1, 6)
    if pa.types.is_duration(arrow):
        return into.name == "interval" and into.modifier == -1
    return {pa.bool_(): "bool", pa.date32(): "date", pa.binary(): "bytea"}.get(arrow) == into.name


def _number_fits(arrow: pa.DataType, into: PgType) -> bool:
    if into.name == "numeric":
        return into.modifier == -1 or _digits_fit(arrow, into.modifier)
    if pa.types.is_integer(arrow):
        return bool(arrow.bit_width <= (_INTEGER_BITS | _EXACT_BITS).get(into.name, 0))
    if pa.types.is_floating(arrow):
        return into.name == "float8" or (into.name == "float4" and arrow.bit_width <= 32)
    return False


def _digits_fit(arrow: pa.DataType, modifier: int) -> bool:
    # The server's packing of numeric(precision, scale); the scale is an 11-bit signed number.
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, ((modifier - 4) & 0x7FF ^ 1024) - 1024
    if pa.types.is_integer(arrow):
        return scale >= 0 and precision - scale >= _DECIMAL_DIGITS[arrow.bit_width]
    if pa.types.is_decimal(arrow):
        return scale >= arrow.scale and precision - scale >= arrow.precision - arrow.scale
    return False


_MADE = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.date32(): "date",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.duration("us"): "interval",
    pa.timestamp("us"): "timestamp",
}


def made_for(arrow: pa.DataType) -> str | None:
    """Return the SQL type of a new column for an Arrow type; None if there is none."""
    if pa.types.is_decimal(arrow):
        return f"numeric({arrow.precision},{arrow.scale})"
    if pa.types.is_timestamp(arrow) and arrow.tz is not None:
        return "timestamptz"
    if pa.types.is_struct(arrow) or pa.types.is_map(arrow):
        return "jsonb"
    if pa.types.is_list(arrow):
        element = arrow.value_type
        inner = made_for(element)
        return inner if inner is None or inner == "jsonb" or pa.types.is_list(element) else f"{inner}[]"
    return _MADE.get(arrow)


# The table and its partitions, which may have additional constraints: pg_partition_tree would lock them.
_TREE = """
WITH RECURSIVE tree AS (
    SELECT c.oid FROM pg_class c WHERE c.oid = to_regclass(%s)
    UNION ALL
    SELECT c.oid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
    JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition)"""
# Expression, partial and non-B-tree indexes may refuse any row; a plain B-tree refuses only long values.
_TABLE = f"""{_TREE}
SELECT c.oid, n.nspname, c.relname, c.relkind::text, c.relpersistence::text, row_security_active(c.oid),
       c.relhasrules OR EXISTS (SELECT FROM pg_trigger JOIN tree ON tgrelid = tree.oid WHERE NOT tgisinternal),
       EXISTS (SELECT FROM pg_constraint JOIN tree ON conrelid = tree.oid WHERE contype = 'x'),
       c.relkind = 'p' OR EXISTS (SELECT FROM pg_constraint JOIN tree ON conrelid = tree.oid WHERE contype = 'f')
       OR EXISTS (SELECT FROM pg_index i JOIN tree ON i.indrelid = tree.oid JOIN pg_class x ON x.oid = i.indexrelid
               JOIN pg_am m ON m.oid = x.relam
               WHERE i.indexprs IS NOT NULL OR i.indpred IS NOT NULL OR m.amname <> 'btree'),
       ARRAY(SELECT DISTINCT a.attname::text FROM pg_index i JOIN tree ON i.indrelid = tree.oid
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey::int2[]) AND a.attlen = -1),
       pg_is_in_recovery(), current_setting('max_prepared_transactions')::int
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass(%s)"""  # noqa: S608  constants
_COLUMNS = """
SELECT a.attname, b.typname, format_type(b.oid, b.modifier), b.typcategory::text, b.modifier, e.typname,
       coalesce(e.typcategory::text, 'U'), format_type(a.atttypid, a.atttypmod), a.attnotnull,
       coalesce(CASE WHEN a.attgenerated = '' THEN pg_get_expr(d.adbin, 0) END, ''), a.attidentity::text,
       a.attgenerated::text,
       coalesce((SELECT format(' COLLATE %%I.%%I', n.nspname, c.collname) FROM pg_collation c
                 JOIN pg_namespace n ON n.oid = c.collnamespace
                 WHERE c.oid = a.attcollation AND c.oid <> t.typcollation), ''),
       has_column_privilege(a.attrelid, a.attnum, 'INSERT'), has_column_privilege(a.attrelid, a.attnum, 'UPDATE'),
       has_column_privilege(a.attrelid, a.attnum, 'SELECT')
FROM pg_attribute a
JOIN pg_type t ON t.oid = a.atttypid
CROSS JOIN LATERAL (
    SELECT u.oid, u.typname, u.typcategory, u.typelem, u.typsubscript,
           CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END AS modifier
    FROM pg_type u WHERE u.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END) b
LEFT JOIN pg_type e ON e.oid = b.typelem AND b.typcategory = 'A'
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum"""
_UNIQUE = f"""{_TREE}
SELECT c.relname, i.indpred IS NULL AND i.indexprs IS NULL AND i.indimmediate AND i.indrelid = to_regclass(%s),
       coalesce((to_jsonb(i) ->> 'indnullsnotdistinct')::boolean, false),
       ARRAY(SELECT a.attname::text FROM unnest(i.indkey::int2[]) WITH ORDINALITY k(number, place)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
             WHERE k.place <= i.indnkeyatts)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN tree ON i.indrelid = tree.oid
WHERE i.indisunique AND i.indisvalid
    AND (i.indrelid = to_regclass(%s) OR NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = i.indexrelid))"""  # noqa: S608  constants
# A NOT VALID constraint still applies to new rows; a NOT ENFORCED constraint does not.
_CHECKS = """
SELECT conname, pg_get_constraintdef(c.oid), 0 = ANY (conkey),
       ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = conrelid AND a.attnum = ANY (conkey))
FROM pg_constraint c WHERE conrelid = %s AND contype = 'c'
    AND coalesce((to_jsonb(c) ->> 'conenforced')::boolean, true)"""


@dataclass(frozen=True)
class Column:
    name: str
    kind: PgType
    declared: str
    not_null: bool
    default: str
    identity: bool
    generated: bool
    collation: str
    may: frozenset[str]

    @property
    def numbers_itself(self) -> bool:
        """Whether the server numbers the rows, so that no transaction waits for another on this column."""
        return self.identity or self.default.startswith("nextval(")


@dataclass(frozen=True)
class Unique:
    """A unique index; `plain` if `ON CONFLICT` can name its columns."""

    name: str
    plain: bool
    nulls_are_equal: bool
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    name: str
    text: str
    of_whole_row: bool
    columns: frozenset[str]


@dataclass(frozen=True)
class Target:
    """The table's definition, as read from the catalogue."""

    oid: int
    schema: str
    name: str
    columns: dict[str, Column]
    unique: tuple[Unique, ...]
    indexed: tuple[str, ...]
    has_triggers: bool  #: Whether the table has triggers or rules
    has_exclusions: bool
    has_late_checks: bool  #: Partitions, foreign keys, or indexes that may refuse a row
    has_row_security: bool
    prepared_max: int

    @property
    def identifier(self) -> sql.Identifier:
        """The table's name in SQL."""
        return sql.Identifier(self.schema, self.name)

    def why_staged(self, keys: Sequence[str], written: Sequence[str]) -> str | None:
        """Return why the sink uses staging tables; None if it uses prepared transactions."""
        if keys:
            return "rows are updated by keys"
        if self.prepared_max == 0:
            return "max_prepared_transactions is 0"
        if self.has_row_security:
            return "row-level security applies to the sink's user, and COPY refuses such a table"
        if self.has_triggers:
            return "the table has triggers or rules, which a prepared transaction may not allow"
        if self.has_exclusions:
            return "an exclusion constraint makes transactions wait for one another"
        for index in self.unique:
            if not any(self.columns[name].numbers_itself and name not in written for name in index.columns):
                return f"unique index {index.name} makes transactions wait for one another"
        return None

    def may_refuse(self, keys: Sequence[str]) -> bool:
        """Return whether, by its definition, the table can refuse rows that a staging table accepts."""
        return bool(
            any(not (index.plain and set(index.columns) == set(keys)) for index in self.unique)
            or any(column.generated for column in self.columns.values())
            or self.has_triggers
            or self.has_exclusions
            or self.has_row_security
            or self.has_late_checks
        )

    def key_index(self, keys: Sequence[str]) -> Unique | None:
        """Return the unique index on exactly these keys, if there is one."""
        return next((i for i in self.unique if i.plain and set(i.columns) == set(keys)), None)


def read(session: Session, table: str) -> Target:
    """Read a table's definition; SQL resolves the name. Raises `InvalidArgumentError` if it cannot be a sink."""
    found = session.run(_TABLE, [table] * 2)
    if not found:
        raise InvalidArgumentError(
            "no such table, or its schema is not on the search path; create it, or write schema.table", table=table
        )
    ((oid, schema, name, kind, persistence, secured, triggers, exclusions, late, indexed, standby, room),) = found
    if standby:
        raise InvalidArgumentError("the server is a read-only standby; connect to the primary", table=table)
    if kind not in ("r", "p"):
        raise InvalidArgumentError("not a table; a view or foreign table cannot be a sink", table=table)
    if persistence != "p":
        raise InvalidArgumentError(
            "a server crash empties an unlogged or temporary table; ALTER TABLE … SET LOGGED", table=table
        )
    unique = session.run(_UNIQUE, [table] * 3)
    return Target(
        oid=oid,
        schema=schema,
        name=name,
        columns={row[0]: _column(row) for row in session.run(_COLUMNS, [oid])},
        unique=tuple(Unique(n, plain, equal, tuple(names)) for n, plain, equal, names in unique),
        indexed=tuple(indexed),
        has_triggers=triggers,
        has_exclusions=exclusions,
        has_late_checks=late,
        has_row_security=secured,
        prepared_max=room,
    )


def checks(session: Session, target: Target) -> list[Check]:
    """Return the table's CHECK constraints; may wait for locks on the table."""
    return [
        Check(name, text, whole, frozenset(names)) for name, text, whole, names in session.run(_CHECKS, [target.oid])
    ]


def _column(row: tuple[Any, ...]) -> Column:
    name, *kind, declared, not_null, default, identity, made, collation = row[:13]
    may = frozenset(right for right, has in zip(("INSERT", "UPDATE", "SELECT"), row[13:], strict=True) if has)
    return Column(name, PgType(*kind), declared, not_null, default, bool(identity), bool(made), collation, may)


def check(target: Target, schema: pa.Schema, keys: Sequence[str]) -> None:
    """Raise if rows of a schema cannot be written to the table with these keys.

    Raises `SchemaMismatchError` for an unfit column, `InvalidArgumentError` for a missing unique index or permission.
    """
    shown = f"{target.schema}.{target.name}"
    for field in schema:
        _check_column(target, field, shown)
    for column in target.columns.values():
        fills_itself = column.default or column.identity or column.generated
        if column.name not in schema.names and column.not_null and not fills_itself:
            raise SchemaMismatchError(
                "the table needs a value that the query does not provide; add the column to the query, or a default "
                "to the table",
                column=column.name, type=column.declared, table=shown,
            )  # fmt: skip
    _check_keys(target, schema, keys, shown)
    _check_rights(target, schema, keys, shown)


def _check_column(target: Target, field: pa.Field, shown: str) -> None:
    column = target.columns.get(field.name)
    if column is None:
        nearest = next((name for name in target.columns if name.lower() == field.name.lower()), None)
        raise SchemaMismatchError(
            "the table has no such column; rename it in the query, or add it to the table",
            column=field.name, type=field.type, table=shown, **({"nearest": nearest} if nearest else {}),
        )  # fmt: skip
    if column.generated or column.identity:
        raise SchemaMismatchError(
            "the server generates this column's values; drop it in the query", column=field.name, table=shown
        )
    if not fits(field.type, column.kind):
        raise SchemaMismatchError(
            "the table's column cannot hold all values of the query's; cast it in the query, or alter the table",
            column=field.name, query_type=field.type, table_type=column.declared, table=shown,
        )  # fmt: skip


def _check_keys(target: Target, schema: pa.Schema, keys: Sequence[str], shown: str) -> None:
    for key in keys:
        if key not in schema.names:
            raise SchemaMismatchError("a key is not a column of the query", column=key, table=shown)
    if keys and target.key_index(keys) is None:
        listed = ", ".join(keys)
        raise InvalidArgumentError(
            f"the keys are not a unique key of the table, so rows cannot be updated by them; ALTER TABLE {shown} ADD "
            f"PRIMARY KEY ({listed}), or pass a unique key of the table",
            keys=listed,
            unique="; ".join(", ".join(index.columns) for index in target.unique if index.plain) or "none",
        )


def _check_rights(target: Target, schema: pa.Schema, keys: Sequence[str], shown: str) -> None:
    for name in schema.names:
        wanted = {"INSERT"}
        if keys:
            wanted |= {"SELECT"} if name in keys else {"SELECT", "UPDATE"}
        lacking = wanted - target.columns[name].may
        if lacking:
            rights = ", ".join(sorted(lacking))
            raise InvalidArgumentError(
                f"no permission to write; GRANT {rights} ON {shown} TO the sink's user", column=name, right=rights
            )
