"""The contract of a two-phase sink, by both ways: invisible, prepared, idempotent, final, apart, found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.errors import ConflictError, InvalidArgumentError, StateLostError, UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.postgres import ending
from holdfast.spark_integration.sinks.postgres.connecting import Session
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery, SinkTransaction
from tests.sinks.postgres.attempts import SCHEMA, Case

pytestmark = pytest.mark.postgres

ROWS = [("a", 1), ("b", 2)]


def test_rows_are_seen_after_the_commit_only(either: Case) -> None:
    assert either.open() == -1
    handle = either.prepared(*ROWS)
    assert either.rows() == []
    either.confirm(handle)
    assert either.rows() == []
    either.commit(handle)
    assert either.rows() == ROWS
    assert either.open() == 0


def test_a_commit_again_changes_nothing(either: Case) -> None:
    either.open()
    handles = [either.prepared(row, partition=place) for place, row in enumerate(ROWS)]
    for _ in range(3):
        either.commit(*handles)
    assert either.rows() == ROWS
    either.commit(either.prepared(("c", 3), batch_id=1), batch_id=1)
    either.commit(*handles)
    assert either.rows() == [*ROWS, ("c", 3)]
    assert either.open() == 1


def test_a_copy_of_both_directories_shows_nothing_twice(
    either: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each copy decides in a log of its own, so there is no fence between them: the mark in the target tells."""
    with open_storage(str(tmp_path / "original")) as one, open_storage(str(tmp_path / "copy")) as other:
        copies = [Coordinator(either.sink, either.query, storage, 3) for storage in (one, other)]
        for copy in copies:
            copy.start(0, SCHEMA)
        for copy, rows in zip(copies, (ROWS, [*ROWS, ("c", 3)]), strict=True):
            copy.finish(0, Prepared((either.prepared(*rows),), len(rows)))
    assert "shows micro-batch 0 already" in caplog.text
    assert either.rows() == ROWS
    assert either.leftovers() == []
    assert either.open() == 0


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


def test_an_abort_after_the_commit_changes_nothing(either: Case) -> None:
    either.open()
    handle = either.prepared(*ROWS)
    either.commit(handle)
    either.abort(handle)
    assert either.rows() == ROWS


def test_attempts_at_one_partition_are_apart(either: Case) -> None:
    either.open()
    one, other = either.begun(*ROWS), either.begun(("a", 7), ("b", 8))
    first, second = one.prepare(), other.prepare()
    assert first != second
    either.abort(first)
    either.commit(second)
    assert either.rows() == [("a", 7), ("b", 8)]


def test_what_nobody_ended_is_found(either: Case) -> None:
    either.open()
    handles = [either.prepared(row, partition=place) for place, row in enumerate(ROWS)]
    found = either.leftovers()
    assert sorted(map(str, found)) == sorted(map(str, handles))
    either.abort(*found)
    assert either.leftovers() == []


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


def test_what_is_aborted_in_the_worker_leaves_nothing(either: Case) -> None:
    either.open()
    either.begun(*ROWS).abort()
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
    monkeypatch.setattr(ending, "_PATIENCE_MS", 100)
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
