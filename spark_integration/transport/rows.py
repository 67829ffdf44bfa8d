"""The `rows` transport: Spark computes the route and sends the rows as they are.

Spark hands rows to ``applyInPandasWithState`` as pandas frames, which lose what Arrow keeps: a null integer
becomes a float, a null float becomes NaN, a time beyond 2262 fails, and a wall-clock time is ambiguous when
clocks go back. So each column travels in a form that survives pandas, and the worker decodes it:

=====================================  =============================================
integers, floats, booleans             the value, 0 where null, and a null flag
date                                   days since 1970 and a null flag
timestamp                              microseconds since 1970 and a null flag
string                                 its bytes, which need not be UTF-8
binary, decimal                        as they are
=====================================  =============================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    FractionalType,
    IntegralType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.transport.late_rows import NEVER_LATE
from holdfast.spark_integration.transport.route_columns import route_column
from holdfast.spark_integration.transport.routes import ROUTE
from holdfast.spark_integration.transport.transport import EventTime, Gather, Received, quoted

_AS_THEY_ARE = (BinaryType, DecimalType)


def carries(data_type: DataType) -> bool:
    """Whether the `rows` transport carries columns of this type."""
    carried = (NumericType, BooleanType, DateType, TimestampType, StringType, *_AS_THEY_ARE)
    return isinstance(data_type, carried)


@dataclass(frozen=True)
class RowsTransport:
    """Rows as Spark ships them, with null flags.

    Attributes
    ----------
    shards : int
    schema : StructType
        Of the columns to carry; the last is the hash, which is never null.
    arrow_schema : pyarrow.Schema
        Of the table to receive.
    event_time : EventTime or None
    """

    shards: int
    schema: StructType
    arrow_schema: pa.Schema
    event_time: EventTime | None

    def __post_init__(self) -> None:
        for field in self.schema:
            if not carries(field.dataType):
                raise InvalidArgumentError(
                    f"the rows transport cannot carry column {field.name!r}: drop the column, or set "
                    "spark.holdfast.transport to packed",
                    type=field.dataType.simpleString(),
                )

    def send(self, frame: DataFrame, hashed: Column) -> DataFrame:
        columns: list[Column] = []
        for i, field in enumerate(self.schema.fields[:-1]):
            columns += _encode(quoted(field.name), field, f"c{i}")
        if self.event_time is not None:
            sent = self.event_time.sent
            later_us = self.event_time.later_us
            # Up to the end of time, beyond which Spark fails; what has no time is never late either.
            at = F.least(F.unix_micros(quoted(self.event_time.column)), F.lit(NEVER_LATE - later_us)) + later_us
            moment = at if self.event_time.filters_rows else F.lit(None)
            columns.append(moment.cast(sent.dataType).alias(sent.name, metadata=sent.metadata))
        last = f"c{len(self.schema) - 1}"
        encoded = frame.select(*columns, hashed.alias(last))
        return encoded.select("*", route_column(F.col(last), self.shards).alias(ROUTE))

    def receive(self, chunks: Iterable[pd.DataFrame], gather: Gather) -> Received:
        rows = gather(self._decode(chunk) for chunk in chunks if len(chunk))
        return Received(rows, None if self.event_time is not None and self.event_time.filters_rows else 0)

    def _decode(self, chunk: pd.DataFrame) -> pa.Table:
        columns = []
        for i, field in enumerate(self.arrow_schema):
            values, nulls = chunk[f"c{i}"], chunk.get(f"c{i}n")
            if pa.types.is_string(field.type):
                columns.append(pa.Array.from_pandas(values, type=pa.binary()).view(field.type))
            elif nulls is None:
                columns.append(pa.Array.from_pandas(values, type=field.type))
            else:
                plain = pa.array(values.to_numpy(), mask=nulls.to_numpy())
                columns.append(_reinterpret(plain, field.type))
        return pa.Table.from_arrays(columns, schema=self.arrow_schema)


def _reinterpret(values: pa.Array, data_type: pa.DataType) -> pa.Array:
    if pa.types.is_date32(data_type):
        return values.cast(pa.int32()).view(data_type)
    if pa.types.is_timestamp(data_type):
        return values.view(data_type)
    return values.cast(data_type)


def _encode(column: Column, field: StructField, name: str) -> list[Column]:
    """Return the columns in which a column travels."""
    t = field.dataType
    if isinstance(t, _AS_THEY_ARE):
        return [column.alias(name)]
    if isinstance(t, StringType):
        return [column.cast("binary").alias(name)]
    if isinstance(t, DateType):
        value = F.unix_date(column)
    elif isinstance(t, TimestampType):
        value = F.unix_micros(column)
    else:
        value = column
    zero = F.lit(False) if isinstance(t, BooleanType) else F.lit(0).cast(_number_type(t))
    return [F.coalesce(value, zero).alias(name), column.isNull().alias(f"{name}n")]


def _number_type(t: DataType) -> DataType | str:
    if isinstance(t, (IntegralType, FractionalType)):
        return t
    return "int" if isinstance(t, DateType) else "long"
