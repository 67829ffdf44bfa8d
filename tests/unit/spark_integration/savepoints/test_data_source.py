"""The data source of savepoints without Spark: what the driver says of a table, and what executors read."""

from __future__ import annotations

import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints.data_source import SavepointSource
from holdfast.spark_integration.spark_types import arrow_schema, spark_type
from holdfast.spark_integration.tables.timers import timers_schema
from tests.unit.snapshotter.savepoints.sample import KEY, STATE, a_savepoint

ALL_TYPES = pa.schema(
    [
        ("s", pa.string()),
        ("b", pa.binary()),
        ("d", pa.decimal128(10, 2)),
        ("t", pa.timestamp("us", "UTC")),
        ("l", pa.list_(pa.field("element", pa.string()))),
        ("m", pa.map_(pa.string(), pa.list_(pa.field("element", pa.int32())))),
        ("r", pa.struct([("x", pa.float32()), ("y", pa.list_(pa.field("element", pa.binary())))])),
        ("i", pa.duration("us")),
        ("n", pa.int8()),
    ]
)
ROWS = [
    {
        "s": "a",
        "b": b"\0",
        "d": decimal.Decimal("1.50"),
        "t": 5,
        "l": ["x", None],
        "m": [("k", [1, None])],
        "r": {"x": 0.5, "y": [b"z"]},
        "i": 7,
        "n": -1,
    },
    dict.fromkeys(ALL_TYPES.names),
]


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target)
    return tmp_path / "one"


def rows_of(source: SavepointSource) -> list[dict[str, Any]]:
    reader = source.reader(source.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]  # type: ignore[union-attr]


def test_a_table_has_its_keys_values_and_shard(savepoint: Path) -> None:
    """A partition for each piece, whose batches have exactly the columns that the driver promised."""
    source = SavepointSource({"path": f"{savepoint}/", "operator": "totals"})
    assert source.schema().simpleString() == "struct<user:string,n:bigint,shard:int>"
    found = rows_of(source)
    assert len(found) == 200
    assert found[0] == {"user": "u0", "n": 0, "shard": 0}
    reader = source.reader(source.schema())
    (batch, *_) = reader.read(reader.partitions()[0])
    assert batch.schema == arrow_schema(source.schema(), "x")  # type: ignore[union-attr]


def test_every_type_of_state_goes_to_spark_and_keeps_its_values(tmp_path: Path) -> None:
    schema = TableSchema.of("state", pa.schema([("user", pa.int64())]), ALL_TYPES)
    values = pa.RecordBatch.from_pylist(ROWS, schema=schema.value)
    keys = Keys(np.arange(2, dtype=np.uint64), pa.record_batch([pa.array([1, 2])], schema=schema.key))
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target, tables=(schema,), run=Run.build(schema, keys, values))
    source = SavepointSource({"path": str(tmp_path / "one")})
    kept = [{name: row[name] for name in ALL_TYPES.names} for row in rows_of(source)[:2]]
    assert kept == pa.RecordBatch.from_pylist(ROWS, schema=ALL_TYPES).to_pylist()


def test_names_that_are_taken(tmp_path: Path) -> None:
    """As read_state has them; the column of shards gives way."""
    schema = TableSchema.of("state", KEY, pa.schema([("user", pa.int64()), ("shard", pa.int64())]))
    no_keys = Keys(np.zeros(0, np.uint64), pa.record_batch([pa.array([], pa.large_string())], schema=KEY))
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target, tables=(schema,), run=Run.build(schema, no_keys, None))
    names = SavepointSource({"path": str(tmp_path / "one")}).schema().names
    assert names == ["user", "value.user", "shard", "_shard"]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, InvalidArgumentError, "load the path of a savepoint"),
        ({"path": "one"}, InvalidArgumentError, "load the path of a savepoint"),
        ({"path": "{}", "batchid": "1"}, InvalidArgumentError, "no such option"),
        ({"path": "{}", "operator": "total"}, NotFoundError, "no such operator.*operators=totals"),
        ({"path": "{}", "table": "stat"}, NotFoundError, "no such table.*tables='state, v.a/b:c'"),
        ({"path": "{}-two"}, NotFoundError, "no savepoint of this name"),
    ],
)
def test_what_is_not_there_is_said(
    savepoint: Path, options: dict[str, str], error: type[HoldfastError], said: str
) -> None:
    with pytest.raises(error, match=said):
        SavepointSource({name: value.format(savepoint) for name, value in options.items()}).schema()


def test_columns_are_the_savepoints(savepoint: Path) -> None:
    source = SavepointSource({"path": str(savepoint)})
    with pytest.raises(InvalidArgumentError, match="knows its columns"):
        source.reader(StructType([StructField("user", StringType())]))


def test_a_variable_has_the_name_that_its_processor_gave_it(savepoint: Path) -> None:
    assert SavepointSource({"path": str(savepoint), "table": "a/b:c"}).schema().names == ["user", "n", "shard"]


def test_tables_by_time_are_holdfasts_own() -> None:
    """Their numbers have no type in Spark."""
    with pytest.raises(InvalidArgumentError, match="Spark has no type"):
        spark_type(timers_schema("t", STATE.key).value.field(0).type)
