"""Types: what can be grouped by, kept and returned, and what is refused by name before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T  # noqa: N812

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.spark_types import arrow_schema, conform_output, parse_struct, require_key_types

COLLATED, MAP = T.StringType("UTF8_LCASE"), T.MapType(T.StringType(), T.LongType())
ORDINARY: list[T.DataType] = [
    *(T.BooleanType(), T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType(), T.FloatType(), T.DoubleType()),
    *(T.DecimalType(38, 18), T.StringType(), T.BinaryType(), T.DateType(), T.TimestampType(), T.TimestampNTZType()),
    *(T.DayTimeIntervalType(), T.NullType()),
    T.ArrayType(T.StringType()),
    T.ArrayType(T.ArrayType(T.DoubleType(), False)),
    T.StructType([T.StructField("a", T.LongType(), False), T.StructField("b", T.ArrayType(T.DateType()))]),
]


def field(data_type: T.DataType, name: str = "c") -> T.StructField:
    return T.StructField(name, data_type)


@pytest.mark.parametrize("data_type", ORDINARY, ids=lambda t: t.simpleString())
def test_ordinary_types_may_be_keys(data_type: T.DataType) -> None:
    require_key_types([field(data_type)])
    assert arrow_schema(T.StructType([field(data_type)]), "the keys").names == ["c"]


@pytest.mark.parametrize(
    ("data_type", "column", "remedy"),
    [
        (MAP, "c", "to_json"),
        (T.ArrayType(MAP), "c", "to_json"),
        (T.StructType([field(MAP, "m")]), "c.m", "to_json"),
        (COLLATED, "c", "UTF8_BINARY"),
        (T.ArrayType(COLLATED), "c", "UTF8_BINARY"),
        (T.StructType([field(T.ArrayType(COLLATED), "s")]), "c.s", "UTF8_BINARY"),
    ],
)
def test_keys_that_group_otherwise_are_refused_with_a_remedy(data_type: T.DataType, column: str, remedy: str) -> None:
    """xxhash64 of a collated string goes by bytes, so 'A' and 'a' would be two keys, in two shards."""
    with pytest.raises(InvalidArgumentError, match=f"'{column}'") as caught:
        require_key_types([field(T.LongType(), "fine"), field(data_type)])
    assert remedy in str(caught.value)


@pytest.mark.parametrize("data_type", [COLLATED, MAP])
def test_what_cannot_be_a_key_can_be_a_value(data_type: T.DataType) -> None:
    assert len(arrow_schema(T.StructType([field(data_type)]), "stateStructType")) == 1


@pytest.mark.parametrize(
    "data_type", [T.YearMonthIntervalType(), T.CalendarIntervalType(), T.VariantType(), T.CharType(5)]
)
@pytest.mark.parametrize("wrap", [lambda t: t, T.ArrayType, lambda t: T.StructType([field(t, "x")])])
def test_types_that_arrow_does_not_carry_are_refused_by_name(data_type: T.DataType, wrap: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"column 'c(\.x)?' of stateStructType") as caught:
        arrow_schema(T.StructType([field(wrap(data_type))]), "stateStructType")
    assert caught.value.facts["type"] == data_type.simpleString()


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the input names a column twice"):
        arrow_schema(T.StructType([field(T.LongType()), field(T.StringType())]), "the input")


@pytest.mark.parametrize("schema", [None, 3, T.LongType(), T.StructType([]), [("n", "long")]])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="outputStructType must be a StructType or a DDL string"):
        parse_struct(schema, "outputStructType")


# What a function returned

OUTPUT = pa.schema([("n", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", "UTC"))])


def test_output_is_put_in_order_and_cast_where_nothing_is_lost() -> None:
    at = pa.array([0, None], pa.timestamp("us", "America/New_York"))
    table = pa.table({"at": at, "name": pa.array(["x", "y"], pa.large_string()), "n": pa.chunked_array([[1], [2]])})
    batch = conform_output(table, OUTPUT, "totals")
    assert batch.schema == OUTPUT
    assert batch.column("n").to_pylist() == [1, 2]
    assert batch.column("at").view(pa.int64()).to_pylist() == [0, None]
    assert conform_output(batch, OUTPUT, "totals") == batch
    assert conform_output(table.slice(0, 0), OUTPUT, "totals").num_rows == 0


def test_output_is_what_was_returned() -> None:
    """A function may fill the same array of numpy for the next shard, while this output waits for its commit."""
    n = np.array([1, 2])
    batch = conform_output(pa.table({"n": n}), pa.schema([("n", pa.int64())]), "totals")
    n *= 0
    assert batch.column("n").to_pylist() == [1, 2]


def test_nulls_where_none_are_declared_are_refused() -> None:
    """Spark would fail later, after the state was committed, and name neither operator nor column."""
    declared = T.StructType([T.StructField("n", T.LongType(), False), T.StructField("m", T.LongType())])
    schema = arrow_schema(declared, "outputStructType", keep_not_null=True)
    table = pa.table({"n": [1, None], "m": [1, None]})
    with pytest.raises(SchemaMismatchError, match="nulls in column 'n', which outputStructType declares NOT NULL"):
        conform_output(table, schema, "totals")
    assert conform_output(table.slice(0, 1), schema, "totals").num_rows == 1
    assert conform_output(table, arrow_schema(declared, "it"), "totals").num_rows == 2


def test_nulls_inside_of_columns_are_refused_where_none_are_declared() -> None:
    """In elements and map values; and a dictionary that holds a null is no way around."""
    declared = T.StructType().add("n", T.LongType(), False).add("l", T.ArrayType(T.LongType(), False))
    declared = declared.add("m", T.MapType(T.StringType(), T.LongType(), False))
    schema = arrow_schema(declared, "outputStructType", keep_not_null=True)
    maps = pa.map_(pa.string(), pa.int64())
    good = {"n": pa.array([1]), "l": pa.array([[1]]), "m": pa.array([[("a", 1)]], maps)}
    hidden = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([None], pa.int64()))
    for name, bad in {"n": hidden, "l": pa.array([[None]]), "m": pa.array([[("a", None)]], maps)}.items():
        with pytest.raises(SchemaMismatchError, match=f"column '{name}'"):
            conform_output(pa.table({**good, name: bad}), schema, "totals")
    nothing = pa.table({**good, "l": pa.nulls(1), "m": pa.nulls(1)})
    assert conform_output(nothing, schema, "totals").num_rows == 1


def test_a_null_struct_is_output_whatever_its_fields_may_be() -> None:
    """Keys say nothing of the nulls inside of them, and output may be declared as the input's column was."""
    point = T.StructType([T.StructField("x", T.LongType(), False)])
    schema = arrow_schema(T.StructType([T.StructField("k", point)]), "outputStructType", keep_not_null=True)
    is_null = pa.array([True, False])
    keys = pa.StructArray.from_arrays([pa.array([None, 1], pa.int64())], ["x"], mask=is_null)
    assert conform_output(pa.table({"k": keys}), schema, "totals").to_pylist() == [{"k": None}, {"k": {"x": 1}}]
    within = pa.StructArray.from_arrays([pa.array([None, 1], pa.int64())], ["x"])
    with pytest.raises(SchemaMismatchError, match="nulls inside column 'k', in 'x'"):
        conform_output(pa.table({"k": within}), schema, "totals")


@pytest.mark.parametrize(("value", "declared"), [(1e300, T.FloatType()), (0.15, T.DecimalType(10, 1))])
def test_numbers_that_do_not_fit_are_refused(value: float, declared: T.DataType) -> None:
    """Arrow makes infinity of the one and drops a digit of the other."""
    schema = arrow_schema(T.StructType([T.StructField("n", declared)]), "outputStructType")
    with pytest.raises(SchemaMismatchError, match="'n' in a type that does not fit"):
        conform_output(pa.table({"n": [value]}), schema, "totals")


def test_a_column_of_nothing_but_nulls_needs_no_type() -> None:
    table = pa.table({"n": pa.nulls(2), "name": pa.nulls(2), "at": pa.nulls(2)})
    assert conform_output(table, OUTPUT, "totals").schema == OUTPUT


N_DIFFERS = "'n' in a type that does not fit"
GOOD = {"n": [1], "name": ["x"], "at": pa.array([0], pa.timestamp("us", "UTC"))}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("text", "must return a pyarrow.Table, a pyarrow.RecordBatch, a dict of columns or None.*returned=str"),
        ([1], "must return a pyarrow.Table.*returned=list"),
        (pa.table({"n": [1]}), "different columns than outputStructType declares.*missing=.*at.*name"),
        (pa.table({**GOOD, "more": [1]}), "unexpected=.*more"),
        (pa.table(list(GOOD.values()), ["n", "name", "name"]), "different columns"),
        (pa.table({**GOOD, "n": ["1"]}), f"{N_DIFFERS}: convert it first.*returned=string declared=int64"),
        (pa.table({**GOOD, "n": [1.5]}), f"{N_DIFFERS}: .*truncated"),
        (pa.table({**GOOD, "name": [b"\xff"]}), "'name' in a type that does not fit"),
        (pa.table({**GOOD, "at": pa.array([0], pa.timestamp("us"))}), "'at' in a type that does not fit"),
        (pa.table({**GOOD, "n": pa.array([2**64 - 1], pa.uint64())}), N_DIFFERS),
    ],
)
def test_output_that_does_not_fit_names_operator_and_column(returned: Any, message: str) -> None:
    with pytest.raises(SchemaMismatchError, match=message) as caught:
        conform_output(returned, OUTPUT, "totals")
    assert caught.value.facts["operator"] == "totals"
