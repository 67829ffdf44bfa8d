"""The row that Spark's state keeps of a shard: what was written is read, and anything else is an error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, SchemaMismatchError
from holdfast.spark_integration.shard.pointer_row import POINTER_COLUMNS, POINTER_STATE, PointerRow

ROW = PointerRow("q-1", "totals", 3, 4, Pointer(7, "00c0ffee00c0ffee"), b"commit", 1_000, 1_795_287_600_000)
NAMES = list(POINTER_COLUMNS)


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        ROW._replace(directory=None, carried=None, earliest_timer_ms=None),
        ROW._replace(directory="totals@0ab9-1", earliest_timer_ms=-5),
        ROW._replace(pointer=None, carried=None),
    ],
)
def test_a_row_is_read_as_it_was_written(row: PointerRow) -> None:
    """Some releases of Spark give binary values back as a bytearray."""
    columns = row.columns()
    assert len(columns) == len(POINTER_COLUMNS)
    assert PointerRow.read(columns) == row
    assert PointerRow.read(tuple(bytearray(v) if isinstance(v, bytes) else v for v in columns)) == row
    assert row.carried_commits == ({} if row.carried is None else {row.pointer: row.carried})


def test_the_columns_are_the_same_for_ever() -> None:
    """Spark refuses to start a query whose state has other ones."""
    assert POINTER_STATE == (
        "format int, query string, directory string, shard int, shards int, version long, commit string, "
        "carried binary, earliest_timer_ms long, batch_ms long, spare binary"
    )


WRONG: list[tuple[str, Any, str]] = [
    ("format", 2, "release that wrote it.*format=2"),
    ("format", None, "release that wrote it"),
    ("query", None, "query"),
    ("query", "../x", "query"),
    ("query", "a/b", "query"),
    ("directory", "..", "directory"),
    ("directory", "totals/x", "directory"),
    ("directory", "totals@../x", "directory"),
    ("directory", "totals@", "directory"),
    ("shard", 4, "shard"),
    ("shard", -1, "shard"),
    ("shard", None, "shard"),
    ("shards", 0, "shard"),
    ("shards", 2**31, "shard"),
    ("directory", b"totals", "directory"),
    ("directory", 0, "directory"),
    ("version", None, "version"),
    ("version", -1, "version"),
    ("commit", None, "version"),
    ("commit", "../../x", "version"),
    ("carried", "text", "carried"),
    ("batch_ms", None, "batch_ms"),
    ("earliest_timer_ms", "soon", "batch_ms"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_what_holdfast_cannot_have_written_is_refused(name: str, value: Any, expected: str) -> None:
    columns = list(ROW.columns())
    columns[NAMES.index(name)] = value
    with pytest.raises(CorruptionError, match=expected):
        PointerRow.read(tuple(columns))


def test_rows_of_other_lengths_are_refused() -> None:
    for columns in ((), ROW.columns()[:-1], (*ROW.columns(), None), (6, "00c0ffee00c0ffee", None, None, 5)):
        with pytest.raises(CorruptionError, match="a format that this release of holdfast cannot read"):
            PointerRow.read(columns)


def test_a_carried_commit_needs_its_pointer() -> None:
    with pytest.raises(CorruptionError, match="carried"):
        PointerRow.read(ROW._replace(pointer=None).columns())


VALUES = st.one_of(st.none(), st.integers(), st.text(max_size=20), st.binary(max_size=5), st.booleans(), st.floats())


@given(st.one_of(st.tuples(*[VALUES] * len(NAMES)), st.tuples(st.just(1), *[VALUES] * (len(NAMES) - 1))))
def test_any_row_is_read_or_refused(columns: tuple[Any, ...]) -> None:
    try:
        row = PointerRow.read(columns)
    except CorruptionError:
        return
    assert PointerRow.read(row.columns()) == row


def test_a_row_of_another_shard_operator_or_number_of_shards_names_both_and_what_to_set() -> None:
    ROW.require("totals", 3, 4)
    ROW._replace(directory="totals@q-2").require("totals", 3, 4)
    ROW._replace(directory=None).require("any", 3, 4)
    with pytest.raises(SchemaMismatchError, match=r"set spark\.holdfast\.shards to 4.*stored=4 asked=8"):
        ROW.require("totals", 3, 8)
    with pytest.raises(SchemaMismatchError, match=r"stored=totals shard 3 asked=totals shard 2|shard 3.*shard 2"):
        ROW.require("totals", 2, 4)
    with pytest.raises(SchemaMismatchError, match=r"old name.*totals shard 3.*others shard 3"):
        ROW.require("others", 3, 4)
