"""What a processor may declare over state that an earlier one has left: `processor.restarting`, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from holdfast.backends.schema import TableSchema
from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.processor.transform_with_state import TransformWithState, require_same_grouping
from tests.unit.spark_integration.processor.processor_shard import ProcessorShard, Scripted, columns

Declare = Callable[[StatefulProcessorHandle], Any]
N, TEXT = columns(n=LongType()), columns(note=StringType())
CONFIGURATION = {"timeMode": "ProcessingTime", "outputMode": "update"}


@pytest.fixture
def stored(tmp_path: Any) -> Callable[..., tuple[StoredTables, TransformWithState]]:
    """Return a function that declares one thing after the other, and returns what is stored by then, and the last."""

    def declared(declares: Sequence[Declare]) -> tuple[StoredTables, TransformWithState]:
        steps = [step_of(declare, tmp_path) for declare in declares]
        tables = StoredTables.of_first_run(steps[0].tables())
        for step in steps[1:-1]:
            step.require_restartable(tables, CONFIGURATION)
            tables = tables.with_declared(step.tables())
        return tables, steps[-1]

    return declared


def step_of(declare: Declare, folder: Any) -> TransformWithState:
    processor: StatefulProcessor = Scripted(declare)
    return ProcessorShard(folder / "shard", processor, "ProcessingTime").function


def not_null(schema: StructType) -> StructType:
    return StructType([StructField(field.name, field.dataType, False) for field in schema])


def entries(key: StructType) -> Declare:
    return lambda handle: handle.getMapState("m", key, N)


def value(schema: StructType, ttl_ms: int | None = None, name: str = "v") -> Declare:
    return lambda handle: handle.getValueState(name, schema, ttl_ms)


GOES: dict[str, list[Declare]] = {
    "a column for another one, in two restarts": [
        value(N),
        value(columns(b=BooleanType())),
        value(columns(m=LongType())),
    ],
    "a column for one of another type": [value(N), value(columns(n2=StringType()))],
    "a field for another one, in two restarts": [
        value(columns(p=N)),
        value(columns(p=columns(b=BooleanType()))),
        value(columns(p=columns(m=LongType()))),
    ],
    "TTL, and none, and TTL": [value(N, 5), value(N), value(N, 7)],
    "TTL for a column": [value(columns(n=LongType(), m=LongType())), value(N, 5)],
    "a column that was NOT NULL before": [value(not_null(N)), value(N)],
    "a column that was always NOT NULL": [value(not_null(N)), value(TEXT, name="w"), value(not_null(N))],
    "a key that was always NOT NULL": [entries(not_null(TEXT)), entries(not_null(TEXT))],
    "what may be null inside of a map's key": [entries(columns(p=not_null(N))), entries(columns(p=N))],
    "what may not be null inside of a map's key": [entries(columns(p=N)), entries(columns(p=not_null(N)))],
    "a new variable that is NOT NULL": [value(TEXT, name="w"), value(not_null(N))],
    "a name that is that of an index": [value(N, 5, "x"), lambda handle: handle.getListState("x.expiring", N)],
    "everything else": [value(N), lambda handle: handle.getMapState("w", TEXT, N)],
}
# Words of the error.
DOES_NOT: dict[str, tuple[list[Declare], str]] = {
    "renamed": (
        [value(N), value(columns(m=LongType()))],
        "to lose the values, give stateChanges={'v': {'drop': ['n']}}; to keep them hidden",
    ),
    "renamed and widened": (
        [value(columns(n=IntegerType())), value(columns(m=LongType()))],
        "{'v': {'rename': {'n': 'm'}}}",
    ),
    "a field renamed": (
        [value(columns(p=ArrayType(N))), value(columns(p=ArrayType(columns(m=LongType()))))],
        "p.n → p.m: what is renamed loses its values",
    ),
    "a field of a map's values renamed": (
        [value(columns(p=MapType(StringType(), N))), value(columns(p=MapType(StringType(), columns(m=LongType()))))],
        "p.n → p.m: what is renamed loses its values",
    ),
    "comes back narrower": (
        [value(N), value(columns(b=BooleanType())), value(columns(b=BooleanType(), n=IntegerType()))],
        "n: int64 → int32",
    ),
    "a column NOT NULL comes back": (
        [
            value(columns(n=LongType(), m=LongType())),
            value(N),
            value(StructType([*N, StructField("m", LongType(), False)])),
        ],
        "m: it is NOT NULL",
    ),
    "a column becomes NOT NULL": ([value(N), value(not_null(N))], "n: it is NOT NULL"),
    "a column that was not NOT NULL in between": (
        [value(not_null(N), 5), value(N, 5), value(not_null(N), 5)],
        "n: it is NOT NULL",
    ),
    "a column that was absent in between": (
        [value(not_null(N)), value(TEXT), value(StructType([*TEXT, *not_null(N)]))],
        "n: it is NOT NULL",
    ),
    "a map's key becomes NOT NULL": ([entries(TEXT), entries(not_null(TEXT))], "entry.note: it is NOT NULL"),
    "TTL over a column of its name": (
        [value(columns(n=LongType(), expires_ms=LongType())), value(N, 5)],
        "expires_ms: a column of the user's and the time to live",
    ),
    "a column of its name over TTL": (
        [value(N, 5), value(N), value(columns(n=LongType(), expires_ms=LongType()))],
        "expires_ms: a column of the user's and the time to live",
    ),
    "an index's name, which was a variable's": (
        [value(N, None, "x.expiring"), lambda handle: handle.getListState("x.expiring", N)],
        "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE",
    ),
    "an index's table": ([value(N, 5, "x"), value(TEXT, None, "x.expiring")], "shares a table with an earlier"),
    "an index where a variable was": ([value(N, None, "x.expiring"), value(N, 5, "x")], "shares a table with an earl"),
}


@pytest.mark.parametrize("name", list(GOES))
def test_what_goes(name: str, stored: Callable[..., tuple[StoredTables, TransformWithState]]) -> None:
    tables, step = stored(GOES[name])
    step.require_restartable(tables, CONFIGURATION)
    assert tables.with_declared(step.tables()).declared == step.tables()


@pytest.mark.parametrize("name", list(DOES_NOT))
def test_what_does_not(name: str, stored: Callable[..., tuple[StoredTables, TransformWithState]]) -> None:
    """It would lose values, or take one for another."""
    declares, words = DOES_NOT[name]
    tables, step = stored(declares)
    with pytest.raises(SchemaMismatchError) as caught:
        step.require_restartable(tables, CONFIGURATION)
    assert words in str(caught.value)


@pytest.mark.parametrize("was_nullable", [True, False])
def test_what_may_be_null_inside_of_grouping_keys_may_change(was_nullable: bool) -> None:
    """The keys are the same."""

    def grouped(is_nullable: bool) -> TableSchema:
        key = pa.schema([("k", pa.struct([pa.field("a", pa.int64(), is_nullable)]))])
        return TableSchema.of("v.v", key, pa.schema([("n", pa.int64())]))

    stored = StoredTables.of_first_run({"v.v": grouped(was_nullable)})
    require_same_grouping(stored, grouped(not was_nullable).key)


def test_state_of_another_api_is_refused(stored: Callable[..., tuple[StoredTables, TransformWithState]]) -> None:
    """Its record has no modes."""
    tables, step = stored([value(N), value(TEXT)])
    with pytest.raises(SchemaMismatchError, match="by another kind of operator"):
        step.require_restartable(tables, {})


@pytest.mark.parametrize("name", ["timeMode", "outputMode"])
def test_modes_stay(name: str, stored: Callable[..., tuple[StoredTables, TransformWithState]]) -> None:
    tables, step = stored([value(N), value(N)])
    with pytest.raises(SchemaMismatchError, match=rf"INVALID_CONFIG_AFTER_RESTART.*another {name}.*stored=another"):
        step.require_restartable(tables, CONFIGURATION | {name: "another"})


def test_a_variable_and_an_index_do_not_share_a_name(tmp_path: Any) -> None:
    """Both would write into one table."""

    def both(handle: StatefulProcessorHandle) -> None:
        handle.getValueState("x", N, 5)
        handle.getValueState("x.expiring", N)

    with pytest.raises(InvalidArgumentError, match="keeps its index under this name"):
        step_of(both, tmp_path)
