"""`PostgresSink`: the results of a query in a table of PostgreSQL, each exactly once.

======================  ==================================================================================
way                     when
======================  ==================================================================================
prepared transactions   rows are appended; the server allows prepared transactions; nothing in the table
                        makes one transaction wait for another. A partition is a transaction of its own:
                        those of a micro-batch become visible one after the other, within milliseconds
staging tables          rows are updated by keys, or the above does not hold. The driver applies a micro-batch
                        in one transaction; a large one in several at once if the user asks for that
======================  ==================================================================================

The sink chooses by itself when a query starts, and logs which and why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
from psycopg import sql

from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.decisions import checked_sink
from holdfast.spark_integration.sinks.postgres import connecting, ending, failures, names, target
from holdfast.spark_integration.sinks.postgres.applying import Helpers
from holdfast.spark_integration.sinks.postgres.columns import made_for
from holdfast.spark_integration.sinks.postgres.connecting import Link
from holdfast.spark_integration.sinks.postgres.ending import Ending
from holdfast.spark_integration.sinks.postgres.marks import Marks
from holdfast.spark_integration.sinks.postgres.target import Target
from holdfast.spark_integration.sinks.postgres.writing import STAGED, CopyTransaction, Work, release_to
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
)

_log = logging.getLogger(__name__)

#: What the table was like when the query started, as its driver's connection knows it.
_OPENED = "opened"


@dataclass(frozen=True)
class PostgresSink(TwoPhaseSink):
    """Results in a table of PostgreSQL, exactly once.

    Where the server is, and the credentials, are settings of the query, by libpq's names:
    ``spark.holdfast.sink.<name>.host``, ``….password``, ``….sslmode``; or libpq's environment and files.

    Parameters
    ----------
    name : str
        Identifies the sink; one query writes under one name.
    table : str
        As SQL has it: ``totals``, ``shop.totals``, ``shop."Totals"``.
    keys : sequence of str
        Columns of a unique key of the table: a row replaces the one of the same key. Without keys, rows are appended.
    create : bool
        Make the table if it is missing, with the keys as its primary key.
    schema : str, optional
        Where the sink keeps its marks and staging tables; by default beside the table.
    dsn : str
        A libpq connection string without credentials: ``host=db dbname=shop``. Settings go before it.
    connections : int
        By how many at once the driver applies what is staged. With 1 a micro-batch is visible as a whole. With more,
        those of more than 4 MB become visible in parts, one after the other, within milliseconds; after a crash between
        two of them, the rest with the next start.

    Raises
    ------
    InvalidArgumentError
        A name or key is empty or there twice, credentials are in ``dsn``, or ``connections`` is no number from 1 on.
    """

    name: str
    table: str
    keys: Sequence[str] = ()
    create: bool = False
    schema: str | None = None
    dsn: str = ""
    connections: int = 1

    credentials: ClassVar[Sequence[str]] = (*sorted(connecting.SECRETS), connecting.DSN)

    def __post_init__(self) -> None:
        if isinstance(self.keys, str):
            raise InvalidArgumentError("keys must be a list of column names", keys=self.keys)
        object.__setattr__(self, "keys", tuple(self.keys))
        checked_sink(self.name)
        if not self.table:
            raise InvalidArgumentError("a PostgreSQL sink needs a table", sink=self.name)
        if len(set(self.keys)) != len(self.keys) or not all(self.keys):
            raise InvalidArgumentError("a key is empty, or named twice", keys=", ".join(self.keys))
        if type(self.connections) is not int or self.connections < 1:
            raise InvalidArgumentError("connections must be a whole number, at least 1", connections=self.connections)
        connecting.checked_dsn(self.dsn)

    def open(self, query: SinkQuery, schema: pa.Schema) -> int:
        with self._driver(query, "a sink is opened") as link:
            connecting.require_own_session(link, lambda: self._lent(query))
            if self.create:
                self._make_table(link, schema)
            found = link.known[self.table] = link.known[_OPENED, self.table] = target.read(link, self.table)
            target.check(found, schema, self.keys)
            why = found.why_staged(self.keys, schema.names)
            marks = self._marks(found)
            marks.require(link, staging=why is not None)
            newest = marks.claim(link, query, found)
        if why is None:
            _log.info("sink %s: each partition is a prepared transaction", self.name)
        else:
            _log.info("sink %s: staging tables, which the driver applies: %s", self.name, why)
        return newest

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        query = attempt.query
        to = connecting.parameters(self.name, self.dsn, query.options)
        application = names.application(query.sink, query.query_id)
        link = connecting.take_alive(to, application)
        try:
            with failures.as_ours("a transaction begins", sink=self.name):
                is_known = self.table in link.known
                found = self._target(link)
                if not is_known:  # the name alone may mean another table here: search_path is each machine's own
                    self._marks(found).require_same(link, query, found)
            index = found.key_index(self.keys)
            equal = index is not None and index.nulls_are_equal
            work = Work(attempt, found, self._marks(found), tuple(self.keys), equal)
            return CopyTransaction(work, schema, link, release_to(to, application))
        except BaseException:
            link.close()
            raise

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        with self._driver(query, "a micro-batch is confirmed", batch=batch_id) as link:
            opened = link.known.get((_OPENED, self.table))
            # A prepared transaction has met all that the table may refuse.
            are_staged = any(handle["way"] == STAGED for handle in handles)
            if are_staged:
                link.known[self.table] = target.read(link, self.table)
            found = self._target(link)
            self._ending(found).confirm(link, query, handles, opened)

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        with (
            self._driver(query, "a micro-batch is committed", batch=batch_id) as link,
            ThreadPoolExecutor(self.connections, "holdfast-postgres") as threads,
        ):
            helpers = Helpers(self.connections, lambda: self._lent(query), threads)
            self._ending(self._target(link)).commit(link, query, batch_id, handles, helpers)

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        with self._driver(query, "what was prepared is aborted") as link:
            ending.abort(link, handles)

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        with self._driver(query, "leftovers are looked for") as link:
            return ending.leftovers(link, query)

    @contextmanager
    def _driver(self, query: SinkQuery, doing: str, **facts: object) -> Iterator[Link]:
        with failures.as_ours(doing, sink=self.name, **facts), self._lent(query) as link:
            yield link

    def _lent(self, query: SinkQuery) -> AbstractContextManager[Link]:
        """Lend a connection of the driver's; it bears another name than those of workers, which may be terminated."""
        to = connecting.parameters(self.name, self.dsn, query.options)
        return connecting.lent(to, f"holdfast {self.name}")

    def _ending(self, found: Target) -> Ending:
        return Ending(found, self._marks(found), tuple(self.keys))

    def _target(self, link: Link) -> Target:
        # Once a connection: a table that is altered meanwhile is met by the server's own errors, and by the next start.
        found = link.known.get(self.table)
        if found is None:
            found = link.known[self.table] = target.read(link, self.table)
        return found

    def _marks(self, found: Target) -> Marks:
        return Marks(self.schema or found.schema)

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
