"""Tables that are locked, altered, or refuse what was staged: nothing waits for ever or fails once decided."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.errors import HoldfastError, InvalidArgumentError, SchemaMismatchError, StateLostError, UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.postgres import connecting
from holdfast.spark_integration.sinks.postgres import sink as sink_module
from holdfast.spark_integration.sinks.postgres.connecting import Session
from holdfast.spark_integration.sinks.postgres.marks import PreparedPart
from holdfast.spark_integration.sinks.postgres.sink import PostgresSink
from tests import sink_logs
from tests.servers.postgres import Postgres
from tests.sinks.postgres.conftest import SCHEMA, Case, case

pytestmark = pytest.mark.postgres

_IMPATIENT = {"options": "-c lock_timeout=300ms"}
_KEYED = "k text PRIMARY KEY, n bigint"


@pytest.mark.parametrize("columns", ["k text, n bigint DEFAULT 0", "k text, n bigint, CHECK (n > 0)"])
def test_an_alter_table_that_waits_for_a_transaction_blocks_nobody_long(postgres: Postgres, columns: str) -> None:
    """The driver alone can end what the ALTER TABLE waits for: it needs no lock of the table, in a new process too."""
    made = case(postgres, columns)
    made.options = _IMPATIENT
    made.open()
    handle = made.prepared(("a", 1))
    alter = threading.Thread(target=made.sql, args=[f"ALTER TABLE {made.sink.table} ADD COLUMN later int"])
    alter.start()
    _wait_for_lock(made)
    with pytest.raises(UnavailableError, match="held a lock for longer than lock_timeout"):
        made.prepared(("b", 2), partition=1)
    connecting.close_idle()
    assert made.open() == -1
    assert made.leftovers() == [handle]
    made.confirm(handle)
    made.commit(handle)
    alter.join(30)
    assert made.rows() == [("a", 1, None)]


def _wait_for_lock(made: Case) -> None:
    end_s = time.monotonic() + 30
    while not made.sql("SELECT pid FROM pg_locks WHERE NOT granted") and time.monotonic() < end_s:
        time.sleep(0.01)


def test_a_row_that_somebody_holds_is_waited_for_a_limited_time(updating: Case) -> None:
    updating.options = _IMPATIENT
    updating.open()
    updating.commit(updating.prepared(("a", 1)))
    handle = updating.prepared(("a", 2), batch_id=1)
    with updating.server.connect() as other:
        other.execute(f"BEGIN; UPDATE {updating.sink.table} SET n = 9")
        with pytest.raises(UnavailableError, match="held a lock"):
            updating.commit(handle, batch_id=1)
        other.execute("ROLLBACK")
    updating.commit(handle, batch_id=1)
    assert updating.rows() == [("a", 2)]


@pytest.mark.parametrize("setting", ["statement_timeout", "transaction_timeout"])
def test_a_time_limit_of_the_server_is_no_mistake_of_the_query(appending: Case, setting: str) -> None:
    appending.open()
    appending.options = {"options": f"-c {setting}=500"}
    slow = appending.begun(("a", 1))
    time.sleep(0.8)
    with pytest.raises(UnavailableError, match="timeout"):
        slow.prepare()
    slow.abort()


#: What others do to a table, how it is undone, and the error meanwhile.
ALTERED: list[tuple[str, str, type[HoldfastError]]] = [
    ("ALTER TABLE {} DROP COLUMN n", "ALTER TABLE {} ADD n bigint", SchemaMismatchError),
    ("ALTER TABLE {} RENAME n TO m", "ALTER TABLE {} RENAME m TO n", SchemaMismatchError),
    ("ALTER TABLE {} ALTER n TYPE int", "ALTER TABLE {} ALTER n TYPE bigint", SchemaMismatchError),
    ("ALTER TABLE {} DROP CONSTRAINT results_pkey", "ALTER TABLE {} ADD PRIMARY KEY (k)", InvalidArgumentError),
    ("ALTER TABLE {} ADD CONSTRAINT c CHECK (n < 0)", "ALTER TABLE {} DROP CONSTRAINT c", InvalidArgumentError),
    ("ALTER TABLE {} ADD x int NOT NULL", "ALTER TABLE {} DROP x", SchemaMismatchError),
]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        *((change, kind) for change, _, kind in ALTERED),
        *((change, InvalidArgumentError) for change in ("ALTER TABLE {} ADD UNIQUE (n)", "DROP TABLE {}")),
    ],
)
def test_an_altered_table_is_noticed_before_deciding(updating: Case, change: str, kind: type[HoldfastError]) -> None:
    updating.open()
    handles = [updating.prepared((str(place), 2**40), partition=place) for place in range(2)]
    updating.sql(change.replace("{}", updating.sink.table))
    with pytest.raises(kind):
        updating.confirm(*handles)


_DEFERRED = """CREATE TABLE {}_parents (n bigint PRIMARY KEY);
ALTER TABLE {} ADD FOREIGN KEY (n) REFERENCES {}_parents DEFERRABLE INITIALLY DEFERRED"""
_LONG = "".join(chr(0x4E00 + i * 7919 % 20_000) for i in range(4000))


@pytest.mark.parametrize(
    ("columns", "after", "row"),
    [
        (_KEYED, "", (_LONG, 1)),
        (f"{_KEYED}, inverse bigint GENERATED ALWAYS AS (100 / n) STORED", "", ("a", 0)),
        (f"{_KEYED}, other int, CHECK (n > 0 OR other IS NOT NULL)", "", ("a", -1)),
        (_KEYED, "CREATE INDEX ON {} ((k::int))", ("a", 1)),
        (_KEYED, "ALTER TABLE {} ADD CHECK (results IS NOT NULL AND n > 0)", ("a", -1)),
        (_KEYED, "ALTER TABLE {} ADD CHECK (n > 0) NOT VALID", ("a", -1)),
        (_KEYED, _DEFERRED, ("a", 1)),
    ],
)  # fmt: skip
def test_a_row_that_will_not_fit_is_refused_early(postgres: Postgres, columns: str, after: str, row: Any) -> None:
    made = case(postgres, columns, keys=["k"])
    if after:
        made.sql(after.replace("{}", made.sink.table))
    made.open()
    with pytest.raises((InvalidArgumentError, SchemaMismatchError)):
        made.confirm(made.prepared(row))
    made.abort(*made.leftovers())
    if row[0] != _LONG and "int))" not in after and "REFERENCES" not in after:
        made.commit(made.prepared(("b", 1)))
        assert [found[:2] for found in made.rows()] == [("b", 1)]


def test_long_values_that_an_index_takes_are_written(updating: Case) -> None:
    updating.open()
    handle = updating.prepared(("x" * 3000, 1))
    updating.confirm(handle)
    updating.commit(handle)
    assert updating.rows() == [("x" * 3000, 1)]


def test_an_index_of_a_partition_alone_makes_transactions_wait_too(postgres: Postgres) -> None:
    made = case(postgres)
    table = made.sink.table
    made.sql(
        f"DROP TABLE {table}; CREATE TABLE {table} (k text, n bigint) PARTITION BY RANGE (n); "
        f"CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES FROM (0) TO (9); CREATE UNIQUE INDEX ON {table}_1 (k)"
    )
    made.open()
    handles = [made.prepared(("a", attempt)) for attempt in range(2)]
    assert all(handle["schema"] is not None for handle in handles)
    made.confirm(handles[1])
    made.commit(handles[1])
    assert made.rows() == [("a", 1)]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.struct([("x", pa.float64())]), {"x": float("nan")}),
        (pa.map_(pa.binary(), pa.int64()), [(b"x", 1)]),
        (pa.map_(pa.string(), pa.int64()), [("x", 1), ("x", 2)]),
    ],
)
def test_what_json_cannot_hold_is_said(postgres: Postgres, kind: pa.DataType, value: Any) -> None:
    made = case(postgres, "k jsonb, n bigint")
    schema = pa.schema([("k", kind), ("n", pa.int64())])
    made.open(schema)
    with pytest.raises(SchemaMismatchError, match="JSON cannot hold NaN"):
        made.prepared((value, 1), schema=schema)


def test_an_error_shows_no_row(postgres: Postgres) -> None:
    made = case(postgres, "k text, n bigint CHECK (n < 10)")
    made.open()
    with pytest.raises(InvalidArgumentError, match="table constraint rejected a row") as raised:
        made.prepared(("x" * 7, 77))
    assert "xxxxxxx" not in "".join(traceback.format_exception(raised.value))


def test_what_others_end_between_look_and_commit_is_lost(either: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    either.open()
    handle = either.prepared(("a", 1))
    looked = sink_module._existing

    def look_and_lose(session: Session, parts: Sequence[PreparedPart]) -> Any:
        found = looked(session, parts)
        monkeypatch.setattr(sink_module, "_existing", looked)
        with either.server.connect() as other:
            if handle["schema"] is None:
                other.execute(f"ROLLBACK PREPARED '{handle['name']}'")
            else:
                other.execute(f"DROP TABLE {handle['schema']}.{handle['name']}")
        return found

    monkeypatch.setattr(sink_module, "_existing", look_and_lose)
    with pytest.raises(StateLostError):
        either.commit(handle)
    assert either.open() == -1


@pytest.mark.parametrize(
    ("change", "back", "kind"),
    [*ALTERED, ("DROP TABLE {}", "CREATE TABLE {} (k text PRIMARY KEY, n bigint)", InvalidArgumentError)],
)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_table_that_is_altered_after_the_decision_shows_all_of_it_later_or_nothing(
    updating: Case, change: str, back: str, kind: type[HoldfastError], is_known: bool
) -> None:
    """The decision stands and its rows stay staged: they are shown when the table is as it was."""
    updating.open()
    handles = [updating.prepared((str(place), 2**40), partition=place) for place in range(2)]
    updating.confirm(*handles)
    updating.sql(change.replace("{}", updating.sink.table))
    if not is_known:
        connecting.close_idle()
    for _ in range(2):
        with pytest.raises(kind, match=r"while committing a micro-batch|no such table"):
            updating.commit(*handles)
    updating.sql(back.replace("{}", updating.sink.table))
    connecting.close_idle()
    assert updating.rows() == []
    assert sorted(map(str, updating.leftovers())) == sorted(map(str, handles))
    updating.open()
    updating.commit(*handles)
    assert updating.rows() == [("0", 2**40), ("1", 2**40)]


def _remake(made: Case) -> None:
    key = " PRIMARY KEY" if made.sink.keys else ""
    made.sql(f"DROP TABLE {made.sink.table}; CREATE TABLE {made.sink.table} (k text{key}, n bigint)")


def test_a_table_that_was_made_anew_under_a_query_is_not_taken_for_the_first_one(either: Case) -> None:
    """The same columns, and nothing of what was committed: noticed before the decision, and by the next start."""
    either.open()
    either.commit(either.prepared(("a", 1)))
    _remake(either)
    handle = either.prepared(("b", 2), batch_id=1)
    with pytest.raises(StateLostError, match="not the table that the query wrote to") as raised:
        either.confirm(handle, batch_id=1)
    either.abort(handle)
    for _ in range(2):
        with pytest.raises(StateLostError, match="not the table that the query wrote to"):
            either.open()
        connecting.close_idle()
    assert either.rows() == []
    # What the message says, of a table that was restored by hand.
    either.sql(raised.value.message[raised.value.message.index("UPDATE") :])
    assert either.open() == 0


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_table_made_anew_after_the_decision_gets_no_rows_behind_the_gap(updating: Case, is_shown: bool) -> None:
    """Where it has shown nothing yet, nothing is missing: the next start goes on with the new one."""
    updating.open()
    if is_shown:
        updating.commit(updating.prepared(("a", 1)))
    batch = int(is_shown)
    handle = updating.prepared(("b", 2), batch_id=batch)
    updating.confirm(handle, batch_id=batch)
    _remake(updating)
    for _ in range(2):
        with pytest.raises(StateLostError, match="not the table that the query wrote to"):
            updating.commit(handle, batch_id=batch)
        connecting.close_idle()
    assert updating.rows() == []
    if is_shown:
        with pytest.raises(StateLostError):
            updating.open()
    else:
        assert updating.open() == -1
        updating.commit(handle)
        assert updating.rows() == [("b", 2)]


def _another(made: Case) -> PostgresSink:
    """Return the sink with a second table of the same columns."""
    made.sql(f"CREATE TABLE {made.sink.table}_2 (LIKE {made.sink.table} INCLUDING ALL)")
    return replace(made.sink, table=f"{made.sink.table}_2")


@pytest.mark.parametrize("is_heir", [False, True], ids=["same query", "query that replaces it"])
def test_another_table_does_not_take_what_the_first_should(either: Case, tmp_path: Path, is_heir: bool) -> None:
    """A first micro-batch is decided when its driver dies; the next start names another table, and then the right one.

    Its rows went to the first table and the mark to the second, without a word.
    """
    storage, other, query = open_storage(str(tmp_path)), _another(either), either.query
    Coordinator(either.sink, query, storage, 100).start(0, SCHEMA)
    sink_logs.decide(storage, query.sink, query.query_id, 0, either.prepared(("a", 1)))
    if is_heir:
        query = replace(query, query_id="99999999-2222-3333-4444-555555555555", replaces=query.query_id)
    for _ in range(2):
        with pytest.raises(StateLostError, match="the name has changed"):
            Coordinator(other, query, storage, 100).start(0, SCHEMA)
        assert (either.rows(), either.rows(other.table)) == ([], [])
    Coordinator(either.sink, query, storage, 100).start(0, SCHEMA)
    assert (either.rows(), either.rows(other.table)) == ([("a", 1)], [])


def test_a_query_that_replaces_another_one_goes_on_in_its_table(either: Case, tmp_path: Path) -> None:
    """Also where all is shown; a table that was renamed is the same one."""
    storage, other, query = open_storage(str(tmp_path)), _another(either), either.query
    run = Coordinator(either.sink, query, storage, 100)
    run.start(0, SCHEMA)
    run.finish(0, Prepared((either.prepared(("a", 1)),), 1))
    heir = replace(query, query_id="99999999-2222-3333-4444-555555555555", replaces=query.query_id)
    with pytest.raises(StateLostError, match="the name has changed"):
        Coordinator(other, heir, storage, 100).start(0, SCHEMA)
    either.sql(f"ALTER TABLE {either.sink.table} RENAME TO moved")
    moved = replace(either.sink, table=f"{either.sink.table.partition('.')[0]}.moved")
    connecting.close_idle()
    Coordinator(moved, heir, storage, 100).start(0, SCHEMA)
    assert either.rows(moved.table) == [("a", 1)]


def test_a_table_that_was_restored_with_its_marks_is_the_same(either: Case) -> None:
    """A dump has names and no numbers: the table that it brings is the one that the marks mean."""
    either.open()
    either.commit(either.prepared(("a", 1)))
    schema = either.sink.table.partition(".")[0]
    dump = either.server.run("pg_dump", f"--schema={schema}")
    either.sql(f"CREATE DATABASE {schema}")
    either.server.run("psql", "--set=ON_ERROR_STOP=1", f"--dbname={schema}", given=dump)
    either.options = {"dbname": schema}
    assert either.open() == 0
    handle = either.prepared(("b", 2), batch_id=1)
    either.confirm(handle, batch_id=1)
    either.commit(handle, batch_id=1)
    assert either.sql(f"SELECT * FROM {either.sink.table} ORDER BY 1", dbname=schema) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("beside", [False, True], ids=["marks where they are", "marks beside the table"])
@pytest.mark.parametrize("columns", ["k text, n bigint", _KEYED])
def test_a_worker_that_finds_another_table_writes_nothing(postgres: Postgres, columns: str, *, beside: bool) -> None:
    """Executors have an environment of their own, and a role may be given another search_path while a query runs.

    Beside the other table there may be marks, too, of sinks that write there.
    """
    made = case(postgres, columns)
    schema = made.sink.table.partition(".")[0]
    made.sql(f"CREATE SCHEMA {schema}_b; CREATE TABLE {schema}_b.results ({columns})")
    keys = ["k"] if columns == _KEYED else []
    replace(made, sink=PostgresSink("another", f"{schema}_b.results", keys)).open()
    made.sink = PostgresSink(made.sink.name, "results", keys, schema=None if beside else schema)
    made.options = {"options": f"-c search_path={schema}"}
    made.open()
    made.commit(made.prepared(("a", 1)))
    made.options = {"options": f"-c search_path={schema}_b"}
    with pytest.raises(StateLostError, match="this is not the table"):
        made.prepared(("b", 2), batch_id=1)
    made.options = {"options": f"-c search_path={schema}"}
    assert made.leftovers() == []
    assert made.rows(f"{schema}.results") == [("a", 1)]
