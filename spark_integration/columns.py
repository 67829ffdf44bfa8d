"""Spark's types seen from Arrow, and what an operator can group by, keep and return."""

from __future__ import annotations

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
    VariantType,
    YearMonthIntervalType,
)

from holdfast.backends.arrow_rows import one_chunk
from holdfast.errors import InvalidArgumentError, SchemaMismatchError

WATERMARK_METADATA = "spark.watermarkDelayMs"

_NOT_CARRIED = (CalendarIntervalType, VariantType, YearMonthIntervalType)
_HINTS = {
    "map": "group by a column of another type, such as its JSON text (to_json)",
    "collated": "group by lower(column), or by the column collated as UTF8_BINARY",
    "type": "cast it to a type that Arrow carries, such as string or bigint",
}


def parse_struct(schema: StructType | str, what: str) -> StructType:
    """Return a schema given as Spark gives it: a `StructType` or a DDL string.

    Raises
    ------
    InvalidArgumentError
        It is neither, or has no columns.
    """
    if isinstance(schema, str):
        schema = StructType.fromDDL(schema)
    if not isinstance(schema, StructType) or not schema.fields:
        raise InvalidArgumentError(
            f"{what} must be a StructType or a DDL string with at least one column, as 'n long, total double'",
            given=type(schema).__name__,
        )
    return schema


def arrow_schema(schema: StructType, what: str) -> pa.Schema:
    """Return the Arrow schema in which Spark exchanges these columns with Python.

    Raises
    ------
    InvalidArgumentError
        A column's type cannot be exchanged, or two columns have one name.
    """
    names = [f.name for f in schema]
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated:
        raise InvalidArgumentError(f"{what} names a column twice", repeated=repeated)
    for field in schema:
        _require_carried(field.dataType, field.name, what)
    return pa.schema([pa.field(f.name, f.type) for f in to_arrow_schema(schema)])


def require_key_types(fields: list[StructField]) -> None:
    """Check that Spark's ``xxhash64`` and byte equality give the groups that Spark's ``groupBy`` gives.

    Raises
    ------
    InvalidArgumentError
        A key column, or a part of it, is a map or a collated string.
    """
    for field in fields:
        _require_key(field.dataType, field.name)


def _require_key(data_type: DataType, column: str) -> None:
    if isinstance(data_type, MapType):
        raise InvalidArgumentError(f"cannot group by map column {column!r}: {_HINTS['map']}")
    if isinstance(data_type, StringType) and getattr(data_type, "collation", "UTF8_BINARY") != "UTF8_BINARY":
        raise InvalidArgumentError(
            f"cannot group by collated column {column!r}: equal keys would have different bytes; "
            f"{_HINTS['collated']}",
            collation=data_type.collation,
        )
    if isinstance(data_type, ArrayType):
        _require_key(data_type.elementType, column)
    if isinstance(data_type, StructType):
        for part in data_type:
            _require_key(part.dataType, f"{column}.{part.name}")


def _require_carried(data_type: DataType, column: str, what: str) -> None:
    if isinstance(data_type, _NOT_CARRIED):
        raise InvalidArgumentError(
            f"column {column!r} of {what} cannot be used: {_HINTS['type']}", type=data_type.simpleString()
        )
    if isinstance(data_type, ArrayType):
        _require_carried(data_type.elementType, column, what)
    elif isinstance(data_type, MapType):
        _require_carried(data_type.keyType, column, what)
        _require_carried(data_type.valueType, column, what)
    elif isinstance(data_type, StructType):
        for part in data_type:
            _require_carried(part.dataType, f"{column}.{part.name}", what)
    else:
        try:
            to_arrow_schema(StructType([StructField(column, data_type)]))
        except (PySparkException, TypeError) as exc:
            raise InvalidArgumentError(
                f"column {column!r} of {what} cannot be used: {_HINTS['type']}", type=data_type.simpleString()
            ) from exc


def conform_output(table: object, schema: pa.Schema, operator: str) -> pa.RecordBatch:
    """Return what a user's function returned as one batch of the declared output columns.

    Raises
    ------
    SchemaMismatchError
        Not a table, or its columns are not the declared ones.
    """
    if not isinstance(table, (pa.Table, pa.RecordBatch)):
        raise SchemaMismatchError(
            "the function must return a pyarrow.Table, a pyarrow.RecordBatch or None",
            operator=operator,
            returned=type(table).__name__,
        )
    if sorted(table.schema.names) != sorted(schema.names):
        raise SchemaMismatchError(
            "the function returned other columns than outputStructType declares",
            operator=operator,
            missing=sorted(set(schema.names) - set(table.schema.names)),
            unexpected=sorted(set(table.schema.names) - set(schema.names)),
        )
    columns = []
    for field in schema:
        column = one_chunk(table.column(field.name))
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
                raise SchemaMismatchError(
                    f"the function returned column {field.name!r} in a type that does not fit: {exc}",
                    operator=operator,
                    returned=str(column.type),
                    declared=str(field.type),
                ) from exc
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)
