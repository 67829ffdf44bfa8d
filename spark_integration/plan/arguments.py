"""Checks the arguments of an API when the step is defined; what Spark refuses fails with Spark's own error."""

from __future__ import annotations

from typing import Any

from pyspark.errors import PySparkTypeError
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.shard.operator_directory import OPERATOR_NAME
from holdfast.spark_integration.spark_types import parse_struct
from holdfast.spark_integration.transport.transport import quoted


def operator_name(func: object, name: str | None) -> str:
    """Return the operator's name, which must be usable as a folder's name.

    Raises
    ------
    InvalidArgumentError
        It is not given and the function has none, or it cannot be a folder's name.
    """
    chosen = getattr(func, "__name__", "") if name is None else name
    if not isinstance(chosen, str) or not OPERATOR_NAME.fullmatch(chosen):
        raise InvalidArgumentError(
            f"{chosen!r} cannot name an operator: give one in name=, of letters, digits, '_', '.' and '-', "
            "beginning with a letter or digit, at most 100 long"
        )
    return chosen


def declared_struct(schema: StructType | str, what: str) -> StructType:
    """Return a schema given to one of Spark's own APIs; raise Spark's errors.

    Raises
    ------
    ParseException
        No DDL string.
    PySparkTypeError
        Neither a `StructType` nor a string, or a string that is a type of another kind.
    InvalidArgumentError
        It has no columns.
    """
    parsed: object = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(parsed, StructType):
        raise _wrong_argument(what, "StructType or str", schema)
    return parse_struct(parsed, what)


def require_accepted_by_spark(
    df: DataFrame,
    func: Any,
    output: StructType | str,
    state: StructType,
    output_mode: str,
    timeout_conf: str,
) -> None:
    """Raise what Spark raises for these arguments: its own ``applyInPandasWithState`` is defined, and dropped."""
    if not isinstance(output_mode, str):
        raise _wrong_argument("outputMode", "str", output_mode)
    # Grouped by any column: Spark refuses expressions as keys here; holdfast accepts them.
    grouped = df.groupBy(quoted(df.columns[0]))
    grouped.applyInPandasWithState(func, output, state, output_mode, timeout_conf)


def _wrong_argument(name: str, expected: str, given: object) -> PySparkTypeError:
    return PySparkTypeError(
        errorClass="NOT_EXPECTED_TYPE",
        messageParameters={"arg_name": name, "expected_type": expected, "arg_type": type(given).__name__},
    )
