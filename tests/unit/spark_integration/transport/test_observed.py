"""Measures beside the output: they alter nothing of it."""

from __future__ import annotations

from dataclasses import asdict

import pyarrow as pa
import pytest
from pyspark.sql import types as T  # noqa: N812

from holdfast.spark_integration.client.measures import MEASURES, CallMeasures
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.transport.observed import MEASURED, ObservedOutput
from holdfast.spark_integration.transport.output import Output, PackedOutput, RowsOutput
from tests.unit.spark_integration.transport.test_output import AWKWARD, as_spark_converts

CALL = CallMeasures(3, *range(1, 13))


@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize("data_type", AWKWARD, ids=lambda t: t.simpleString())
def test_rows_arrive_as_without_measures(data_type: T.DataType, nullable: bool) -> None:
    """Spark's worker puts the row of measures into one frame with rows, whose types must stay as they are."""
    schema = T.StructType([T.StructField("c", data_type, nullable)])
    types = arrow_schema(schema, "the output")
    values = [*AWKWARD[data_type], *([None] if nullable else [])]
    batch = pa.RecordBatch.from_arrays([pa.array(values, types.types[0])], schema=types)
    output = ObservedOutput.of(RowsOutput(schema), "holdfast.op")
    frames = [*output.send([batch]), *output.send_measures(CALL)]
    assert [list(frame.columns) for frame in frames] == [["c", MEASURED]] * 2
    assert frames[0][MEASURED].isna().all()
    assert frames[1][MEASURED].tolist() == [CALL.row()]
    converted = as_spark_converts(frames, output.sent_schema)
    assert converted.slice(0, len(values)).cast(types.types[0]).equals(batch.column(0))
    assert converted.null_count == batch.column(0).null_count or data_type == T.NullType()


@pytest.mark.parametrize(
    "inner",
    [PackedOutput(T.StructType().add("n", "long"), 10), RowsOutput(T.StructType().add("n", "long", False))],
    ids=["packed", "rows"],
)
def test_large_output_goes_on_at_once(inner: Output) -> None:
    batches = [pa.record_batch({"n": pa.array([1, 2, 3])})]
    sent = [len(frame) for frame in inner.send_at_once(batches)]
    output = ObservedOutput.of(inner, "holdfast.op")
    assert [len(frame) for frame in output.send_at_once(batches)] == sent
    assert list(inner.send_measures(CALL)) == []


def test_measures_have_places() -> None:
    """Drivers read by place what workers write by name."""
    row = dict(zip(MEASURES, CALL.row(), strict=True))
    assert row == asdict(CALL)
    assert row["shard"] == 3
    told = CALL.with_news(1, 2, 3)
    assert (told.snapshot_lag_ms, told.snapshot_bytes, told.snapshot_failures) == (1, 2, 3)
