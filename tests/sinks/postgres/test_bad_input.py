"""What a sink refuses, before anything is written: tables, columns, keys, rights, settings, servers that are away."""

from __future__ import annotations

import logging
import pickle
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.errors import HoldfastError, InvalidArgumentError, SchemaMismatchError, UnavailableError
from holdfast.spark_integration.sinks.postgres import connecting
from holdfast.spark_integration.sinks.postgres.sink import PostgresSink
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery
from tests.servers.postgres import PASSWORD, Postgres
from tests.servers.postgres import postgres as a_server
from tests.sinks.postgres.conftest import SCHEMA, Case, batch, case

pytestmark = pytest.mark.postgres

ROWS = [("a", 1), ("b", 2)]


@pytest.mark.parametrize(
    ("columns", "sink", "kind", "match"),
    [
        ("k text", {}, SchemaMismatchError, "no such column.*column=n"),
        ('k text, "N" bigint', {}, SchemaMismatchError, "nearest=N"),
        ("k text, n bigint, m int NOT NULL", {}, SchemaMismatchError, "does not provide.*column=m type=integer"),
        ("k text, n bigint GENERATED ALWAYS AS IDENTITY", {}, SchemaMismatchError, "generates this column.*column=n"),
        ("k text, n bigint GENERATED ALWAYS AS (1) STORED", {}, SchemaMismatchError, "generates this column.*column=n"),
        ("k text, n bigint", {"keys": ["k"]}, InvalidArgumentError, "not a unique key.*unique=none"),
        ("k text, n bigint, PRIMARY KEY (k, n)", {"keys": ["k"]}, InvalidArgumentError, "unique='k, n'"),
        ("k text, n bigint, UNIQUE (k) DEFERRABLE", {"keys": ["k"]}, InvalidArgumentError, "not a unique key"),
        ("k text PRIMARY KEY, n bigint", {"keys": ["x"]}, SchemaMismatchError, "not a column of the query.*column=x"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_refused(
    postgres: Postgres, columns: str, sink: Any, kind: type[HoldfastError], match: str
) -> None:
    made = case(postgres, columns, **sink)
    with pytest.raises(kind, match=match):
        made.open()
    assert made.sql(f"SELECT count(*) FROM pg_tables WHERE schemaname = '{made.sink.table.partition('.')[0]}'") == [
        (1,)
    ]


def test_columns_may_come_in_another_order_and_the_server_fills_its_own(postgres: Postgres) -> None:
    made = case(postgres, "id bigserial PRIMARY KEY, n bigint, extra text DEFAULT 'x', k text")
    made.open()
    handle = made.prepared(*ROWS)
    assert handle["schema"] is None, "a key that the server numbers makes nobody wait"
    made.commit(handle)
    assert made.rows() == [(1, 1, "x", "a"), (2, 2, "x", "b")]


def test_a_number_that_the_query_gives_itself_makes_attempts_wait_for_each_other(postgres: Postgres) -> None:
    """Prepared transactions with the same number: the repeat of a task would wait for its first attempt, and fail."""
    made = case(postgres, "n bigserial PRIMARY KEY, k text")
    made.open()
    assert made.prepared(*ROWS)["schema"] is not None


@pytest.mark.parametrize("kind", ["missing", "view", "unlogged"])
def test_what_is_no_table_is_refused(appending: Case, kind: str) -> None:
    table = appending.sink.table
    below = table.replace("results", "below")
    make = {
        "missing": f"DROP TABLE {table}",
        "view": f"ALTER TABLE {table} RENAME TO below; CREATE VIEW {table} AS SELECT * FROM {below}",
        "unlogged": f"ALTER TABLE {table} SET UNLOGGED",
    }
    appending.sql(make[kind])
    with pytest.raises(
        InvalidArgumentError, match={"missing": "no such table", "view": "not a table"}.get(kind, "unlogged")
    ):
        appending.open()


DOES_NOTHING = "EXECUTE FUNCTION suppress_redundant_updates_trigger()"


@pytest.mark.parametrize(
    ("columns", "after", "why"),
    [
        ("k text UNIQUE, n bigint", "", "unique index"),
        ("k text, n bigint, EXCLUDE USING btree (n WITH =)", "", "exclusion"),
        ("k text, n bigint", f"CREATE TRIGGER t BEFORE UPDATE ON {{}} FOR EACH ROW {DOES_NOTHING}", "triggers"),
    ],
)
def test_where_transactions_could_wait_staging_tables_are_chosen_and_said(
    postgres: Postgres, columns: str, after: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = case(postgres, columns)
    if after:
        made.sql(after.format(made.sink.table))
    with caplog.at_level(logging.INFO):
        made.open()
    assert why in caplog.text
    handle = made.prepared(*ROWS)
    assert handle["schema"] is not None
    made.commit(handle)
    assert made.rows() == ROWS


def test_a_constraint_across_rows_is_met_before_the_decision(postgres: Postgres) -> None:
    made = case(postgres, "k text UNIQUE, n bigint")
    made.open()
    handles = [made.prepared(("same", place), partition=place) for place in range(2)]
    with pytest.raises(InvalidArgumentError, match=r"table constraint rejected a row.*results_k_key"):
        made.confirm(*handles)
    assert made.rows() == []


def test_a_null_key_is_refused_unless_nulls_are_equal(postgres: Postgres) -> None:
    made = case(postgres, "k text UNIQUE, n bigint", keys=["k"])
    made.open()
    with pytest.raises(SchemaMismatchError, match=r"a key is null.*column=k"):
        made.prepared((None, 1))
    equal = case(postgres, "k text, n bigint, UNIQUE NULLS NOT DISTINCT (k)", keys=["k"])
    equal.open()
    for batch_id in range(2):
        equal.commit(equal.prepared((None, batch_id), batch_id=batch_id), batch_id=batch_id)
    assert equal.rows() == [(None, 1)]


def test_a_table_is_made_where_that_is_asked_for(postgres: Postgres) -> None:
    made = case(postgres, keys=["k"], create=True)
    made.sql(f"DROP TABLE {made.sink.table}")
    for _ in range(2):
        made.open()
    made.commit(made.prepared(*ROWS))
    assert made.rows() == ROWS


@pytest.mark.parametrize(
    ("grants", "match"),
    [
        ("", "permission denied|no permission"),
        ("GRANT USAGE ON SCHEMA {schema} TO {user}", "no permission to write; GRANT INSERT"),
        ("GRANT USAGE ON SCHEMA {schema} TO {user}; GRANT INSERT ON {table} TO {user}", "GRANT CREATE ON SCHEMA"),
    ],
)
def test_a_right_that_is_lacking_is_named(appending: Case, grants: str, match: str) -> None:
    user = f"u_{secrets.token_hex(4)}"
    table = appending.sink.table
    appending.sql(
        f"CREATE USER {user} PASSWORD 'canary-other'; "
        + grants.format(schema=table.partition(".")[0], table=table, user=user)
    )
    appending.options = {"user": user, "password": "canary-other"}
    with pytest.raises(InvalidArgumentError, match=match):
        appending.open()


def test_rights_to_append_are_enough_where_the_marks_are_elsewhere(postgres: Postgres) -> None:
    own = f"own_{secrets.token_hex(4)}"
    made = case(postgres, schema=own)
    schema = made.sink.table.partition(".")[0]
    made.sql(f"CREATE USER {own} PASSWORD 'canary-other'; CREATE SCHEMA {own} AUTHORIZATION {own}")
    made.sql(f"GRANT USAGE ON SCHEMA {schema} TO {own}; GRANT INSERT ON {made.sink.table} TO {own}")
    made.options = {"user": own, "password": "canary-other"}
    made.open()
    made.commit(made.prepared(*ROWS))
    assert made.rows() == ROWS


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"pasword": "x"}, InvalidArgumentError, "no such option.*did you mean 'password'"),
        ({"password": "canary-wrong"}, InvalidArgumentError, "authentication failed"),
        ({"dbname": "nowhere"}, InvalidArgumentError, "does not exist"),
        ({"sslmode": "require"}, InvalidArgumentError, "SSL"),
        ({"port": "1"}, UnavailableError, "did not answer"),
        ({"dsn": "password=canary-wrong host"}, InvalidArgumentError, "not a libpq connection string"),
    ],
)
def test_settings_that_lead_nowhere_are_errors_without_credentials(
    appending: Case, options: dict[str, str], kind: type[HoldfastError], match: str
) -> None:
    appending.options = options
    with pytest.raises(kind, match=match) as raised:
        appending.open()
    error: BaseException | None = raised.value
    while error is not None:
        assert "canary" not in f"{error!r} {vars(error)}"
        error = error.__cause__ or error.__context__


def test_a_sink_holds_no_credential(postgres: Postgres) -> None:
    for dsn in ("password=canary host=db", "postgresql://me:canary@db/shop"):
        with pytest.raises(InvalidArgumentError, match="a sink must hold no credentials") as raised:
            PostgresSink("s", "t", dsn=dsn)
        assert "canary" not in str(raised.value)
    made = case(postgres)
    made.open()
    made.prepared(*ROWS)
    assert PASSWORD.encode() not in pickle.dumps(made.sink)
    assert PASSWORD not in repr(made.sink) + repr(vars(made.sink)) + repr(made.query)
    assert pickle.loads(pickle.dumps(made.sink)) == made.sink
    made.abort(*made.leftovers())


def test_a_dsn_says_where_and_the_settings_go_before_it(postgres: Postgres) -> None:
    made = case(postgres)
    where = f"host=127.0.0.1 port={postgres.port} dbname=nowhere"
    sink = PostgresSink(made.sink.name, made.sink.table, dsn=where)
    query = SinkQuery(
        sink.name, "q", options={"dsn": f"user=holdfast dbname={postgres.options['dbname']}", "password": PASSWORD}
    )
    assert sink.open(query, SCHEMA) == -1


@pytest.mark.parametrize("given", [{"keys": "k"}, {"keys": ["k", "k"]}, {"keys": [""]}, {"table": ""}])
def test_a_sink_that_makes_no_sense_is_refused_when_it_is_made(given: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        PostgresSink(**{"name": "s", "table": "t", **given})


def test_a_server_that_is_away_is_an_error_of_each_step_and_nothing_is_lost(either: Case) -> None:
    server = either.server
    either.open()
    handle = either.prepared(("a", 1))
    half = either.begun(("b", 2), partition=1)
    server.kill()
    try:
        for step in (
            either.open, either.leftovers, lambda: either.confirm(handle), lambda: either.commit(handle),
            lambda: either.abort(handle), lambda: either.prepared(("c", 3)), half.prepare,
        ):  # fmt: skip
            with pytest.raises(UnavailableError):
                step()
        half.abort()
    finally:
        server.start()
    assert either.leftovers() == [handle]
    other = either.prepared(("b", 2), partition=1)
    either.confirm(handle, other)
    either.commit(handle, other)
    assert either.rows() == ROWS


def test_without_prepared_transactions_or_without_room_for_one_rows_are_staged() -> None:
    with a_server(settings={"max_prepared_transactions": 2}) as server:
        made = case(server)
        made.open()
        handles = [made.prepared((str(place), place), partition=place) for place in range(4)]
        assert [handle["schema"] is None for handle in handles] == [True, True, False, False]
        made.confirm(*handles)
        made.commit(*handles)
        made.commit(*handles)
        assert made.rows() == [(str(place), place) for place in range(4)]
        server.stop()
        server.start(max_prepared_transactions=0)
        assert made.open() == 0
        handle = made.prepared(("z", 26), batch_id=1)
        assert handle["schema"] is not None
        made.commit(handle, batch_id=1)
        assert made.rows()[-1] == ("z", 26)
        connecting.close_idle()


def test_of_tasks_that_begin_at_once_no_more_prepare_than_there_is_room_for() -> None:
    """With more partitions than room, each micro-batch of local mode, which repeats no task, would fail."""
    with a_server(settings={"max_prepared_transactions": 3}) as server, ThreadPoolExecutor(8) as tasks:
        made, barrier = case(server), threading.Barrier(8)
        made.open()

        def prepare(place: int) -> Handle:
            barrier.wait()
            return made.prepared((str(place), place), batch_id=place // 8, partition=place % 8)

        for batch_id in range(4):
            handles = list(tasks.map(prepare, range(8 * batch_id, 8 * batch_id + 8)))
            made.commit(*handles, batch_id=batch_id)
        assert len(made.rows()) == 32
        connecting.close_idle()


def test_the_oldest_server_here_serves_too() -> None:
    with a_server(16) as server:
        for made in (case(server), case(server, "k text PRIMARY KEY, n bigint", keys=["k"])):
            made.open()
            rows = [("a\n\\.\nb", 1), ("c", 2)]
            made.commit(made.prepared(*rows))
            assert made.rows() == rows
        connecting.close_idle()


def test_many_rows_are_written_in_slices(appending: Case) -> None:
    appending.open()
    count = 150_000
    rows = pa.RecordBatch.from_arrays([pa.array(map(str, range(count))), pa.array(range(count))], schema=SCHEMA)
    transaction = appending.sink.begin(appending.attempt(), SCHEMA)
    transaction.write(rows)
    transaction.write(batch(("x", -1)))
    appending.commit(transaction.prepare())
    assert appending.sql(f"SELECT count(*), sum(n) FROM {appending.sink.table} WHERE n < 0 OR k = n::text") == [
        (count + 1, sum(range(count)) - 1)
    ]


@pytest.mark.parametrize("statement", ["PREPARE p AS SELECT 1", "DEALLOCATE q"])
def test_statements_that_others_prepared_in_the_same_session_mean_a_pooler(postgres: Postgres, statement: str) -> None:
    """PgBouncer in transaction mode, where the look at the start has not seen it."""
    with postgres.connect() as connection:
        connection.execute("PREPARE p AS SELECT 1")
        with pytest.raises(InvalidArgumentError, match="pool_mode = session"), connecting.translated("copying rows"):
            connection.execute(statement)


def test_a_name_that_postgres_would_cut_makes_no_table(postgres: Postgres) -> None:
    """It would make the column under a shorter name, and then not find it."""
    made = case(postgres)
    made.sql(f"DROP TABLE {made.sink.table}")
    long = "ü" * 32
    schema = pa.schema([("k", pa.string()), (long, pa.int64())])
    with pytest.raises(InvalidArgumentError, match=f"column names to 63 bytes.*column={long} bytes=64"):
        replace(made.sink, create=True).open(made.query, schema)
    assert made.sql(f"SELECT to_regclass('{made.sink.table}')") == [(None,)]


def test_a_process_without_a_host_says_that_its_environment_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """PGHOST, set in the driver, is not there in workers: they look for a server on their own machine."""
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    attempt = SinkAttempt(SinkQuery("s", "q", options={"port": "1"}), 0, 0, clock.new_id())
    with pytest.raises(UnavailableError, match=r"has no PGHOST.*set spark\.holdfast\.sink\.<name>\.host"):
        PostgresSink("s", "t").begin(attempt, SCHEMA)
