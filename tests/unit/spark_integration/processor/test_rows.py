"""Rows that a processor returns: what does not fit is refused, with the key whose row it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, BinaryType, DataType, LongType, MapType, StringType, StructType

from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration.keyed.python_values import row_maker
from holdfast.spark_integration.processor.exchange import OutputRows

PAIR = StructType().add("a", LongType(), False).add("b", LongType())


@pytest.mark.parametrize(
    ("data_type", "good", "bad", "where"),
    [
        (LongType(), 1, None, "in column 'x'"),
        (PAIR, {"a": 1, "b": None}, {"a": None, "b": 1}, "inside column 'x', in 'a'"),
        (ArrayType(LongType(), False), [1], [1, None], "inside column 'x', in 'element'"),
        (MapType(StringType(), PAIR), {"k": None}, {"k": Row(a=None, b=1)}, "inside column 'x', in 'value': 'a'"),
    ],
)
def test_nulls_where_none_may_be(data_type: DataType, good: Any, bad: Any, where: str) -> None:
    """Spark would read them as 0: at any depth they are an error."""
    output = OutputRows(StructType().add("x", data_type, not isinstance(data_type, LongType)), 10)
    for key, value in enumerate([good, bad, good]):
        assert not list(output.add_all([Row(x=value)], (key,)))
    with pytest.raises(SchemaMismatchError, match=f"the processor returned nulls {where}, which .* NOT NULL"):
        list(output.finish())
    assert output.failed_key == (1,)


def test_a_row_that_was_given_is_returned_as_one_of_sparks() -> None:
    """As a filter does; also with its columns in another order, and in a struct."""
    given = row_maker("a", "b")
    output = OutputRows(StructType().add("b", LongType()).add("a", LongType()).add("pair", PAIR), 10)
    rows = [
        given((1, 2)),
        row_maker("pair", "b", "a")((given((3, 4)), 2, 1)),
        row_maker("b", "a", "pair")((2, 1, None)),
    ]
    with pytest.raises(SchemaMismatchError, match="without a column"):
        list(output.add_all(rows[:1], (0,)))
    assert not list(output.add_all(rows[1:], (0,)))
    [batch] = output.finish()
    assert batch.to_pylist() == [{"b": 2, "a": 1, "pair": {"a": 3, "b": 4}}, {"b": 2, "a": 1, "pair": None}]


def test_a_row_with_fewer_values_than_names_lacks_a_column() -> None:
    """A row of names takes fewer values: the error names the column, and not how we convert."""
    output = OutputRows(StructType().add("a", LongType()).add("b", LongType()), 10)
    with pytest.raises(SchemaMismatchError, match=r"without a column.*missing=\['b'\]"):
        list(output.add_all([Row("a", "b")(1)], (0,)))


@pytest.mark.parametrize(
    ("data_type", "buffer", "fill", "expected"),
    [
        (BinaryType(), bytearray(1), lambda buffer, n: buffer.__setitem__(0, n), [b"\0", b"\1"]),
        (BinaryType(), memoryview(bytearray(1)), lambda buffer, n: buffer.__setitem__(0, n), [b"\0", b"\1"]),
        (ArrayType(LongType()), np.zeros(1, np.int64), lambda buffer, n: buffer.fill(n), [[0], [1]]),
    ],
)
def test_what_a_processor_fills_anew_for_each_key(data_type: DataType, buffer: Any, fill: Any, expected: Any) -> None:
    """Spark converts a key's rows before it calls the next key; here those of many keys are converted together."""
    output = OutputRows(StructType().add("x", data_type), 10)
    for key in range(2):
        fill(buffer, key)
        assert not list(output.add_all([Row(x=buffer)], (key,)))
    [batch] = output.finish()
    assert batch.column(0).to_pylist() == expected
