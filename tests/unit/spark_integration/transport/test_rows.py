"""The rows transport: nothing of what Spark's pandas frames lose is lost."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as T  # noqa: N812

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.transport.rows import RowsTransport, carries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLD = dt.datetime(2024, 11, 3, 5, 30, tzinfo=dt.UTC)  # 01:30 in New York, and an hour later again
#: By type: values that a pandas frame would alter, and a null.
AWKWARD: dict[T.DataType, list[Any]] = {
    T.BooleanType(): [True, False, None, True],
    T.ByteType(): [-128, 127, None, 0],
    T.ShortType(): [-(2**15), 2**15 - 1, None, 0],
    T.IntegerType(): [-(2**31), 2**31 - 1, None, 0],
    T.LongType(): [2**53 + 1, -(2**63), None, 2**63 - 1],
    T.FloatType(): [math.nan, -0.0, None, math.inf],
    T.DoubleType(): [math.nan, -0.0, None, 5e-324],
    T.DecimalType(38, 18): [Decimal("12345678901234567890.123456789012345678"), Decimal("-1E-18"), None, Decimal(0)],
    T.StringType(): ["", "ünï\0code", None, "None"],
    T.BinaryType(): [b"", b"\xff\x00", None, b"x"],
    T.DateType(): [dt.date(1, 1, 1), dt.date(9999, 12, 31), None, dt.date(1969, 12, 31)],
    T.TimestampType(): [FOLD, FOLD + dt.timedelta(hours=1), None, dt.datetime(9999, 1, 1, tzinfo=dt.UTC)],
}
SCHEMA = T.StructType([T.StructField(f"v {i}`", t) for i, t in enumerate(AWKWARD)])
ARROW = arrow_schema(SCHEMA, "the input")
INPUT = pa.table([pa.array(v, t) for v, t in zip(AWKWARD.values(), ARROW.types, strict=True)], schema=ARROW)


def exact(table: pa.Table) -> list[tuple[Any, ...]]:
    """Return rows in which -0.0, 0.0, NaN and null differ, and instants are numbers."""
    columns = []
    for column in table.columns:
        plain = column.cast(pa.timestamp("us")).cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        columns.append([repr(v) for v in plain.to_pylist()])
    return sorted(zip(*columns, strict=True))


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
    received = list(transport.receive(iter([chunk, chunk])))
    assert all(table.schema == ARROW for table in received)
    assert exact(pa.concat_tables(received, promote_options="none") if received else ARROW.empty_table()) == exact(
        pa.concat_tables([part, part])
    )


def test_text_may_have_any_bytes() -> None:
    """Spark validates no string, and pandas takes none that is not UTF-8."""
    schema = T.StructType([T.StructField("text", T.StringType())])
    given = pa.array([b"\xff\xfe", None, b"", b"caf\xe9"]).view(pa.string())
    transport = RowsTransport([0], schema, arrow_schema(schema, "the input"), None)
    (received,) = transport.receive([pd.DataFrame(encoded(pa.chunked_array([given.view(pa.binary())]), 0))])
    assert received["text"].combine_chunks().equals(given)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["rows", "packed"])
def test_a_streaming_query_loses_nothing(spark: SparkSession, tmp_path: Path, transport: str) -> None:
    """In a zone whose clocks go back; chunks of two rows, so that some have nulls and others have none."""
    import holdfast

    (tmp_path / "in").mkdir()
    (tmp_path / "seen").mkdir()
    pq.write_table(pa.concat_tables([INPUT, INPUT.slice(0, 1), INPUT.slice(3, 1)]), tmp_path / "in" / "rows.parquet")
    seen = str(tmp_path / "seen")

    def keep(batch: holdfast.ShardBatch) -> pa.Table:
        with pa.OSFile(f"{seen}/{batch.shard}.arrow", "wb") as file, pa.ipc.new_file(file, batch.rows.schema) as writer:
            writer.write_table(batch.rows)
        return batch.rows

    settings = {
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "2",
        "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
        "spark.holdfast.transport": transport,
        "spark.holdfast.state.dir": str(tmp_path / "durable"),
        "spark.holdfast.local.dir": str(tmp_path / "local"),
    }
    before = {key: spark.conf.get(key, None) for key in settings}
    try:
        for key, value in settings.items():
            spark.conf.set(key, value)
        events = spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "in"))
        output = (
            holdfast.stream(events).groupBy("v 4`").applyInArrowWithState(keep, SCHEMA, "n long", "update", name="kept")
        )
        name = f"output_{transport}"
        query = (
            output.writeStream.format("memory").queryName(name).outputMode("update").trigger(availableNow=True).start()
        )
        query.awaitTermination()
        returned = spark.table(name).toArrow()
    finally:
        for key, value in before.items():
            spark.conf.unset(key) if value is None else spark.conf.set(key, value)
    received = [pa.ipc.open_file(str(path)).read_all() for path in sorted((tmp_path / "seen").iterdir())]
    wanted = exact(pa.concat_tables([INPUT, INPUT.slice(0, 1), INPUT.slice(3, 1)]))
    assert sorted(row for table in received for row in exact(table)) == wanted
    assert exact(returned) == wanted
