"""What state tables may become at a restart, and how numbers of list elements go on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import CorruptionError, SchemaMismatchError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.tables.entry_rows import first_number, renumbered
from holdfast.spark_integration.tables.restarting import require_readable_tables, require_same_api
from holdfast.spark_integration.timers import KeyTimers
from holdfast.spark_integration.ttl.expiry import expiring_tables

KEY = pa.schema([("k", pa.string())])
# Keys that differ in what may be null inside of them.
NULLABLE, NEVER_NULL = (
    pa.schema([("k", pa.list_(pa.field("element", pa.struct([pa.field("a", pa.int64(), is_nullable)]), is_nullable)))])
    for is_nullable in (True, False)
)
INT, LONG, TEXT = pa.int32(), pa.int64(), pa.string()
Tables = Mapping[str, TableSchema]


def table(name: str = "state", key: pa.Schema = KEY, **columns: pa.DataType | pa.Field) -> dict[str, TableSchema]:
    fields = [t.with_name(n) if isinstance(t, pa.Field) else pa.field(n, t) for n, t in columns.items()]
    return {name: TableSchema.of(name, key, pa.schema(fields))}


def expiring(**columns: pa.DataType) -> Tables:
    return expiring_tables("state", KEY, pa.schema(list(columns.items())))


REQUIRED = pa.field("", INT, nullable=False)
EVENT_TIMERS, CLOCK_TIMERS = (KeyTimers.tables(KEY, conf) for conf in ("EventTimeTimeout", "ProcessingTimeTimeout"))
PLACE, WIDER_PLACE = pa.struct([("x", INT)]), pa.struct([("x", LONG), ("y", TEXT)])
RENAMED = pa.list_(pa.struct([("z", INT)]))

GOES: dict[str, tuple[Tables, Tables]] = {
    "added": (table(n=INT), table(m=TEXT, n=INT)),
    "left out": (table(n=INT, m=TEXT), table(n=INT)),
    "reordered": (table(n=INT, m=TEXT), table(m=TEXT, n=INT)),
    "widened": (table(n=INT, d=pa.decimal128(5, 2)), table(n=pa.float64(), d=pa.decimal128(7, 3))),
    "widened within": (
        table(a=PLACE, b=pa.list_(PLACE), c=pa.map_(TEXT, PLACE)),
        table(a=WIDER_PLACE, b=pa.list_(WIDER_PLACE), c=pa.map_(TEXT, WIDER_PLACE)),
    ),
    "nullable": (table(n=REQUIRED), table(n=INT)),
    "a table added": (table("a", n=INT), {**table("a", n=INT), **table("b", n=INT)}),
    "a table left out": ({**table("a", n=INT), **table("b", n=INT)}, table("b", n=INT)),
    "a time to live": (table(n=INT), expiring(n=INT)),
    "no time to live": (expiring(n=INT), table(n=INT)),
    "null inside of keys": (table(key=NEVER_NULL, n=INT), table(key=NULLABLE, n=INT)),
    "no null inside of keys": (table(key=NULLABLE, n=INT), table(key=NEVER_NULL, n=INT)),
    "timers": ({**table(n=INT), **EVENT_TIMERS}, {**table(n=LONG), **EVENT_TIMERS}),
}
# What the error says.
DOES_NOT: dict[str, tuple[Tables, Tables, list[str]]] = {
    "narrowed": (table(n=LONG), table(n=INT), ["n: int64 → int32: stored values cannot", "declared='n int32'"]),
    "rounded": (table(n=LONG), table(n=pa.float64()), ["n: int64 → double", "stored='n int64'", "migrate=…"]),
    "another type": (
        *(table(n=INT), table(n=TEXT)),
        ["n: int32 → large_string", "a new name", "a new checkpointLocation"],
    ),
    "narrowed within": (table(a=WIDER_PLACE), table(a=PLACE), ["a: struct<x: int64, y: large_string> → struct<x:"]),
    "NOT NULL": (table(n=INT), table(n=REQUIRED), ["n: it is NOT NULL, but stored rows may have null"]),
    "a key": (
        *(table(n=INT), table(key=pa.schema([("k", LONG)]), n=INT)),
        ["key columns of stored state cannot change", "k: large_string → int64", "table=state"],
    ),
    "a rename": (
        *(table(n=INT, m=TEXT), table(total=LONG, m=TEXT)),
        [
            "total added and n omitted at the same restart: to rename, pass stateChanges={'rename': {'n': 'total'}}; ",
            "to delete the values, pass stateChanges={'drop': ['n']}; to keep them hidden",
        ],
    ),
    "two renames": (table(a=INT, b=INT), table(c=INT, d=INT), ["{'rename': {'a': 'c', 'b': 'd'}}"]),
    "one for another": (table(n=TEXT), table(m=INT), ["m added and n omitted at the same restart: to delete"]),
    "a rename in one of two tables": (
        *({**table("a", n=INT), **table("b", n=INT)}, {**table("a", m=INT), **table("b", n=INT)}),
        ["stateChanges={'a': {'rename': {'n': 'm'}}}", "stateChanges={'a': {'drop': ['n']}}"],
    ),
    "a field renamed": (table(a=pa.list_(PLACE)), table(a=RENAMED), ["a.x → a.z: a renamed field loses its values"]),
    "a table renamed": (table("a", n=INT), table("b", n=INT), ["tables cannot be renamed", "new=['b'] missing=['a']"]),
    "other timers": ({**table(n=INT), **EVENT_TIMERS}, {**table(n=INT), **CLOCK_TIMERS}, ["their clocks differ"]),
    "timers added": (table(n=INT), {**table(n=INT), **EVENT_TIMERS}, ["stored timers do not fit"]),
    "timers left out": ({**table(n=INT), **EVENT_TIMERS}, table(n=INT), ["stored timers do not fit"]),
    "a column of a time to live": (
        *(expiring(n=INT), table(n=INT, expires_ms=LONG)),
        ["expires_ms: a user"],
    ),
}


@pytest.mark.parametrize("name", list(GOES))
def test_what_goes(name: str) -> None:
    before, after = GOES[name]
    stored = StoredTables.of_first_run(before)
    require_readable_tables(stored, after)
    assert stored.with_declared(after).declared == after


@pytest.mark.parametrize("name", list(DOES_NOT))
def test_what_does_not(name: str) -> None:
    before, after, words = DOES_NOT[name]
    with pytest.raises(SchemaMismatchError) as caught:
        require_readable_tables(StoredTables.of_first_run(before), after)
    for said in words:
        assert said in str(caught.value)


def test_what_is_consented_to_goes() -> None:
    stored = StoredTables.of_first_run(table(n=LONG, m=TEXT))
    changes = {"state": ColumnChanges(frozenset({"m"}), {"n": "total"})}
    for declared in (table(total=LONG), table(total=LONG, m=INT)):
        for _ in range(2):
            stored = stored.with_changes(changes if "m" not in declared["state"].value.names else {})
            require_readable_tables(stored, declared)
            stored = stored.with_declared(declared)
    with pytest.raises(SchemaMismatchError, match="total: int64 → int32"):
        require_readable_tables(stored, table(total=INT))


def test_a_hidden_column_is_found_as_it_was() -> None:
    stored = (
        StoredTables.of_first_run(table(n=INT, m=INT)).with_declared(table(n=INT)).with_declared(table(n=INT, x=INT))
    )
    require_readable_tables(stored, table(n=INT, m=LONG, x=INT))
    with pytest.raises(SchemaMismatchError, match="m: int32 → large_string"):
        require_readable_tables(stored, table(n=INT, m=TEXT, x=INT))


def test_an_operator_stays_of_its_kind() -> None:
    for stored, now in (({}, {"timeMode": "none"}), ({"timeMode": "none"}, {})):
        require_same_api(stored, stored)
        with pytest.raises(SchemaMismatchError, match="by another kind of operator"):
            require_same_api(stored, now)


TABLE = TableSchema.of(
    "l.items", pa.schema([("user", pa.int64()), ("seq", pa.int64())]), pa.schema([("item", pa.int64())])
)


def elements(*numbers: int) -> Run:
    columns = [pa.array([7] * len(numbers)), pa.array(numbers, pa.int64())]
    keys = Keys(np.full(len(numbers), 5, np.uint64), pa.record_batch(columns, schema=TABLE.key))
    return Run.build(TABLE, keys, pa.record_batch([pa.array(range(len(numbers)))], schema=TABLE.value))


def test_numbers_become_smaller_and_stay_in_order() -> None:
    """Whatever was restored before: an earlier restore has left numbers below zero."""
    run = renumbered(elements(-(2**60), first_number(3), first_number(8) + 1), 7)
    assert run.keys.column(1).to_pylist() == [-(2**60) - 7 * 2**32, -4 * 2**32, 2**32 + 1]


@pytest.mark.parametrize(("number", "versions"), [(-(2**63), 1), (-(2**62), 2**31 - 1), (0, 2**31), (0, 2**61)])
def test_numbers_that_no_query_gives_are_damage(number: int, versions: int) -> None:
    """As of a manifest that somebody has altered: smaller ones would begin again at the largest."""
    with pytest.raises(CorruptionError, match="impossible numbers"):
        renumbered(elements(number, 1), versions)
