"""What an operator's record and tables say, or the error that hides it; with Spark's types, which users know."""

from __future__ import annotations

import pyarrow as pa

from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, read_operator
from holdfast.snapshotter.ownership.stored_tables import stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.spark_types import spark_type

#: By table, its ``key`` and ``value`` columns as name and type.
SparkTables = dict[str, dict[str, list[tuple[str, str]]]]


def record_of(storage: ObjectStorage, operator: str) -> OperatorRecord | HoldfastError:
    """Return an operator's record, or the error if it is damaged, or deleted since it was listed."""
    try:
        return read_operator(storage, operator)
    except (CorruptionError, NotFoundError) as exc:
        return exc


def tables_of(storage: ObjectStorage, record: OperatorRecord | HoldfastError) -> SparkTables | HoldfastError:
    """Return the tables that an operator's state holds by now, or the error of its record or tables."""
    if isinstance(record, HoldfastError):
        return record
    try:
        schemas = stored_tables(storage, record).live
    except (CorruptionError, NotFoundError) as exc:
        return exc
    return {
        name: {
            side: [(field.name, _type_name(field.type)) for field in columns]
            for side, columns in (("key", schema.key), ("value", schema.value))
        }
        for name, schema in schemas.items()
    }


def _type_name(stored: pa.DataType) -> str:
    """Return Spark's name of a stored type, or Arrow's if Spark has none."""
    try:
        return str(spark_type(stored).simpleString())
    except InvalidArgumentError:
        return str(stored)
