"""The contract of a two-phase sink on PostgreSQL: by prepared transactions, by staging tables, and by keys."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import ClassVar

import pyarrow as pa
import pytest

from holdfast.spark_integration.sinks.postgres import connecting
from holdfast.spark_integration.sinks.postgres.sink import PostgresSink
from holdfast.spark_integration.sinks.two_phase_sink import TwoPhaseSink
from tests.contract.conftest import KEYS, SampledContract, SeveralKeys
from tests.servers.postgres import PASSWORD, Postgres

pytestmark = [pytest.mark.postgres, pytest.mark.slow(60)]

COLUMNS = "amount double precision NOT NULL, key bigint NOT NULL, word text"


class PostgresContract(SampledContract):
    """What the ways share."""

    secrets = (PASSWORD,)
    columns: ClassVar[str] = COLUMNS
    keys: ClassVar[list[str]] = []
    server: Postgres

    @pytest.fixture
    def sink(self, postgres: Postgres) -> Iterator[TwoPhaseSink]:
        self.server = postgres
        table = f"results_{secrets.token_hex(6)}"
        with postgres.connect() as connection:
            connection.execute(f"CREATE TABLE {table} ({self.columns})")
        yield PostgresSink(f"sink-{table}", table, keys=self.keys)
        connecting.close_idle()

    @pytest.fixture
    def options(self, postgres: Postgres) -> Mapping[str, str]:
        return postgres.options

    def shown(self, sink: TwoPhaseSink) -> pa.Table:
        assert isinstance(sink, PostgresSink)
        with self.server.connect() as connection:
            rows = connection.execute(f"SELECT {', '.join(self.schema().names)} FROM {sink.table}").fetchall()
        return pa.Table.from_pylist([dict(zip(self.schema().names, row, strict=True)) for row in rows], self.schema())

    def restart_target(self) -> None:
        self.server.kill()
        self.server.start()


class TestPrepared(PostgresContract):
    """Rows are appended by prepared transactions."""


@pytest.mark.all
class TestStaged(PostgresContract):
    """Rows are appended through staging tables, as a unique index is in the way."""

    columns = f"{COLUMNS}, UNIQUE (key, word)"


class TestUpserted(SeveralKeys, PostgresContract):
    """Rows are updated by several keys."""

    columns = (
        "flag boolean, key bigint, word text, amount double precision NOT NULL, "
        f"UNIQUE NULLS NOT DISTINCT ({', '.join(KEYS)})"
    )
    keys: ClassVar[list[str]] = KEYS
