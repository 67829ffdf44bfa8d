"""PostgreSQL sessions, pooled between micro-batches, and translation of the server's errors.

A query's options (``spark.holdfast.sink.<name>.<option>``) are libpq's. They override the sink's own ``dsn``, which
overrides libpq's environment and files. A password belongs in the options, ``PGPASSWORD`` or a password file, never in
the sink, which is pickled.

======================  ==============================================================  =======================
SQLSTATE                meaning                                                         raised as
======================  ==============================================================  =======================
08, 53, 57P, 58, none   the server is unreachable, stopping, full or failing            UnavailableError
40, 55000/006/P03       lost a race for a lock or a transaction                         UnavailableError
57014, 25P03/P04        cancelled, or stopped by a server timeout                       UnavailableError
22, 23502, 42703/804    a value or a column does not fit                                SchemaMismatchError
23                      a constraint of the table refuses a row                         InvalidArgumentError
42P05, 26000            a pooler shares the session with other clients                  InvalidArgumentError
all others              no permission, no such table, wrong password and so on          InvalidArgumentError
======================  ==============================================================  =======================

Errors contain only the first line of the server's message, without psycopg's error as cause: both may contain a row.
"""

from __future__ import annotations

import math
import os
import select
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import conninfo, errors, pq, sql

from holdfast import clock
from holdfast.backends.options import did_you_mean
from holdfast.errors import HoldfastError, InvalidArgumentError, SchemaMismatchError, UnavailableError

_AWAY = ("08", "53", "57", "40", "58")
# idle_in_transaction_session_timeout, transaction_timeout
_TIMED_OUT = {"25P03", "25P04"}
_LOCKED = "55P03"
# A prepared statement exists already, or is missing: other clients use this session.
_SHARED = {"42P05", "26000"}
_NO_SESSION = (
    "a pooler shares the server's sessions, and with them the sink's settings, between clients: set pool_mode = "
    "session in PgBouncer, or connect to the server directly"
)
_LOST_A_RACE = {_LOCKED, "55000", "55006"}
_DOES_NOT_FIT = {"23502", "42703", "42804"}
# libpq gives no SQLSTATE for a refused connection. Non-English messages do not match, and count as unavailable.
_REFUSED = (
    "authentication failed", "no pg_hba.conf entry", "no password supplied", "does not exist", "permission denied",
    "is not permitted to log in", "SSL was required", "does not support SSL", "certificate verify failed",
    "invalid sslmode", "root certificate file", "could not read certificate file", "private key file",
)  # fmt: skip


@contextmanager
def translated(doing: str, **facts: object) -> Iterator[None]:
    """Translate psycopg's errors to holdfast's; `doing` names the action in progress."""
    try:
        yield
    except psycopg.Error as exc:
        raise _translated(exc, doing, facts) from None


def _translated(exc: psycopg.Error, doing: str, facts: dict[str, object]) -> HoldfastError:
    state = exc.sqlstate or ""
    lines = (exc.diag.message_primary or str(exc)).strip().splitlines()
    text = lines[0] if lines else type(exc).__name__
    named = {"column": exc.diag.column_name, "constraint": exc.diag.constraint_name}
    facts |= {what: name for what, name in named.items() if name is not None}
    if state == "53200" and "prepared transactions" in text:
        return UnavailableError(
            "the server has reached max_prepared_transactions; raise it above the number of partitions of all "
            "queries, or end prepared transactions that are no longer needed (pg_prepared_xacts)",
            **facts,
        )
    if state in _SHARED:
        return InvalidArgumentError(_NO_SESSION, **facts)
    if state == _LOCKED:
        return UnavailableError(
            f"another session held a lock for longer than lock_timeout while {doing}: {text}; see pg_locks", **facts
        )
    if state[:2] == "53" and exc.diag.message_hint:
        text = f"{text}: {exc.diag.message_hint}"
    is_away = state[:2] in _AWAY or state in _LOST_A_RACE | _TIMED_OUT
    if not state:
        connection_failed = isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError)
        is_away = connection_failed and not any(part in text for part in _REFUSED)
    if is_away:
        return UnavailableError(f"PostgreSQL did not answer while {doing}: {text}", **facts)
    if state[:2] == "22" or state in _DOES_NOT_FIT:
        return SchemaMismatchError(f"PostgreSQL rejected a value while {doing}: {text}", **facts)
    if state[:2] == "23":
        return InvalidArgumentError(
            f"a table constraint rejected a row while {doing}: {text}; correct the query or the constraint",
            **facts,
        )
    if state == "42501":
        return InvalidArgumentError(f"missing permission while {doing}: {text}; grant it to the sink's user", **facts)
    return InvalidArgumentError(f"PostgreSQL reported an error while {doing}: {text}", **facts)


#: Options that hold credentials.
SECRETS = {"password", "sslpassword", "oauth_client_secret"}
# The server must not lose a commit in a crash. Values of this setting other than off are safe.
_SETTLED = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
# An ALTER TABLE may wait for a prepared transaction, a worker for the ALTER TABLE, and the driver, which alone can end
# the prepared transaction, for the worker: a deadlock that the server cannot detect. It also keeps a frozen client's
# open transaction forever, and a vanished client's for two hours of TCP keepalive. Non-default settings are kept.
_PATIENT = """
SELECT set_config(name, wanted, false) FROM pg_settings JOIN (VALUES
    ('lock_timeout', '60s'), ('idle_in_transaction_session_timeout', '60s'), ('tcp_keepalives_idle', '30'),
    ('tcp_keepalives_interval', '10'), ('tcp_keepalives_count', '3')) ours (name, wanted) USING (name)
WHERE source = 'default' OR setting = '0'"""
#: A query option that holds several libpq options, such as ``host=db dbname=shop``.
DSN = "dsn"
#: A query option: the seconds for which a connected server may be silent.
ANSWER = "answer_timeout"
# A server must not block a worker forever, whether its machine vanishes or only TCP still responds.
_PATIENCE = {
    "connect_timeout": "10",
    "tcp_user_timeout": "60000",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    ANSWER: "600",
}
_ANSWER_MAX_S = 86_400


def parsed(dsn: str) -> dict[str, str]:
    """Parse a libpq connection string or URL; errors never quote it, as it may contain a password."""
    try:
        return {name: str(value) for name, value in conninfo.conninfo_to_dict(dsn).items() if value is not None}
    except psycopg.Error:
        problem = "not a libpq connection string; write 'host=db dbname=shop' or 'postgresql://db/shop'"
    # Not chained to psycopg's error, which quotes the string.
    raise InvalidArgumentError(problem)


def refuse_secrets(dsn: str) -> None:
    """Raise `InvalidArgumentError` if a sink's own ``dsn`` contains a secret."""
    secret = sorted(SECRETS & parsed(dsn).keys())
    if secret:
        raise InvalidArgumentError(
            "a sink must hold no credentials, because it is pickled with the query's plan; set "
            f"spark.holdfast.sink.<name>.{secret[0]} instead, or PGPASSWORD or a password file on every machine"
        )


def parameters(sink: str, dsn: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return a query's libpq parameters, and `ANSWER`."""
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()} | {DSN, ANSWER}
    for name in options:
        if name not in known:
            raise InvalidArgumentError(
                f"libpq has no such option{did_you_mean(name, known)}", option=f"spark.holdfast.sink.{sink}.{name}"
            )
    given = {name: value for name, value in options.items() if name != DSN}
    found = {**_PATIENCE, **parsed(dsn), **parsed(options.get(DSN, "")), **given}
    if not found[ANSWER].isdecimal() or not 0 < int(found[ANSWER]) <= _ANSWER_MAX_S:
        raise InvalidArgumentError(
            f"give a whole number of seconds, from 1 to {_ANSWER_MAX_S}",
            option=f"spark.holdfast.sink.{sink}.{ANSWER}",
            given=found[ANSWER],
        )
    return found


class Connection(psycopg.Connection[Any]):
    """A connection that fails if the server is silent for too long."""

    answer_timeout_s = int(_PATIENCE[ANSWER])

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().wait(self._until_silent(gen), *args, **kwargs)
        except _SilentError:
            self.close()  # The server may still be executing the statement, so the session is unusable.
            raise
        except psycopg.OperationalError as exc:
            if not self.broken or exc.sqlstate is not None:
                raise
            # libpq loses the server's final message if the client sends afterwards, as a frozen driver does on waking.
            raise errors.AdminShutdown(str(exc)) from None

    def _until_silent(self, waiting: Generator[Any, int, Any]) -> Generator[Any, int, Any]:
        """Relay psycopg's waits and their results, of which 0 means no data; raise `_SilentError` after the limit."""
        try:
            wanted, heard_ms = next(waiting), clock.monotonic_ms()
            while True:
                ready = yield wanted
                if ready:
                    heard_ms = clock.monotonic_ms()
                elif clock.monotonic_ms() - heard_ms > self.answer_timeout_s * 1000:
                    raise _SilentError(
                        f"it has sent nothing for {self.answer_timeout_s} s; see {ANSWER} in docs/postgres-sink.md"
                    )
                wanted = waiting.send(ready)
        except StopIteration as ended:
            return ended.value


class _SilentError(psycopg.OperationalError):
    """The connected server has been silent for too long."""


@dataclass
class Session:
    """An autocommit connection, and cached facts about the server."""

    connection: Connection
    key: tuple[object, ...] = field(repr=False)  #: Sessions with equal keys are interchangeable; may contain a password
    known: dict[object, Any] = field(default_factory=dict)
    kept_ms: int = 0  #: The time of the last `give_back`

    def run(self, statement: str | sql.Composed, values: Any = None) -> list[tuple[Any, ...]]:
        query = sql.SQL(statement) if isinstance(statement, str) else statement
        if values is not None and isinstance(query, sql.Composed):
            query = sql.Composed([_plain(part) for part in query])
        cursor = self.connection.execute(query, values)
        # Do not check the columns: `SELECT FROM …` has none, but may return rows.
        has_rows = cursor.pgresult is not None and cursor.pgresult.status == pq.ExecStatus.TUPLES_OK
        return cursor.fetchall() if has_rows else []

    def close(self) -> None:
        with suppress(psycopg.Error):
            self.connection.close()


def _plain(part: sql.Composable) -> sql.Composable:
    """Escape % in an identifier of a statement with values, for psycopg."""
    return sql.SQL(part.as_string().replace("%", "%%")) if isinstance(part, sql.Identifier) else part


_idle: dict[tuple[object, ...], list[Session]] = {}
#: A session idle for this long belongs to a query that has ended or now uses another password.
_FORGOTTEN_MS = 3600_000
_lock = threading.Lock()


def take(to: Mapping[str, str], application: str) -> Session:
    """Return a pooled session that the server has not ended, or a new session."""
    while True:
        with _lock:
            idle = _idle.get(_key(to, application))
            session = idle.pop() if idle else None
        if session is None:
            return connect(to, application)
        if not session.connection.closed and _is_alive(session):
            return session
        session.close()


def give_back(session: Session) -> None:
    """Return a session to the pool; close it if a transaction is open."""
    connection = session.connection
    if connection.closed or connection.info.transaction_status != pq.TransactionStatus.IDLE:
        session.close()
        return
    session.kept_ms = clock.monotonic_ms()
    with _lock:
        _idle.setdefault(session.key, []).append(session)
    close_idle(session.kept_ms - _FORGOTTEN_MS)


def connect(to: Mapping[str, str], application: str) -> Session:
    wanted: dict[str, Any] = {**to, "application_name": application, "client_encoding": "UTF8"}
    answer_timeout_s = int(wanted.pop(ANSWER, _PATIENCE[ANSWER]))
    with translated("connecting" + _without_host(to)):
        session = Session(_connected(wanted, answer_timeout_s), _key(to, application))
    try:
        session.run(_SETTLED)
        session.run(_PATIENT)
    except BaseException:
        session.close()
        raise
    return session


def _without_host(to: Mapping[str, str]) -> str:
    if {"host", "hostaddr", "service"} & to.keys() or {"PGHOST", "PGHOSTADDR", "PGSERVICE"} & os.environ.keys():
        return ""
    return (
        " without a host (this process has no PGHOST, and a driver's environment does not reach its workers: "
        "set spark.holdfast.sink.<name>.host)"
    )


def _connected(wanted: Mapping[str, Any], answer_timeout_s: int) -> Connection:
    try:
        connection = Connection.connect(**wanted, autocommit=True)
        connection.answer_timeout_s = answer_timeout_s
        return connection
    except psycopg.Error as exc:
        problem = type(exc)(str(exc))
    # A new error, not chained to psycopg's, which references the connection and all its parameters.
    raise problem


@contextmanager
def lent(to: Mapping[str, str], application: str) -> Iterator[Session]:
    """Lend a session; return it to the pool afterwards, or close it after an error."""
    session = take(to, application)
    try:
        yield session
    except BaseException:
        session.close()
        raise
    give_back(session)


def require_own_session(session: Session, lend: Callable[[], AbstractContextManager[Session]]) -> None:
    """Raise `InvalidArgumentError` if a pooler shares server sessions and their settings between transactions."""
    query = "SELECT pg_backend_pid()"
    mine = session.run(query)
    if mine == [(session.connection.info.backend_pid,)]:  # a pooler reports a different pid at connection time
        return
    with lend() as other:
        if other.run(query) == mine:
            raise InvalidArgumentError(_NO_SESSION)


def _is_alive(session: Session) -> bool:
    # A server that ends a session sends data.
    waiting = select.poll()
    waiting.register(session.connection.fileno(), select.POLLIN)
    return not waiting.poll(0)


def close_idle(kept_until_ms: float = math.inf) -> None:
    """Close the idle sessions that this process returned to the pool by `kept_until_ms`."""
    closed = []
    with _lock:
        for key, kept in list(_idle.items()):
            _idle[key] = [session for session in kept if session.kept_ms > kept_until_ms]
            if key[0] == os.getpid():
                closed += [session for session in kept if session.kept_ms <= kept_until_ms]
            if not _idle[key]:
                del _idle[key]
    for session in closed:
        session.close()


def _key(to: Mapping[str, str], application: str) -> tuple[object, ...]:
    # Includes the process id: a forked child must not use its parent's connections.
    return (os.getpid(), application, *sorted(to.items()))
