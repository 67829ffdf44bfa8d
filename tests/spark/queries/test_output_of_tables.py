"""Tables that a vectorised function returns arrive as they are."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest

import holdfast
from tests.spark.conftest import Lab

pytestmark = pytest.mark.spark

ZONE = dt.UTC
VALUES = {
    "whole": (pa.int64(), "long", [2**53 + 1, None, -(2**63)]),
    "byte": (pa.int8(), "tinyint", [-128, None, 127]),
    "real": (pa.float64(), "double", [float("nan"), None, -0.0]),
    "single": (pa.float32(), "float", [float("nan"), None, float("-inf")]),
    "`Real`": (pa.float64(), "double", [1.5, float("nan"), None]),
    "yes": (pa.bool_(), "boolean", [True, None, False]),
    "text": (pa.string(), "string", ["", None, "nan"]),
    "raw": (pa.binary(), "binary", [b"\xff", None, b""]),
    "day": (pa.date32(), "date", [dt.date(1, 1, 1), None, dt.date(9999, 12, 31)]),
    "at": (
        pa.timestamp("us", "UTC"),
        "timestamp",
        [dt.datetime(1, 1, 2, tzinfo=ZONE), None, dt.datetime(9999, 12, 30, tzinfo=ZONE)],
    ),
    "money": (pa.decimal128(38, 18), "decimal(38,18)", [Decimal("1.000000000000000001"), None, Decimal(-1)]),
}


def test_values_arrive_as_they_are(lab: Lab) -> None:
    """NaN and null apart, whole numbers beyond 2^53, times beyond those of pandas; names that differ in case."""
    sent = pa.table({name.strip("`"): pa.array(values, kind) for name, (kind, _, values) in VALUES.items()})

    def send(_: holdfast.ShardBatch) -> pa.Table:
        return sent

    lab.feed([("a", 1)])
    output = ", ".join(f"{name} {spark_type}" for name, (_, spark_type, _) in VALUES.items())
    lab.spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        grouped = holdfast.stream(lab.source()).groupBy("key")
        (arrived,) = lab.run(grouped.applyInArrowWithState(send, output, "n long", "update", name="values"))
    finally:
        lab.spark.conf.unset("spark.sql.caseSensitive")
    assert repr(arrived) == repr(sent.to_pylist())


def test_a_batch_query_and_its_schema(lab: Lab) -> None:
    """NaN in a column that is NOT NULL, text that is not UTF-8, a collation: neither refused nor altered."""
    fields = "real double not null, text string, folded string collate utf8_lcase"

    def send(batch: holdfast.ShardBatch) -> pa.Table:
        n = len(batch.keys["text"])
        return batch.keys.append_column("real", pa.array([float("nan")] * n)).append_column(
            "folded", pa.array(["A"] * n)
        )

    rows = lab.spark.sql("SELECT cast(unhex('FF') AS string) AS text")
    grouped = holdfast.stream(rows).groupBy("text")
    for function, declared in ((send, fields), (lambda batch: batch.keys, "text string")):
        output = grouped.applyInArrowWithState(function, declared, "n long", "update", name="values")
        assert [f.nullable for f in output.schema] == ["not null" not in part for part in declared.split(",")]
        assert output.selectExpr("hex(text)").collect() == [("FF",)]
