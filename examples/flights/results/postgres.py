"""Results in a PostgreSQL table, in a schema that the demo creates and drops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pandas as pd

from holdfast import sinks
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.examples.flights.results.base import PATIENCE_S, SINK_OPTIONS, SinkResults

if TYPE_CHECKING:
    import psycopg


class PostgresResults(SinkResults):
    called, reader = "PostgreSQL table", "psycopg"

    @property
    def schema(self) -> str:
        return f"holdfast_demo_{self.run}"

    @property
    def where(self) -> str:
        return f"{self.called} {self.schema}.totals"

    def prepare(self) -> None:
        super().prepare()
        with self._connection() as connection:
            connection.execute(f"CREATE SCHEMA {self.schema}".encode())

    def sink(self) -> sinks.TwoPhaseSink:
        return sinks.postgres(self.name, f"{self.schema}.totals", create=True, schema=self.schema)

    def rows(self) -> pd.DataFrame:
        with self._connection() as connection:
            found = connection.execute(f"TABLE {self.schema}.totals".encode())
            return pd.DataFrame(found.fetchall(), columns=[column.name for column in found.description or ()])

    def remove(self, query_id: str | None) -> None:
        import psycopg

        super().remove(query_id)
        try:
            with self._connection() as connection:
                connection.execute(f"SET lock_timeout = '{PATIENCE_S}s'".encode())
                connection.execute(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE".encode())
        except psycopg.Error as exc:
            raise UnavailableError("cannot drop the demo's schema", problem=exc, schema=self.schema) from exc

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Any]]:
        """Yield an autocommit connection, as configured by libpq's environment and the options."""
        import psycopg

        options: dict[str, Any] = {name: value for name, value in self.options.items() if name != "dsn"}
        try:
            connection = psycopg.connect(
                self.options.get("dsn", ""), autocommit=True, connect_timeout=PATIENCE_S, **options
            )
        except psycopg.OperationalError as exc:
            problem = str(exc).strip()
        except psycopg.ProgrammingError:  # quotes the options
            problem = "libpq rejects the options"
        else:
            with connection:
                yield connection
            return
        raise InvalidArgumentError(
            "the demo found no PostgreSQL: `make postgres` starts a server and prints what to type; or name yours in "
            f"libpq's environment (PGHOST, PGPASSWORD …), or by --conf {SINK_OPTIONS}host=… and so on",
            problem=problem,
        )
