"""States against what Spark was seen to keep of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DayTimeIntervalType, StructType

from holdfast.backends.run import TableSchema
from holdfast.spark_integration.keyed.pandas_with_state import KeyStates
from holdfast.spark_integration.keyed.python_values import RowValues
from holdfast.testing.ddl import parse_schema
from tests.fuzz.spark_states import KEPT
from tests.time_zone import process_in


@pytest.fixture(autouse=True)
def _in_new_york() -> Iterator[None]:
    """The zone of the process decides over states, and not the session's."""
    with process_in("America/New_York"):
        yield


@pytest.mark.parametrize(("ddl", "value", "kept"), KEPT, ids=[f"{ddl} {value!r}" for ddl, value, _ in KEPT])
def test_what_spark_keeps_is_kept(ddl: str, value: Any, kept: Any) -> None:
    """From `update` in one micro-batch to `get` in the next, by way of the types in which states are stored."""
    schema = StructType().add("x", DayTimeIntervalType()) if ddl.startswith("interval") else parse_schema(f"x {ddl}")
    state = KeyStates(schema, "NoTimeout", 0, None).open(None)
    state.update((value,))
    values = RowValues(schema)
    table = TableSchema.of("state", pa.schema([("key", pa.int64())]), values.arrow)
    [found] = values.to_tuples(table.conform(values.to_arrow([state.value]), "value"))
    assert repr(found) == repr((kept,))
