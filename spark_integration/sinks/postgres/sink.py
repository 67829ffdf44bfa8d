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

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import pyarrow as pa
from psycopg import errors, sql

from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.sink_log import checked_sink
from holdfast.spark_integration.sinks.postgres import connecting, ending, names, target
from holdfast.spark_integration.sinks.postgres.columns import made_for
from holdfast.spark_integration.sinks.postgres.connecting import Link, as_ours
from holdfast.spark_integration.sinks.postgres.ending import Ending
from holdfast.spark_integration.sinks.postgres.marks import Marks
from holdfast.spark_integration.sinks.postgres.names import Part
from holdfast.spark_integration.sinks.postgres.target import Target
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

#: What the table was like when the query started, as its driver's connection knows it.
_OPENED = "opened"
#: How many others may start while one is at a step, and end its session.
_DRIVERS_AT_ONCE = 2
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class PostgresSink(TwoPhaseSink):
    """A table of PostgreSQL; see `holdfast.sinks.postgres`. Append, or update by keys."""

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
        connecting.checked_dsn(self.dsn)

    def open(self, query: SinkQuery, schema: pa.Schema) -> int:
        # Once, also if it is ended itself, by a driver that ends others at this moment, too: two that start at the same
        # time would go on ending each other's sessions.
        with (
            as_ours("older drivers are ended", sink=self.name),
            suppress(errors.AdminShutdown),
            self._lent(query) as link,
        ):
            connecting.require_own_session(link, lambda: self._lent(query))
            ending.end_older_drivers(link, query)
        return self._drive(query, "a sink is opened", lambda link: self._open(link, query, schema))

    def _open(self, link: Link, query: SinkQuery, schema: pa.Schema) -> int:
        if self.create:
            self._make_table(link, schema)
        found = link.known[self.table] = link.known[_OPENED, self.table] = target.read(link, self.table)
        target.check(found, schema, self.keys)
        why = found.why_staged(self.keys, schema.names)
        marks = self._marks(link, query, found)
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
        application = names.application(query.sink, query.query_id)
        with as_ours("a transaction begins", sink=self.name):
            link = connecting.take(to, application)
            try:
                is_known = self.table in link.known
                marks = self._marks(link, query, self._target(link))
                if not is_known:  # the name alone may mean another table here: search_path is each machine's own
                    marks.require_same()
                release = functools.partial(connecting.give_back, to=to, application=application)
                return CopyTransaction(attempt, marks, self.keys, schema, release)
            except BaseException:
                link.close()
                raise

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        def confirm(link: Link) -> None:
            opened = link.known.get((_OPENED, self.table))
            # A prepared transaction has met all that the table may refuse.
            if any(Part.of(handle).is_staged for handle in handles):
                link.known[self.table] = target.read(link, self.table)
            self._ending(link, query).confirm(handles, opened)

        self._drive(query, "a micro-batch is confirmed", confirm, batch=batch_id)

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        def commit(link: Link) -> None:
            self._ending(link, query).commit(batch_id, handles)

        self._drive(query, "a micro-batch is committed", commit, batch=batch_id)

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        self._drive(query, "what was prepared is aborted", lambda link: ending.abort(link, handles))

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        return self._drive(query, "leftovers are looked for", lambda link: ending.leftovers(link, query))

    def _drive(self, query: SinkQuery, doing: str, step: Callable[[Link], _Result], **facts: object) -> _Result:
        """Run a step of the driver, and repeat it if a driver that starts or wakes up ends its session."""
        with as_ours(doing, sink=self.name, **facts):
            for _ in range(_DRIVERS_AT_ONCE):
                with suppress(errors.AdminShutdown), self._lent(query) as link:
                    return step(link)
            with self._lent(query) as link:
                return step(link)

    def _lent(self, query: SinkQuery) -> AbstractContextManager[Link]:
        """Lend a connection under the driver's name: those under the workers' name may be terminated."""
        to = connecting.parameters(self.name, self.dsn, query.options)
        return connecting.lent(to, names.driver_application(query.sink, query.query_id))

    def _ending(self, link: Link, query: SinkQuery) -> Ending:
        return Ending(self._marks(link, query, self._target(link)), self.keys)

    def _target(self, link: Link) -> Target:
        # Once a connection: a table that is altered meanwhile is met by the server's own errors, and by the next start.
        found = link.known.get(self.table)
        if found is None:
            found = link.known[self.table] = target.read(link, self.table)
        return found

    def _marks(self, link: Link, query: SinkQuery, found: Target) -> Marks:
        return Marks(self.schema or found.schema, link, query, found)

    def _make_table(self, link: Link, schema: pa.Schema) -> None:
        # IF NOT EXISTS alone looks in the first schema of the search path only, and wants the right to create there.
        if link.run("SELECT to_regclass(%s) IS NOT NULL", [self.table])[0][0]:
            return
        parts: list[sql.Composable] = []
        for field in schema:
            if len(field.name.encode()) > names.NAME_BYTES_MAX:
                raise InvalidArgumentError(
                    f"PostgreSQL keeps {names.NAME_BYTES_MAX} bytes of a column's name; rename it in the query",
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
        names_ = link.run("SELECT parse_ident(%s)", [self.table])[0][0]
        make = sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})")
        link.run(make.format(sql.Identifier(*names_), sql.SQL(", ").join(parts)))
