"""What the PostgreSQL sink writes: values of each type, rows by key, and tables whose changes are applied."""

from __future__ import annotations

import datetime as dt
import ipaddress
import math
import random
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from holdfast.errors import InvalidArgumentError, SchemaMismatchError, UnavailableError
from holdfast.spark_integration.sinks.postgres import sink as sink_module
from holdfast.spark_integration.sinks.postgres.marks import MarkTables
from holdfast.spark_integration.sinks.two_phase_sink import Handle
from tests.servers.postgres import Postgres
from tests.sinks.postgres.conftest import Case, case
from tests.tiers import cases

pytestmark = pytest.mark.postgres

UTC = dt.UTC
ID = "0c7a8a2e-1f5e-4a53-9d4f-2f9e9c1d7b11"
AWKWARD = ["", "\\N", "\\.", "a\n\\.\nb", "tab\there", 'quo"te', "back\\slash", "cr\rlf\n"]
AWKWARD += ["NULL", "{1,2}", "é 漢 🙂", "'"]
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
        (arrow, declared)
        for arrow, every in (
            (pa.int64(), ("integer", "double precision", "text", "numeric(18,0)")),
            (pa.int32(), ("real",)),
            (pa.float64(), ("real", "numeric(10,2)", "bigint")),
            (pa.decimal128(38, 18), ("numeric(38,6)", "numeric(30,18)")),
            (pa.decimal128(10, 2), ("double precision",)),
            (pa.bool_(), ("integer",)),
            (pa.string(), ("bigint", "timestamptz", "bytea", "name", '"char"', "text[]")),
            (pa.binary(), ("text",)),
            (pa.date32(), ("timestamp",)),
            (pa.timestamp("us"), ("timestamptz",)),
            (pa.timestamp("us", "UTC"), ("timestamp", "timestamptz(3)")),
            (pa.list_(pa.int64()), ("integer[]", "bigint")),
            (NESTED, ("text",)),
        )
        for declared in every
    ],
    ids=str,
)
def test_a_type_that_would_change_values_is_refused(postgres: Postgres, arrow: pa.DataType, declared: str) -> None:
    made = case(postgres, f"v {declared}")
    with pytest.raises(SchemaMismatchError, match="cannot hold all values") as raised:
        made.sink.open(made.query, pa.schema([("v", arrow)]))
    assert raised.value.facts["column"] == "v"
    assert raised.value.facts["query_type"] == str(arrow)
    assert str(raised.value.facts["table_type"]).startswith(declared[:7])


@pytest.mark.parametrize(
    ("row", "match"),
    [(("a\0b", 1), "NUL"), (("a", None), "null value"), (("too long", 1), "too long"), (("neg", -1), "constraint")],
    ids=["NUL", "null", "long", "check"],
)
@pytest.mark.parametrize("keys", [[], ["k"]], ids=["prepared", "staged"])
def test_a_value_that_the_table_refuses_is_an_error_of_the_worker(
    postgres: Postgres, row: tuple[Any, ...], match: str, keys: list[str]
) -> None:
    schema = pa.schema([("k", pa.string()), ("n", pa.int64())])
    unique = ", PRIMARY KEY (k)" if keys else ""
    made: Case = case(postgres, f"k varchar(4) NOT NULL, n bigint NOT NULL CHECK (n > 0){unique}", keys=keys)
    made.open(schema)
    with pytest.raises(ValueError if match == "constraint" else SchemaMismatchError, match=match):
        made.prepared(row, schema=schema)
    assert made.rows() == []


@pytest.mark.parametrize(
    ("arrow", "declared", "value", "match"),
    [
        (pa.string(), "varchar(3)", "abc ", "too long"),
        (pa.string(), "varchar(3)", "abcd", "too long"),
        (pa.string(), "code", "abc ", "too long"),
        (pa.string(), "char(3)", "ab", "differs in length"),
        (pa.string(), "char(3)", "abc  ", "differs in length"),
        (pa.string(), "char", "", "differs in length"),
        (pa.list_(pa.string()), "varchar(3)[]", ["a", "abc "], "too long"),
        (pa.list_(pa.list_(pa.string())), "char(3)[]", [["abc", "a"]], "differs in length"),
        *((pa.list_(pa.list_(pa.int64())), "bigint[]", v, "array within an array is empty") for v in ([[], []], [[]])),
        (pa.list_(pa.list_(pa.list_(pa.int64()))), "bigint[]", [[[]], [[]]], "array within an array is empty"),
        *((pa.list_(pa.list_(pa.int64())), "bigint[]", [[1], v], "rejected a value") for v in ([2, 3], None)),
    ],
)
@pytest.mark.parametrize("keys", cases([[], ["k"]]), ids=lambda keys: "staged" if keys else "prepared")
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


#: Types of keys, each with values that it may have besides null.
TYPES: dict[str, tuple[pa.DataType, Sequence[Any]]] = {
    "boolean": (pa.bool_(), [True, False]),
    "bigint": (pa.int64(), [-(1 << 63), 0, 7]),
    "text": (pa.string(), ["", "a", "A", "NULL", "a\tb"]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(2024, 2, 29)]),
    "timestamptz": (pa.timestamp("us", "UTC"), [dt.datetime(2024, 1, 1, 0, 0, 0, 1, dt.UTC)]),
    "numeric(20,2)": (pa.decimal128(20, 2), [Decimal("-1.25"), Decimal("123456789012345678.99")]),
    "bytea": (pa.binary(), [b"", b"\x00\xff"]),
    "interval": (pa.duration("us"), [dt.timedelta(days=-3), dt.timedelta(microseconds=7)]),
    "integer[]": (pa.list_(pa.int32()), [[], [1, None]]),
    "jsonb": (pa.struct([("a", pa.bool_())]), [{"a": True}, {"a": None}]),
}


@pytest.mark.parametrize(
    "keys",
    [
        *(("boolean", "bigint"), ("bigint", "boolean"), ("boolean", "boolean", "text")),
        ("date", "bytea", "boolean", "timestamptz"),
        *(("numeric(20,2)", "interval"), ("integer[]", "boolean"), ("text", "jsonb")),
    ],
    ids="-".join,
)
def test_rows_of_several_keys_replace_their_own(postgres: Postgres, keys: tuple[str, ...]) -> None:
    """Where the unique index says that nulls are equal, they are, in whichever key."""
    named = [f"k{i}" for i in range(len(keys))]
    columns = ", ".join(f"{name} {key}" for name, key in zip(named, keys, strict=True))
    made = case(postgres, f"{columns}, n bigint, UNIQUE NULLS NOT DISTINCT ({', '.join(named)})", keys=named)
    schema = pa.schema([*((name, TYPES[key][0]) for name, key in zip(named, keys, strict=True)), ("n", pa.int64())])
    made.open(schema)
    rng, expected = random.Random(7), dict[str, int]()
    for batch in range(3):
        parts = [[(*(rng.choice([None, *TYPES[key][1]]) for key in keys), 100 * batch + row) for row in range(8)]]
        parts.append([(*row[:-1], row[-1] + 50) for row in parts[0][:3]])
        handles = [made.prepared(*rows, batch_id=batch, partition=i, schema=schema) for i, rows in enumerate(parts)]
        made.confirm(*handles, batch_id=batch)
        made.commit(*handles, batch_id=batch)
        expected |= {str(row[:-1]): row[-1] for rows in parts for row in rows}
        shown = made.rows()
        assert {str(tuple(_plain(key) for key in row[:-1])): row[-1] for row in shown} == expected
        assert len(shown) == len(expected)


def _plain(value: Any) -> Any:
    """Return a value as the test has it: psycopg may give it in another zone."""
    return value.astimezone(dt.UTC) if isinstance(value, dt.datetime) else value


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


def test_of_a_key_that_is_there_often_the_last_row_of_the_highest_partition_counts(updating: Case) -> None:
    """Whatever the order of the handles; a key of one partition alone has that one's last row."""
    updating.open()
    for batch in range(2):
        parts = [[("b", 1), ("a", 9), ("b", 2)], [("a", 8), ("a", batch)]]
        handles = [updating.prepared(*rows, batch_id=batch, partition=part) for part, rows in enumerate(parts)]
        updating.commit(*reversed(handles), batch_id=batch)
        assert updating.rows() == [("a", batch), ("b", 2)]


@pytest.mark.parametrize(("place", "name"), [(sink_module, "drop"), (MarkTables, "show")])
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
    with pytest.raises(InvalidArgumentError, match="table constraint rejected"):
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
