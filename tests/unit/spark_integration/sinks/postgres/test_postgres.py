"""The PostgreSQL sink without a server: what COPY reads, and what is asked before a table is made."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa
import pytest
from psycopg import sql

from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration.sinks.postgres.connecting import Session
from holdfast.spark_integration.sinks.postgres.sink import PostgresSink
from holdfast.spark_integration.sinks.postgres.writing import encoded
from tests.sinks.postgres.conftest import SCHEMA


class Asked:
    """A session to a server that says whether the table is there."""

    def __init__(self, *, is_there: bool) -> None:
        self.is_there = is_there
        self.made: list[str] = []

    def run(self, statement: str | sql.Composed, values: Any = None) -> list[tuple[Any, ...]]:
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


def copied(values: Any, kind: pa.DataType) -> str:
    """Return a column as COPY reads it."""
    rows = pa.record_batch([pa.array(values, kind)], names=["c"])
    return b"".join(map(bytes, encoded(rows, frozenset()))).decode()


def test_json_in_an_array_is_quoted() -> None:
    """Its braces and commas would be the array's own: a column of jsonb[] refused it, and [{}] came empty."""
    inner = pa.struct([("a", pa.int32()), ("b", pa.string())])
    structs = [[{"a": 1, "b": 'q"'}, None], [], None]
    assert copied(structs, pa.list_(inner)) == (r"""{"{\\"a\\": 1, \\"b\\": \\"q\\\\\\"\\"}",NULL}""" + "\n{}\n\\N\n")
    assert copied([[[]]], pa.list_(pa.map_(pa.string(), pa.int32()))) == '{"{}"}\n'


@pytest.mark.parametrize(
    ("kind", "far"),
    [(pa.date32(), 2_932_897), (pa.timestamp("us"), 253_402_300_800_000_000), (pa.timestamp("us", "UTC"), -(1 << 60))],
)
def test_times_that_json_cannot_say_are_told(kind: pa.DataType, far: int) -> None:
    """Spark has years beyond 9999, Python has none: its own error said neither what it was nor what to do."""
    times = pa.array([far], pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    rows = pa.record_batch([pa.StructArray.from_arrays([times], ["at"])], names=["c"])
    with pytest.raises(SchemaMismatchError, match="year"):
        list(encoded(rows, frozenset()))
