"""`PostgresSink`: the results of a query in a table of PostgreSQL, each exactly once.

======================  ==================================================================================
way                     when
======================  ==================================================================================
prepared transactions   rows are appended; the server allows prepared transactions; nothing in the table
                        makes one transaction wait for another. A partition is a transaction of its own:
                        those of a micro-batch become visible one after the other, within milliseconds
staging tables          rows are updated by keys, or the above does not hold. The driver applies a micro-batch
                        in one transaction
======================  ==================================================================================

The sink chooses by itself when a query starts, and logs which and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import pyarrow as pa
from psycopg import errors, sql

from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.sink_log import checked_sink
from holdfast.spark_integration.sinks.postgres import connecting, ending, target
from holdfast.spark_integration.sinks.postgres.connecting import Session, translated
from holdfast.spark_integration.sinks.postgres.ending import Ending
from holdfast.spark_integration.sinks.postgres.marks import (
    NAME_BYTES_MAX,
    MarkTables,
    PreparedPart,
    driver_application,
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
    column_names,
)

_log = logging.getLogger(__name__)

#: The table at the query's start, as its driver's connection sees it.
_OPENED = "opened"
#: How many others may start during a step, and end its session.
_DRIVERS_AT_ONCE = 2
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class PostgresSink(TwoPhaseSink):
    """See the module and `holdfast.sinks.postgres`."""

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
        # Once, even if another driver that starts now ends this session: two would go on ending each other's.
        with (
            translated("older drivers are ended", sink=self.name),
            suppress(errors.AdminShutdown),
            self._lent(query) as session,
        ):
            connecting.require_own_session(session, lambda: self._lent(query))
            ending.end_older_drivers(session, query)
        return self._drive(query, "a sink is opened", lambda session: self._open(session, query, schema))

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
            _log.info("sink %s: staging tables, which the driver applies: %s", self.name, why)
        return newest

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        query = attempt.query
        to = connecting.parameters(self.name, self.dsn, query.options)
        with translated("a transaction begins", sink=self.name):
            session = connecting.take(to, worker_application(query))
            try:
                is_known = self.table in session.known
                marks = self._marks(session, query, self._target(session))
                if not is_known:  # the name alone may mean another table here: search_path is each machine's own
                    marks.require_same()
                return CopyTransaction(attempt, marks, self.keys, schema)
            except BaseException:
                session.close()
                raise

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        def confirm(session: Session) -> None:
            opened = session.known.get((_OPENED, self.table))
            # A prepared transaction has met all that the table may refuse.
            if any(PreparedPart.of(query, handle).is_staged for handle in handles):
                session.known[self.table] = target.read(session, self.table)
            self._ending(session, query).confirm(handles, opened)

        self._drive(query, "a micro-batch is confirmed", confirm, batch=batch_id)

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        def commit(session: Session) -> None:
            self._ending(session, query).commit(batch_id, handles)

        self._drive(query, "a micro-batch is committed", commit, batch=batch_id)

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        self._drive(query, "what was prepared is aborted", lambda session: ending.abort(session, query, handles))

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        return self._drive(query, "leftovers are looked for", lambda session: ending.leftovers(session, query))

    def _drive(self, query: SinkQuery, doing: str, step: Callable[[Session], _Result], **facts: object) -> _Result:
        """Run a step of the driver; repeat it if another driver that starts or wakes up ends its session."""
        with translated(doing, sink=self.name, **facts):
            for _ in range(_DRIVERS_AT_ONCE):
                with suppress(errors.AdminShutdown), self._lent(query) as session:
                    return step(session)
            with self._lent(query) as session:
                return step(session)

    def _lent(self, query: SinkQuery) -> AbstractContextManager[Session]:
        """Lend a connection under the driver's name: those under the workers' name may be terminated."""
        to = connecting.parameters(self.name, self.dsn, query.options)
        return connecting.lent(to, driver_application(query))

    def _ending(self, session: Session, query: SinkQuery) -> Ending:
        return Ending(self._marks(session, query, self._target(session)), self.keys)

    def _target(self, session: Session) -> Target:
        # Once a connection: a table that is altered meanwhile is met by the server's own errors, and by the next start.
        found = session.known.get(self.table)
        if found is None:
            found = session.known[self.table] = target.read(session, self.table)
        return found

    def _marks(self, session: Session, query: SinkQuery, found: Target) -> MarkTables:
        return MarkTables(self.schema or found.schema, session, query, found)

    def _make_table(self, session: Session, schema: pa.Schema) -> None:
        # IF NOT EXISTS alone looks in the first schema of the search path only, and wants the right to create there.
        if session.run("SELECT to_regclass(%s) IS NOT NULL", [self.table])[0][0]:
            return
        parts: list[sql.Composable] = []
        for field in schema:
            if len(field.name.encode()) > NAME_BYTES_MAX:
                raise InvalidArgumentError(
                    f"PostgreSQL keeps {NAME_BYTES_MAX} bytes of a column's name; rename it in the query",
                    column=field.name,
                    bytes=len(field.name.encode()),
                )
            kind = made_for(field.type)
            if kind is None:
                raise InvalidArgumentError(
                    "no column can be made for this type; cast it in the query", column=field.name, type=field.type
                )
            parts.append(sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(kind)))
        if self.keys:
            parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, self.keys))))
        names_ = session.run("SELECT parse_ident(%s)", [self.table])[0][0]
        make = sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})")
        session.run(make.format(sql.Identifier(*names_), sql.SQL(", ").join(parts)))
