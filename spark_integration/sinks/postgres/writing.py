"""What one attempt does in a worker: COPY into the target and PREPARE, or COPY into a staging table of its own.

::

    prepared    BEGIN; mark; COPY target …; PREPARE TRANSACTION     invisible, holds its locks until the driver ends it
    staged      BEGIN; CREATE TABLE; COPY staging table …; COMMIT   read by nobody; the driver applies and drops it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from holdfast.errors import ClosedError, SchemaMismatchError
from holdfast.spark_integration.sinks.postgres import encoding, failures, names, target
from holdfast.spark_integration.sinks.postgres.columns import require_room
from holdfast.spark_integration.sinks.postgres.connecting import Link
from holdfast.spark_integration.sinks.postgres.marks import Marks
from holdfast.spark_integration.sinks.postgres.names import Part
from holdfast.spark_integration.sinks.postgres.target import Check, Target
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkTransaction

# Transactions that are open will want room too.
_ROOM = """
SELECT current_setting('max_prepared_transactions')::int - (SELECT count(*) FROM pg_prepared_xacts)
    - (SELECT count(*) FROM pg_stat_activity
       WHERE starts_with(application_name, 'hf_') AND xact_start IS NOT NULL AND pid <> pg_backend_pid())"""


class CopyTransaction(SinkTransaction):
    """See the module; the link of the marks is this attempt's until it is prepared or aborted.

    `release`: takes the link back.
    """

    def __init__(
        self,
        attempt: SinkAttempt,
        marks: Marks,
        keys: Sequence[str],
        schema: pa.Schema,
        release: Callable[[Link], None],
    ) -> None:
        self._attempt, self._marks, self._keys = attempt, marks, keys
        self._target, self._release = marks.target, release
        self._link: Link | None = marks.link
        index = self._target.key_index(keys)
        self._nulls_are_equal = index is not None and index.nulls_are_equal
        self._json = frozenset(
            name for name in schema.names if self._target.columns[name].kind.name in ("json", "jsonb")
        )
        self._facts = {"sink": attempt.query.sink, "partition": attempt.partition}
        with self._ours("a transaction begins"):
            why_staged = self._target.why_staged(keys, schema.names)
            self.staged = why_staged is not None or marks.link.run(_ROOM)[0][0] <= 0
            into = self._begin_staged(schema) if self.staged else self._begin_prepared()
            copying = sql.SQL("COPY {} ({}) FROM STDIN").format(into, self._target.names(schema))
            self._copying = marks.link.connection.cursor().copy(copying)
            self._copy: psycopg.Copy = self._copying.__enter__()

    def write(self, rows: pa.RecordBatch) -> None:
        if not self._nulls_are_equal:
            self._refuse_null_keys(rows)
        for name in rows.schema.names:
            require_room(rows.column(name), name, self._target.columns[name].kind)
        rows = by_key(rows, self._keys)
        with self._ours("rows are copied"):
            for text in encoding.encoded(rows, self._json):
                self._copy.write(text)

    def prepare(self) -> Handle:
        link, attempt = self._open_link(), self._attempt
        with self._ours("a transaction is prepared"):
            self._copying.__exit__(None, None, None)
            if self.staged:
                link.run("COMMIT")
                part = Part(names.table(attempt), self._marks.schema)
            else:
                part = Part(names.transaction(attempt))
                link.run(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(part.name)))
        self._link = None
        self._release(link)
        return part.handle()

    def abort(self) -> None:
        # A closed connection ends its transaction, in whatever state it was.
        if self._link is not None:
            self._link.close()
            self._link = None
            with suppress(psycopg.Error):
                self._copying.__exit__(None, None, None)

    def _open_link(self) -> Link:
        if self._link is None:
            raise ClosedError("prepared or aborted already", **self._facts)
        return self._link

    def _begin_prepared(self) -> sql.Composable:
        mark = self._marks.remember(self._attempt.batch_id, self._attempt.attempt_id)
        self._open_link().connection.execute(sql.SQL("BEGIN; {}").format(mark))
        return self._target.identifier

    def _begin_staged(self, schema: pa.Schema) -> sql.Composable:
        link, attempt = self._open_link(), self._attempt
        table = sql.Identifier(self._marks.schema, names.table(attempt))
        comment = f"holdfast: sink {attempt.query.sink}, query {attempt.query.query_id}, batch {attempt.batch_id}"
        make = sql.SQL("BEGIN; CREATE TABLE {} ({}) WITH (autovacuum_enabled = off); COMMENT ON TABLE {} IS {}")
        columns = _staging_columns(self._target, schema, target.checks(link, self._target))
        link.connection.execute(make.format(table, columns, table, sql.Literal(comment)))
        return table

    def _refuse_null_keys(self, rows: pa.RecordBatch) -> None:
        for key in self._keys:
            if rows.column(rows.schema.get_field_index(key)).null_count:
                raise SchemaMismatchError(
                    "a key is null, and a null equals no other key in the table; filter such rows, give them a value, "
                    "or make the unique index NULLS NOT DISTINCT (PostgreSQL 15)",
                    column=key, **self._facts,
                )  # fmt: skip

    def _ours(self, doing: str) -> Any:
        return failures.as_ours(doing, **self._facts)


def by_key(rows: pa.RecordBatch, keys: Sequence[str]) -> pa.RecordBatch:
    """Return rows in the order of their keys, those of one key in their own.

    So they meet the pages of an index one after the other, which saves a quarter of the server's time.
    """
    if not keys or any(pa.types.is_nested(rows.schema.field(key).type) for key in keys):
        return rows
    return rows.take(pc.sort_indices(rows, [(key, "ascending") for key in keys]))


def _staging_columns(into: Target, schema: pa.Schema, checks: Sequence[Check]) -> sql.Composed:
    """Return a staging table's columns: they refuse what the target would, so that the worker meets it."""
    parts: list[sql.Composable] = []
    for name in schema.names:
        column = into.columns[name]
        null = sql.SQL(" NOT NULL" if column.not_null else "")
        parts.append(sql.SQL("{} {}{}").format(sql.Identifier(name), sql.SQL(column.declared + column.collation), null))
    parts += (
        sql.SQL("CONSTRAINT {} {}").format(sql.Identifier(check.name), sql.SQL(check.text))
        for check in checks
        if check.is_about(schema.names)
    )
    return sql.SQL(", ").join(parts)
