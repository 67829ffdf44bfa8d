"""A function that gives saved rows other columns: what it is given, and what it must not return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import InvalidArgumentError, NotFoundError, SchemaMismatchError
from holdfast.snapshotter.savepoints.manifest import SavedOperator
from holdfast.spark_integration.savepoints import changes
from holdfast.spark_integration.savepoints.changes import migrated, migrations_of
from holdfast.spark_integration.timers import KeyTimers
from holdfast.spark_integration.ttl.expiry import expiring_tables

KEY = pa.schema([("k", pa.string())])
VALUE = pa.schema([("n", pa.int64()), ("k", pa.int64())])
STATE = TableSchema.of("state", KEY, VALUE)
Function = Callable[[pa.RecordBatch], Any]


def operator(tables: Mapping[str, TableSchema]) -> SavedOperator:
    return SavedOperator("totals", 0, "applyInPandasWithState", False, 2, tables, tables, True, {}, (), ())


def rows(schema: TableSchema, **columns: Any) -> Run:
    count = len(columns["n"])
    keys = Keys.of(schema, np.arange(count, dtype=np.uint64), pa.table({"k": [f"u{i}" for i in range(count)]}))
    return Run.build(schema, keys, schema.conform(pa.table(columns), "value"))


def as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Give the number as text, and the column of the key's name as it is."""
    return pa.record_batch({"s": batch["n"].cast(pa.string()), "k": batch["k"], "value.k": batch["value.k"]})


def test_rows_get_other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches; types are those that are stored, and names those that users see."""
    monkeypatch.setattr(changes, "_ROWS", 3)
    seen: list[int] = []

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.num_rows)
        assert batch.schema.names == ["k", "n", "value.k"]
        return as_text(batch)

    tables = {"state": STATE, **KeyTimers.tables(KEY, "EventTimeTimeout")}
    (migration,) = migrations_of(operator(tables), function).values()
    wanted = TableSchema.of("state", KEY, pa.schema([("s", pa.string()), ("k", pa.int64())]))
    found = migration(rows(STATE, n=[*range(7)], k=[None, *range(6)]))
    assert seen == [0, 3, 3, 1]
    assert found.schema == wanted
    assert found.values.to_pylist() == [{"s": str(i), "k": i - 1 if i else None} for i in range(7)]
    assert found.keys.column(0).to_pylist() == [f"u{i}" for i in range(7)]
    after = migrated(operator(tables), {"state": migration})
    assert (after.tables, after.declared) == ({**tables, "state": wanted},) * 2


def test_a_column_may_be_called_as_a_key_in_another_case() -> None:
    """The function sees it under a name that Spark can tell apart, and may call its own columns what it likes."""
    table = TableSchema.of("state", KEY, pa.schema([("n", pa.int64()), ("K", pa.int64())]))

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch.schema.names == ["k", "n", "value.K"]
        return batch.rename_columns(["k", "N", "value.K"]).append_column("n", batch["n"])

    (migration,) = migrations_of(operator({"state": table}), function).values()
    found = migration(rows(table, n=[1, 2], K=[3, 4]))
    assert found.values.to_pylist() == [{"N": 1, "K": 3, "n": 1}, {"N": 2, "K": 4, "n": 2}]


def test_times_to_live_are_kept() -> None:
    """The function does not see them; its table may be left with nothing else."""
    tables = dict(expiring_tables("v.total", KEY, pa.schema([("n", pa.int64())])))
    saved = rows(tables["v.total"], n=[1, 2], expires_ms=[5, None])
    for function, own in ((lambda b: b.select(["k"]), {}), (lambda b: b, {"n": 1})):
        migration = migrations_of(operator(tables), {"total": function})["v.total"]
        assert migration(saved).values.to_pylist()[0] == {**own, "expires_ms": 5}
    with pytest.raises(InvalidArgumentError, match="'expires_ms' is holdfast's own"):
        migrations_of(operator(tables), lambda b: b.append_column("expires_ms", b["n"]))


def only_with_rows(function: Function) -> Function:
    """Return a function that does wrong only where there are rows."""
    return lambda batch: function(batch) if batch.num_rows else batch


WRONG: dict[str, tuple[Function, str]] = {
    "fails": (lambda b: pc.divide(b["n"], 0), "it failed: ArrowInvalid: divide by zero"),
    "no batch": (lambda b: b.to_pandas(), "it returned no pyarrow.RecordBatch"),
    "other rows": (lambda b: b.slice(1), "it returned another number of rows"),
    "columns twice": (lambda b: pa.record_batch([b["n"]] * 2, names=["k", "k"]), "two columns of one name"),
    "other columns": (lambda b: b.select(["k", "n"]), "it returned other columns than for no rows"),
    "other keys": (lambda b: b.set_column(0, "k", pc.add_checked(b["k"], "x")), "it failed"),
    "another order": (lambda b: b.take(pa.array([1, 0])), "it returned other keys, or the same in another order"),
    "nulls": (
        lambda b: b.set_column(1, pa.field("n", pa.int64(), nullable=False), pa.nulls(2, pa.int64())),
        "nulls in columns that it says have none",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_a_function_may_not_return(name: str) -> None:
    """Found before anything is written where it can be; in a task, at the first batch."""
    function, words = WRONG[name]
    if name == "nulls":
        required = STATE.value.set(0, pa.field("n", pa.int64(), nullable=False))
        fixed = {"state": TableSchema.of("state", KEY, required)}
        migration = migrations_of(
            operator(fixed), lambda b: b.set_column(1, pa.field("n", pa.int64(), nullable=False), b["n"])
        )["state"]
        migration = type(migration)(function, migration.before, migration.after, False, migration.returned)
    else:
        migration = migrations_of(operator({"state": STATE}), only_with_rows(function))["state"]
    with pytest.raises(InvalidArgumentError, match="the function that migrates a state table is wrong") as caught:
        migration(rows(STATE, n=[1, 2], k=[3, 4]))
    assert words in str(caught.value)


def test_values_are_of_the_types_that_it_returned_for_no_rows() -> None:
    """What does not fit names its column."""
    for function, words in (
        (lambda b: b.set_column(1, "n", b["n"].cast(pa.string())), "'n' has a different type"),
        (lambda b: b.set_column(1, "n", pc.multiply(b["n"], 0.5)), "'n' cannot be stored"),
    ):
        with pytest.raises(SchemaMismatchError, match=words):
            migrations_of(operator({"state": STATE}), only_with_rows(function))["state"](rows(STATE, n=[1], k=[1]))


def test_what_cannot_be_migrated() -> None:
    both = {"a": TableSchema.of("a", KEY, VALUE), "b": TableSchema.of("b", KEY, VALUE)}
    with pytest.raises(InvalidArgumentError, match="several state tables"):
        migrations_of(operator(both), as_text)
    with pytest.raises(NotFoundError, match="no such table to migrate"):
        migrations_of(operator(both), {"c": as_text})
    with pytest.raises(InvalidArgumentError, match="functions by table"):
        migrations_of(operator(both), {"a": "text"})
    with pytest.raises(InvalidArgumentError, match="it returned no key columns"):
        migrations_of(operator({"state": STATE}), lambda b: b.select(["n"]))
