"""The row that Spark's state keeps of a shard: what was written is read, and anything else is an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, SchemaMismatchError
from holdfast.spark_integration.hosts.stateful_processor import POINTER_SCHEMA
from holdfast.spark_integration.shard.pointer_row import POINTER_STATE, PointerRow

ROW = PointerRow(
    "q-1", "totals", 3, 4, Pointer(7, "00c0ffee00c0ffee"), b"commit", 1_000, 1_795_287_600_000, "s3://bucket/app"
)
FIELDS = json.loads(ROW.columns()[0].partition(b"\n")[0])


def stored(fields: object, carried: bytes | None = b"commit") -> tuple[bytes]:
    """Return a row as Spark's state has it."""
    line = json.dumps(fields).encode()
    return (line if carried is None else line + b"\n" + carried,)


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        ROW._replace(directory=None, state_dir=None, carried=None, earliest_timer_ms=None),
        ROW._replace(directory="totals@0ab9-1", earliest_timer_ms=-5),
        ROW._replace(pointer=None, carried=None),
        ROW._replace(carried=b"\n\x00{\n"),
        ROW._replace(carried=b""),
    ],
)
def test_a_row_is_read_as_it_was_written(row: PointerRow) -> None:
    """Some releases of Spark give binary values back as a bytearray."""
    columns = row.columns()
    assert PointerRow.read(columns) == row
    assert PointerRow.read((bytearray(columns[0]),)) == row
    assert row.carried_commits == ({} if row.carried is None else {row.pointer: row.carried})


def test_the_columns_are_the_same_for_ever() -> None:
    """Spark refuses to start a query whose state has other ones."""
    assert POINTER_STATE == "holdfast_pointer binary"
    assert POINTER_SCHEMA.simpleString() == "struct<holdfast_pointer:binary>"


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
    ("directory", 0, "directory"),
    ("directory", None, "state_dir"),
    ("state_dir", 0, "state_dir"),
    ("version", None, "version"),
    ("version", -1, "version"),
    ("commit", None, "version"),
    ("commit", "../../x", "version"),
    ("batch_ms", None, "batch_ms"),
    ("batch_ms", 2**63, "batch_ms"),
    ("batch_ms", True, "batch_ms"),
    ("earliest_timer_ms", "soon", "earliest_timer_ms"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_what_holdfast_cannot_have_written_is_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(CorruptionError, match=expected):
        PointerRow.read(stored(FIELDS | {name: value}))


@pytest.mark.parametrize(
    "row",
    [
        (),
        (None,),
        ("text",),
        (*ROW.columns(), None),
        (b"",),
        (b"\n",),
        (b"[" * 100_000,),
        (b'{"format": ' + b"1" * 5_000 + b"}",),
        stored([1]),
        stored(FIELDS | {"more": 1}),
        stored({name: value for name, value in FIELDS.items() if name != "commit"}),
        (1, "q-1", "totals", 3, 4, 7, "00c0ffee00c0ffee", b"commit", 1_000, 5, None),
    ],
)
def test_rows_of_other_forms_are_refused(row: tuple[Any, ...]) -> None:
    """Another release's, the user's own, and JSON that is damage."""
    with pytest.raises(CorruptionError, match="a format that this release of holdfast cannot read"):
        PointerRow.read(row)


def test_a_carried_commit_needs_its_pointer() -> None:
    with pytest.raises(CorruptionError, match="carried"):
        PointerRow.read(ROW._replace(pointer=None).columns())


VALUES = st.one_of(st.none(), st.integers(), st.text(max_size=20), st.booleans(), st.floats())


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), VALUES), st.none() | st.binary(max_size=5))
def test_any_row_is_read_or_refused(changes: dict[str, Any], carried: bytes | None) -> None:
    columns = stored(FIELDS | changes, carried)
    try:
        row = PointerRow.read(columns)
    except CorruptionError:
        return
    assert PointerRow.read(row.columns()) == row


def test_a_row_of_another_shard_operator_or_number_of_shards_names_both_and_what_to_set() -> None:
    ROW.require("totals", 3, 4)
    ROW._replace(directory="totals@q-2").require("totals", 3, 4)
    ROW._replace(directory=None).require("any", 3, 4)
    with pytest.raises(SchemaMismatchError, match=r"set spark\.holdfast\.shards to 4, or rescale.*stored=4 asked=8"):
        ROW.require("totals", 3, 8)
    with pytest.raises(SchemaMismatchError, match=r"set spark\.holdfast\.shards to 4, operator="):
        ROW._replace(directory=None).require("totals", 3, 8)
    with pytest.raises(SchemaMismatchError, match=r"another shard's pointer.*operator=totals stored=3 asked=2"):
        ROW.require("totals", 2, 4)


@pytest.mark.parametrize(("shard", "shards"), [(3, 4), (2, 4), (3, 8)])
def test_another_operators_row_names_the_name_first(shard: int, shards: int) -> None:
    """Who forgets a restored operator's name is not told to change the number of shards."""
    with pytest.raises(SchemaMismatchError, match=r"old name, here name='totals'.*stored=totals asked=others"):
        ROW.require("others", shard, shards)
