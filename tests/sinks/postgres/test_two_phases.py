"""The two phases of the PostgreSQL sink, and servers that fall silent in between."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.errors import ConflictError, CorruptionError, InvalidArgumentError, StateLostError, UnavailableError
from holdfast.snapshotter.savepoints.manifest import SavedQuery, continue_sinks, sinks_of
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.postgres import connecting
from holdfast.spark_integration.sinks.postgres import sink as sink_module
from holdfast.spark_integration.sinks.postgres.connecting import Session
from holdfast.spark_integration.sinks.postgres.marks import driver_application
from holdfast.spark_integration.sinks.postgres.sink import PostgresSink
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery, SinkTransaction
from tests.servers.programs import wait_until
from tests.sinks.postgres.conftest import SCHEMA, Case, batch

pytestmark = pytest.mark.postgres


ROWS = [("a", 1), ("b", 2)]


def test_a_staged_partition_costs_the_driver_one_request(updating: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 partitions each further request is 200 round trips, while the table's rows are locked."""
    updating.open()
    handles = [updating.prepared((f"k{place}", place), partition=place) for place in range(20)]
    asked = counted(monkeypatch)
    updating.commit(*handles)
    assert len(asked) < 20 + 20
    assert len(updating.rows()) == 20


def test_partitions_are_sorted_from_the_first_one_that_has_a_key_twice(
    updating: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ones before it have shown that they need not be, which saves the server as much as they cost."""
    updating.open()
    handles = [updating.prepared((f"k{place}", place), partition=place) for place in range(5)]
    handles.append(updating.prepared(("last", 1), ("last", 2), partition=5))
    handles.append(updating.prepared(("k0", 7), partition=6))
    asked = counted(monkeypatch)
    updating.commit(*handles)
    assert sum("DISTINCT ON" in statement for statement in asked) == 2
    assert updating.rows() == [("k0", 7), *((f"k{place}", place) for place in range(1, 5)), ("last", 2)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what will hold all statements from now on."""
    asked: list[str] = []
    execute = psycopg.Connection.execute

    def noted(connection: Any, statement: Any, *given: Any, **more: Any) -> Any:
        asked.append(statement if isinstance(statement, str) else statement.as_string())
        return execute(connection, statement, *given, **more)

    monkeypatch.setattr(psycopg.Connection, "execute", noted)
    return asked


def test_a_copy_shows_nothing_twice(either: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each copy decides in a log of its own, so there is no fence between them: the mark in the target tells."""
    with open_storage(str(tmp_path / "original")) as one, open_storage(str(tmp_path / "copy")) as other:
        copies = [Coordinator(either.sink, either.query, storage, 3) for storage in (one, other)]
        for copy in copies:
            copy.start(0, SCHEMA)
        for copy, rows in zip(copies, (ROWS, [*ROWS, ("c", 3)]), strict=True):
            copy.finish(0, Prepared((either.prepared(*rows),), len(rows)))
    assert "already shows micro-batch 0" in caplog.text
    assert either.rows() == ROWS
    assert either.leftovers() == []
    assert either.open() == 0


def test_what_a_saved_query_prepares_when_it_wakes_goes_with_the_next_start(
    either: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task began while the restored query was taking its place, and its driver dies before it is told.

    What is prepared would hold its locks for ever.
    """
    heir = Case(either.server, either.sink, query_id="22222222-2222-3333-4444-555555555555")
    with open_storage(str(tmp_path)) as storage:

        def started(made: Case, batch_id: int) -> Coordinator:
            coordinator = Coordinator(made.sink, made.query, storage, 3)
            coordinator.start(batch_id, SCHEMA)
            return coordinator

        started(either, 0).finish(0, Prepared((either.prepared(*ROWS),), 2))
        saved = SavedQuery(either.query_id, 0, "v1", "{}", 0, (), None, sinks_of(storage, either.query_id))
        continue_sinks(storage, saved, heir.query_id, clock.new_id())
        tasks, take_over = [], PostgresSink.open

        def begin_and_open(sink: PostgresSink, query: SinkQuery, schema: pa.Schema) -> int:
            tasks.append(either.begun(("late", 1), batch_id=1))
            return take_over(sink, query, schema)

        with monkeypatch.context() as patched:
            patched.setattr(PostgresSink, "open", begin_and_open)
            run = started(heir, 1)
        (late,) = [task.prepare() for task in tasks]
        run.finish(1, Prepared((heir.prepared(("c", 3), batch_id=1),), 1))
        assert either.leftovers() == [late]
        started(heir, 2)
    assert either.leftovers() == []
    assert either.rows() == [*ROWS, ("c", 3)]


def test_a_batch_without_rows_is_marked_too(either: Case) -> None:
    either.open()
    either.commit(batch_id=4)
    either.commit(batch_id=4)
    assert either.open() == 4


def test_what_is_aborted_cannot_be_committed(either: Case) -> None:
    either.open()
    handle, other = either.prepared(ROWS[0]), either.prepared(ROWS[1], partition=1)
    either.abort(handle)
    either.abort(handle)
    with pytest.raises(UnavailableError, match="is gone"):
        either.confirm(handle, other)
    with pytest.raises(StateLostError, match="has lost"):
        either.commit(handle, other)
    assert either.rows() == []
    assert either.open() == -1
    # Nor after another attempt at it has been committed.
    either.commit(other)
    with pytest.raises(StateLostError, match="has lost"):
        either.commit(handle)
    assert either.rows() == [ROWS[1]]


def test_what_was_committed_changes_no_more(either: Case) -> None:
    """Neither by an abort nor by a commit again, also of a micro-batch before the newest."""
    either.open()
    handle = either.prepared(*ROWS)
    either.commit(handle)
    either.abort(handle)
    either.commit(either.prepared(("c", 3), batch_id=1), batch_id=1)
    either.commit(handle)
    either.abort(handle)
    assert either.rows() == [*ROWS, ("c", 3)]
    assert either.open() == 1


def test_a_handle_that_names_anything_else_ends_nothing(either: Case) -> None:
    """Who can write to the state directory reaches no further into the server than the sink does."""
    either.open()
    handle = either.prepared(*ROWS)
    either.commit(handle)
    schema, _, table = either.sink.table.partition(".")
    other = {**handle, "name": f"x{handle['name']}"}
    for stored in ({"name": table, "schema": schema}, {"name": 7, "schema": None}, {"name": "x"}, other):
        for end in (either.abort, either.commit, either.confirm):
            with pytest.raises(CorruptionError, match="a handle"):
                end(stored)
    assert either.rows() == ROWS


def test_a_dead_workers_attempt_cannot_be_prepared_after_the_listing(either: Case) -> None:
    either.open()
    zombie = either.begun(*ROWS)
    assert either.leftovers() == []
    with pytest.raises(UnavailableError):
        zombie.prepare()
    zombie.abort()
    assert either.leftovers() == []
    either.commit(either.prepared(*ROWS))
    assert either.rows() == ROWS


def test_another_query_is_refused_unless_it_replaces_the_owner(either: Case) -> None:
    either.open()
    left = either.prepared(("a", 1), batch_id=3)
    either.commit(left, batch_id=3)
    waiting = either.prepared(("z", 26), batch_id=4)
    new = SinkQuery(either.sink.name, "another", options=either.query.options)
    with pytest.raises(ConflictError, match="another query"):
        either.sink.open(new, SCHEMA)
    replacing = SinkQuery(new.sink, new.query_id, replaces=either.query_id, options=new.options)
    assert either.leftovers() == [waiting]
    either.abort(waiting)
    assert either.sink.open(replacing, SCHEMA) == -1
    # What the replaced query decided may be committed again, by its id; what it lost stays lost.
    either.commit(left, batch_id=3)
    with pytest.raises(StateLostError):
        either.commit(waiting, batch_id=4)
    assert either.rows() == [("a", 1)]
    with pytest.raises(ConflictError):
        either.open()


def test_a_replaced_querys_driver_commits_nothing_more(either: Case) -> None:
    either.open()
    handle = either.prepared(*ROWS)
    replacing = SinkQuery(either.sink.name, "another", replaces=either.query_id, options=either.query.options)
    either.sink.open(replacing, SCHEMA)
    with pytest.raises(ConflictError):
        either.commit(handle)
    assert either.rows() == []
    either.abort(handle)


def test_marks_of_another_version_are_refused_with_what_to_do(either: Case) -> None:
    either.open()
    either.commit(either.prepared(*ROWS))
    schema = either.sink.table.partition(".")[0]
    either.sql(f"ALTER TABLE {schema}.holdfast_sinks DROP target")
    with pytest.raises(InvalidArgumentError, match="another version of holdfast") as raised:
        either.open()
    said = raised.value.message.replace("<table>", either.sink.table).replace("<name>", either.sink.name)
    for statement in re.findall(r'(?:ALTER TABLE|UPDATE) "[^;,]*', said):
        either.sql(statement)
    assert either.open() == 0


def test_a_dead_workers_connection_that_does_not_end_is_said(either: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could still prepare, after the listing of what is left."""
    either.open()
    zombie = either.begun(*ROWS)
    asked = f"SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'hf_% {either.sink.name}'"
    ((pid,),) = either.sql(asked)
    monkeypatch.setattr(sink_module, "_PATIENCE_MS", 100)
    process = psutil.Process(pid)
    process.suspend()
    try:
        with pytest.raises(UnavailableError, match="does not end"):
            either.leftovers()
    finally:
        process.resume()
    zombie.abort()
    assert either.leftovers() == []


def test_another_drivers_new_session_is_no_dead_workers(either: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened between the end of the old sessions and the look at them: the fence decides between the two drivers."""
    either.open()
    old, run, begun = either.begun(*ROWS), Session.run, list[SinkTransaction]()

    def run_and_let_another_begin(session: Session, statement: Any, *values: Any) -> Any:
        found = run(session, statement, *values)
        if "pg_terminate_backend" in str(statement):
            monkeypatch.setattr(Session, "run", run)
            begun.append(either.begun(*ROWS))
        return found

    monkeypatch.setattr(Session, "run", run_and_let_another_begin)
    either.leftovers()
    handle = begun[0].prepare()
    either.commit(handle)
    assert either.rows() == ROWS
    old.abort()


def test_a_schema_may_have_any_name(either: Case) -> None:
    """Such as one in which psycopg sees the place of a value."""
    schema = '50%s "off"'
    quoted = '"' + schema.replace('"', '""') + '"'
    either.sql(f"DROP SCHEMA IF EXISTS {quoted} CASCADE; CREATE SCHEMA {quoted}")
    object.__setattr__(either.sink, "schema", schema)
    either.open()
    handles = [either.prepared(row, partition=place) for place, row in enumerate(ROWS)]
    either.confirm(*handles)
    for _ in range(2):
        either.commit(*handles)
    assert either.rows() == ROWS
    assert either.leftovers() == []
    assert either.open() == 0


@pytest.mark.timeout(60)
def test_a_server_that_falls_silent_is_given_up_and_nothing_is_lost(either: Case) -> None:
    """At each step, of workers and of the driver; what was decided is committed when the server is back."""
    slow = replace(either, options={"answer_timeout": "1"})
    slow.open()
    handle = slow.prepared(("a", 1))
    half = slow.begun(("b", 2), partition=1)
    lost = slow.begun(("c", 3), partition=2)
    with either.server.silent():
        began_s = time.monotonic()
        with pytest.raises(UnavailableError, match=r"sent nothing for 1 s; see answer_timeout"):
            slow.commit(handle)
        with pytest.raises(UnavailableError, match=r"sent nothing for 1 s"):
            half.prepare()
        half.abort()
        many = batch(*[("x" * 1000, i) for i in range(1000)])
        with pytest.raises(UnavailableError, match=r"sent nothing for 1 s"):  # noqa: PT012  when buffers are full
            for _ in range(100):
                lost.write(many)
        lost.abort()
        assert time.monotonic() - began_s < 20
        connecting.close_idle()
    either.open()
    left = [one for one in either.leftovers() if one != handle]
    either.abort(*left)
    either.commit(handle)
    assert either.rows() == [("a", 1)]
    assert either.leftovers() == []


@pytest.mark.timeout(60)
def test_a_server_that_lets_nobody_in_is_given_up(appending: Case) -> None:
    """By libpq's own limit, which the user may set."""
    slow = replace(appending, options={"connect_timeout": "2"})
    began_s = time.monotonic()
    with appending.server.silent(), pytest.raises(UnavailableError, match="did not answer"):
        slow.open()
    assert time.monotonic() - began_s < 10


def test_connections_have_limits_unless_the_user_sets_others(appending: Case) -> None:
    """Also where TCP itself would wait for two hours."""
    found = connecting.parameters("s", "keepalives_count=9", {"tcp_user_timeout": "5000"})
    wanted = {"connect_timeout": "10", "tcp_user_timeout": "5000", "keepalives_idle": "30", "keepalives_count": "9"}
    assert wanted.items() <= found.items()
    session = connecting.connect({**found, **appending.query.options}, "holdfast test")
    try:
        assert session.connection.answer_timeout_s == 600
        assert session.connection.info.get_parameters()["keepalives_interval"] == "10"
    finally:
        session.close()


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "long", "86401", ""])
def test_a_limit_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"spark\.holdfast\.sink\.s\.answer_timeout"):
        connecting.parameters("s", "", {"answer_timeout": given})


def test_sessions_that_nobody_takes_up_are_closed(either: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may live for months, and its queries end, or get other passwords."""

    def sessions() -> int:
        return len(either.sql(f"SELECT pid FROM pg_stat_activity WHERE application_name = '{application}'"))

    application = driver_application(either.query)
    either.open()
    assert sessions() == 1
    later_ms = clock.monotonic_ms() + 3_700_000
    monkeypatch.setattr(clock, "monotonic_ms", lambda: later_ms)
    replace(either, sink=replace(either.sink, name="another")).open()
    wait_until(lambda: sessions() == 0, list, limit_s=20)
