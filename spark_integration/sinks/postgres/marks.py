"""The sink's objects in a server: names that identify prepared work for any process, and two small tables of marks.

    prepared transaction   holdfast:<sink>:<query>:<batch>:<partition>:<attempt>       at most 200 bytes
    staging table          hf_<digest of sink and query>_<partition>_<attempt>         at most 63 bytes
    a worker's connection  hf_<digest of sink and query> <sink>                        application_name, cut at 63 bytes
    the driver's           holdfast <digest of sink and query> <sink>                  as above

In a transaction's name, a sink's name longer than 60 characters, or a query's id longer than 40, is truncated, and a
digest of the full text is appended.

    holdfast_sinks            sink | query_id | batch_id | committed_at      one row per sink: its query, the newest
                              | target                                      complete micro-batch, -1 for none, and
                                                                            the target table
    holdfast_sink_attempts    sink | batch_id | attempt | query_id          the committed attempts of the newest
                                                                            micro-batch

An attempt's row is part of its transaction: once the name is gone from ``pg_prepared_xacts``, the row distinguishes a
committed attempt from a lost one. The next micro-batch's commit deletes the row. The target is a ``regclass``, stored
as an OID, so that a recreated table differs, but dumped as a name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from psycopg import sql

from holdfast.errors import InvalidArgumentError, StateLostError
from holdfast.snapshotter.fields import Stored, refuse
from holdfast.spark_integration.sinks.postgres.connecting import Session
from holdfast.spark_integration.sinks.postgres.target import Target
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery, another_query

_SINK_CHARACTERS, _QUERY_CHARACTERS, _ATTEMPT_CHARACTERS, _DIGEST = 60, 40, 32, 16
# A name after the query's prefix: batch, partition and attempt of a transaction; partition and attempt of a table.
_PART = re.compile(r"([0-9]+:[0-9]+:|[0-9]+_)[0-9a-f]{32}")
#: PostgreSQL's limit on the length of a name.
NAME_BYTES_MAX = 63
SINKS, ATTEMPTS = "holdfast_sinks", "holdfast_sink_attempts"


@dataclass(frozen=True)
class PreparedPart(Stored):
    """An attempt's prepared transaction or staging table."""

    name: str
    schema: str | None = None

    @classmethod
    def of(cls, query: SinkQuery, handle: Handle) -> PreparedPart:
        """Parse a query's handle. Raises `CorruptionError` if the handle names no part of this query."""
        part = cls.read(handle, "a handle")
        prefix = tables_of(query) if part.is_staged else transactions_of(query)
        if not part.name.startswith(prefix) or not _PART.fullmatch(part.name.removeprefix(prefix)):
            refuse("a handle", "names another query's part", name=part.name)
        return part

    @property
    def is_staged(self) -> bool:
        return self.schema is not None

    @property
    def attempt(self) -> str:
        """The attempt's id, the suffix of both kinds of names."""
        return self.name[-_ATTEMPT_CHARACTERS:]

    @property
    def partition(self) -> int:
        return int(self.name.split("_")[2])


def transactions_of(query: SinkQuery) -> str:
    """Return the name prefix of a query's prepared transactions."""
    return f"holdfast:{_short(query.sink, _SINK_CHARACTERS)}:{_short(query.query_id, _QUERY_CHARACTERS)}:"


def transaction_name(attempt: SinkAttempt) -> str:
    return f"{transactions_of(attempt.query)}{attempt.batch_id}:{attempt.partition}:{attempt.attempt_id}"


def tables_of(query: SinkQuery) -> str:
    """Return the name prefix of a query's staging tables."""
    return f"hf_{_digest(query.sink, query.query_id)}_"


def table_name(attempt: SinkAttempt) -> str:
    return f"{tables_of(attempt.query)}{attempt.partition}_{attempt.attempt_id}"


def worker_application(query: SinkQuery) -> str:
    """Return the application name of a query's workers."""
    return f"hf_{_digest(query.sink, query.query_id)} {query.sink}"[:NAME_BYTES_MAX]


def driver_application(query: SinkQuery) -> str:
    """Return the application name of a query's driver, by which later drivers find a dead driver's sessions."""
    return f"holdfast {_digest(query.sink, query.query_id)} {query.sink}"[:NAME_BYTES_MAX]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_DIGEST]


def _short(name: str, characters: int) -> str:
    if len(name) <= characters:
        return name
    return f"{name[: characters - _DIGEST - 1]}~{_digest(name)}"


_MAKE = """
CREATE TABLE IF NOT EXISTS {sinks} (
    sink text PRIMARY KEY, query_id text NOT NULL, batch_id bigint NOT NULL,
    committed_at timestamptz NOT NULL DEFAULT now(), target regclass NOT NULL);
CREATE TABLE IF NOT EXISTS {attempts} (
    sink text, batch_id bigint, attempt text, query_id text NOT NULL, PRIMARY KEY (sink, batch_id, attempt))"""
_RIGHTS = """
SELECT c.relname, has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')
                  AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = ANY (%s)"""
_MAY_CREATE = "SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace WHERE nspname = %s"
_HAS_TARGET = """
SELECT FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = 'holdfast_sinks' AND a.attname = 'target' AND a.atttypid = 'regclass'::regtype
    AND NOT a.attisdropped"""
_TAKE_TARGET = """\
ALTER TABLE {sinks} ADD target regclass; UPDATE {sinks} SET target = '<table>' WHERE sink = '<name>'; \
ALTER TABLE {sinks} ALTER target SET NOT NULL"""
# CREATE TABLE IF NOT EXISTS alone may fail when two drivers run it concurrently.
_ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(hashtext('holdfast_sinks'))"
_CLAIM = "INSERT INTO {sinks} (sink, query_id, batch_id, target) VALUES (%s, %s, -1, %s::oid) ON CONFLICT DO NOTHING"
_TAKE_OVER = "UPDATE {sinks} SET query_id = %s, batch_id = -1 WHERE sink = %s AND query_id = %s"
# Safe, because no micro-batch of the query was decided: no table shows its rows.
_BEGIN_WITH = "UPDATE {sinks} SET target = %s::oid WHERE sink = %s AND query_id = %s AND batch_id = -1"
_NEWEST = "SELECT query_id, batch_id, target::oid = %s::oid FROM {sinks} WHERE sink = %s"
_IS_SAME = "SELECT query_id, target::oid = to_regclass(%s)::oid FROM {sinks} WHERE sink = %s"
_SHOW = """
WITH shown AS (
    INSERT INTO {sinks} AS s (sink, query_id, batch_id, target)
    VALUES (%(sink)s, %(query)s, %(batch)s, %(target)s::oid)
    ON CONFLICT (sink) DO UPDATE SET batch_id = EXCLUDED.batch_id, committed_at = now()
    WHERE s.query_id = EXCLUDED.query_id AND s.batch_id <= EXCLUDED.batch_id
    RETURNING sink)
DELETE FROM {attempts} WHERE sink IN (SELECT sink FROM shown)
    AND NOT (query_id = %(query)s AND batch_id = %(batch)s)"""
_REMEMBER = """
INSERT INTO {attempts} (sink, batch_id, attempt, query_id) SELECT {sink}, {batch}, unnest({ids}::text[]), {query}"""
_REMEMBERED = "SELECT attempt FROM {attempts} WHERE sink = %s AND batch_id = %s AND attempt = ANY (%s)"


class Shown(NamedTuple):
    """A sink's marks."""

    query_id: str | None  #: The query that owns the name
    batch_id: int  #: The newest complete micro-batch, -1 for none
    is_there: bool  #: Whether the present table is the marked target


@dataclass(frozen=True)
class MarkTables:
    """The marks of one query in one schema; calls take part in the session's open transaction, if there is one."""

    schema: str
    session: Session
    query: SinkQuery
    target: Target

    def require(self, *, staging: bool) -> None:
        """Create missing tables. Raises `InvalidArgumentError` if the user lacks a permission."""
        rights = dict(self.session.run(_RIGHTS, [self.schema, [SINKS, ATTEMPTS]]))
        may_create = self.session.run(_MAY_CREATE, [self.schema])
        if not may_create:
            raise InvalidArgumentError("no such schema; create it", schema=self.schema)
        complete = {SINKS, ATTEMPTS} <= rights.keys()
        if not may_create[0][0] and (staging or not complete):
            what = "staging tables" if complete else f"the tables {SINKS} and {ATTEMPTS}"
            raise InvalidArgumentError(
                f"no permission to create {what}; GRANT CREATE ON SCHEMA to the sink's user, or give the sink its own "
                "schema: sinks.postgres(…, schema=…)",
                schema=self.schema,
            )
        for name, usable in rights.items():
            if not usable:
                raise InvalidArgumentError(
                    "no permission to write marks; GRANT SELECT, INSERT, UPDATE, DELETE on it to the sink's user",
                    table=f"{self.schema}.{name}",
                )
        if SINKS in rights and not self.session.run(_HAS_TARGET, [self.schema]):
            adopt = self._sql(_TAKE_TARGET)
            raise InvalidArgumentError(
                "the sinks' marks lack their target table: another version of holdfast made them. To adopt them, run "
                "these statements, the second for each sink that still writes to its original table: "
                f"{adopt.as_string()}",
                table=f"{self.schema}.{SINKS}",
            )
        if not complete:
            with self.session.connection.transaction():
                self.session.run(_ONE_AT_A_TIME)
                self.session.run(self._sql(_MAKE))

    def claim(self) -> int:
        """Claim a free or replaced sink name; return the query's newest micro-batch. Raises as `require_same` does."""
        is_new = self.query.was_shown is None
        if is_new:
            self.session.run(self._sql(_CLAIM), [self.query.sink, self.query.query_id, self.target.oid])
        if self.query.replaces is not None and self.query.replaces != self.query.query_id:
            before = self.shown()
            if before.query_id == self.query.replaces and before.batch_id >= 0 and not before.is_there:
                raise self.another_table()
            self.session.run(self._sql(_TAKE_OVER), [self.query.query_id, self.query.sink, self.query.replaces])
        if is_new:
            self.session.run(self._sql(_BEGIN_WITH), [self.target.oid, self.query.sink, self.query.query_id])
        self.require_same()
        return self.shown().batch_id

    def require_same(self) -> None:
        """Raise `ConflictError` if another query owns the sink's name, `StateLostError` if the table was replaced."""
        marked = self.session.run(self._sql(_IS_SAME), [self.target.identifier.as_string(), self.query.sink])
        owner, is_same = marked[0] if marked else (self.query.query_id, False)
        if owner != self.query.query_id:
            raise another_query(self.query, owner)
        if not is_same:
            raise self.another_table()

    def another_table(self) -> StateLostError:
        """Return the error for a table that is not the marked target."""
        name = self.target.identifier.as_string()
        update = self._sql(
            "UPDATE {sinks} SET target = {target} WHERE sink = {sink}",
            target=sql.Literal(name),
            sink=sql.Literal(self.query.sink),
        )
        return StateLostError(
            "this is not the table that the query wrote to: the name has changed, or the table was dropped or "
            "recreated, so committed rows may be gone. Name the original, or restore it; or give the sink another "
            f"name to start over. If the present table has all rows, run: {update.as_string()}",
            sink=self.query.sink, table=name,
        )  # fmt: skip

    def shown(self, *, lock: bool = False) -> Shown:
        """Return the sink's marks; with `lock`, hold a row lock until the transaction ends."""
        query = self._sql(_NEWEST + (" FOR UPDATE" if lock else ""))
        marked = self.session.run(query, [self.target.oid, self.query.sink])
        return Shown(marked[0][0], int(marked[0][1]), marked[0][2]) if marked else Shown(None, -1, is_there=True)

    def show(self, batch_id: int) -> None:
        """Mark a micro-batch as complete and delete earlier attempts' marks, unless a later micro-batch is marked."""
        values = {"sink": self.query.sink, "query": self.query.query_id, "batch": batch_id, "target": self.target.oid}
        self.session.run(self._sql(_SHOW), values)

    def remember(self, batch_id: int, attempts: Sequence[str]) -> sql.Composed:
        """Return a statement that marks attempts as committed when its transaction commits."""
        given = {"sink": self.query.sink, "batch": batch_id, "ids": list(attempts), "query": self.query.query_id}
        return self._sql(_REMEMBER, **{name: sql.Literal(value) for name, value in given.items()})

    def remembered(self, batch_id: int, attempts: Sequence[str]) -> set[str]:
        """Return the attempts that are marked as committed."""
        found = self.session.run(self._sql(_REMEMBERED), [self.query.sink, batch_id, list(attempts)])
        return {row[0] for row in found}

    def _sql(self, text: str, **given: sql.Composable) -> sql.Composed:
        sinks, attempts = sql.Identifier(self.schema, SINKS), sql.Identifier(self.schema, ATTEMPTS)
        return sql.SQL(text).format(**{"sinks": sinks, "attempts": attempts, **given})
