"""Converts between Spark's and Arrow's types, and checks what an operator can group by, store and return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.errors import ParseException
from pyspark.sql import types as T  # noqa: N812

from holdfast.backends.arrow.rows import is_same_kind, nullable_type, one_chunk, storage_type
from holdfast.backends.arrow.values import cast, forbidden_null
from holdfast.errors import InvalidArgumentError, SchemaMismatchError

WATERMARK_METADATA = "spark.watermarkDelayMs"
#: Replaces Spark's mark on times that Spark's own operators would consider late.
_DELAY_METADATA, _HELD_BACK_METADATA = "holdfast.watermarkDelayMs", "holdfast.heldBackMs"

# The types in which Spark exchanges columns with Python. Spark's own conversion is private, and its parameters change
# from release to release.
_ARROW_TYPES: dict[type[T.DataType], pa.DataType] = {
    T.BinaryType: pa.binary(),
    T.BooleanType: pa.bool_(),
    T.ByteType: pa.int8(),
    T.DateType: pa.date32(),
    T.DayTimeIntervalType: pa.duration("us"),
    T.DoubleType: pa.float64(),
    T.FloatType: pa.float32(),
    T.IntegerType: pa.int32(),
    T.LongType: pa.int64(),
    T.NullType: pa.null(),
    T.ShortType: pa.int16(),
    T.TimestampNTZType: pa.timestamp("us"),
    T.TimestampType: pa.timestamp("us", "UTC"),
}
# Types that Spark only sends to Python, by class name, since older releases lack the classes. State, keys and output
# cannot have them.
_ONLY_SENT: dict[str, pa.DataType] = {
    "GeographyType": pa.struct([pa.field("srid", pa.int32(), False), pa.field("wkb", pa.binary(), False)]),
    "GeometryType": pa.struct([pa.field("srid", pa.int32(), False), pa.field("wkb", pa.binary(), False)]),
    "TimeType": pa.time64("ns"),
    "VariantType": pa.struct([pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False)]),
}


class Watermark(NamedTuple):
    """The watermark of an event-time column: a row is late after `delay_ms` plus `held_back_ms`."""

    delay_ms: int
    held_back_ms: int = 0

    @classmethod
    def of(cls, field: T.StructField) -> Watermark | None:
        """Return the watermark of a column; None if it has none."""
        metadata = field.metadata or {}
        if WATERMARK_METADATA in metadata:
            return cls(int(metadata[WATERMARK_METADATA]))
        if _DELAY_METADATA in metadata:
            return cls(int(metadata[_DELAY_METADATA]), int(metadata[_HELD_BACK_METADATA]))
        return None

    def later(self, ms: int) -> Watermark:
        """Return the watermark of rows that may be later by `ms`."""
        return self._replace(held_back_ms=self.held_back_ms + ms)

    @property
    def metadata(self) -> dict[str, int]:
        """The mark in column metadata: Spark's own, unless Spark's operators would drop held-back rows as late."""
        if not self.held_back_ms:
            return {WATERMARK_METADATA: self.delay_ms}
        return {_DELAY_METADATA: self.delay_ms, _HELD_BACK_METADATA: self.held_back_ms}

    @staticmethod
    def removed(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a column's metadata without its mark."""
        marks = (WATERMARK_METADATA, _DELAY_METADATA, _HELD_BACK_METADATA)
        return {name: value for name, value in (metadata or {}).items() if name not in marks}


def parse_struct(schema: T.StructType | str, what: str) -> T.StructType:
    """Return a schema given in Spark's forms: a `StructType` or a DDL string. Raises `InvalidArgumentError`."""
    try:
        parsed = T.StructType.fromDDL(schema) if isinstance(schema, str) else schema
    except ParseException as exc:
        raise InvalidArgumentError(f"{what} is not a DDL string: {exc}") from exc
    if not isinstance(parsed, T.StructType) or not parsed.fields:
        raise InvalidArgumentError(
            f"{what} must be a StructType or a DDL string with at least one column, such as 'n long, total double'",
            given=type(schema).__name__,
        )
    return parsed


def arrow_schema(schema: T.StructType, what: str, *, keep_not_null: bool = False) -> pa.Schema:
    """Return the Arrow schema in which Spark exchanges columns with Python; nullable unless `keep_not_null`."""
    types = _arrow_types(schema, what, {})
    return pa.schema([pa.field(f.name, t, f.nullable or not keep_not_null) for f, t in zip(schema, types, strict=True)])


def sent_schema(schema: T.StructType, what: str) -> pa.Schema:
    """Return the Arrow schema in which Spark sends a function its rows, including columns that state cannot hold."""
    return pa.schema(list(zip(schema.names, _arrow_types(schema, what, _ONLY_SENT), strict=True)))


def _arrow_types(schema: T.StructType, what: str, only_sent: Mapping[str, pa.DataType]) -> list[pa.DataType]:
    names = schema.names
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated:
        raise InvalidArgumentError(f"{what} names a column twice", repeated=repeated)
    return [_arrow_type(f.dataType, f.name, what, only_sent) for f in schema]


def _arrow_type(t: T.DataType, column: str, what: str, only_sent: Mapping[str, pa.DataType]) -> pa.DataType:
    def part(of: T.DataType, name: str = column) -> pa.DataType:
        return _arrow_type(of, name, what, only_sent)

    if isinstance(t, T.ArrayType):
        element = part(t.elementType)
        # Arrow refuses the elements of ``array()``, which have type null but are not nullable.
        return pa.list_(pa.field("element", element, t.containsNull or pa.types.is_null(element)))
    if isinstance(t, T.MapType):
        return pa.map_(part(t.keyType), pa.field("value", part(t.valueType), t.valueContainsNull))
    if isinstance(t, T.StructType):
        return pa.struct([pa.field(f.name, part(f.dataType, f"{column}.{f.name}"), f.nullable) for f in t])
    if isinstance(t, T.DecimalType):
        return pa.decimal128(t.precision, t.scale)
    if isinstance(t, T.StringType):
        return pa.string()
    if only_sent and isinstance(t, T.UserDefinedType):
        return part(t.sqlType())
    if type(t).__name__ in only_sent:
        return only_sent[type(t).__name__]
    if type(t) not in _ARROW_TYPES:
        raise InvalidArgumentError(
            f"column {column!r} of {what} has a type that cannot be used: cast it to a type that Arrow supports, "
            "such as string or bigint",
            type=t.simpleString(),
        )
    return _ARROW_TYPES[type(t)]


def types_of_keys(fields: list[T.StructField]) -> pa.Schema:
    """Return the Arrow schema of keys, nullable at any depth: stored keys may have nulls where a frame's have none."""
    types = arrow_schema(T.StructType(fields), "the keys")
    return pa.schema([field.with_type(nullable_type(field.type)) for field in types])


def spark_type(t: pa.DataType) -> T.DataType:
    """Return Spark's type of a stored column; the inverse of `arrow_schema` and `storage_type`."""
    for spark, arrow in _ARROW_TYPES.items():
        if t == storage_type(arrow):
            return spark()
    if pa.types.is_large_string(t):
        return T.StringType()
    if pa.types.is_decimal128(t):
        return T.DecimalType(t.precision, t.scale)
    if pa.types.is_large_list(t):
        return T.ArrayType(spark_type(t.value_type), t.value_field.nullable)
    if pa.types.is_map(t):
        return T.MapType(spark_type(t.key_type), spark_type(t.item_type), t.item_field.nullable)
    if pa.types.is_struct(t):
        return T.StructType([T.StructField(f.name, spark_type(f.type), f.nullable) for f in t])
    raise InvalidArgumentError("Spark has no type for a stored column", type=t)


def type_name(t: pa.DataType) -> str:
    """Return Spark's name of a type, or Arrow's if Spark has none."""
    try:
        return str(spark_type(t).simpleString())
    except InvalidArgumentError:
        return str(t)


def require_key_types(fields: list[T.StructField]) -> None:
    """Check that Spark's ``xxhash64`` and byte equality group as Spark's ``groupBy`` does."""
    for field in fields:
        _require_key(field.dataType, field.name)


def _require_key(data_type: T.DataType, column: str) -> None:
    if isinstance(data_type, T.MapType):
        raise InvalidArgumentError(
            f"cannot group by map column {column!r}: group by a different column, such as its JSON text (to_json)"
        )
    if isinstance(data_type, T.StringType) and getattr(data_type, "collation", "UTF8_BINARY") != "UTF8_BINARY":
        raise InvalidArgumentError(
            f"cannot group by collated column {column!r}: equal keys would have different bytes; group by "
            "lower(column), or by the column collated as UTF8_BINARY",
            collation=data_type.collation,
        )
    if isinstance(data_type, T.ArrayType):
        _require_key(data_type.elementType, column)
    if isinstance(data_type, T.StructType):
        for part in data_type:
            _require_key(part.dataType, f"{column}.{part.name}")


def require_utf8(rows: pa.Table | pa.RecordBatch, what: str, who: str = "Python and pandas cannot hold") -> None:
    """Raise unless text is UTF-8, which Spark does not ensure; `what` and `who` go into the error."""
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        try:
            column.validate(full=True)
        except ValueError as exc:
            raise InvalidArgumentError(
                f"column {name!r} of {what} has text that is not UTF-8, which {who}: make it valid with "
                "make_valid_utf8(column), or keep it as binary"
            ) from exc


def owned(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Copy a column into its own memory: Arrow arrays may share numpy memory that its owner still changes."""
    whole = one_chunk(column)
    return pa.concat_arrays([whole, whole.slice(0, 0)])


def conform_output(table: object, schema: pa.Schema, operator: str) -> pa.RecordBatch:
    """Return a user function's result as one batch of the declared output columns."""
    if not isinstance(table, (pa.Table, pa.RecordBatch)):
        raise SchemaMismatchError(
            "the function must return a pyarrow.Table, a pyarrow.RecordBatch, a dict of columns or None",
            operator=operator,
            returned=type(table).__name__,
        )
    if sorted(table.schema.names) != sorted(schema.names):
        raise SchemaMismatchError(
            "the function returned different columns than outputStructType declares",
            operator=operator,
            missing=sorted(set(schema.names) - set(table.schema.names)),
            unexpected=sorted(set(table.schema.names) - set(schema.names)),
        )
    columns = []
    for field in schema:
        column = _cast_output(owned(table.column(field.name)), field, operator)
        require_nulls_allowed(column, field, "the function", operator=operator)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def require_nulls_allowed(column: pa.Array, field: pa.Field, whose: str, **facts: object) -> None:
    """Check that output has nulls, at any depth, only where `field` allows: Spark would read others as 0."""
    if column.null_count and not field.nullable:
        raise SchemaMismatchError(
            f"{whose} returned nulls in column {field.name!r}, which outputStructType declares NOT NULL",
            **facts,
            nulls=column.null_count,
        )
    if forbidden := forbidden_null(column):
        raise SchemaMismatchError(
            f"{whose} returned nulls inside column {field.name!r}, in {forbidden}, which outputStructType declares "
            "NOT NULL",
            **facts,
        )


def _cast_output(column: pa.Array, field: pa.Field, operator: str) -> pa.Array:
    problem = f"the function returned column {field.name!r} in a type that does not fit"
    facts = {"operator": operator, "returned": str(column.type), "declared": str(field.type)}
    if not is_same_kind(column.type, field.type):
        raise SchemaMismatchError(f"{problem}: convert it first", **facts)
    try:
        return cast(column, field.type)
    except (ValueError, pa.ArrowNotImplementedError) as exc:
        raise SchemaMismatchError(f"{problem}: {exc}", **facts) from exc
