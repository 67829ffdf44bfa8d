"""Staged rows that several connections of the driver apply at once: all or nothing, each once, the last of a key."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pyarrow as pa
import pytest

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.sinks.postgres import applying
from holdfast.spark_integration.sinks.postgres.connecting import Link
from holdfast.spark_integration.sinks.postgres.marks import Marks
from holdfast.spark_integration.sinks.two_phase_sink import Handle
from tests.servers.postgres import Postgres
from tests.servers.programs import wait_until
from tests.sinks.postgres.attempts import Case, case

pytestmark = pytest.mark.postgres


@pytest.fixture
def large(updating: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Return a sink to which every micro-batch is large."""
    monkeypatch.setattr(applying, "_SMALL_BYTES", 0)
    updating.sink = replace(updating.sink, connections=4)
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
    updating.sink = replace(updating.sink, connections=4)
    updating.open()
    updating.commit(*prepared(updating, 0))
    assert transactions(updating) == 1


def test_a_large_micro_batch_is_visible_as_a_whole_unless_the_user_asks_for_speed(
    updating: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "_SMALL_BYTES", 0)
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


@pytest.mark.parametrize(("broken", "visible"), [(1, 0), (0, 1)])
def test_a_share_whose_connection_is_gone_at_its_commit_is_added_later(
    large: Case, broken: int, visible: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is committed first: what was committed before the broken one stays, and the rest follows."""
    handles, lent, drop = prepared(large, 0), applying._lent, applying.drop
    helping: list[Link] = []

    @contextmanager
    def noted(helpers: applying.Helpers) -> Iterator[Link]:
        with lent(helpers) as link:
            helping.append(link)
            yield link

    def drop_and_break(link: Link, share: Sequence[applying.Staged]) -> None:
        drop(link, share)
        if link is helping[broken]:
            large.sql(f"SELECT pg_terminate_backend({link.connection.info.backend_pid}, 5000)")

    monkeypatch.setattr(applying, "_lent", noted)
    monkeypatch.setattr(applying, "drop", drop_and_break)
    with pytest.raises(UnavailableError):
        large.commit(*handles)
    monkeypatch.undo()
    assert len(large.rows()) == 4 * visible
    assert large.open() == -1
    large.commit(*handles)
    assert len(large.rows()) == 12
    assert large.open() == 0
    assert large.leftovers() == []


@pytest.mark.parametrize(
    "columns",
    [
        "k text PRIMARY KEY, n bigint, twice bigint GENERATED ALWAYS AS (2 * n) STORED",
        "k text PRIMARY KEY, n bigint) PARTITION BY HASH (k",
    ],
)
def test_generated_columns_and_partitions_go_over_several_connections(
    postgres: Postgres, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "_SMALL_BYTES", 0)
    made = case(postgres, columns, keys=["k"], connections=4)
    if "PARTITION" in columns:
        for part in range(2):
            values = f"FOR VALUES WITH (MODULUS 2, REMAINDER {part})"
            made.sql(f"CREATE TABLE {made.sink.table}_{part} PARTITION OF {made.sink.table} {values}")
    made.open()
    for batch in range(2):
        handles = prepared(made, batch)
        made.confirm(*handles, batch_id=batch)
        made.commit(*handles, batch_id=batch)
        assert [row[1] for row in made.rows()] == [batch] * 12
        assert transactions(made) == 3


def test_a_part_that_is_refused_takes_the_others_along(large: Case) -> None:
    handles = [large.prepared((str(part), part), partition=part) for part in range(3)]
    large.confirm(*handles)
    large.sql(f"ALTER TABLE {large.sink.table} ADD CONSTRAINT c CHECK (n <> 1)")
    with pytest.raises(InvalidArgumentError, match="constraint of the table refuses"):
        large.commit(*handles)
    assert large.rows() == []
    large.sql(f"ALTER TABLE {large.sink.table} DROP CONSTRAINT c")
    large.commit(*handles)
    assert large.rows() == [("0", 0), ("1", 1), ("2", 2)]


REFERS = "ALTER TABLE {0} ADD CONSTRAINT other FOREIGN KEY (n) REFERENCES {0} (k)"
SWAPS = "ALTER TABLE {0} ADD CONSTRAINT other UNIQUE (n) DEFERRABLE INITIALLY DEFERRED"
CHAINS = """
CREATE FUNCTION {1}.chained() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.n > 0 AND NOT EXISTS (SELECT FROM {0} WHERE k = NEW.n) THEN RAISE 'no such row'; END IF;
    RETURN NEW; END $$;
CREATE TRIGGER chained BEFORE INSERT ON {0} FOR EACH ROW EXECUTE FUNCTION {1}.chained()"""


@pytest.mark.parametrize(
    ("change", "batches"),
    [
        (REFERS, [[(0, 0)], [(1, 0)]]),
        (REFERS + " DEFERRABLE INITIALLY DEFERRED", [[(0, 1)], [(1, 0)]]),
        (SWAPS, [[(0, 1)], [(1, 0)]]),
        (CHAINS, [[(1, 0)], [(2, 1)]]),
    ],
)
def test_rows_that_depend_on_one_another_are_applied_together(
    postgres: Postgres, change: str, batches: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tried before the decision, in one transaction, is not refused after it, in several, at each start."""
    monkeypatch.setattr(applying, "_SMALL_BYTES", 0)
    numbers = pa.schema([("k", pa.int64()), ("n", pa.int64())])
    made = case(postgres, "k bigint PRIMARY KEY, n bigint", keys=["k"], connections=4)
    made.sql(change.format(made.sink.table, made.sink.table.partition(".")[0]))
    made.open(numbers)
    if change == SWAPS:
        made.sql(f"INSERT INTO {made.sink.table} VALUES (0, 0), (1, 1)")
    handles = [made.prepared(*rows, partition=part, schema=numbers) for part, rows in enumerate(batches)]
    made.confirm(*handles)
    made.commit(*handles)
    assert made.rows() == sorted({row for rows in batches for row in rows})
    assert made.open(numbers) == 0


def test_a_role_that_has_no_further_connection_applies_over_one(large: Case) -> None:
    """What was decided must not wait for the administrator."""
    role = f"role_{large.sink.table.partition('.')[0]}"
    schema = large.sink.table.partition(".")[0]
    large.sql(
        f"CREATE ROLE {role} LOGIN PASSWORD 'role' CONNECTION LIMIT 2; ALTER SCHEMA {schema} OWNER TO {role};"
        + "".join(
            f"ALTER TABLE {schema}.{table} OWNER TO {role};"
            for table in ("results", "holdfast_sinks", "holdfast_sink_attempts")
        )
    )
    large.options = {"user": role, "password": "role"}
    handles = prepared(large, 0)
    large.commit(*handles)
    assert len(large.rows()) == 12
    assert transactions(large) == 1


def is_held_up(made: Case, by: str = "transactionid") -> bool:
    """Tell whether the driver waits for a lock."""
    asked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event"
    return bool(made.sql(f"{asked} = '{by}' AND application_name = 'holdfast {made.sink.name}'")[0][0])


def test_a_share_that_a_dead_driver_was_still_committing_counts_once(large: Case) -> None:
    """Its other connections are gone, and with them the lock that a successor would have waited for."""
    handles = prepared(large, 0)
    schema, staging = handles[1]["schema"], f"{handles[1]['schema']}.{handles[1]['table']}"
    attempt = str(handles[1]["table"]).rpartition("_")[2]
    with (
        large.server.connect() as first, large.server.connect() as dead, ThreadPoolExecutor(1) as threads
    ):  # fmt: skip
        first.execute(f"BEGIN; SELECT FROM {schema}.holdfast_sinks FOR UPDATE")
        successor = threads.submit(large.commit, *handles)
        wait_until(lambda: is_held_up(large), list)
        dead.execute(f"BEGIN; INSERT INTO {large.sink.table} SELECT * FROM {staging}; DROP TABLE {staging}")
        dead.execute(
            f"INSERT INTO {schema}.holdfast_sink_attempts (sink, batch_id, attempt, query_id) VALUES (%s, 0, %s, %s)",
            [large.sink.name, attempt, large.query_id],
        )
        first.execute("ROLLBACK")
        wait_until(lambda: is_held_up(large, "relation") or successor.done(), list)
        dead.execute("COMMIT")
        successor.result()
    assert len(large.rows()) == 12
    assert large.leftovers() == []
    assert large.open() == 0


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


def test_two_drivers_that_commit_at_once_show_each_row_once(large: Case) -> None:
    """A zombie and its successor: the second waits for the first, and finds all of it done."""
    for batch in range(3):
        handles = prepared(large, batch)
        with ThreadPoolExecutor(2) as threads:
            for each in [threads.submit(large.commit, *handles, batch_id=batch) for _ in range(2)]:
                each.result()
        assert [row[1] for row in large.rows()] == [batch] * 12
        assert large.open() == batch
        assert large.leftovers() == []
