"""What one attempt does in a worker: COPY into the target and PREPARE, or COPY into a staging table of its own.

::

    prepared    BEGIN; mark; COPY target …; PREPARE TRANSACTION     invisible, holds its locks until the driver ends it
    staged      BEGIN; CREATE TABLE; COPY staging table …; COMMIT   read by nobody; the driver applies and drops it
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from holdfast.errors import ClosedError, SchemaMismatchError
from holdfast.spark_integration.sinks.postgres import connecting, encoding, failures, names, target
from holdfast.spark_integration.sinks.postgres.connecting import Link
from holdfast.spark_integration.sinks.postgres.marks import Marks
from holdfast.spark_integration.sinks.postgres.target import Check, Target
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkTransaction

PREPARED, STAGED = "prepared", "staged"

# Transactions that are open will want room too.
_ROOM = """
SELECT current_setting('max_prepared_transactions')::int - (SELECT count(*) FROM pg_prepared_xacts)
    - (SELECT count(*) FROM pg_stat_activity
       WHERE starts_with(application_name, 'hf_') AND xact_start IS NOT NULL AND pid <> pg_backend_pid())"""


@dataclass(frozen=True)
class Work:
    """What an attempt writes and where, as its worker found it."""

    attempt: SinkAttempt
    target: Target
    marks: Marks
    keys: tuple[str, ...]
    nulls_are_equal: bool


class CopyTransaction(SinkTransaction):
    """See the module; `link` is this attempt's until it is prepared or aborted."""

    def __init__(self, work: Work, schema: pa.Schema, link: Link, release: functools.partial[None]) -> None:
        self._work = work
        self._link: Link | None = link
        self._release = release
        self._json = frozenset(
            name for name in schema.names if work.target.columns[name].kind.name in ("json", "jsonb")
        )
        self._facts = {"sink": work.attempt.query.sink, "partition": work.attempt.partition}
        with self._ours("a transaction begins"):
            self.staged = work.target.why_staged(work.keys, schema.names) is not None or link.run(_ROOM)[0][0] <= 0
            into = self._begin_staged(schema) if self.staged else self._begin_prepared()
            copying = sql.SQL("COPY {} ({}) FROM STDIN").format(into, work.target.names(schema))
            self._copying = link.connection.cursor().copy(copying)
            self._copy: psycopg.Copy = self._copying.__enter__()

    def write(self, rows: pa.RecordBatch) -> None:
        if not self._work.nulls_are_equal:
            self._refuse_null_keys(rows)
        rows = by_key(rows, self._work.keys)
        with self._ours("rows are copied"):
            for text in encoding.encoded(rows, self._json):
                self._copy.write(text)

    def prepare(self) -> Handle:
        link = self._open_link()
        attempt = self._work.attempt
        with self._ours("a transaction is prepared"):
            self._copying.__exit__(None, None, None)
            if self.staged:
                link.run("COMMIT")
                handle: Handle = staged_handle(self._work.marks.schema, names.table(attempt))
            else:
                gid = names.transaction(attempt)
                link.run(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid)))
                handle = prepared_handle(gid)
        self._link = None
        self._release(link)
        return handle

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
        work, attempt = self._work, self._work.attempt
        mark = work.marks.remember(attempt.query, attempt.batch_id, attempt.attempt_id)
        self._open_link().connection.execute(sql.SQL("BEGIN; {}").format(mark))
        return work.target.identifier

    def _begin_staged(self, schema: pa.Schema) -> sql.Composable:
        work, attempt = self._work, self._work.attempt
        table = sql.Identifier(work.marks.schema, names.table(attempt))
        comment = f"holdfast: sink {attempt.query.sink}, query {attempt.query.query_id}, batch {attempt.batch_id}"
        make = sql.SQL("BEGIN; CREATE TABLE {} ({}) WITH (autovacuum_enabled = off); COMMENT ON TABLE {} IS {}")
        columns = _staging_columns(work.target, schema, target.checks(self._open_link(), work.target))
        self._open_link().connection.execute(make.format(table, columns, table, sql.Literal(comment)))
        return table

    def _refuse_null_keys(self, rows: pa.RecordBatch) -> None:
        for key in self._work.keys:
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


def prepared_handle(gid: str) -> Handle:
    """Return what finds a prepared transaction again."""
    return {"way": PREPARED, "gid": gid}


def staged_handle(schema: str, table: str) -> Handle:
    """Return what finds a staging table again."""
    return {"way": STAGED, "schema": schema, "table": table}


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


def release_to(to: dict[str, str], application: str) -> functools.partial[None]:
    """Return what an attempt gives its connection back by."""
    return functools.partial(connecting.give_back, to=to, application=application)
