"""What is shown of state: the columns that keys are given by, and whether a key still holds the same."""

from __future__ import annotations

import pyarrow as pa
import pytest

from holdfast.backends.run import TableSchema
from holdfast.spark_integration.lookup.query_pointers import grouping_of
from holdfast.spark_integration.lookup.shown import same_rows

NAN = float("nan")


def table(name: str, keys: str, values: str = "v") -> TableSchema:
    return TableSchema.of(name, *(pa.schema([(one, pa.int64()) for one in names.split()]) for names in (keys, values)))


@pytest.mark.parametrize(
    "tables",
    [
        [table("state", "a b")],
        [table("timers", "a b", "due_ms"), table("state", "a b")],
        [table("m.seen", "a b entry.id"), table("v.total", "a b")],
        [table("l.seen", "a b seq")],
        [table("m.seen", "a b entry.id entry.day")],
        [table("m.one", "a b entry.id"), table("m.other", "a b entry.day")],
        [table("timers", "a b due_ms", "")],
        [table("m.seen", "a b entry.id"), table("timers", "a b due_ms", "")],
        [table("s.state", "a b session_start")],
        [table("j.left", "a b at number"), table("j.right", "a b paid number")],
    ],
    ids=lambda tables: " ".join(one.name for one in tables),
)
def test_keys_are_given_by_the_grouping_columns(tables: list[TableSchema]) -> None:
    """Also where all tables have key columns of their own: part of a key would find nothing, and say so of all."""
    assert grouping_of({one.name: one for one in tables}) == ("a", "b")


def test_a_value_that_is_not_a_number_is_still_the_same() -> None:
    """Or the history of a key that holds NaN would be as long as the query."""
    rows = {"state": pa.table({"f": [NAN, 1.0, None], "l": [[NAN], [], None]})}
    assert same_rows(rows, {"state": pa.concat_tables([rows["state"].slice(0, 1), rows["state"].slice(1)])})
    for other in ([NAN, 2.0, None], [NAN, 1.0, 0.0], [None, 1.0, None]):
        assert not same_rows(rows, {"state": rows["state"].set_column(0, "f", pa.array(other))})
    assert not same_rows(rows, {"state": rows["state"].slice(0, 2)})
    assert not same_rows(rows, {})
