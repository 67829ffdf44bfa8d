"""The table of Spark's types in Arrow is our own, and says what Spark really sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.sql import types as T  # noqa: N812

from holdfast.spark_integration.spark_types import arrow_schema
from tests.unit.spark_integration.test_spark_types import COLLATED, ORDINARY, field

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_spark_exchanges_these_very_arrow_types_with_python(spark: SparkSession) -> None:
    """The table of types is our own: it must say what Spark really sends, nested names and nullability included."""
    more = [T.MapType(T.StringType(), T.LongType()), T.MapType(T.IntegerType(), T.ArrayType(COLLATED), False), COLLATED]
    schema = T.StructType([field(t, f"c{i}") for i, t in enumerate([*ORDINARY, *more])])
    frame = spark.createDataFrame([], schema).union(spark.range(1).selectExpr(*["null"] * len(schema)))

    def tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"schema": pa.array([batch.schema.serialize().to_pybytes()])})

    told = [pa.ipc.read_schema(pa.py_buffer(row.schema)) for row in frame.mapInArrow(tell, "schema binary").collect()]
    expected = arrow_schema(schema, "the input")
    assert told
    assert dict(zip(told[0].names, told[0].types, strict=True)) == dict(
        zip(expected.names, expected.types, strict=True)
    )
    nested = [(a.type, b.type) for a, b in zip(told[0], expected, strict=True) if a.type.num_fields]
    assert [a.field(0).nullable for a, _ in nested] == [b.field(0).nullable for _, b in nested]
