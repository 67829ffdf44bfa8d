"""What differs between the versions of Spark that holdfast runs on; no other module checks the version.

=================================  =====================  =====================  ==========================
                                   4.0                    4.1                    4.2 and later
=================================  =====================  =====================  ==========================
pandas and Arrow in the worker     its serializer         its serializer         ``pyspark.sql.conversion``
output of a different type         rejected               cast                   cast
integers for decimals              rejected               by a setting           by a setting
integers with nulls, in pandas     floats                 floats                 nullable, by a setting
frames and keys of a processor     as Arrow has them      Python's values, but   Python's values
                                                          where an initial
                                                          state is read
number of state partitions         shuffle partitions of  a property of the      a property of the
                                   the run's session      run's session          run's session
binaries in a state                bytearray              bytes                  bytes
error for a wrong argument         NOT_STR, …             NOT_STR, …             NOT_EXPECTED_TYPE
Java                               17, 21                 17, 21                 17, 21, 25
fails with pyarrow 26 and later    before 4.0.5           before 4.1.4           no
fails with protobuf 7 and later    yes                    no                     no
=================================  =====================  =====================  ==========================

The conversions are private to Spark. holdfast calls them anyway, so that a function's frames and output are exactly
those of Spark's own worker.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.errors import PySparkTypeError

from holdfast.errors import InvalidArgumentError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import Row, StructType

OLDEST = (4, 0)
#: Since this version Spark passes Arrow batches to a stream writer in Python.
STREAMS_TO_ARROW = (4, 1)


def minor_version(text: str) -> tuple[int, int]:
    """Return the major and minor number of a version: (4, 1) for 4.1.0.dev1."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def stream_arrow_writer() -> Any:
    """Return Spark's base class for writers of Arrow batches; before 4.1 a stand-in that Spark never calls."""
    from pyspark.sql import datasource

    return getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter)


def require_arrow_streams(version: str = pyspark.__version__) -> None:
    """Reject a Spark whose streams cannot be written as Arrow batches. Raises `InvalidArgumentError`."""
    if minor_version(version) < STREAMS_TO_ARROW:
        raise InvalidArgumentError(
            "before Spark 4.1, sinks are not data sources: write with foreachBatch(holdfast.sinks.exactly_once(sink))",
            spark=version,
        )


def require_supported(version: str) -> None:
    """Reject a Spark that is too old, before an import fails with an obscure error. Raises `ImportError`."""
    if minor_version(version) < OLDEST:
        raise ImportError(
            f"holdfast needs PySpark 4.0 or newer, but this is {version}: pip install --upgrade 'pyspark>=4'"
        )


require_supported(pyspark.__version__)
_SPARK = minor_version(pyspark.__version__)


def require_fitting_arrow(arrow_version: str, spark_version: str = pyspark.__version__) -> None:
    """Refuse a pyarrow on which this Spark's stateful operator fails in the first micro-batch."""
    spark = tuple(int(number) for number in re.findall(r"\d+", spark_version)[:3])
    fails_from_26 = (4, 0) <= spark < (4, 0, 5) or (4, 1) <= spark < (4, 1, 4)
    if fails_from_26 and minor_version(arrow_version)[0] >= 26:
        raise InvalidArgumentError(
            f"Spark {spark_version} cannot run applyInPandasWithState, which holdfast builds on, with pyarrow "
            f"{arrow_version}: install 'pyarrow<26' on the driver and the executors, or Spark 4.0.5, "
            "4.1.4 or newer"
        )


def require_protobuf() -> None:
    """Refuse a protobuf with which this Spark's ``transformWithState`` fails in its workers."""
    try:
        importlib.import_module("pyspark.sql.streaming.proto.StateMessage_pb2")
    except Exception as exc:  # protobuf's own error has no public class
        raise InvalidArgumentError(
            f"Spark {pyspark.__version__} cannot run transformWithState with the installed protobuf: install "
            f"'protobuf>=6.33.5,<7' on the driver and the executors ({exc})"
        ) from exc


def require_host_of_processors(*, classic: bool, version: str = pyspark.__version__) -> None:
    """Refuse a session without ``transformWithStateInPandas``, which runs a stream's processors."""
    if not classic and minor_version(version) < (4, 1):
        raise InvalidArgumentError(
            "over Spark Connect, streaming processors need Spark 4.1: use a classic session, or applyInArrowWithState",
            spark=version,
        )


def java_versions(spark_version: str = pyspark.__version__) -> frozenset[int]:
    """Return the long-term-support Java versions that a version of Spark runs on."""
    return frozenset({17, 21, 25} if minor_version(spark_version) >= (4, 2) else {17, 21})


# ------------------------------------------------------------------------------------------------ tasks


def state_partitions(property_of: Callable[[str], str], *, in_sparks_thread: bool) -> int | None:
    """Return the number of partitions of Spark's state, as its offset log pins it; None if unknown.

    Spark 4.0 pins it in the session's ``spark.sql.shuffle.partitions``, which counts only `in_sparks_thread`.
    """
    if _SPARK >= (4, 1):
        return _number(property_of("spark.sql.streaming.internal.stateStore.partitions"))
    return _number(property_of("spark.sql.shuffle.partitions")) if in_sparks_thread else None


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def wrong_type(name: str, expected: str, given: object) -> PySparkTypeError:
    """Return Spark's error for an argument of the wrong type, with this version's error class."""
    of_argument = {"arg_name": name, "arg_type": type(given).__name__}
    if _SPARK >= (4, 2):
        return PySparkTypeError(
            errorClass="NOT_EXPECTED_TYPE", messageParameters=of_argument | {"expected_type": expected}
        )
    condition = "NOT_STR" if expected == "str" else "NOT_STR_OR_STRUCT"
    return PySparkTypeError(errorClass=condition, messageParameters=of_argument)


def version_of(spark: SparkSession) -> str:
    """Return the version of a session's Spark, for messages."""
    return spark.version


def java_stack(error: BaseException) -> str:
    """Return an exception's Java stack trace with all causes, or "": the message may hide the reason."""
    of_connect = getattr(error, "getStackTrace", str)() or ""
    cause = getattr(error, "_cause", None)
    return "\n".join([of_connect, getattr(error, "_stackTrace", ""), java_stack(cause) if cause is not None else ""])


def is_classic(session: SparkSession) -> bool:
    """Return whether a session is in the driver's process: not over Spark Connect, which has no SparkContext."""
    return hasattr(session, "sparkContext")


def start_state_coordinator(spark: SparkSession) -> None:
    """Start Spark's state store coordinator, without which a read on Spark 4.1 may fail, by listing the queries."""
    _ = spark.streams.active


# --------------------------------------------------------------------------------- states, pandas and Arrow


def state_binaries(values: list[bytes | None]) -> list[Any]:
    """Return a state's binaries as `GroupState.get` gives them: on Spark 4.0 as bytearrays."""
    return values if _SPARK >= (4, 1) else [None if value is None else bytearray(value) for value in values]


def prefers_nullable_integers(session: SparkSession) -> bool:
    """Return whether a session shows integers as pandas' nullable types."""
    return _SPARK >= (4, 2) and is_on(session, "spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype", "false")


def makes_frames_anew(*, beside_initial_state: bool = False) -> bool:
    """Return whether a processor's frames and keys are made from Python values, with or without initial state."""
    if beside_initial_state:
        return _SPARK >= (4, 2)
    return _SPARK >= (4, 1)


def takes_integers_as_decimals(session: SparkSession) -> bool:
    """Return whether a session lets a function return integers for decimals."""
    return _SPARK >= (4, 1) and is_on(
        session, "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled", "false"
    )


def is_on(session: SparkSession, name: str, *default: str) -> bool:
    """Return whether a session setting is on: Spark accepts ``True`` and returns it as given."""
    return str(session.conf.get(name, *default)).strip().lower() == "true"


def arrow_to_pandas(batch: pa.RecordBatch, timezone: str, *, prefer_int_ext_dtype: bool) -> list[pd.Series[Any]]:
    """Return the columns of a batch as Spark's worker shows them to a function of ``applyInPandasWithState``."""
    if _SPARK >= (4, 2):
        from pyspark.sql.conversion import ArrowBatchTransformer

        return ArrowBatchTransformer.to_pandas(  # type: ignore[return-value]
            batch, timezone=timezone, prefer_int_ext_dtype=prefer_int_ext_dtype
        )
    import pyarrow as pa

    serializer = _serializer(timezone, safecheck=True, int_to_decimal_coercion_enabled=False)
    columns = pa.Table.from_batches([batch]).itercolumns()  # not the batch's: a table's columns have names
    if _SPARK >= (4, 1):
        return [serializer.arrow_to_pandas(column, at) for at, column in enumerate(columns)]
    return [serializer.arrow_to_pandas(column) for column in columns]


def pandas_to_arrow(
    columns: list[pd.Series[Any]],
    schema: StructType,
    timezone: str,
    *,
    safecheck: bool = True,
    int_to_decimal_coercion_enabled: bool = False,
) -> pa.RecordBatch:
    """Convert a function's output, its columns in the order of `schema`, as Spark's worker does."""
    if _SPARK >= (4, 2):
        from pyspark.sql.conversion import PandasToArrowConversion

        return PandasToArrowConversion.convert(
            columns,
            schema,
            timezone=timezone,
            safecheck=safecheck,
            arrow_cast=True,
            int_to_decimal_coercion_enabled=int_to_decimal_coercion_enabled,
        )
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_type

    serializer = _serializer(timezone, safecheck, int_to_decimal_coercion_enabled)
    arrays = []
    for column, field in zip(columns, schema, strict=True):
        column.name = field.name  # for the serializer's error messages
        arrow_type = to_arrow_type(field.dataType)
        arrays.append(serializer._create_array(column, arrow_type, arrow_cast=_SPARK >= (4, 1)))  # noqa: SLF001
    return pa.RecordBatch.from_arrays(arrays, schema.names)


def rows_to_arrow(rows: list[Any], schema: StructType) -> pa.Table:
    """Return rows, tuples or dicts as ``createDataFrame`` would take them."""
    from pyspark.sql.conversion import LocalDataToArrowConversion

    return LocalDataToArrowConversion.convert(rows, schema, False)


def arrow_to_rows(table: pa.Table, schema: StructType) -> list[Row]:
    """Return a table as ``collect`` would give it."""
    from pyspark.sql.conversion import ArrowTableToRowsConversion

    return ArrowTableToRowsConversion.convert(table, schema)


@lru_cache(maxsize=8)
def _serializer(timezone: str, safecheck: bool, int_to_decimal_coercion_enabled: bool) -> Any:
    from pyspark.sql.pandas import serializers

    further = {"int_to_decimal_coercion_enabled": int_to_decimal_coercion_enabled} if _SPARK >= (4, 1) else {}
    serializer: Any = serializers.ArrowStreamPandasUDFSerializer  # type: ignore[attr-defined]  # gone in 4.3
    return serializer(timezone, safecheck, assign_cols_by_name=True, **further)
