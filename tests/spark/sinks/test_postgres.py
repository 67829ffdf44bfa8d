"""Real queries into PostgreSQL: appended and updated rows, restarts, what a dead run left, the example."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from holdfast import sinks
from holdfast.spark_integration.sinks.postgres import connecting
from holdfast.spark_integration.sinks.two_phase_sink import TwoPhaseSink
from tests.servers.postgres import PASSWORD, Postgres
from tests.spark.conftest import Lab
from tests.spark.sinks.conftest import forget_the_last_end

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.slow(40)]

FED: list[list[tuple[str | None, int]]] = [
    [("a", 1), ("b", 2), ("c", 3), ("d", 4)],
    [("a", 10), ("e", 5)],
    [("a", 100), ("b", 20), ("e", 50)],
]


class Shown:
    """A query into a table of its own."""

    def __init__(self, lab: Lab, server: Postgres, columns: str, **sink: Any) -> None:
        self.lab, self.server, self.table = lab, server, f"shown_{secrets.token_hex(6)}"
        self.sink: TwoPhaseSink = sinks.postgres(self.table, self.table, **sink)
        lab.configure({f"sink.{self.table}.{name}": value for name, value in server.options.items()})
        self.sql(f"CREATE TABLE {self.table} ({columns})")

    def run(self, frame: DataFrame, mode: str) -> None:
        # Another function object each time, as another driver has it.
        writer = frame.writeStream.foreachBatch(sinks.exactly_once(self.sink)).outputMode(mode)
        writer = writer.trigger(availableNow=True).option("checkpointLocation", str(self.lab.folder / "query"))
        writer.start().awaitTermination()

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with self.server.connect() as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def rows(self) -> list[tuple[Any, ...]]:
        return self.sql(f"SELECT * FROM {self.table} ORDER BY 1, 2, 3")

    def forget_the_last_end(self) -> None:
        forget_the_last_end(self.lab.folder / "query")


@pytest.fixture(autouse=True)
def _no_connection_is_left() -> Iterator[None]:
    yield
    connecting.close_idle()


def test_totals_are_updated_by_their_key_over_restarts_and_repeats(lab: Lab, postgres: Postgres) -> None:
    shown = Shown(lab, postgres, "key text PRIMARY KEY, n bigint, total bigint", keys=["key"])
    for table in FED[:2]:
        lab.feed(table)
    shown.run(lab.totals(), "update")
    expected = [("a", 2, 11), ("b", 1, 2), ("c", 1, 3), ("d", 1, 4), ("e", 1, 5)]
    assert shown.rows() == expected
    shown.forget_the_last_end()
    shown.run(lab.totals(), "update")
    assert shown.rows() == expected
    lab.feed(FED[2])
    shown.run(lab.totals(), "update")
    assert shown.rows() == [("a", 3, 111), ("b", 2, 22), *expected[2:4], ("e", 2, 55)]
    assert shown.sql("SELECT batch_id FROM holdfast_sinks WHERE sink = '" + shown.table + "'") == [(2,)]


@pytest.mark.all
def test_appended_rows_are_there_once_and_a_server_that_was_away_changes_nothing(lab: Lab, postgres: Postgres) -> None:
    shown = Shown(lab, postgres, "key text, n int, total bigint")
    lab.feed(FED[0])
    frame = lab.source().selectExpr("key", "1 as n", "v as total")
    shown.run(frame.repartition(3), "append")
    lab.feed(FED[1])
    postgres.kill()
    try:
        with pytest.raises(StreamingQueryException, match="PostgreSQL did not answer") as raised:
            shown.run(frame.repartition(3), "append")
        assert PASSWORD not in str(raised.value)
    finally:
        postgres.start()
    shown.run(frame.repartition(3), "append")
    shown.forget_the_last_end()
    shown.run(frame.repartition(3), "append")
    assert shown.rows() == sorted((key, 1, value) for table in FED[:2] for key, value in table)
    # The server is other tests' too, and some leave what a dead run had prepared.
    assert shown.sql(f"SELECT gid FROM pg_prepared_xacts WHERE gid LIKE '%:{shown.table}:%'") == []


@pytest.mark.all
def test_the_example_keeps_a_running_total(postgres: Postgres, java_home: Path, tmp_path: Path) -> None:
    environment = {**os.environ, **postgres.environment(), "JAVA_HOME": str(java_home)}
    command = [sys.executable, "-m", "holdfast.examples.sinks.running_total", str(tmp_path)]
    for _ in range(2):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        lines = [line.split() for line in ran.stdout.splitlines()]
        assert lines == [
            ["ann", "2", "payments", "1500", "cents"],
            ["bob", "2", "payments", "300", "cents"],
            ["eve", "1", "payments", "7", "cents"],
        ]
