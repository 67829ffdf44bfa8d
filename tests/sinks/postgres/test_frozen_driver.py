"""Drivers of the PostgreSQL sink that freeze, and two that run at once: sessions of the old one are ended."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg import pq

from holdfast.errors import ConflictError, InvalidArgumentError, UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.postgres import connecting, target
from holdfast.spark_integration.sinks.postgres import sink as sink_module
from holdfast.spark_integration.sinks.postgres.connecting import Connection, Session
from holdfast.spark_integration.sinks.postgres.marks import MarkTables
from holdfast.spark_integration.sinks.postgres.sink import Ending, PostgresSink
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery, TwoPhaseSink
from tests.faults.elsewhere import run_elsewhere
from tests.model.turns import Turns
from tests.servers.postgres import Postgres
from tests.servers.programs import wait_until
from tests.sink_drivers import Driver, World, stand_still_anywhere
from tests.sinks.postgres.conftest import Case, case
from tests.tiers import ALL, LONG, cases

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]


ROWS = [("a", 1), ("b", 2)]
#: Where a driver is frozen, with its transaction open: step of the protocol, and the call after which.
PLACES: dict[str, tuple[str, Any, str]] = {
    "applied": ("commit", Ending, "apply"),
    "dropped": ("commit", Ending, "put"),
    "shown": ("commit", MarkTables, "show"),
    "tried": ("confirm", Ending, "apply"),
}


def _freeze(sink: PostgresSink, query: SinkQuery, handles: list[Handle], place: str) -> None:
    """Confirm or commit a micro-batch as a driver of its own, which stops on the way, until somebody continues it."""
    step, owner, name = PLACES[place]
    call = getattr(owner, name)

    def call_and_stop(*given: Any) -> None:
        call(*given)
        setattr(owner, name, call)
        os.kill(os.getpid(), signal.SIGSTOP)

    setattr(owner, name, call_and_stop)
    # The server has said farewell meanwhile; what is done again finds that all is done, or gone.
    with suppress(UnavailableError, ConflictError):
        getattr(sink, step)(query, 1, handles)


def _frozen(made: Case, handles: list[Handle], place: str) -> BaseProcess:
    process = run_elsewhere(_freeze, made.sink, made.query, handles, place)
    assert process.pid is not None
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, list)
    return process


def _woken(process: BaseProcess) -> int | None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    process.join(30)
    return process.exitcode


@pytest.fixture
def may_refuse(postgres: Postgres) -> Case:
    """Return an upsert into a table that a dry run is needed for."""
    return case(postgres, "k text PRIMARY KEY, n bigint, twice bigint GENERATED ALWAYS AS (2 * n) STORED", keys=["k"])


@pytest.mark.parametrize("place", PLACES)
def test_a_start_ends_the_open_transaction_of_a_frozen_driver(may_refuse: Case, place: str) -> None:
    """In milliseconds: not when locks, or the server's two hours of patience with a lost machine, run out."""
    made = may_refuse
    made.open()
    made.commit(made.prepared(("a", 0)), batch_id=0)
    handles = [made.prepared(row, batch_id=1, partition=part) for part, row in enumerate(ROWS)]
    process = _frozen(made, handles, place)
    try:
        began_s = time.monotonic()
        assert made.open() == 0
        made.confirm(*handles, batch_id=1)
        made.commit(*handles, batch_id=1)
        assert time.monotonic() - began_s < 20
        assert made.leftovers() == []
        assert made.rows() == [("a", 1, 2), ("b", 2, 4)]
        later = made.prepared(("a", 7), batch_id=2)
        made.commit(later, batch_id=2)
    finally:
        assert _woken(process) == 0
    assert made.rows() == [("a", 7, 14), ("b", 2, 4)]
    assert made.open() == 2


def test_a_start_ends_that_of_the_query_that_it_replaces(may_refuse: Case) -> None:
    """Which has ended for good, and whose name it takes over."""
    made = may_refuse
    made.open()
    made.commit(made.prepared(("a", 0)), batch_id=0)
    handles = [made.prepared(row, batch_id=1, partition=part) for part, row in enumerate(ROWS)]
    process = _frozen(made, handles, "applied")
    try:
        newer = Case(made.server, made.sink, query_id="22222222-2222-3333-4444-555555555555", replaces=made.query_id)
        began_s = time.monotonic()
        assert newer.open() == -1
        assert time.monotonic() - began_s < 20
    finally:
        assert _woken(process) == 0


@pytest.mark.parametrize("how", ["at work", "connecting", "unheard"])
@pytest.mark.parametrize("times", cases([2, 1]))
@pytest.mark.parametrize("step", ["open", "leftovers", "confirm", "commit", "abort"])
def test_a_driver_whose_session_is_ended_does_the_same_again(
    updating: Case, step: str, times: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older driver that wakes up in its start takes the newer one for older, and ends what that has open.

    So may a third one, and wherever the session is: the server knows its name before it has its settings. Who was
    frozen and sends something when it wakes, does not hear why.
    """
    updating.open()
    handle, run, ended = updating.prepared(("a", 1)), Session.run, []
    if how == "connecting":
        connecting.close_idle()

    def end_it(session: Session, *given: Any) -> Any:
        ended.append(session)
        if len(ended) == times:
            monkeypatch.setattr(Session, "run", run)
        updating.sql(f"SELECT pg_terminate_backend({session.connection.info.backend_pid}, 10000)")
        if how == "unheard":
            os.read(session.connection.fileno(), 1 << 16)
        return run(session, *given)

    monkeypatch.setattr(Session, "run", end_it)
    steps: dict[str, Callable[[], object]] = {
        "open": updating.open,
        "leftovers": updating.leftovers,
        "confirm": lambda: updating.confirm(handle),
        "commit": lambda: updating.commit(handle),
        "abort": lambda: updating.abort(handle),
    }
    steps[step]()
    assert Session.run is run, "it was ended"


def test_a_start_that_is_done_again_ends_no_driver_again(updating: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at once would end each other's sessions until one gives up."""
    end, read, ended = sink_module.end_older_drivers, target.read, []

    def end_and_note(session: Session, query: SinkQuery) -> None:
        ended.append(query)
        end(session, query)

    def read_when_ended(session: Session, table: str) -> target.Target:
        monkeypatch.setattr(target, "read", read)
        updating.sql(f"SELECT pg_terminate_backend({session.connection.info.backend_pid}, 10000)")
        return read(session, table)

    monkeypatch.setattr(sink_module, "end_older_drivers", end_and_note)
    monkeypatch.setattr(target, "read", read_when_ended)
    updating.open()
    assert target.read is read, "it was ended"
    assert len(ended) == 1


def test_other_queries_and_sinks_keep_their_sessions(updating: Case) -> None:
    """Whoever has another name, or the same under another query, is not ended."""
    updating.open()
    beside = Case(updating.server, updating.sink, query_id="33333333-2222-3333-4444-555555555555")
    with beside.sink._lent(beside.query) as session:
        session.run("BEGIN")
        updating.open()
        assert session.run("SELECT 1") == [(1,)]
        session.run("ROLLBACK")


def test_a_driver_that_nobody_succeeds_is_ended_by_the_server(updating: Case) -> None:
    """Its locks hold up whoever writes to the table, and VACUUM."""
    updating.open()
    updating.commit(updating.prepared(("a", 0)), batch_id=0)
    handles = [updating.prepared(row, batch_id=1, partition=part) for part, row in enumerate(ROWS)]
    updating.options = {"options": "-c idle_in_transaction_session_timeout=500ms"}
    process = _frozen(updating, handles, "applied")
    try:
        locked = "SELECT count(*) FROM pg_locks WHERE relation = '{}'::regclass AND mode = 'RowExclusiveLock'"
        wait_until(lambda: updating.sql(locked.format(updating.sink.table)) == [(0,)], list)
        assert updating.rows() == [("a", 0)]
    finally:
        assert _woken(process) == 0


def test_sessions_have_limits_unless_somebody_has_set_others(postgres: Postgres) -> None:
    """What the user, or the database, says goes before; the server's own defaults are two hours and for ever."""
    asked = "SELECT current_setting(name) FROM unnest(ARRAY['idle_in_transaction_session_timeout', 'lock_timeout', "
    asked += "'tcp_keepalives_idle', 'tcp_keepalives_interval', 'tcp_keepalives_count']) name"
    for options, wanted in (
        ("", ["1min", "1min", "30", "10", "3"]),
        ("-c lock_timeout=7s -c tcp_keepalives_idle=99", ["1min", "7s", "99", "10", "3"]),
        ("-c idle_in_transaction_session_timeout=1h", ["1h", "1min", "30", "10", "3"]),
    ):
        session = connecting.connect({**postgres.options, "options": options}, "holdfast test")
        try:
            assert [row[0] for row in session.run(asked)] == wanted
        finally:
            session.close()


def test_a_session_of_another_role_is_an_error_that_says_which_right(updating: Case) -> None:
    """Who changes the sink's user must let the new one end what the old one has left."""
    updating.open()
    schema = updating.sink.table.partition(".")[0]
    old, new = (f"{name}_{secrets.token_hex(4)}" for name in ("old", "new"))
    for role in (old, new):
        updating.sql(
            f"CREATE ROLE {role} LOGIN PASSWORD 'role'; GRANT ALL ON SCHEMA {schema} TO {role};"
            f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}"
        )
    of_old, of_new = (replace(updating, options={"user": role, "password": "role"}) for role in (old, new))
    with updating.sink._lent(of_old.query) as session:
        session.run("BEGIN")
        with pytest.raises(InvalidArgumentError, match=f"GRANT {old} TO"):
            of_new.open()
        updating.sql(f"GRANT {old} TO {new}")
        assert of_new.open() == -1
        with pytest.raises(psycopg.OperationalError):
            session.run("SELECT 1")


class PostgresWorld(World):
    """A table; a statement, a transaction of the driver and one of a task is a step each."""

    def __init__(self, made: Case, state_dir: Path) -> None:
        super().__init__(open_storage(str(state_dir)), made.query)
        self.made = made

    def sink(self, turns: Turns) -> TwoPhaseSink:
        return self.made.sink

    def prepare(self, sink: TwoPhaseSink, turns: Turns, batch_id: int, part: int, row: str) -> Handle:
        with turns.around():
            turns.asks = "a task"
            handle = super().prepare(sink, turns, batch_id, part, row)
            turns.asks = None
            return handle

    def shown(self) -> Sequence[str]:
        return [row for (row,) in self.made.sql(f"SELECT row FROM {self.made.sink.table}")]

    def left(self) -> Sequence[object]:
        return self.made.leftovers()


def _turn(connection: Connection) -> Any:
    """Return what waits for a driver's turn, unless it is in a transaction: a lock would stop the other one."""
    driver = threading.current_thread()
    is_idle = connection.info.transaction_status == pq.TransactionStatus.IDLE
    if isinstance(driver, Driver) and driver.turns.asks is None and is_idle:
        return driver.turns.around()
    return nullcontext()


@pytest.fixture(params=["append", "upsert"])
def make(
    request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], PostgresWorld]:
    """Return what makes a new world, in which each driver has connections of its own."""
    run, transaction, key, number = Session.run, Connection.transaction, connecting._key, itertools.count()

    def run_in_turn(session: Session, *given: Any) -> Any:
        with _turn(session.connection):
            return run(session, *given)

    @contextmanager
    def transaction_in_turn(connection: Connection, *given: Any, **more: Any) -> Iterator[Any]:
        with _turn(connection), transaction(connection, *given, **more) as found:
            yield found

    def made() -> PostgresWorld:
        connecting.close_idle()
        is_upsert = request.param == "upsert"
        of_row = case(postgres, f"row text {'PRIMARY KEY' * is_upsert}", keys=["row"] if is_upsert else [])
        return PostgresWorld(of_row, tmp_path / str(next(number)))

    monkeypatch.setattr(Session, "run", run_in_turn)
    monkeypatch.setattr(Connection, "transaction", transaction_in_turn)
    monkeypatch.setattr(connecting, "_key", lambda *given: (*key(*given), threading.current_thread().name))
    return made


@pytest.mark.timeout(1800)
@pytest.mark.slow(30)
def test_a_driver_that_stands_still_anywhere(make: Callable[[], PostgresWorld]) -> None:
    """One stands still before any of its requests, another one starts and stands still, and the first one wakes."""
    stand_still_anywhere(
        make, first_every=1 if LONG else 3 if ALL else 23, second_every=5 if LONG else 11 if ALL else 31
    )
