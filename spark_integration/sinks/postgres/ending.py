"""What the driver does with what was prepared: look, commit, abort, find what is left.

A handle that is still there is not committed: a prepared transaction's name goes with its commit, and a staging table
is dropped in the transaction that applies it. One that is gone was committed if its mark says so, or if the target
shows a later micro-batch; else it is lost.

All staging tables of a micro-batch are applied, marked and dropped in one transaction. Of a key that is in a table
twice, the row that was written last counts; of one in two tables, that of the higher partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from psycopg import errors, sql

from holdfast.errors import SchemaMismatchError, StateLostError, UnavailableError
from holdfast.spark_integration.sinks.postgres import names, target
from holdfast.spark_integration.sinks.postgres.connecting import Link
from holdfast.spark_integration.sinks.postgres.marks import Marks
from holdfast.spark_integration.sinks.postgres.target import Target
from holdfast.spark_integration.sinks.postgres.writing import PREPARED, STAGED, prepared_handle, staged_handle
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery

_PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid = ANY (%s)"
_STAGED = """
SELECT n.nspname, c.relname, ARRAY(SELECT ARRAY[attname::text, format_type(atttypid, atttypmod)] FROM pg_attribute
                                   WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped ORDER BY attnum),
       ARRAY(SELECT conname::text FROM pg_constraint WHERE conrelid = c.oid AND contype = 'c')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r' AND c.relname = ANY (%s)"""
_LEFT_PREPARED = """
SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s) ORDER BY gid"""
_LEFT_STAGED = """
SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND starts_with(c.relname, %s) ORDER BY 2"""
_BACKENDS = """
FROM pg_stat_activity WHERE application_name = %s AND datname = current_database() AND pid <> pg_backend_pid()"""
_PATIENCE_MS = 10_000
# A B-tree takes up to 2,704 bytes a row, of all its columns.
_INDEXED_BYTES_MAX = 2_000


class Staged(NamedTuple):
    """A staging table, with names and types of its columns, and names of its checks."""

    schema: str
    table: str
    columns: list[tuple[str, str]]
    checks: set[str]

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [name for name, _ in self.columns]

    @property
    def identifier(self) -> sql.Identifier:
        """The table's name in SQL."""
        return sql.Identifier(self.schema, self.table)


@dataclass(frozen=True)
class Ending:
    """See the module."""

    target: Target
    marks: Marks
    keys: tuple[str, ...]

    def confirm(self, link: Link, query: SinkQuery, handles: Sequence[Handle], opened: Target | None) -> None:
        """Raise if a handle is gone, or if the target refuses what was staged; `opened` is what it was when opened.

        Nothing can be mended after the decision: what a staging table does not refuse by itself is tried.
        """
        there, staged = _there(link, handles)
        gone = _gone(handles, there)
        if gone:
            raise UnavailableError(
                "what was prepared is gone from the server: somebody ended it, or it was restored; the micro-batch is "
                "written again",
                sink=query.sink, gone=len(gone), first=_key(gone[0])[-1],
            )  # fmt: skip
        for one in staged:
            self._check_unaltered(one)
        if staged and (self.target != opened or self._may_refuse(link, staged)):
            with link.connection.transaction(force_rollback=True):
                self._apply(link, staged)
                link.run("SET CONSTRAINTS ALL IMMEDIATE")

    def _check_unaltered(self, staged: Staged) -> None:
        for name, declared in staged.columns:
            column = self.target.columns.get(name)
            if column is None or column.declared != declared:
                raise SchemaMismatchError(
                    "the table was altered while a micro-batch was written for it; start the query again",
                    column=name, written_as=declared, table=f"{self.target.schema}.{self.target.name}",
                )  # fmt: skip

    def _may_refuse(self, link: Link, staged: Sequence[Staged]) -> bool:
        if self.target.may_refuse(self.keys):
            return True
        checks = target.checks(link, self.target)
        return any(not all(check.name in one.checks for check in checks) or self._is_long(link, one) for one in staged)

    def _is_long(self, link: Link, staged: Staged) -> bool:
        sizes = [sql.SQL("coalesce(pg_column_size({}), 0)").format(sql.Identifier(name)) for name in self.target.indexed
                 if name in staged.names]  # fmt: skip
        if not sizes:
            return False
        ask = sql.SQL("SELECT EXISTS (SELECT FROM {} WHERE {} > {})")
        size = sql.SQL(" + ").join(sizes)
        return bool(link.run(ask.format(staged.identifier, size, sql.Literal(_INDEXED_BYTES_MAX)))[0][0])

    def commit(self, link: Link, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Commit what is there, once all that is gone is known to be committed."""
        there, _ = _there(link, handles)
        owner, newest = self.marks.shown(link, query)
        is_ours = owner in (None, query.query_id)
        if not is_ours or batch_id >= newest:
            self._check_gone(link, query, batch_id, _gone(handles, there))
        if not is_ours:
            if there:
                raise self.marks.conflict(query, owner)
            return
        prepared = [handle for handle in handles if handle["way"] == PREPARED and _key(handle) in there]
        others = [handle for handle in prepared if not end_prepared(link, "COMMIT", str(handle["gid"]))]
        if others and self.marks.shown(link, query)[1] <= batch_id:
            self._check_gone(link, query, batch_id, others)
        if any(handle["way"] == STAGED and _key(handle) in there for handle in handles):
            with link.connection.transaction():
                self._commit_staged(link, query, batch_id, [handle for handle in handles if handle["way"] == STAGED])
        elif there or batch_id > newest:
            self.marks.show(link, query, batch_id)

    def _commit_staged(self, link: Link, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        # Whoever else commits this micro-batch waits here, and then finds it done.
        owner, newest = self.marks.shown(link, query, lock=True)
        if owner not in (None, query.query_id):
            raise self.marks.conflict(query, owner)
        there, staged = _there(link, handles)
        if batch_id >= newest:
            self._check_gone(link, query, batch_id, _gone(handles, there))
        self._apply(link, staged)
        for one in staged:
            link.run(self.marks.remember(query, batch_id, names.attempt_of_table(one.table)))
        self.marks.show(link, query, batch_id)
        _drop(link, staged)

    def _check_gone(self, link: Link, query: SinkQuery, batch_id: int, gone: Sequence[Handle]) -> None:
        attempts = {_attempt_of(handle) for handle in gone}
        lost = attempts - self.marks.remembered(link, query, batch_id, sorted(attempts)) if gone else None
        if lost:
            raise StateLostError(
                "the server has lost what was prepared for a decided micro-batch: somebody rolled it back or dropped "
                "it, or the server was restored from a backup; nothing more of the micro-batch is made visible. Bring "
                "the server back to where it was, or restore query and table together to a state before it",
                sink=query.sink, batch=batch_id, lost=len(lost), attempt=min(lost),
            )  # fmt: skip

    def _apply(self, link: Link, staged: Sequence[Staged]) -> None:
        for one in sorted(staged, key=lambda each: names.partition_of(each.table)):
            try:
                with link.connection.transaction():
                    link.run(self._insert(one.identifier, one.names, sql.SQL("")))
            except errors.CardinalityViolation:
                # Rare, and sorting costs as much as the rest: so only where a key is there twice.
                link.run(self._insert(one.identifier, one.names, sql.SQL("DISTINCT ON ({keys}) ")))

    def _insert(self, source: sql.Identifier, columns: Sequence[str], distinct: sql.SQL) -> sql.Composed:
        named = sql.SQL(", ").join(map(sql.Identifier, columns))
        keys = sql.SQL(", ").join(map(sql.Identifier, self.keys))
        once = distinct.format(keys=keys)
        # The last row that was written is the last in the file: nothing was ever deleted from it.
        order = sql.SQL(" ORDER BY {}, ctid DESC").format(keys) if once.as_string() else sql.SQL("")
        parts = [self.target.identifier, named, once, named, source, order]
        insert = sql.SQL("INSERT INTO {} ({}) SELECT {}{} FROM {}{}").format(*parts)
        return sql.Composed([insert, self._on_conflict(columns, keys)]) if self.keys else insert

    def _on_conflict(self, columns: Sequence[str], keys: sql.Composed) -> sql.Composed:
        values = [name for name in columns if name not in self.keys]
        if not values:
            return sql.SQL(" ON CONFLICT ({}) DO NOTHING").format(keys)
        sets = sql.SQL(", ").join(
            sql.SQL("{} = EXCLUDED.{}").format(sql.Identifier(name), sql.Identifier(name)) for name in values
        )
        return sql.SQL(" ON CONFLICT ({}) DO UPDATE SET {}").format(keys, sets)


def abort(link: Link, handles: Sequence[Handle]) -> None:
    """Roll back or drop what is still there."""
    there, staged = _there(link, handles)
    for handle in handles:
        if handle["way"] == PREPARED and _key(handle) in there:
            end_prepared(link, "ROLLBACK", str(handle["gid"]))
    _drop(link, staged)


def leftovers(link: Link, query: SinkQuery) -> list[Handle]:
    """Return all that is there of a query, after its workers of earlier runs can add nothing more."""
    _terminate_workers(link, names.application(query.sink, query.query_id))
    prepared = link.run(_LEFT_PREPARED, [names.transactions_of(query.sink, query.query_id)])
    staged = link.run(_LEFT_STAGED, [names.tables_of(query.sink, query.query_id)])
    return [*(prepared_handle(gid) for (gid,) in prepared), *(staged_handle(*names_) for names_ in staged)]


def _terminate_workers(link: Link, application: str) -> None:
    link.run(f"SELECT pg_terminate_backend(pid, {_PATIENCE_MS}) {_BACKENDS}", [application])
    if link.run(f"SELECT {_BACKENDS}", [application]):
        raise UnavailableError(
            "a connection of an earlier run's worker does not end, so that it could still prepare; end it by "
            "pg_terminate_backend, and start the query again",
            application_name=application,
        )


def end_prepared(link: Link, how: str, gid: str) -> bool:
    """Commit or roll back a prepared transaction; False if somebody else has ended it since we looked."""
    try:
        link.run(sql.SQL(how + " PREPARED {}").format(sql.Literal(gid)))
    except errors.UndefinedObject:
        return False
    return True


def _there(link: Link, handles: Sequence[Handle]) -> tuple[set[tuple[str, ...]], list[Staged]]:
    """Return the keys of those handles that are still there, and the staging tables among them."""
    keys = {_key(handle) for handle in handles}
    there: set[tuple[str, ...]] = set()
    gids = [str(handle["gid"]) for handle in handles if handle["way"] == PREPARED]
    tables = [str(handle["table"]) for handle in handles if handle["way"] == STAGED]
    if gids:
        there |= {(gid,) for (gid,) in link.run(_PREPARED, [gids])}
    rows = [row for row in link.run(_STAGED, [tables]) if row[:2] in keys] if tables else []
    staged = [Staged(row[0], row[1], [(name, declared) for name, declared in row[2]], set(row[3])) for row in rows]
    return there | {row[:2] for row in rows}, staged


def _gone(handles: Sequence[Handle], there: set[tuple[str, ...]]) -> list[Handle]:
    return [handle for handle in handles if _key(handle) not in there]


def _key(handle: Handle) -> tuple[str, ...]:
    if handle["way"] == PREPARED:
        return (str(handle["gid"]),)
    return (str(handle["schema"]), str(handle["table"]))


def _attempt_of(handle: Handle) -> str:
    if handle["way"] == PREPARED:
        return names.attempt_of(str(handle["gid"]))
    return names.attempt_of_table(str(handle["table"]))


def _drop(link: Link, tables: Sequence[Staged]) -> None:
    if tables:
        listed = sql.SQL(", ").join(one.identifier for one in tables)
        link.run(sql.SQL("DROP TABLE IF EXISTS {}").format(listed))
