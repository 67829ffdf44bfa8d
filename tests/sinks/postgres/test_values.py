"""Values of every type arrive as they are, by both ways; what could change on its way is refused before."""

from __future__ import annotations

import datetime as dt
import ipaddress
import math
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from holdfast.errors import SchemaMismatchError
from tests.servers.postgres import Postgres
from tests.sinks.postgres.attempts import Case, case

pytestmark = pytest.mark.postgres

UTC = dt.UTC
ID = "0c7a8a2e-1f5e-4a53-9d4f-2f9e9c1d7b11"
AWKWARD = [
    "",
    "\\N",
    "\\.",
    "a\n\\.\nb",
    "tab\there",
    'quo"te',
    "back\\slash",
    "cr\rlf\n",
    "NULL",
    "{1,2}",
    "é 漢 🙂",
    "'",
]
NESTED = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])

CASES: dict[str, tuple[pa.DataType, str, list[Any]]] = {
    "boolean": (pa.bool_(), "boolean", [True, False]),
    "byte": (pa.int8(), "smallint", [-128, 127]),
    "short": (pa.int16(), "integer", [-(2**15), 2**15 - 1]),
    "int": (pa.int32(), "integer", [-(2**31), 2**31 - 1]),
    "long": (pa.int64(), "bigint", [-(2**63), 2**63 - 1]),
    "long as numeric": (pa.int64(), "numeric(20,0)", [Decimal(-(2**63)), Decimal(2**63 - 1)]),
    "float": (pa.float32(), "real", [1.5, -0.25, math.inf, -math.inf]),
    "double": (pa.float64(), "double precision", [0.1, 1e308, 5e-324, -0.0, math.inf, 1 / 3]),
    "double as numeric": (pa.float64(), "numeric", [0.1, 1e22]),
    "decimal": (
        pa.decimal128(38, 18), "numeric(38,18)", [Decimal("-12345678901234567890.123456789012345678"), Decimal(0)],
    ),
    "wide decimal": (pa.decimal128(10, 2), "numeric", [Decimal("99999999.99")]),
    "text": (pa.string(), "text", AWKWARD),
    "varchar": (pa.string(), "varchar(40)", AWKWARD),
    "varchar at its limit": (pa.string(), "varchar(3)", ["abc", "a  ", "", "üü "]),
    "char": (pa.string(), "char(3)", ["abc", "a  ", "   ", "üü "]),
    "array of chars": (pa.list_(pa.string()), "char(2)[]", [["ab", None, "c "], []]),
    "large text": (pa.large_string(), "text", AWKWARD),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), "text", AWKWARD),
    "uuid": (pa.string(), "uuid", [ID]),
    "enum": (pa.string(), "mood", ["so so", "fine"]),
    "inet": (pa.string(), "inet", ["10.0.0.1"]),
    "domain": (pa.int32(), "positive", [1, 7]),
    "bytes": (pa.binary(), "bytea", [b"", b"\x00\xff\\x", bytes(range(256))]),
    "date": (pa.date32(), "date", [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(9999, 12, 31)]),
    "timestamp": (
        pa.timestamp("us", "UTC"), "timestamptz",
        [dt.datetime(1, 1, 2, tzinfo=UTC), dt.datetime(2026, 3, 29, 1, 30, 0, 123456, UTC)],
    ),
    "zoned": (pa.timestamp("us", "Europe/Berlin"), "timestamptz", [dt.datetime(2026, 3, 29, 1, 30, 0, 123456, UTC)]),
    "timestamp_ntz": (pa.timestamp("us"), "timestamp", [dt.datetime.min, dt.datetime.max]),  # noqa: DTZ901  it has no zone
    "time": (pa.time64("us"), "time", [dt.time(23, 59, 59, 999999)]),
    "interval": (pa.duration("us"), "interval", [dt.timedelta(days=-3, microseconds=7), dt.timedelta(0)]),
    "array": (pa.list_(pa.int32()), "integer[]", [[], [1, None, 3]]),
    "array of text": (pa.list_(pa.string()), "text[]", [AWKWARD, ["a", None], []]),
    "array of bytes": (pa.list_(pa.binary()), "bytea[]", [[b'\x00\\"', None]]),
    "array of times": (
        pa.list_(pa.timestamp("us", "UTC")), "timestamptz[]", [[dt.datetime(2026, 1, 1, tzinfo=UTC), None]],
    ),
    "array of decimals": (pa.list_(pa.decimal128(6, 2)), "numeric(6,2)[]", [[Decimal("1234.56"), None]]),
    "array of arrays": (pa.list_(pa.list_(pa.int64())), "bigint[]", [[[1, 2], [3, None]], []]),
    "array as json": (pa.list_(pa.string()), "jsonb", [["a\n", None], []]),
    "struct": (NESTED, "jsonb", [{"a": 1, "b": ["x\\", 'q"', "tab\t"]}, {"a": None, "b": None}]),
    "map": (pa.map_(pa.string(), pa.float64()), "json", [{"a": 1.5}, {}]),
    "json text": (pa.string(), "jsonb", ['{"a": [1, "\\n"]}', "null"]),
}  # fmt: skip


@pytest.mark.parametrize("way", ["appending", "updating"])
def test_values_arrive_as_they_are(postgres: Postgres, way: str) -> None:
    made = case(
        postgres, "id integer PRIMARY KEY" if way == "updating" else "id integer", keys=["id"] * (way == "updating")
    )
    place = made.sink.table.partition(".")[0]
    made.sql(
        f"CREATE TYPE {place}.mood AS ENUM ('so so', 'fine'); CREATE DOMAIN {place}.positive AS int CHECK (VALUE > 0)"
    )
    schema, columns = [("id", pa.int32())], []
    count = max(len(values) for _, _, values in CASES.values())
    data: dict[str, list[Any]] = {"id": list(range(count + 1))}
    for name, (arrow, declared, values) in CASES.items():
        own = declared in ("mood", "positive")
        columns.append(f'ADD COLUMN "{name}" {f"{place}.{declared}" if own else declared}')
        schema.append((name, arrow))
        data[name] = [*values, *[None] * (count + 1 - len(values))]
    made.sql(f"ALTER TABLE {made.sink.table} {', '.join(columns)}")
    arrays = [pa.array(_given(data[name], arrow), arrow) for name, arrow in schema]
    rows = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(schema))
    made.sink.open(made.query, rows.schema)
    transaction = made.sink.begin(made.attempt(), rows.schema)
    # Slices of a larger batch, as Spark hands them on.
    transaction.write(rows.slice(0, 3))
    transaction.write(rows.slice(3))
    made.commit(transaction.prepare())
    for name in CASES:
        read = [value for (value,) in made.sql(f'SELECT "{name}" FROM {made.sink.table} ORDER BY id')]
        assert read == _expected(name, data[name]), name


def _given(values: list[Any], arrow: pa.DataType) -> list[Any]:
    if pa.types.is_map(arrow):
        return [None if value is None else list(value.items()) for value in values]
    return [int(value) if isinstance(value, Decimal) and pa.types.is_integer(arrow) else value for value in values]


def _expected(name: str, values: list[Any]) -> list[Any]:
    if name == "uuid":
        return [None if value is None else uuid.UUID(value) for value in values]
    if name == "inet":
        return [None if value is None else ipaddress.ip_address(value) for value in values]
    if name == "double as numeric":
        return [None if value is None else Decimal(repr(value)) for value in values]
    if name == "json text":
        return [{"a": [1, "\n"]}, None, *values[2:]]
    return values


def test_not_a_number_is_itself(postgres: Postgres) -> None:
    made = case(postgres, "a double precision, b real, c numeric")
    schema = pa.schema([("a", pa.float64()), ("b", pa.float32()), ("c", pa.float64())])
    made.sink.open(made.query, schema)
    made.commit(made.prepared((math.nan, math.nan, math.nan), schema=schema))
    assert made.sql(f"SELECT count(*) FROM {made.sink.table} WHERE a = 'NaN' AND b = 'NaN' AND c = 'NaN'") == [(1,)]


@pytest.mark.parametrize(
    ("arrow", "declared"),
    [
        (pa.int64(), "integer"),
        (pa.int64(), "double precision"),
        (pa.int64(), "text"),
        (pa.int64(), "numeric(18,0)"),
        (pa.int32(), "real"),
        (pa.float64(), "real"),
        (pa.float64(), "numeric(10,2)"),
        (pa.float64(), "bigint"),
        (pa.decimal128(38, 18), "numeric(38,6)"),
        (pa.decimal128(38, 18), "numeric(30,18)"),
        (pa.decimal128(10, 2), "double precision"),
        (pa.bool_(), "integer"),
        (pa.string(), "bigint"),
        (pa.string(), "timestamptz"),
        (pa.string(), "bytea"),
        (pa.string(), "name"),
        (pa.string(), '"char"'),
        (pa.string(), "text[]"),
        (pa.binary(), "text"),
        (pa.date32(), "timestamp"),
        (pa.timestamp("us"), "timestamptz"),
        (pa.timestamp("us", "UTC"), "timestamp"),
        (pa.timestamp("us", "UTC"), "timestamptz(3)"),
        (pa.list_(pa.int64()), "integer[]"),
        (pa.list_(pa.int64()), "bigint"),
        (NESTED, "text"),
    ],
    ids=str,
)
def test_a_type_into_which_values_could_not_go_unchanged_is_refused(
    postgres: Postgres, arrow: pa.DataType, declared: str
) -> None:
    made = case(postgres, f"v {declared}")
    with pytest.raises(SchemaMismatchError, match="could change") as raised:
        made.sink.open(made.query, pa.schema([("v", arrow)]))
    assert raised.value.facts["column"] == "v"
    assert raised.value.facts["query_type"] == str(arrow)
    assert str(raised.value.facts["table_type"]).startswith(declared[:7])


@pytest.mark.parametrize(
    ("rows", "schema", "match"),
    [
        ([("a\0b", 1)], pa.schema([("k", pa.string()), ("n", pa.int64())]), "NUL"),
        ([("a", None)], pa.schema([("k", pa.string()), ("n", pa.int64())]), "null value"),
        ([("too long", 1)], pa.schema([("k", pa.string()), ("n", pa.int64())]), "too long"),
        ([("neg", -1)], pa.schema([("k", pa.string()), ("n", pa.int64())]), "constraint"),
    ],
    ids=["NUL", "null", "long", "check"],
)
@pytest.mark.parametrize("keys", [[], ["k"]], ids=["prepared", "staged"])
def test_a_value_that_the_table_refuses_is_an_error_of_the_worker(
    postgres: Postgres, rows: list[Any], schema: pa.Schema, match: str, keys: list[str]
) -> None:
    unique = ", PRIMARY KEY (k)" if keys else ""
    made: Case = case(postgres, f"k varchar(4) NOT NULL, n bigint NOT NULL CHECK (n > 0){unique}", keys=keys)
    made.open(schema)
    with pytest.raises(ValueError if match == "constraint" else SchemaMismatchError, match=match):
        made.prepared(*rows, schema=schema)
    assert made.rows() == []


@pytest.mark.parametrize(
    ("arrow", "declared", "value", "match"),
    [
        (pa.string(), "varchar(3)", "abc ", "too long"),
        (pa.string(), "varchar(3)", "abcd", "too long"),
        (pa.dictionary(pa.int32(), pa.string()), "varchar(3)", "abc ", "too long"),
        (pa.string(), "code", "abc ", "too long"),
        (pa.string(), "char(3)", "ab", "adds blanks"),
        (pa.string(), "char(3)", "abc  ", "adds blanks"),
        (pa.string(), "char", "", "adds blanks"),
        (pa.list_(pa.string()), "varchar(3)[]", ["a", "abc "], "too long"),
        (pa.list_(pa.list_(pa.string())), "char(3)[]", [["abc", "a"]], "adds blanks"),
        (pa.list_(pa.list_(pa.int64())), "bigint[]", [[], []], "array within an array is empty"),
        (pa.list_(pa.list_(pa.int64())), "bigint[]", [[]], "array within an array is empty"),
        (pa.list_(pa.list_(pa.list_(pa.int64()))), "bigint[]", [[[]], [[]]], "array within an array is empty"),
        (pa.list_(pa.list_(pa.int64())), "bigint[]", [[1], [2, 3]], "PostgreSQL does not accept"),
        (pa.list_(pa.list_(pa.int64())), "bigint[]", [[1], None], "PostgreSQL does not accept"),
    ],
)
@pytest.mark.parametrize("keys", [[], ["k"]], ids=["prepared", "staged"])
def test_a_value_that_the_server_would_change_without_a_word_fails_the_task(
    postgres: Postgres, arrow: pa.DataType, declared: str, value: Any, match: str, keys: list[str]
) -> None:
    """Before the decision: what is shown is what the query gave, or nothing."""
    made = case(postgres, "k bigint PRIMARY KEY" if keys else "k bigint", keys=keys)
    place = made.sink.table.partition(".")[0]
    made.sql(f"CREATE DOMAIN {place}.code AS varchar(3)")
    own = f"{place}.{declared}" if declared == "code" else declared
    made.sql(f"ALTER TABLE {made.sink.table} ADD COLUMN v {own}")
    schema = pa.schema([("k", pa.int64()), ("v", arrow)])
    made.open(schema)
    with pytest.raises(SchemaMismatchError, match=match):
        made.prepared((1, value), schema=schema)
    made.commit(made.prepared((1, None), schema=schema))
    assert made.rows() == [(1, None)]
