"""Checks an API's arguments when the step is defined; what Spark rejects fails with Spark's own error."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.shard.pointer_row import OPERATOR_NAME
from holdfast.spark_integration.spark_types import parse_struct
from holdfast.spark_integration.spark_versions import wrong_type
from holdfast.spark_integration.transport.transport import quoted


def operator_name(func: object, name: str | None) -> str:
    """Return the operator's name, which must be a valid folder name.

    Without a name it is that of the function or class, less the underscores that make it private: to Spark and others
    who read savepoints, a folder that begins with one is hidden.

    Raises `InvalidArgumentError` if neither the caller nor the function names it, or it is not a valid folder name.
    """
    chosen = getattr(func, "__name__", "").lstrip("_") if name is None else name
    if not isinstance(chosen, str) or not OPERATOR_NAME.fullmatch(chosen):
        raise InvalidArgumentError(
            f"{chosen!r} cannot name an operator: pass name= with letters, digits, '_', '.' and '-', beginning with a "
            "letter or digit, at most 100 characters"
        )
    return chosen


def declared_struct(schema: StructType | str, what: str) -> StructType:
    """Return a schema passed to one of Spark's own APIs; raise Spark's errors.

    Raises `ParseException` or `PySparkTypeError` if it is no struct, and `InvalidArgumentError` if it has no columns.
    """
    parsed: object = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(parsed, StructType):
        raise wrong_type(what, "StructType or str", schema)
    return parse_struct(parsed, what)


def require_accepted_by_spark(
    df: DataFrame,
    func: Any,
    output: StructType | str,
    state: StructType,
    output_mode: str,
    timeout_conf: str,
) -> None:
    """Raise what Spark raises for these arguments: define its own ``applyInPandasWithState`` and discard it."""
    if not isinstance(output_mode, str):
        raise wrong_type("outputMode", "str", output_mode)
    # Any column will do as the key: Spark rejects expressions here, holdfast accepts them.
    grouped = df.groupBy(quoted(df.columns[0]))
    grouped.applyInPandasWithState(func, output, state, output_mode, timeout_conf)
