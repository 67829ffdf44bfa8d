"""Staged rows that several connections of the driver apply at once: all or nothing, each once, the last of a key."""

from __future__ import annotations

import threading
from dataclasses import replace

import psycopg
import pytest

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.sinks.postgres import applying
from holdfast.spark_integration.sinks.postgres.marks import Marks
from holdfast.spark_integration.sinks.two_phase_sink import Handle
from tests.servers.postgres import Postgres
from tests.unit.spark_integration.sinks.postgres.attempts import Case, case

pytestmark = pytest.mark.postgres


@pytest.fixture
def large(updating: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Return a sink to which every micro-batch is large."""
    monkeypatch.setattr(applying, "_SMALL_BYTES", 0)
    updating.open()
    return updating


def prepared(made: Case, batch_id: int, partitions: int = 3, keys: int = 4) -> list[Handle]:
    """Return a micro-batch of which each partition has keys of its own."""
    rows = [[(f"{part}-{key}", batch_id) for key in range(keys)] for part in range(partitions)]
    return [made.prepared(*each, batch_id=batch_id, partition=part) for part, each in enumerate(rows)]


def transactions(made: Case) -> int:
    """Return how many transactions committed the newest micro-batch: each has marked its attempts."""
    schema = made.sink.table.partition(".")[0]
    return int(made.sql(f"SELECT count(DISTINCT xmin::text) FROM {schema}.holdfast_sink_attempts")[0][0])


@pytest.mark.parametrize(("connections", "parts"), [(1, 1), (2, 2), (8, 3)])
def test_a_large_micro_batch_is_applied_over_as_many_connections_as_are_allowed(
    large: Case, connections: int, parts: int
) -> None:
    large.sink = replace(large.sink, connections=connections)
    for batch in range(2):
        handles = prepared(large, batch)
        large.confirm(*handles, batch_id=batch)
        large.commit(*handles, batch_id=batch)
        large.commit(*handles, batch_id=batch)
        assert [row[1] for row in large.rows()] == [batch] * 12
        assert transactions(large) == parts
    assert large.leftovers() == []
    assert large.open() == 1


def test_a_small_micro_batch_is_visible_as_a_whole(updating: Case) -> None:
    updating.open()
    updating.commit(*prepared(updating, 0))
    assert transactions(updating) == 1


def test_partitions_that_share_a_key_are_applied_one_after_the_other(large: Case) -> None:
    """They would wait for one another: noticed after a second, and known from then on."""
    for batch in range(2):
        handles = [large.prepared(("a", 10 * batch + part), batch_id=batch, partition=part) for part in range(3)]
        large.commit(*reversed(handles), batch_id=batch)
        assert large.rows() == [("a", 10 * batch + 2)]
        assert large.open() == batch


@pytest.mark.parametrize("parts_before_the_end", [0, 1])
def test_a_driver_that_dies_between_the_parts_shows_each_once(
    large: Case, parts_before_the_end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is visible has its mark and the rest is staged: the next start adds it."""
    handles = prepared(large, 0)
    # As a crash, it ends the driver's connections with whatever is open on them.
    if parts_before_the_end:
        monkeypatch.setattr(Marks, "show", _die)
    else:
        monkeypatch.setattr(applying, "drop", _die)
    with pytest.raises(UnavailableError):
        large.commit(*handles)
    monkeypatch.undo()
    assert len(large.rows()) == (8 if parts_before_the_end else 0)
    assert large.open() == -1
    assert len(large.leftovers()) == (1 if parts_before_the_end else 3)
    large.commit(*handles)
    assert len(large.rows()) == 12
    assert large.open() == 0


def _die(*_: object) -> None:
    raise psycopg.OperationalError("the connection is gone")


def test_a_part_that_is_refused_takes_the_others_along(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "_SMALL_BYTES", 0)
    made = case(postgres, "k text PRIMARY KEY, n bigint UNIQUE", keys=["k"])
    made.open()
    handles = [made.prepared((str(part), part), partition=part) for part in range(3)]
    made.confirm(*handles)
    made.sql(f"INSERT INTO {made.sink.table} VALUES ('other', 1)")
    with pytest.raises(InvalidArgumentError, match="constraint of the table refuses"):
        made.commit(*handles)
    assert made.rows() == [("other", 1)]
    made.sql(f"DELETE FROM {made.sink.table}")
    made.commit(*handles)
    assert made.rows() == [("0", 0), ("1", 1), ("2", 2)]


def test_rows_that_somebody_else_has_locked_are_waited_for(large: Case) -> None:
    """As with one connection: longer than the second after which parts no longer wait for one another."""
    large.commit(*prepared(large, 0))
    handles = prepared(large, 1)
    with large.server.connect() as other:
        other.execute(f"BEGIN; UPDATE {large.sink.table} SET n = 7 WHERE k = '1-0'")
        end = threading.Timer(2.5, other.rollback)
        end.start()
        large.commit(*handles, batch_id=1)
        end.join()
    assert [row[1] for row in large.rows()] == [1] * 12
