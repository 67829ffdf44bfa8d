"""Rows become messages: values, nulls, types, and what is refused."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.sinks.kafka.transaction import check_schema, messages

_HEADERS = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
_ALL = pa.schema(
    {
        "value": pa.binary(),
        "key": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "headers": _HEADERS,
        "timestamp": pa.timestamp("us", "UTC"),
    }
)


def test_all_columns() -> None:
    moment = dt.datetime(2026, 11, 24, 1, 2, 3, 456_789, dt.UTC)
    row = [[b"v"], ["k"], ["t"], [3], [[{"key": "h", "value": b"x"}, {"key": "h", "value": None}]], [moment]]
    found = list(messages(pa.record_batch(row, schema=_ALL), None))
    assert found == [("t", b"v", b"k", 3, 1795482123456, [("h", b"x"), ("h", None)])]


def test_nulls_mean_a_tombstone_no_key_by_the_key_no_headers_and_now() -> None:
    row = [[None], [None], ["t"], [None], [None], [None]]
    assert list(messages(pa.record_batch(row, schema=_ALL), None)) == [("t", None, None, -1, 0, None)]


def test_value_alone_goes_to_the_sinks_topic() -> None:
    rows = pa.record_batch({"value": pa.array(["ä", "b"])})
    assert list(messages(rows, "t")) == [("t", "ä".encode(), None, -1, 0, None), ("t", b"b", None, -1, 0, None)]


def test_a_row_without_topic_or_a_header_without_key_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no topic"):
        list(messages(pa.record_batch({"value": ["v"], "topic": pa.array([None], pa.string())}), None))
    headers = pa.array([[{"key": None, "value": b"x"}]], _HEADERS)
    with pytest.raises(InvalidArgumentError, match="no key"):
        list(messages(pa.record_batch({"value": pa.array(["v"]), "headers": headers}), "t"))


@pytest.mark.parametrize("moment", [dt.datetime(1970, 1, 1, tzinfo=dt.UTC), dt.datetime(1969, 1, 1, tzinfo=dt.UTC)])
def test_a_time_that_would_become_another_is_refused(moment: dt.datetime) -> None:
    times = pa.array([None, moment], pa.timestamp("us", "UTC"))
    with pytest.raises(InvalidArgumentError, match="1970-01-01 or before"):
        list(messages(pa.record_batch({"value": pa.array(["a", "v"]), "timestamp": times}), "t"))


def test_a_negative_partition_is_refused() -> None:
    rows = pa.record_batch({"value": pa.array(["a", "v"]), "partition": pa.array([None, -1], pa.int32())})
    with pytest.raises(InvalidArgumentError, match="negative partition"):
        list(messages(rows, "t"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("value", pa.int64()),
        ("key", pa.float64()),
        ("partition", pa.int64()),
        ("timestamp", pa.date32()),
        ("topic", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("headers", pa.list_(pa.struct({"key": pa.binary(), "value": pa.binary()}))),
    ],
)
def test_other_types_are_refused_by_name_and_type(name: str, kind: pa.DataType) -> None:
    schema = _ALL.set(_ALL.get_field_index(name), pa.field(name, kind))
    with pytest.raises(SchemaMismatchError, match=f"column={name}"):
        check_schema(schema, None)


def test_a_missing_value_and_columns_of_no_message_are_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="needs the column value"):
        check_schema(pa.schema({"key": pa.string()}), "t")
    with pytest.raises(SchemaMismatchError, match="column=user"):
        check_schema(pa.schema({"value": pa.string(), "user": pa.string()}), "t")


def test_one_topic_from_one_place() -> None:
    for schema, topic in ((pa.schema({"value": pa.string()}), None), (_ALL, "t")):
        with pytest.raises(InvalidArgumentError, match="topic"):
            check_schema(schema, topic)


@pytest.mark.parametrize("column", ["topic", "headers"])
def test_names_that_are_not_utf8_are_refused(column: str) -> None:
    """Kafka's topics and header keys are text: what Python cannot decode is said, with what to do."""
    broken = pa.array([b"\xff"]).cast(pa.string(), safe=False)
    header = pa.StructArray.from_arrays([broken, pa.array([b"x"])], ["key", "value"])
    columns = {"topic": broken, "headers": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), header)}
    rows = pa.record_batch({"value": pa.array(["v"]), column: columns[column]})
    with pytest.raises(InvalidArgumentError, match=f"column '{column}' of the messages has text that is not UTF-8"):
        list(messages(rows, None if column == "topic" else "t"))
