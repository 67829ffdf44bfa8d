"""A sink by each of the two ways."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from holdfast.spark_integration.sinks.postgres import connecting
from holdfast.spark_integration.sinks.postgres.sink import PostgresSink
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery, SinkTransaction
from tests.servers.postgres import Postgres


@pytest.fixture
def appending(postgres: Postgres) -> Case:
    """Return a sink that prepares transactions."""
    return case(postgres)


@pytest.fixture
def updating(postgres: Postgres) -> Case:
    """Return a sink that updates by a key, through staging tables."""
    return case(postgres, "k text PRIMARY KEY, n bigint", keys=["k"])


@pytest.fixture(params=["appending", "updating"])
def either(request: pytest.FixtureRequest) -> Case:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Case)
    return found


@pytest.fixture(autouse=True)
def _no_connection_is_left() -> Iterator[None]:
    yield
    connecting.close_idle()


SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


def batch(*rows: tuple[str | None, int | None], schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


@contextmanager
def aborted_after_an_error(transaction: SinkTransaction) -> Iterator[None]:
    try:
        yield
    except BaseException:
        transaction.abort()
        raise


@dataclass
class Case:
    """A sink in a schema of its own in the server, and its query."""

    server: Postgres
    sink: PostgresSink
    query_id: str = "11111111-2222-3333-4444-555555555555"
    options: Mapping[str, str] = field(default_factory=dict)
    replaces: str | None = None

    @property
    def query(self) -> SinkQuery:
        options = {**self.server.options, **self.options}
        return SinkQuery(self.sink.name, self.query_id, self.replaces, options)

    def attempt(self, batch_id: int = 0, partition: int = 0) -> SinkAttempt:
        return SinkAttempt(self.query, batch_id, partition, secrets.token_hex(16))

    def begun(self, *rows: Any, batch_id: int = 0, partition: int = 0, schema: pa.Schema = SCHEMA) -> SinkTransaction:
        transaction = self.sink.begin(self.attempt(batch_id, partition), schema)
        with aborted_after_an_error(transaction):
            transaction.write(batch(*rows, schema=schema))
        return transaction

    def prepared(self, *rows: Any, batch_id: int = 0, partition: int = 0, schema: pa.Schema = SCHEMA) -> Handle:
        transaction = self.begun(*rows, batch_id=batch_id, partition=partition, schema=schema)
        with aborted_after_an_error(transaction):
            return transaction.prepare()

    def open(self, schema: pa.Schema = SCHEMA) -> int:
        return self.sink.open(self.query, schema)

    def confirm(self, *handles: Handle, batch_id: int = 0) -> None:
        self.sink.confirm(self.query, batch_id, handles)

    def commit(self, *handles: Handle, batch_id: int = 0) -> None:
        self.sink.commit(self.query, batch_id, handles)

    def abort(self, *handles: Handle) -> None:
        self.sink.abort(self.query, handles)

    def leftovers(self) -> list[Handle]:
        return list(self.sink.leftovers(self.query))

    def rows(self, table: str | None = None) -> list[tuple[Any, ...]]:
        return self.sql(f"SELECT * FROM {table or self.sink.table} ORDER BY 1, 2")

    def sql(self, statement: str, **options: Any) -> list[tuple[Any, ...]]:
        with self.server.connect(**options) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


def case(server: Postgres, columns: str = "k text, n bigint", **sink: Any) -> Case:
    """Return a sink with a new table of these columns."""
    schema = f"t_{secrets.token_hex(6)}"
    made = Case(server, PostgresSink(f"sink-{schema}", f"{schema}.results", **sink))
    made.sql(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.results ({columns})")
    return made
