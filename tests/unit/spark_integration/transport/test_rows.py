"""The rows transport: nothing of what Spark's pandas frames lose is lost."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import types as T  # noqa: N812

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.transport.rows import RowsTransport, carries
from tests.awkward_rows import ARROW, AWKWARD, INPUT, SCHEMA, exact


@pytest.mark.parametrize(
    "data_type",
    [
        T.ArrayType(T.LongType()),
        T.MapType(T.StringType(), T.LongType()),
        T.StructType([T.StructField("a", T.LongType())]),
        T.TimestampNTZType(),
        T.DayTimeIntervalType(),
        T.NullType(),
    ],
    ids=lambda t: t.simpleString(),
)
def test_a_type_that_it_would_harm_is_refused_with_the_remedy(data_type: T.DataType) -> None:
    assert not carries(data_type)
    schema = T.StructType([T.StructField("fine", T.LongType()), T.StructField("c", data_type)])
    with pytest.raises(InvalidArgumentError, match=r"column 'c'.*spark\.holdfast\.transport to packed") as caught:
        RowsTransport([0], schema, arrow_schema(schema, "the input"), None)
    assert caught.value.facts["type"] == data_type.simpleString()


@pytest.mark.parametrize("data_type", AWKWARD, ids=lambda t: t.simpleString())
def test_carried_types(data_type: T.DataType) -> None:
    assert carries(data_type)


def encoded(column: pa.ChunkedArray, i: int) -> dict[str, pd.Series]:
    """Return a column as Spark hands it over."""
    t = column.type
    if pa.types.is_string(t):
        return encoded(column.cast(pa.binary()), i)
    if pa.types.is_binary(t) or pa.types.is_decimal(t):
        return {f"c{i}": pd.Series(column.to_pylist(), dtype=object)}
    if pa.types.is_date(t):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(t):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    zero = pa.scalar(False if pa.types.is_boolean(t) else 0, column.type)
    values = column.fill_null(zero).combine_chunks().to_numpy(zero_copy_only=False)
    return {f"c{i}": pd.Series(values), f"c{i}n": pd.Series(column.is_null().to_numpy())}


@pytest.mark.parametrize(
    "rows", [slice(0, 4), slice(0, 0), slice(2, 3), slice(0, 1)], ids=["all", "none", "nulls", "no null"]
)
def test_frames_are_decoded_as_what_was_sent(rows: slice) -> None:
    """Also a chunk of nothing but nulls, whose pandas columns have no type."""
    transport = RowsTransport([0], SCHEMA, ARROW, None)
    part = INPUT.slice(rows.start, rows.stop - rows.start)
    chunk = pd.DataFrame({k: v for i, c in enumerate(part.columns) for k, v in encoded(c, i).items()})
    tables: list[pa.Table] = []

    def gather(received: Iterable[pa.Table]) -> pa.Table:
        tables.extend(received)
        return pa.concat_tables(tables, promote_options="none") if tables else ARROW.empty_table()

    received = transport.receive(iter([chunk, chunk]), gather)
    assert all(table.schema == ARROW for table in tables)
    assert exact(received.rows) == exact(pa.concat_tables([part, part]))
    assert received.late == 0


def test_text_may_have_any_bytes() -> None:
    """Spark validates no string, and pandas takes none that is not UTF-8."""
    schema = T.StructType([T.StructField("text", T.StringType())])
    given = pa.array([b"\xff\xfe", None, b"", b"caf\xe9"]).view(pa.string())
    transport = RowsTransport([0], schema, arrow_schema(schema, "the input"), None)
    frame = pd.DataFrame(encoded(pa.chunked_array([given.view(pa.binary())]), 0))
    received = transport.receive([frame], pa.concat_tables).rows
    assert received["text"].combine_chunks().equals(given)
