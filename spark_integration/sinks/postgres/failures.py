"""Errors of PostgreSQL and libpq as holdfast's; the one place that knows their codes.

======================  ==============================================================  =======================
SQLSTATE                what it is                                                      raised as
======================  ==============================================================  =======================
08, 57P, 53, none       the server is away, stopping, full                              UnavailableError
40, 55000/006/P03       lost a race for a lock or for a transaction                     UnavailableError
57014, 25P03/P04        cancelled, or a time limit of the server's                      UnavailableError
22, 23502, 42703/804    a value or a column does not fit                                SchemaMismatchError
23                      a constraint of the table refuses a row                         InvalidArgumentError
42P05, 26000            somebody else is in the same session: a pooler                  InvalidArgumentError
all others              no right, no table, another password                            InvalidArgumentError
======================  ==============================================================  =======================

Of a server's message only its first line is shown: the lines below it may hold a row, as may psycopg's own errors, so
that these are not ours' cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import psycopg

from holdfast.errors import HoldfastError, InvalidArgumentError, SchemaMismatchError, UnavailableError

_AWAY = ("08", "53", "57", "40", "58")
# idle_in_transaction_session_timeout, transaction_timeout
_TIMED_OUT = {"25P03", "25P04"}
_LOCKED = "55P03"
# Prepared statements that others have made in this session, or that it has lost.
_SHARED = {"42P05", "26000"}
NO_SESSION = (
    "a pooler gives the server's sessions to others between two transactions, and the sink's settings with them: set "
    "pool_mode = session for it in PgBouncer, or name the server itself"
)
_LOST_A_RACE = {_LOCKED, "55000", "55006"}
_DOES_NOT_FIT = {"23502", "42703", "42804"}
# libpq gives no SQLSTATE where a connection is refused. Servers that speak another language are taken for away.
_REFUSED = (
    "authentication failed", "no pg_hba.conf entry", "no password supplied", "does not exist", "permission denied",
    "is not permitted to log in", "SSL was required", "does not support SSL", "certificate verify failed",
    "invalid sslmode", "root certificate file", "could not read certificate file", "private key file",
)  # fmt: skip


@contextmanager
def as_ours(doing: str, **facts: object) -> Iterator[None]:
    """Map an error of psycopg to ours; `doing` says what was tried."""
    try:
        yield
    except psycopg.Error as exc:
        raise_ours(exc, doing, **facts)


def raise_ours(exc: psycopg.Error, doing: str, **facts: object) -> NoReturn:
    """Raise our error for one of psycopg's."""
    raise _ours(exc, doing, facts) from None


def _ours(exc: psycopg.Error, doing: str, facts: dict[str, object]) -> HoldfastError:
    state = exc.sqlstate or ""
    said = _first_line(exc)
    named = {"column": exc.diag.column_name, "constraint": exc.diag.constraint_name}
    facts |= {what: name for what, name in named.items() if name is not None}
    if state == "53200" and "prepared transactions" in said:
        return UnavailableError(
            "the server holds as many prepared transactions as max_prepared_transactions allows; raise it above the "
            "number of partitions of all queries, or end those that nobody needs (pg_prepared_xacts)",
            **facts,
        )
    if state in _SHARED:
        return InvalidArgumentError(NO_SESSION, **facts)
    if state == _LOCKED:
        return UnavailableError(
            f"somebody else held a lock for longer than lock_timeout while {doing}: {said}; pg_locks shows who", **facts
        )
    if state[:2] == "53" and exc.diag.message_hint:
        said = f"{said}: {exc.diag.message_hint}"
    if _is_away(exc, state, said):
        return UnavailableError(f"PostgreSQL did not answer while {doing}: {said}", **facts)
    if state[:2] == "22" or state in _DOES_NOT_FIT:
        return SchemaMismatchError(f"PostgreSQL does not accept a value while {doing}: {said}", **facts)
    if state[:2] == "23":
        return InvalidArgumentError(
            f"a constraint of the table refuses a row while {doing}: {said}; correct the query, or the constraint",
            **facts,
        )
    if state == "42501":
        return InvalidArgumentError(f"no right to do this while {doing}: {said}; grant it to the sink's user", **facts)
    return InvalidArgumentError(f"PostgreSQL refuses while {doing}: {said}", **facts)


def _is_away(exc: psycopg.Error, state: str, said: str) -> bool:
    if not state:
        connection_failed = isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError)
        return connection_failed and not any(text in said for text in _REFUSED)
    return state[:2] in _AWAY or state in _LOST_A_RACE | _TIMED_OUT


def _first_line(exc: psycopg.Error) -> str:
    lines = (exc.diag.message_primary or str(exc)).strip().splitlines()
    return lines[0] if lines else type(exc).__name__
