"""`PostgresSink`: writes a query's results to a PostgreSQL table exactly once.

======================  ==================================================================================
mode                    condition
======================  ==================================================================================
prepared transactions   rows are appended, the server allows prepared transactions, and nothing in the table
                        makes one transaction wait for another. Each partition is a separate transaction:
                        a micro-batch's partitions become visible one by one, within milliseconds
staging tables          rows are updated by key, or another condition above fails. The driver applies a
                        micro-batch in one transaction
======================  ==================================================================================

The sink chooses the mode when a query starts, and logs the reason.

A part that still exists is not committed: the name of a prepared transaction disappears at its commit, and the driver
applies, marks and drops staging tables in one transaction. A missing part was committed if it is marked as such, or
if a later micro-batch is marked as complete; otherwise it is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeVar

import pyarrow as pa
from psycopg import errors, sql

from holdfast.errors import InvalidArgumentError, SchemaMismatchError, StateLostError, UnavailableError
from holdfast.snapshotter.sink_log import checked_sink
from holdfast.spark_integration.sinks.postgres import connecting, target
from holdfast.spark_integration.sinks.postgres.connecting import Session, translated
from holdfast.spark_integration.sinks.postgres.marks import (
    NAME_BYTES_MAX,
    MarkTables,
    PreparedPart,
    driver_application,
    tables_of,
    transactions_of,
    worker_application,
)
from holdfast.spark_integration.sinks.postgres.target import Target, made_for
from holdfast.spark_integration.sinks.postgres.writing import CopyTransaction
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
    another_query,
    column_names,
    warn_of_another_driver,
)

_log = logging.getLogger(__name__)

#: First part of the key in `Session.known` for the table's definition at the query's start.
_OPENED = "opened"
#: The number of other drivers that may start during a step and end its session.
_DRIVERS_AT_ONCE = 2
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class PostgresSink(TwoPhaseSink):
    """The sink that `holdfast.sinks.postgres` returns."""

    name: str
    table: str
    keys: Sequence[str] = ()
    create: bool = False
    schema: str | None = None
    dsn: str = ""

    credentials: ClassVar[Sequence[str]] = (*sorted(connecting.SECRETS), connecting.DSN)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", column_names("keys", self.keys))
        checked_sink(self.name)
        if not self.table:
            raise InvalidArgumentError("a PostgreSQL sink needs a table", sink=self.name)
        if len(set(self.keys)) != len(self.keys) or not all(self.keys):
            raise InvalidArgumentError("a key is empty, or named twice", keys=", ".join(self.keys))
        connecting.refuse_secrets(self.dsn)

    def open(self, query: SinkQuery, schema: pa.Schema) -> int:
        # No retry if a concurrently starting driver ends this session: the two would keep ending each other's.
        with (
            translated("ending older drivers", sink=self.name),
            suppress(errors.AdminShutdown),
            self._lent(query) as session,
        ):
            connecting.require_own_session(session, lambda: self._lent(query))
            end_older_drivers(session, query)
        return self._drive(query, "opening the sink", lambda session: self._open(session, query, schema))

    def _open(self, session: Session, query: SinkQuery, schema: pa.Schema) -> int:
        if self.create:
            self._make_table(session, schema)
        found = session.known[self.table] = session.known[_OPENED, self.table] = target.read(session, self.table)
        target.check(found, schema, self.keys)
        why = found.why_staged(self.keys, schema.names)
        marks = self._marks(session, query, found)
        marks.require(staging=why is not None)
        newest = marks.claim()
        if why is None:
            _log.info("sink %s: each partition is a prepared transaction", self.name)
        else:
            _log.info("sink %s: the driver applies staging tables, since %s", self.name, why)
        return newest

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        query = attempt.query
        to = connecting.parameters(self.name, self.dsn, query.options)
        with translated("beginning a transaction", sink=self.name):
            session = connecting.take(to, worker_application(query))
            try:
                is_known = self.table in session.known
                marks = self._marks(session, query, self._target(session))
                if not is_known:  # search_path may differ by machine, and resolve the name to a different table
                    marks.require_same()
                return CopyTransaction(attempt, marks, self.keys, schema)
            except BaseException:
                session.close()
                raise

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        def confirm(session: Session) -> None:
            opened = session.known.get((_OPENED, self.table))
            # A prepared transaction has already passed the table's checks.
            if any(PreparedPart.of(query, handle).is_staged for handle in handles):
                session.known[self.table] = target.read(session, self.table)
            self._ending(session, query).confirm(handles, opened)

        self._drive(query, "confirming a micro-batch", confirm, batch=batch_id)

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        def commit(session: Session) -> None:
            self._ending(session, query).commit(batch_id, handles)

        self._drive(query, "committing a micro-batch", commit, batch=batch_id)

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        parts = [PreparedPart.of(query, handle) for handle in handles]
        self._drive(query, "aborting prepared work", lambda session: _end(session, _existing(session, parts)))

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        return self._drive(query, "listing leftovers", lambda session: _leftovers(session, query))

    def _drive(self, query: SinkQuery, doing: str, step: Callable[[Session], _Result], **facts: object) -> _Result:
        """Run a driver step; repeat it if a different driver, starting or waking up, ends its session."""
        with translated(doing, sink=self.name, **facts):
            for _ in range(_DRIVERS_AT_ONCE):
                with suppress(errors.AdminShutdown), self._lent(query) as session:
                    return step(session)
            with self._lent(query) as session:
                return step(session)

    def _lent(self, query: SinkQuery) -> AbstractContextManager[Session]:
        """Lend a session with the driver's application name: sessions with the workers' name may be terminated."""
        to = connecting.parameters(self.name, self.dsn, query.options)
        return connecting.lent(to, driver_application(query))

    def _ending(self, session: Session, query: SinkQuery) -> Ending:
        return Ending(self._marks(session, query, self._target(session)), self.keys)

    def _target(self, session: Session) -> Target:
        # Read once per session: a later ALTER TABLE surfaces as a server error, or at the next start.
        found = session.known.get(self.table)
        if found is None:
            found = session.known[self.table] = target.read(session, self.table)
        return found

    def _marks(self, session: Session, query: SinkQuery, found: Target) -> MarkTables:
        return MarkTables(self.schema or found.schema, session, query, found)

    def _make_table(self, session: Session, schema: pa.Schema) -> None:
        # IF NOT EXISTS alone checks only the first schema of the search path, and needs permission to create in it.
        if session.run("SELECT to_regclass(%s) IS NOT NULL", [self.table])[0][0]:
            return
        parts: list[sql.Composable] = []
        for field in schema:
            if len(field.name.encode()) > NAME_BYTES_MAX:
                raise InvalidArgumentError(
                    f"PostgreSQL truncates column names to {NAME_BYTES_MAX} bytes; rename the column in the query",
                    column=field.name,
                    bytes=len(field.name.encode()),
                )
            kind = made_for(field.type)
            if kind is None:
                raise InvalidArgumentError(
                    "PostgreSQL has no type for this column; cast it in the query", column=field.name, type=field.type
                )
            parts.append(sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(kind)))
        if self.keys:
            parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, self.keys))))
        names_ = session.run("SELECT parse_ident(%s)", [self.table])[0][0]
        make = sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})")
        session.run(make.format(sql.Identifier(*names_), sql.SQL(", ").join(parts)))


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
_SESSIONS = """
FROM pg_stat_activity WHERE application_name = %s AND datname = current_database() AND pid <> pg_backend_pid()"""
# Open transactions of any role: pg_stat_activity shows their state only to their own role.
_IN_TRANSACTION = "AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'virtualxid')"
_PATIENCE_MS = 10_000
# A B-tree entry may have up to 2,704 bytes over all columns.
_INDEXED_BYTES_MAX = 2_000


class StagingTable(NamedTuple):
    part: PreparedPart
    columns: dict[str, str]  #: Column name to SQL type
    checks: set[str]  #: Names of its CHECK constraints

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(str(self.part.schema), self.part.name)


class Ending:
    """Confirms and commits the parts of a micro-batch in one session of a query's driver."""

    def __init__(self, marks: MarkTables, keys: Sequence[str]) -> None:
        self._marks, self._keys = marks, keys
        self._session, self._query, self._target = marks.session, marks.query, marks.target

    def confirm(self, handles: Sequence[Handle], opened: Target | None) -> None:
        """Raise if a part is gone, or if a rolled-back trial shows that the target refuses staged rows."""
        self._marks.require_same()
        parts = [PreparedPart.of(self._query, handle) for handle in handles]
        there = _existing(self._session, parts)
        gone = [part for part in parts if part not in there]
        if gone:
            raise UnavailableError(
                "prepared work is gone from the server: someone ended it, or the server was restored; the micro-batch "
                "is written again",
                sink=self._query.sink, gone=len(gone), first=gone[0].name,
            )  # fmt: skip
        staged = _staged(there)
        for one in staged:
            self._check_unaltered(one)
        if staged and (self._target != opened or self._may_refuse(staged)):
            with self._session.connection.transaction(force_rollback=True):
                self.apply(staged)
                self._session.run("SET CONSTRAINTS ALL IMMEDIATE")

    def commit(self, batch_id: int, handles: Sequence[Handle]) -> None:
        """Commit the remaining parts after verifying that all missing parts were committed."""
        parts = [PreparedPart.of(self._query, handle) for handle in handles]
        # Read the marks first: a mark is written last, so parts found after it belong to attempts that do not count.
        shown = self._marks.shown()
        there = _existing(self._session, parts)
        is_ours = shown.query_id in (None, self._query.query_id)
        if is_ours and batch_id > shown.batch_id and not shown.is_there:
            raise self._marks.another_table()
        if not is_ours or batch_id >= shown.batch_id:
            self._check_gone(batch_id, [part for part in parts if part not in there])
        if not is_ours:
            if there:
                raise another_query(self._query, shown.query_id)
            return
        if batch_id <= shown.batch_id:
            self._end_another_drivers(batch_id, there)
            return
        prepared = [part for part in there if not part.is_staged]
        others = [part for part in prepared if not end_prepared(self._session, "COMMIT", part)]
        if others and self._marks.shown().batch_id <= batch_id:
            self._check_gone(batch_id, others)
        if len(prepared) < len(there):
            with self._session.connection.transaction():
                self._commit_staged(batch_id, [part for part in parts if part.is_staged])
        else:
            self._marks.show(batch_id)

    def apply(self, staged: Iterable[StagingTable]) -> None:
        """Insert staged rows into the target; for each key, the last row of the highest partition wins."""
        parts, applied = sorted(staged, key=lambda each: each.part.partition), 0
        try:
            # A single savepoint, because with hundreds of partitions each request matters.
            with self._session.connection.transaction():
                for part in parts:
                    self._session.run(self._insert(part, once=False))
                    applied += 1
        except errors.CardinalityViolation:
            # Sorting doubles the cost, so sort only the first partition with a duplicate key and those after it.
            for number, part in enumerate(parts):
                self._session.run(self._insert(part, once=number >= applied))

    def put(self, batch_id: int, staged: Sequence[StagingTable]) -> None:
        """Apply staging tables, mark their attempts as committed, and drop the tables."""
        self.apply(staged)
        # From here on, this transaction's lock keeps the table from being dropped.
        self._marks.require_same()
        self._session.run(self._marks.remember(batch_id, [one.part.attempt for one in staged]))
        drop(self._session, staged)

    def _check_unaltered(self, staged: StagingTable) -> None:
        for name, declared in staged.columns.items():
            column = self._target.columns.get(name)
            if column is None or column.declared != declared:
                raise SchemaMismatchError(
                    "the table was altered while a micro-batch was being written; start the query again",
                    column=name, written_as=declared, table=f"{self._target.schema}.{self._target.name}",
                )  # fmt: skip

    def _may_refuse(self, staged: Sequence[StagingTable]) -> bool:
        if self._target.may_refuse(self._keys):
            return True
        checks = target.checks(self._session, self._target)
        return any(not all(check.name in one.checks for check in checks) or self._is_long(one) for one in staged)

    def _is_long(self, staged: StagingTable) -> bool:
        sizes = [sql.SQL("coalesce(pg_column_size({}), 0)").format(sql.Identifier(name))
                 for name in self._target.indexed if name in staged.columns]  # fmt: skip
        if not sizes:
            return False
        query = sql.SQL("SELECT EXISTS (SELECT FROM {} WHERE {} > {})")
        size = sql.SQL(" + ").join(sizes)
        return bool(self._session.run(query.format(staged.identifier, size, sql.Literal(_INDEXED_BYTES_MAX)))[0][0])

    def _commit_staged(self, batch_id: int, parts: Sequence[PreparedPart]) -> None:
        # A concurrent commit of this micro-batch waits for this lock, and then finds the work done.
        shown = self._marks.shown(lock=True)
        if shown.query_id not in (None, self._query.query_id):
            raise another_query(self._query, shown.query_id)
        there = _existing(self._session, parts)
        if batch_id >= shown.batch_id:
            self._check_gone(batch_id, [part for part in parts if part not in there])
        if batch_id <= shown.batch_id:
            self._end_another_drivers(batch_id, there)
            return
        self.put(batch_id, _staged(there))
        self._marks.show(batch_id)

    def _check_gone(self, batch_id: int, gone: Sequence[PreparedPart]) -> None:
        attempts = {part.attempt for part in gone}
        lost = attempts - self._marks.remembered(batch_id, sorted(attempts)) if gone else None
        if lost:
            raise StateLostError(
                "the server has lost prepared work of a decided micro-batch: someone rolled it back or dropped it, or "
                "the server was restored from a backup; no more of the micro-batch becomes visible. Restore the "
                "server to a state that has the work, or query and table together to an earlier state",
                sink=self._query.sink, batch=batch_id, lost=len(lost), attempt=min(lost),
            )  # fmt: skip

    def _end_another_drivers(self, batch_id: int, there: Mapping[PreparedPart, StagingTable | None]) -> None:
        """Abort other attempts at a visible micro-batch: their commit would duplicate rows."""
        if there:
            warn_of_another_driver(self._query, batch_id)
            _end(self._session, there)

    def _insert(self, staged: StagingTable, *, once: bool) -> sql.Composed:
        named = sql.SQL(", ").join(map(sql.Identifier, staged.columns))
        keys = sql.SQL(", ").join(map(sql.Identifier, self._keys))
        distinct = sql.SQL("DISTINCT ON ({}) ").format(keys) if once else sql.SQL("")
        # The row written last has the highest ctid: no row was ever deleted from the table.
        order = sql.SQL(" ORDER BY {}, ctid DESC").format(keys) if once else sql.SQL("")
        parts = [self._target.identifier, named, distinct, named, staged.identifier, order]
        insert = sql.SQL("INSERT INTO {} ({}) SELECT {}{} FROM {}{}").format(*parts)
        return sql.Composed([insert, self._on_conflict(staged.columns, keys)]) if self._keys else insert

    def _on_conflict(self, columns: Iterable[str], keys: sql.Composed) -> sql.Composed:
        values = [name for name in columns if name not in self._keys]
        if not values:
            return sql.SQL(" ON CONFLICT ({}) DO NOTHING").format(keys)
        sets = sql.SQL(", ").join(
            sql.SQL("{} = EXCLUDED.{}").format(sql.Identifier(name), sql.Identifier(name)) for name in values
        )
        return sql.SQL(" ON CONFLICT ({}) DO UPDATE SET {}").format(keys, sets)


def drop(session: Session, tables: Sequence[StagingTable]) -> None:
    if tables:
        listed = sql.SQL(", ").join(one.identifier for one in tables)
        session.run(sql.SQL("DROP TABLE IF EXISTS {}").format(listed))


def _leftovers(session: Session, query: SinkQuery) -> list[Handle]:
    """End the sessions of a query's workers, and return the handles of all prepared parts."""
    _end_sessions(session, worker_application(query))
    prepared = [PreparedPart(gid) for (gid,) in session.run(_LEFT_PREPARED, [transactions_of(query)])]
    staged = [PreparedPart(name, schema) for schema, name in session.run(_LEFT_STAGED, [tables_of(query)])]
    return [part.to_json() for part in prepared + staged]


def end_older_drivers(session: Session, query: SinkQuery) -> None:
    """End the sessions of older drivers with open transactions: a frozen or vanished driver would block this one."""
    for query_id in filter(None, [query.query_id, query.replaces]):
        _end_sessions(session, driver_application(replace(query, query_id=query_id)), _IN_TRANSACTION)


def _end_sessions(session: Session, application: str, which: str = "") -> None:
    sessions = f"{_SESSIONS} {which}"
    try:
        ended = session.run(f"SELECT pid, pg_terminate_backend(pid, {_PATIENCE_MS}) {sessions}", [application])
    except errors.InsufficientPrivilege as exc:
        roles = ", ".join(sorted({row[0] for row in session.run(f"SELECT usename {sessions}", [application])}))
        raise InvalidArgumentError(
            "an earlier run's session belongs to another role, and could still commit or hold locks: GRANT "
            f"{roles} TO the sink's user, or end it with pg_terminate_backend as that role",
            application_name=application,
        ) from exc
    # Sessions opened in the meantime do not matter; a session that ended by itself is reported as not terminated.
    left = [pid for pid, is_ended in ended if not is_ended]
    if left and session.run(f"SELECT {sessions} AND pid = ANY (%s)", [application, left]):
        raise UnavailableError(
            "an earlier run's session does not end, and could still prepare, commit or hold locks; end it with "
            "pg_terminate_backend, and start the query again",
            application_name=application,
        )


def end_prepared(session: Session, how: str, part: PreparedPart) -> bool:
    """Commit or roll back a prepared transaction; return False if another session ended it first."""
    try:
        session.run(sql.SQL(how + " PREPARED {}").format(sql.Literal(part.name)))
    except errors.UndefinedObject:
        return False
    return True


def _end(session: Session, there: Mapping[PreparedPart, StagingTable | None]) -> None:
    """Roll back prepared transactions and drop staging tables."""
    for part in there:
        if not part.is_staged:
            end_prepared(session, "ROLLBACK", part)
    drop(session, _staged(there))


def _existing(session: Session, parts: Sequence[PreparedPart]) -> dict[PreparedPart, StagingTable | None]:
    prepared = [part.name for part in parts if not part.is_staged]
    tables = [part.name for part in parts if part.is_staged]
    found: dict[PreparedPart, StagingTable | None] = {}
    if prepared:
        found |= {PreparedPart(gid): None for (gid,) in session.run(_PREPARED, [prepared])}
    for schema, name, columns, checks in session.run(_STAGED, [tables]) if tables else []:
        part = PreparedPart(name, schema)
        found[part] = StagingTable(part, dict(columns), set(checks))
    return {part: found[part] for part in parts if part in found}


def _staged(there: Mapping[PreparedPart, StagingTable | None]) -> list[StagingTable]:
    return [one for one in there.values() if one is not None]
