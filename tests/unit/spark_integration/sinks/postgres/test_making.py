"""Whether a table is made, as what the server is asked: no server is needed to tell."""

from __future__ import annotations

from typing import Any, cast

import pytest
from psycopg import sql

from holdfast.spark_integration.sinks.postgres.connecting import Session
from holdfast.spark_integration.sinks.postgres.sink import PostgresSink
from tests.sinks.postgres.attempts import SCHEMA


class Asked:
    """A session to a server that says whether the table is there."""

    def __init__(self, *, is_there: bool) -> None:
        self.is_there = is_there
        self.made: list[str] = []

    def run(self, statement: str | sql.Composed, values: Any = None) -> list[tuple[Any, ...]]:
        """Answer as the server would."""
        text = statement if isinstance(statement, str) else statement.as_string()
        if "to_regclass" in text:
            return [(self.is_there,)]
        if "parse_ident" in text:
            return [(values[0].split("."),)]
        self.made.append(text)
        return []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_table_that_its_name_finds_is_not_made(is_there: bool) -> None:
    """It may be in a later schema of the search path, which another one would hide, or nobody may create beside it."""
    server = Asked(is_there=is_there)
    PostgresSink("totals", "totals", ["k"], create=True)._make_table(cast("Session", server), SCHEMA)
    made = 'CREATE TABLE IF NOT EXISTS "totals" ("k" text, "n" bigint, PRIMARY KEY ("k"))'
    assert server.made == ([] if is_there else [made])
