"""The tables of an operator's state with Spark's types, which their users know."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from holdfast.backends.schema import TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.spark_types import spark_type

#: By table, its ``key`` and ``value`` columns as name and type.
SparkTables = dict[str, dict[str, list[tuple[str, str]]]]


def spark_tables(schemas: Mapping[str, TableSchema]) -> SparkTables:
    """Return the columns of tables as Spark names their types."""
    return {
        name: {
            side: [(field.name, type_name(field.type)) for field in columns]
            for side, columns in (("key", schema.key), ("value", schema.value))
        }
        for name, schema in schemas.items()
    }


def type_name(stored: pa.DataType) -> str:
    """Return Spark's name of a stored type, or Arrow's if Spark has none."""
    try:
        return str(spark_type(stored).simpleString())
    except InvalidArgumentError:
        return str(stored)
