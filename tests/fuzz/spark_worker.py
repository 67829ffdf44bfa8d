"""Spark's own worker of ``applyInPandasWithState`` in this process: what it makes of frames that a function returns.

It is the code that Spark runs in its Python workers, driven with the record batches that the JVM would send; only the
JVM and the socket are left out. So the oracle is Spark itself, and a thousand cases cost no query. Until Spark 4.2 it
is the worker's serializer that does it, which is driven without the worker.
"""

from __future__ import annotations

import inspect
import io
import json
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.ipc as ipc
from pyspark.sql.pandas import serializers
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import StructType
from pyspark.util import PythonEvalType

from holdfast.spark_integration.keyed.frames import FrameFormat

_STATE_SCHEMA = StructType().add("n", "long")

_STATE = pa.struct(
    [
        pa.field("properties", pa.string()),
        pa.field("keyRowAsUnsafe", pa.binary()),
        pa.field("object", pa.binary()),
        pa.field("startOffset", pa.int32()),
        pa.field("numRows", pa.int32()),
        pa.field("isLastChunk", pa.bool_()),
    ]
)
_PROPERTIES = {
    "batchProcessingTimeMs": 0,
    "eventTimeWatermarkMs": -1,
    "timeoutConf": "NoTimeout",
    "hasTimedOut": False,
    "watermarkPresent": False,
    "defined": False,
    "updated": False,
    "removed": False,
    "timeoutTimestamp": -1,
}


def returned_by_spark(
    returned: Sequence[Iterable[pd.DataFrame]], schema: StructType, frame_format: FrameFormat
) -> pa.Table:
    """Return what Spark's worker sends to the JVM for keys whose functions return these frames."""
    serializer = getattr(serializers, "ApplyInPandasWithStateSerializer", None)
    run = _worker if serializer is None else _serializer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # pandas' of Spark's use of it
        pieces = [_without_padding(batch) for batch in run(returned, schema, frame_format)]
    return pa.concat_tables(pieces)


def _worker(
    returned: Sequence[Iterable[pd.DataFrame]], schema: StructType, frame_format: FrameFormat
) -> Iterable[pa.RecordBatch]:
    from pyspark.worker import EvalConf, RunnerConf, read_udfs
    from pyspark.worker_message import UDFInfo

    commands = [((lambda key, frames, state: returned[int(key[0])]), schema)]
    run, _, _, _ = read_udfs(
        _Unpickled(commands),
        [UDFInfo(udfs=[memoryview(b"0")], args=[3, 1, 0, 0], kwargs={}, result_id=0)],
        PythonEvalType.SQL_GROUPED_MAP_PANDAS_UDF_WITH_STATE,
        RunnerConf(_settings(frame_format)),
        EvalConf({"state_value_schema": _STATE_SCHEMA.json()}),
    )
    return run(0, iter([_sent(len(returned))]))


def _serializer(
    returned: Sequence[Iterable[pd.DataFrame]], schema: StructType, frame_format: FrameFormat
) -> Iterable[pa.RecordBatch]:
    made = serializers.ApplyInPandasWithStateSerializer
    known = inspect.signature(made).parameters
    settings = {
        "timezone": frame_format.timezone,
        "safecheck": frame_format.safecheck,
        "assign_cols_by_name": frame_format.assign_cols_by_name,
        "prefer_int_ext_dtype": frame_format.prefer_int_ext_dtype,
        "state_object_schema": _STATE_SCHEMA,
        "arrow_max_records_per_batch": 10_000,
        "prefers_large_var_types": False,
        "int_to_decimal_coercion_enabled": frame_format.int_to_decimal_coercion_enabled,
    }
    serializer = made(**{name: value for name, value in settings.items() if name in known})
    # The worker hands on Arrow's type where the serializer converts by itself.
    declared = to_arrow_type(schema) if hasattr(serializer, "_create_array") else schema
    stream = io.BytesIO()
    serializer.dump_stream(
        (
            [
                (
                    (
                        iter(frames),
                        GroupState(optionalValue=None, keyAsUnsafe=b"", valueSchema=_STATE_SCHEMA, **_PROPERTIES),
                    ),
                    declared,
                )
            ]
            for frames in returned
        ),
        stream,
    )
    start_of_arrow_stream = 4
    return ipc.open_stream(stream.getvalue()[start_of_arrow_stream:])


def _settings(given: FrameFormat) -> dict[str, str]:
    """Return all settings on which the conversion depends, as the JVM sends them."""
    return {
        "spark.sql.session.timeZone": given.timezone,
        "spark.sql.execution.pandas.convertToArrowArraySafely": str(given.safecheck).lower(),
        "spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName": str(given.assign_cols_by_name).lower(),
        "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled": str(
            given.int_to_decimal_coercion_enabled
        ).lower(),
    }


def _sent(keys: int) -> pa.RecordBatch:
    """Return what the JVM sends: one row of data for each key, and where in them the rows of each key stand."""
    states = [
        {
            "properties": json.dumps(_PROPERTIES),
            "keyRowAsUnsafe": b"",
            "object": None,
            "startOffset": key,
            "numRows": 1,
            "isLastChunk": True,
        }
        for key in range(keys)
    ]
    return pa.RecordBatch.from_arrays([pa.array(range(keys), pa.int64()), pa.array(states, _STATE)], ["key", "state"])


def _without_padding(batch: pa.RecordBatch) -> pa.Table:
    counts, output, _ = batch.columns
    rows = counts[0]["dataCount"].as_py()
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(output)]).slice(0, rows)


class _Unpickled:
    """Gives a worker its commands as they are; nothing needs to be pickled in one process."""

    def __init__(self, commands: list[Any]) -> None:
        self._commands = commands

    def loads(self, which: memoryview) -> Any:
        return self._commands[int(bytes(which))]
