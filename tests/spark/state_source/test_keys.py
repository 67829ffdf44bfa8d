"""The hash of a key is Spark's, whatever the key: or a filter on it would find nothing."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField, StructType, TimestampType

from holdfast import savepoints
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.lookup.keys import hash_of_key
from holdfast.spark_integration.spark_types import arrow_schema
from tests.spark.conftest import Lab
from tests.unit.snapshotter.savepoints.sample import a_savepoint

pytestmark = pytest.mark.spark
UTC = dt.UTC
#: By type: values that hashes, or their way through filters, might get wrong.
VALUES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "tinyint": [-128, 127],
    "smallint": [-32768, 5],
    "int": [-(2**31), 2**31 - 1],
    "bigint": [-(2**63), 2**63 - 1, 0],
    "float": [-0.0, math.nan, 1.1, math.inf],
    "double": [-0.0, math.nan, 1.1, -math.inf],
    "string": ["", "a", "日本語" * 20, "\0x"],
    "binary": [b"", b"\0\xff" * 40],
    "date": [dt.date(1969, 12, 31), dt.date(2026, 11, 23)],
    "timestamp": [dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), dt.datetime(2026, 11, 23, 1, 2, 3, 4, UTC)],
    "timestamp_ntz": [dt.datetime(1969, 12, 31, 23, 59, 59, 1), dt.datetime(2026, 11, 23, 1, 2, 3, 4)],  # noqa: DTZ001
    "decimal(10,2)": [Decimal("-1.50"), Decimal("12345678.90")],
    "decimal(18,0)": [Decimal(10**18 - 1), Decimal(-1)],
    "decimal(38,3)": [Decimal("-0.128"), Decimal("0.128"), Decimal("12345678901234567890.125"), Decimal("-1e30")],
    "decimal(38,0)": [Decimal(12345678901234567890123456789012345678), Decimal(1 - 10**38)],
    "interval day to second": [dt.timedelta(days=-3, microseconds=7)],
    "array<string>": [["a", None, ""], [], [None]],
    "struct<x:double,y:array<int>>": [{"x": -0.0, "y": [1, None]}, {"x": math.nan, "y": None}, {"x": None, "y": []}],
}


#: Spark keeps filters on intervals to itself, rounds long decimals in them, and nested columns are left to it.
LEFT_TO_SPARK = ("interval", "decimal(38,0)", "array", "struct")
FILTERED = {kind: values for kind, values in VALUES.items() if not kind.startswith(LEFT_TO_SPARK)}


def keys_of(spark: SparkSession) -> tuple[pa.Schema, pa.RecordBatch, list[int]]:
    """Return keys with a column of each type, in storage types, and Spark's hashes of them."""
    types = [StructType.fromDDL(f"c {kind}")["c"].dataType for kind in FILTERED]
    schema = StructType([StructField(f"c{i}", t) for i, t in enumerate(types)])
    rows = [tuple(values[n % len(values)] for values in FILTERED.values()) for n in range(12)]
    rows.append(tuple(None for _ in types))
    frame = spark.createDataFrame(rows, schema)
    hashes = [row[0] & (2**64 - 1) for row in frame.select(F.xxhash64(*frame.columns)).collect()]
    table = TableSchema.of("state", arrow_schema(schema, "keys"), pa.schema([("n", pa.int64())]))
    given = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], arrow_schema(schema, "k"))
    return table.key, Keys.of(table, np.array(hashes, np.uint64), given).columns, hashes


def test_hashes_are_sparks(spark: SparkSession) -> None:
    """Of each type alone, and of all of them one after the other."""
    for kind, values in VALUES.items():
        schema = StructType.fromDDL(f"c {kind}")
        frame = spark.createDataFrame([(value,) for value in [*values, None]], schema)
        expected = [row[0] & (2**64 - 1) for row in frame.select(F.xxhash64("c")).collect()]
        table = TableSchema.of("t", arrow_schema(schema, "t"), pa.schema([]))
        given = pa.table({"c": pa.array([*values, None], arrow_schema(schema, "t").field("c").type)})
        column = table.conform(given, "key").column(0)
        assert [hash_of_key([value]) for value in column] == expected, kind
    _, keys, hashes = keys_of(spark)
    assert [hash_of_key([column[row] for column in keys.columns]) for row in range(len(hashes))] == hashes


def test_what_spark_does_not_hash_is_not_hashed_here() -> None:
    """Grouping by maps is refused."""
    assert hash_of_key([pa.scalar([("a", 1)], pa.map_(pa.large_string(), pa.int64()))]) is None
    assert hash_of_key([pa.scalar(None, pa.map_(pa.large_string(), pa.int64()))]) is None


@pytest.mark.all
def test_a_key_of_every_type_finds_its_row(lab: Lab) -> None:
    """Reading only the piece that may have the key."""
    key, columns, hashes = keys_of(lab.spark)
    schema = TableSchema.of("state", key, pa.schema([("n", pa.int64())]))
    run = Run.build(
        schema,
        Keys(np.array(hashes, np.uint64), columns),
        pa.record_batch([pa.array(range(len(hashes)), pa.int64())], schema=schema.value),
    )
    with open_storage(str(lab.folder)) as target:
        made = a_savepoint(target, tables=(schema,), run=run)
    everything = savepoints.load(lab.spark, lab.folder, "one")
    by_n = {row["n"]: row for row in everything.collect() if row["shard"] == 0}
    for n in (0, 1, 2, len(hashes) - 1):
        others = [
            lab.folder / "one" / piece.key
            for piece in made.operators[0].pieces
            if not piece.first_hash <= hashes[n] <= piece.last_hash
        ]
        assert others
        for path in others:
            path.rename(path.with_suffix(".away"))
        looked_up = {name: by_n[n][name] for name in key.names}
        for name, value in looked_up.items():  # `collect` shows times in the zone of this process
            if isinstance(value, dt.datetime) and isinstance(everything.schema[name].dataType, TimestampType):
                looked_up[name] = value.astimezone(UTC)
        assert {row["n"] for row in savepoints.load(lab.spark, lab.folder, "one", key=looked_up).collect()} == {n}
        for path in others:
            path.with_suffix(".away").rename(path)
