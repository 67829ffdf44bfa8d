"""Under which names columns are stored: each is given once, whatever columns are called meanwhile."""

from __future__ import annotations

import pyarrow as pa
import pytest

from holdfast.backends.column_names import ColumnChanges, Names, named, with_columns
from holdfast.backends.run import Run, TableSchema, under_names
from holdfast.errors import SchemaMismatchError
from holdfast.testing.state_rows import run_of

KEY = pa.schema([("k", pa.string())])


def changed(names: Names, **changes: object) -> Names:
    drop, rename = changes.get("drop", ()), changes.get("rename", {})
    return ColumnChanges(frozenset(drop), rename).applied(names, "t")  # type: ignore[arg-type, call-overload]


def test_a_name_that_comes_back_is_another_column() -> None:
    """Also the third time, and where a user's own column is called like a stored one."""
    names = with_columns({}, [], ["n", "m"])
    assert names == {"n": "n", "m": "m"}
    names = with_columns(changed(names, drop=["m"]), ["n", "m"], ["n", "m", "m#2"])
    assert names == {"n": "n", "m": "m#2", "m#2": "m#2#2"}
    names = with_columns(changed(names, drop=["m"]), ["n", "m", "m#2", "m#2#2"], ["m"])
    assert names == {"n": "n", "m": "m#3", "m#2": "m#2#2"}


def test_a_renamed_column_stays_where_it_is() -> None:
    """There and back; the old name is free for another column, which is stored elsewhere."""
    names = changed({"n": "n", "m": "m"}, rename={"n": "total"})
    assert names == {"total": "n", "m": "m"}
    assert changed(names, rename={"n": "total"}) == names, "made once"
    names = with_columns(names, ["n", "m"], ["n"])
    assert names == {"total": "n", "m": "m", "n": "n#2"}
    assert changed(changed(names, drop=["n"]), rename={"total": "n"}) == {"n": "n", "m": "m"}


def test_a_rename_takes_no_others_name() -> None:
    with pytest.raises(SchemaMismatchError, match=r"drop that one first.*n → m"):
        changed({"n": "n", "m": "m"}, rename={"n": "m"})


def test_rows_are_shown_under_the_names_of_now() -> None:
    """What no row was stored with is null, also where a dropped column had its name."""
    stored = TableSchema.of("t", KEY, pa.schema([("n", pa.int32()), ("m", pa.string())]))
    run = run_of(stored, [(("a",), (1, "dropped"))])
    wanted = TableSchema.of("t", KEY, pa.schema([("m", pa.int64()), ("total", pa.int64()), ("new", pa.string())]))
    for names in ({"total": "n", "m": "m#2", "new": "new"}, {"total": "n", "m": "m#2"}):
        found: Run = under_names(run, wanted, names)
        assert found.schema is wanted
        assert found.values.to_pylist() == [{"m": None, "total": 1, "new": None}]


def test_which_columns_have_no_null_goes_with_them() -> None:
    columns = pa.schema([pa.field("n", pa.int32(), nullable=False), pa.field("m", pa.int32(), nullable=False)])
    table = TableSchema.of("t", pa.schema([pa.field("k", pa.string(), nullable=False)]), columns)
    assert named(table, {"n": "total"}).not_null == {"key.k", "value.total"}
    assert named(table, {"n": "m", "m": "n"}).not_null == {"key.k", "value.m", "value.n"}
