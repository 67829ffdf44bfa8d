"""Spark's own ``applyInPandasWithState`` on holdfast, from end to end, and on what operators put out."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pyspark
import pytest
from pyspark.errors import IllegalArgumentException, ParseException, PySparkTypeError
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.state import GroupState

import holdfast
from holdfast.errors import InvalidArgumentError
from tests.spark.conftest import OUTPUT, STATE, Lab
from tests.spark.parity.engines import configured
from tests.tiers import cases

pytestmark = pytest.mark.spark

FIRST = [("a", 1), ("b", 2), ("a", 3), (None, 4)]
SECOND = [("a", 10), ("c", 20), (None, 30), ("", 40)]
BACKENDS = ["memory", "filesystem", "rocksdb"]


def count_and_sum(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n, total = state.getOption or (0, 0)
    for frame in frames:
        n += len(frame)
        total += frame["v"].sum()
    state.update((n, total))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "total": [total]})


@pytest.mark.parametrize("backend", cases(BACKENDS))
def test_state_is_carried_from_micro_batch_to_micro_batch(lab: Lab, backend: str) -> None:
    """And a vectorised operator goes on with it: without timeouts both have the same tables."""
    lab.configure({"backend": backend})
    lab.feed(FIRST)
    lab.feed(SECOND)
    totals = holdfast.stream(lab.source()).groupBy("key")
    output = lab.run(totals.applyInPandasWithState(count_and_sum, OUTPUT, STATE, "update", "NoTimeout", name="totals"))
    assert [{row["key"]: (row["n"], row["total"]) for row in rows} for rows in output] == [
        {"a": (2, 4), "b": (1, 2), None: (1, 4)},
        {"a": (3, 14), "c": (1, 20), None: (2, 34), "": (1, 40)},
    ]
    lab.feed(FIRST)
    lab.run(lab.totals())
    assert lab.state() == {"a": (5, 18), "b": (2, 4), "c": (1, 20), None: (3, 38), "": (1, 40)}


def test_keys_may_be_expressions(lab: Lab) -> None:
    """Spark takes columns only; the frames have all columns of the input, and no other."""

    def columns(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        (frame,) = frames
        state.update((len(frame),))
        yield pd.DataFrame({"upper": [key[0]], "odd": [bool(key[1])], "columns": [",".join(frame.columns)]})

    lab.feed([("a", 1), ("A", 3), ("a", 2)])
    keys = (F.upper("key"), (F.col("v") % 2 == 1).alias("odd"))
    stream = holdfast.stream(lab.source()).groupBy(*keys)
    schema = "upper string, odd boolean, columns string"
    (rows,) = lab.run(stream.applyInPandasWithState(columns, schema, "n long", "update", "NoTimeout"))
    assert sorted(tuple(row.values()) for row in rows) == [("A", False, "key,v"), ("A", True, "key,v")]


WRONG_TYPE = "NOT_DATATYPE_OR_STR" if pyspark.__version__.startswith(("4.0.", "4.1.")) else "NOT_EXPECTED_TYPE"


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"timeoutConf": "notimeout"}, AssertionError, "^$"),
        ({"outputMode": "sometimes"}, IllegalArgumentException, "STREAMING_OUTPUT_MODE"),
        ({"outputMode": "complete"}, IllegalArgumentException, "append or update"),
        ({"outputMode": None}, PySparkTypeError, "outputMode.*NoneType"),
        ({"outputStructType": "a lng"}, ParseException, "UNSUPPORTED_DATATYPE"),
        ({"outputStructType": 7}, PySparkTypeError, WRONG_TYPE),
        ({"outputStructType": "long"}, PySparkTypeError, "INVALID_RETURN_TYPE_FOR_PANDAS_UDF"),
        ({"stateStructType": "n lng"}, ParseException, "UNSUPPORTED_DATATYPE"),
        ({"stateStructType": 7}, PySparkTypeError, "stateStructType.*int"),
        ({"stateStructType": "long"}, PySparkTypeError, "stateStructType"),
        ({"stateStructType": "v variant"}, InvalidArgumentError, "type that cannot be used"),
        ({"func": 7}, TypeError, "callable"),
        ({"name": "a/b"}, InvalidArgumentError, "cannot name an operator"),
    ],
    ids=str,
)
def test_refused_where_it_is_defined(lab: Lab, changed: dict[str, Any], error: type[Exception], match: str) -> None:
    """In Spark's words, where Spark has some."""
    lab.feed(FIRST)
    arguments: dict[str, Any] = {
        "func": count_and_sum,
        "outputStructType": OUTPUT,
        "stateStructType": STATE,
        "outputMode": "update",
        "timeoutConf": "NoTimeout",
    }
    with pytest.raises(error, match=match):
        holdfast.stream(lab.source()).groupBy("key").applyInPandasWithState(**arguments | changed)


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
    with configured(lab.spark, {"spark.sql.caseSensitive": "true"}):
        grouped = holdfast.stream(lab.source()).groupBy("key")
        (arrived,) = lab.run(grouped.applyInArrowWithState(send, output, "n long", "update", name="values"))

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
