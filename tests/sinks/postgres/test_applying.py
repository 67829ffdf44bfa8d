"""Staged rows that the driver applies: in one transaction, each once, the last of a key."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pyarrow as pa
import pytest

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.sinks.postgres import ending
from holdfast.spark_integration.sinks.postgres.marks import MarkTables
from holdfast.spark_integration.sinks.two_phase_sink import Handle
from tests.servers.postgres import Postgres
from tests.sinks.postgres.attempts import Case, case

pytestmark = pytest.mark.postgres


def prepared(made: Case, batch_id: int, partitions: int = 3, keys: int = 4) -> list[Handle]:
    """Return a micro-batch of which each partition has keys of its own."""
    rows = [[(f"{part}-{key}", batch_id) for key in range(keys)] for part in range(partitions)]
    return [made.prepared(*each, batch_id=batch_id, partition=part) for part, each in enumerate(rows)]


def test_a_micro_batch_is_visible_as_a_whole(updating: Case) -> None:
    """One transaction has marked all its attempts."""
    updating.open()
    for batch in range(2):
        handles = prepared(updating, batch)
        updating.confirm(*handles, batch_id=batch)
        updating.commit(*handles, batch_id=batch)
        updating.commit(*handles, batch_id=batch)
        assert [row[1] for row in updating.rows()] == [batch] * 12
        schema = updating.sink.table.partition(".")[0]
        made_by = updating.sql(f"SELECT DISTINCT xmin::text FROM {schema}.holdfast_sink_attempts")
        assert len(made_by) == 1
    assert updating.leftovers() == []
    assert updating.open() == 1


def test_of_a_key_in_several_partitions_that_of_the_highest_counts(updating: Case) -> None:
    updating.open()
    for batch in range(2):
        handles = [updating.prepared(("a", 10 * batch + part), batch_id=batch, partition=part) for part in range(3)]
        updating.commit(*reversed(handles), batch_id=batch)
        assert updating.rows() == [("a", 10 * batch + 2)]
        assert updating.open() == batch


@pytest.mark.parametrize(("place", "name"), [(ending, "drop"), (MarkTables, "show")])
def test_a_driver_that_dies_while_it_applies_shows_nothing(
    updating: Case, place: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start applies all: nothing was dropped."""
    updating.open()
    handles = prepared(updating, 0)
    # As a crash, it ends the driver's connection with whatever is open on it.
    monkeypatch.setattr(place, name, _die)
    with pytest.raises(UnavailableError):
        updating.commit(*handles)
    monkeypatch.undo()
    assert updating.rows() == []
    assert updating.open() == -1
    assert len(updating.leftovers()) == 3
    updating.commit(*handles)
    assert len(updating.rows()) == 12
    assert updating.open() == 0


def _die(*_: object) -> None:
    raise psycopg.OperationalError("the connection is gone")


@pytest.mark.parametrize(
    "columns",
    [
        "k text PRIMARY KEY, n bigint, twice bigint GENERATED ALWAYS AS (2 * n) STORED",
        "k text PRIMARY KEY, n bigint) PARTITION BY HASH (k",
    ],
)
def test_generated_columns_and_partitions_are_applied(postgres: Postgres, columns: str) -> None:
    made = case(postgres, columns, keys=["k"])
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


def test_a_part_that_is_refused_takes_the_others_along(updating: Case) -> None:
    updating.open()
    handles = [updating.prepared((str(part), part), partition=part) for part in range(3)]
    updating.confirm(*handles)
    updating.sql(f"ALTER TABLE {updating.sink.table} ADD CONSTRAINT c CHECK (n <> 1)")
    with pytest.raises(InvalidArgumentError, match="constraint of the table refuses"):
        updating.commit(*handles)
    assert updating.rows() == []
    updating.sql(f"ALTER TABLE {updating.sink.table} DROP CONSTRAINT c")
    updating.commit(*handles)
    assert updating.rows() == [("0", 0), ("1", 1), ("2", 2)]


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
    postgres: Postgres, change: str, batches: list[list[tuple[int, int]]]
) -> None:
    """As they were tried before the decision."""
    numbers = pa.schema([("k", pa.int64()), ("n", pa.int64())])
    made = case(postgres, "k bigint PRIMARY KEY, n bigint", keys=["k"])
    made.sql(change.format(made.sink.table, made.sink.table.partition(".")[0]))
    made.open(numbers)
    if change == SWAPS:
        made.sql(f"INSERT INTO {made.sink.table} VALUES (0, 0), (1, 1)")
    handles = [made.prepared(*rows, partition=part, schema=numbers) for part, rows in enumerate(batches)]
    made.confirm(*handles)
    made.commit(*handles)
    assert made.rows() == sorted({row for rows in batches for row in rows})
    assert made.open(numbers) == 0


def test_rows_that_somebody_else_has_locked_are_waited_for(updating: Case) -> None:
    updating.open()
    updating.commit(*prepared(updating, 0))
    handles = prepared(updating, 1)
    with updating.server.connect() as other:
        other.execute(f"BEGIN; UPDATE {updating.sink.table} SET n = 7 WHERE k = '1-0'")
        end = threading.Timer(1.5, other.rollback)
        end.start()
        updating.commit(*handles, batch_id=1)
        end.join()
    assert [row[1] for row in updating.rows()] == [1] * 12


def test_two_drivers_that_commit_at_once_show_each_row_once(updating: Case) -> None:
    """A zombie and its successor: the second waits for the first, and finds all of it done."""
    updating.open()
    for batch in range(3):
        handles = prepared(updating, batch)
        with ThreadPoolExecutor(2) as threads:
            for each in [threads.submit(updating.commit, *handles, batch_id=batch) for _ in range(2)]:
                each.result()
        assert [row[1] for row in updating.rows()] == [batch] * 12
        assert updating.open() == batch
        assert updating.leftovers() == []
