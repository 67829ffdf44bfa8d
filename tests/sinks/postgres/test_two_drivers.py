"""Two drivers write to one table, of which any may stand still between any two of its transactions."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from psycopg import pq

from holdfast import clock
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.postgres import connecting
from holdfast.spark_integration.sinks.postgres.connecting import Connection, Session
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, TwoPhaseSink
from tests.model.turns import Turns
from tests.servers.postgres import Postgres
from tests.sink_drivers import SCHEMA, Driver, World, stand_still_anywhere
from tests.sinks.postgres.attempts import Case, case
from tests.tiers import ALL, LONG

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(1800)]


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
            attempt = SinkAttempt(self.query, batch_id, part, clock.new_id() + clock.new_id())
            transaction = sink.begin(attempt, SCHEMA)
            transaction.write(pa.record_batch([[row]], schema=SCHEMA))
            handle = transaction.prepare()
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


@pytest.mark.slow(30)
def test_a_driver_that_stands_still_anywhere(make: Callable[[], PostgresWorld]) -> None:
    """One stands still before any of its requests, another one starts and stands still, and the first one wakes."""
    stand_still_anywhere(
        make, first_every=1 if LONG else 3 if ALL else 23, second_every=5 if LONG else 11 if ALL else 31
    )
