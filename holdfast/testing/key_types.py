"""Keys that a test gives, as rows of grouping columns whose types the first one tells."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.spark_types import arrow_schema, require_key_types

# A bool is an int and a datetime is a date: those stand first.
_TYPES: Sequence[tuple[tuple[type, ...], DataType]] = (
    ((bool, np.bool_), BooleanType()),
    ((int, np.integer), LongType()),
    ((float, np.floating), DoubleType()),
    ((str, type(None)), StringType()),
    ((bytes, bytearray), BinaryType()),
    ((dt.datetime,), TimestampType()),
    ((dt.date,), DateType()),
    ((Decimal,), DecimalType(38, 18)),
)


class GroupingColumns:
    """The grouping columns of a test.

    Parameters
    ----------
    schema : StructType

    Raises
    ------
    InvalidArgumentError
        A type cannot be grouped by.
    """

    def __init__(self, schema: StructType) -> None:
        require_key_types(schema.fields)
        self.schema = schema
        self.types = arrow_schema(schema, "the keys")

    @classmethod
    def of_key(cls, key: Any) -> GroupingColumns:
        """Return the columns of a key with these values; None counts as a string.

        Raises
        ------
        InvalidArgumentError
            A value tells no type.
        """
        return cls(StructType([StructField(f"_{at}", _type_of(value)) for at, value in enumerate(_values(key), 1)]))

    def rows(self, key: Any, n: int) -> pa.Table:
        """Return `n` rows with this key.

        Raises
        ------
        InvalidArgumentError
            It does not fit the columns.
        """
        values = _values(key)
        facts = {"key": repr(key), "columns": self.schema.simpleString()}
        if len(values) != len(self.schema):
            raise InvalidArgumentError("a key has one value for each grouping column", **facts)
        try:
            row = spark_versions.rows_to_arrow([values], self.schema).cast(self.types)
        except (TypeError, ValueError, ArithmeticError, AssertionError) as exc:  # of Arrow, and of Spark
            raise InvalidArgumentError(
                f"the key does not fit the grouping columns, whose types are those of the first key unless the tester "
                f"is given keyStructType: {exc}",
                **facts,
            ) from exc
        return row.take(pa.array([0] * n, pa.int64()))


def _values(key: Any) -> tuple[Any, ...]:
    return tuple(key) if isinstance(key, tuple) else (key,)


def _type_of(value: Any) -> DataType:
    for types, data_type in _TYPES:
        if isinstance(value, types):
            return data_type
    raise InvalidArgumentError(
        "the type of a grouping column cannot be told from its value: pass keyStructType", given=type(value).__name__
    )
