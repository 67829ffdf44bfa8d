"""What the driver does with what was prepared: look, commit, abort, find what is left.

A handle that is still there is not committed: a prepared transaction's name goes with its commit, and a staging table
is dropped in the transaction that applies it. One that is gone was committed if its mark says so, or if the target
shows a later micro-batch; else it is lost.

Staging tables are applied, marked and dropped as `applying` says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from psycopg import errors, sql

from holdfast.errors import SchemaMismatchError, StateLostError, UnavailableError
from holdfast.spark_integration.sinks.postgres import names, target
from holdfast.spark_integration.sinks.postgres.applying import Applying, Helpers, Staged, drop
from holdfast.spark_integration.sinks.postgres.connecting import Link
from holdfast.spark_integration.sinks.postgres.marks import Marks
from holdfast.spark_integration.sinks.postgres.target import Target
from holdfast.spark_integration.sinks.postgres.writing import PREPARED, STAGED, prepared_handle, staged_handle
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery, tell_of_two_drivers

_PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid = ANY (%s)"
_STAGED = """
SELECT n.nspname, c.relname, ARRAY(SELECT ARRAY[attname::text, format_type(atttypid, atttypmod)] FROM pg_attribute
                                   WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped ORDER BY attnum),
       ARRAY(SELECT conname::text FROM pg_constraint WHERE conrelid = c.oid AND contype = 'c'), pg_relation_size(c.oid)
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


@dataclass(frozen=True)
class Ending:
    """See the module."""

    target: Target
    marks: Marks
    keys: tuple[str, ...]

    @property
    def _applying(self) -> Applying:
        return Applying(self.target, self.marks, self.keys)

    def confirm(self, link: Link, query: SinkQuery, handles: Sequence[Handle], opened: Target | None) -> None:
        """Raise if a handle is gone, or if the target refuses what was staged; `opened` is what it was when opened.

        Nothing can be mended after the decision: what a staging table does not refuse by itself is tried.
        """
        self.marks.require_same(link, query, self.target)
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
                self._applying.apply(link, staged)
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

    def commit(
        self, link: Link, query: SinkQuery, batch_id: int, handles: Sequence[Handle], helpers: Helpers | None = None
    ) -> None:
        """Commit what is there, once all that is gone is known to be committed."""
        # In this order: the mark is written last, so what is there after it is of an attempt that does not count.
        shown = self.marks.shown(link, query)
        there, _ = _there(link, handles)
        is_ours = shown.query_id in (None, query.query_id)
        if not is_ours or batch_id >= shown.batch_id:
            self._check_gone(link, query, batch_id, _gone(handles, there))
        if not is_ours:
            if there:
                raise self.marks.conflict(query, shown.query_id)
            return
        if batch_id <= shown.batch_id:
            _end_another_drivers(link, query, batch_id, handles, there)
            return
        prepared = [handle for handle in handles if handle["way"] == PREPARED and _key(handle) in there]
        others = [handle for handle in prepared if not end_prepared(link, "COMMIT", str(handle["gid"]))]
        if others and self.marks.shown(link, query).batch_id <= batch_id:
            self._check_gone(link, query, batch_id, others)
        staged = [handle for handle in handles if handle["way"] == STAGED]
        if any(_key(handle) in there for handle in staged):
            with link.connection.transaction():
                self._commit_staged(link, query, batch_id, staged, helpers)
        else:
            self.marks.show(link, query, batch_id, self.target)

    def _commit_staged(
        self, link: Link, query: SinkQuery, batch_id: int, handles: Sequence[Handle], helpers: Helpers | None
    ) -> None:
        # Whoever else commits this micro-batch waits here, and then finds it done.
        shown = self.marks.shown(link, query, lock=True)
        if shown.query_id not in (None, query.query_id):
            raise self.marks.conflict(query, shown.query_id)
        there, staged = _there(link, handles)
        if batch_id >= shown.batch_id:
            self._check_gone(link, query, batch_id, _gone(handles, there))
        if batch_id <= shown.batch_id:
            _end_another_drivers(link, query, batch_id, handles, there)
            return
        self._applying.commit(link, query, batch_id, staged, helpers)
        self.marks.show(link, query, batch_id, self.target)

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


def _end_another_drivers(
    link: Link, query: SinkQuery, batch_id: int, handles: Sequence[Handle], there: Collection[tuple[str, ...]]
) -> None:
    """End what another attempt at a micro-batch that is shown has prepared: it would be shown twice."""
    if there:
        tell_of_two_drivers(query, batch_id)
        abort(link, handles)


def abort(link: Link, handles: Sequence[Handle]) -> None:
    """Roll back or drop what is still there."""
    there, staged = _there(link, handles)
    for handle in handles:
        if handle["way"] == PREPARED and _key(handle) in there:
            end_prepared(link, "ROLLBACK", str(handle["gid"]))
    drop(link, staged)


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
            "an earlier run's worker connection does not end and could still prepare; end it with "
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
    found = link.run(_STAGED, [tables]) if tables else []
    # A size is waited for while somebody drops the table, as a dead driver's connection may; then there is none.
    rows = [row for row in found if row[:2] in keys and row[4] is not None]
    staged = [
        Staged(row[0], row[1], [(name, declared) for name, declared in row[2]], set(row[3]), row[4]) for row in rows
    ]
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
