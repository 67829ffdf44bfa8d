"""What an operator's state may hold: many writers, any of which may die, and none of which overwrites another."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pytest

from holdfast.backends import stored_file
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.run import TableSchema
from holdfast.backends.schema import encode_schema, encode_schemas
from holdfast.errors import ConflictError, CorruptionError, SchemaMismatchError, UnavailableError
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.stored_tables import StoredTables, declare_tables, stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.testing.faulty_storage import Action, Fault, FaultyStorage, Kind
from tests.storage_in_ram import storage_in_ram

KEY = pa.schema([("k", pa.string())])


def table(name: str, **columns: pa.DataType) -> dict[str, TableSchema]:
    return {name: TableSchema.of(name, KEY, pa.schema(list(columns.items())))}


A, B = table("a", n=pa.int32()), table("b", s=pa.string())
WIDE = table("a", n=pa.int64(), note=pa.string())
OTHER = table("a", n=pa.string())
RECORD = OperatorRecord.of("totals", "query", "def-1", "run-1", 2, A, 100)


@pytest.fixture
def storage() -> Iterator[FaultyStorage]:
    with storage_in_ram() as storage, FaultyStorage(storage) as opened:
        declare_operator(opened, RECORD)
        opened.operations.clear()
        yield opened


def names(storage: ObjectStorage) -> list[str]:
    return [info.key.removeprefix("totals/schemas/") for info in storage.list("totals/schemas/")]


def put_tables(storage: ObjectStorage, tables: StoredTables, **changed: object) -> None:
    """Store what another run has declared, or what none would."""
    header = {"operator": "totals", "query_id": "query", "number": 1, **tables.to_json(), **changed}
    storage.put(f"totals/schemas/{1:020d}", stored_file.encode("schemas", header)[0])


def test_what_is_held_grows_and_what_is_declared_changes(storage: FaultyStorage) -> None:
    """Left out and found again; the order of the objects is that of the runs."""
    assert stored_tables(storage, RECORD).held == A
    for declared in ({**A, **B}, B, WIDE, WIDE):
        declare_tables(storage, RECORD, StoredTables.of_first_run(declared))
    found = stored_tables(storage, RECORD)
    assert found.held == {**WIDE, **B}
    assert found.declared == WIDE
    assert found.latest == {**WIDE, **B}
    assert [int(name) for name in names(storage)] == [1, 2, 3], "the same again writes nothing"
    narrow = table("a", note=pa.string())
    declare_tables(storage, RECORD, StoredTables.of_first_run(narrow))
    found = stored_tables(storage, RECORD)
    assert (found.held, found.latest) == ({**WIDE, **B}, {**narrow, **B})


def change(
    storage: ObjectStorage, declared: dict[str, TableSchema], drop: tuple[str, ...] = (), **rename: str
) -> StoredTables:
    """Do what a run does that drops and renames columns of `a`; return what is stored by then."""
    changes = {"a": ColumnChanges(frozenset(drop), rename)}
    declare_tables(storage, RECORD, stored_tables(storage, RECORD).with_changes(changes).with_declared(declared))
    return stored_tables(storage, RECORD)


def test_columns_are_renamed_and_dropped_for_good(storage: FaultyStorage) -> None:
    """Each change is stored once, however often it is asked for; rows keep the names that they were stored under."""
    change(storage, WIDE)
    total = table("a", total=pa.int64())
    for _ in range(2):
        found = change(storage, total, ("note", "never"), n="total")
        assert (found.held, found.live, found.latest) == (WIDE, total, total)
    assert len(names(storage)) == 2
    again = table("a", total=pa.int64(), note=pa.int32(), n=pa.string())
    found = change(storage, again, n="total")
    assert found.names["a"] == {"total": "n", "note": "note#2", "n": "n#2"}
    assert found.held["a"].value.names == ["n", "note", "note#2", "n#2"]
    assert (found.live, found.latest) == (again, again)
    found = change(storage, again)
    assert found.names["a"]["note"] == "note#2"


def test_a_column_that_is_hidden_is_dropped_too(storage: FaultyStorage) -> None:
    """Though the run declares what the last one did."""
    for _ in range(2):
        change(storage, table("a", x=pa.int8()))
    assert stored_tables(storage, RECORD).names["a"] == {"n": "n", "x": "x"}
    assert change(storage, table("a", x=pa.int8()), ("n",)).names["a"] == {"x": "x"}


def test_what_was_never_null_goes_with_its_column(storage: FaultyStorage) -> None:
    columns = pa.schema([pa.field("n", pa.int32(), nullable=False), pa.field("m", pa.int32(), nullable=False)])
    fixed = {"a": TableSchema.of("a", KEY, columns)}
    other = replace(RECORD, operator="others", schemas=encode_schemas(fixed))
    changed = stored_tables(storage, other).with_changes({"a": ColumnChanges(frozenset({"m"}), {"n": "total"})})
    assert changed.live["a"].not_null == {"value.total"}
    declared = {
        "a": TableSchema.of("a", KEY, pa.schema([pa.field(n, pa.int32(), nullable=False) for n in ("total", "m")]))
    }
    assert changed.with_declared(declared).live["a"].not_null == {"value.total"}, "rows from before have no new m"


def test_who_began_before_a_rename_is_told(storage: FaultyStorage) -> None:
    """Its rows would have the column where it is no more."""
    begun = stored_tables(storage, RECORD)
    change(storage, table("a", total=pa.int32()), n="total")
    for planned in (begun.with_declared({**A, **B}), begun.with_declared(A)):
        with pytest.raises(ConflictError, match="one run at a time"):
            declare_tables(storage, RECORD, planned)
    assert stored_tables(storage, RECORD).live == table("a", total=pa.int32())


def test_who_has_seen_every_run_knows_it(storage: FaultyStorage) -> None:
    """What was left out once was not looked after meanwhile: `StoredTables.is_continuous`."""
    declare_tables(storage, RECORD, StoredTables.of_first_run({**A, **B}))
    assert stored_tables(storage, RECORD).is_continuous
    declare_tables(storage, RECORD, StoredTables.of_first_run(B))
    assert stored_tables(storage, RECORD).is_continuous
    declare_tables(storage, RECORD, StoredTables.of_first_run({**A, **B}))
    assert not stored_tables(storage, RECORD).is_continuous
    declare_tables(storage, RECORD, StoredTables.of_first_run(B))
    assert stored_tables(storage, RECORD).is_continuous


def test_all_tasks_of_a_run_may_declare_at_once(storage: FaultyStorage) -> None:
    """Each finds in the end what all of them have declared."""
    with ThreadPoolExecutor(8) as threads:
        for done in [
            threads.submit(declare_tables, storage, RECORD, StoredTables.of_first_run({**WIDE, **B})) for _ in range(16)
        ]:
            done.result()
    assert stored_tables(storage, RECORD).held == {**WIDE, **B}
    assert len(names(storage)) == 1


@pytest.mark.parametrize("when", ["put", "list"])
def test_a_task_that_comes_between_writes_no_second_object(storage: FaultyStorage, when: Action) -> None:
    """Names of tables come in any order: from a set."""

    def meanwhile() -> None:
        declare_tables(storage, RECORD, StoredTables.of_first_run({**B, **WIDE}))

    faulty = FaultyStorage(storage, [Fault("delay", action=when, wait=meanwhile)])
    declare_tables(faulty, RECORD, StoredTables.of_first_run({**WIDE, **B}))
    faulty.assert_all_hit()
    assert len(names(storage)) == 1


def test_what_does_not_go_with_stored_rows_is_refused_before_anything_is_written(storage: FaultyStorage) -> None:
    with pytest.raises(SchemaMismatchError, match="n: int32 → large_string"):
        stored_tables(storage, RECORD).with_declared(OTHER)
    with pytest.raises(ConflictError, match="one run at a time"):
        declare_tables(storage, RECORD, StoredTables.of_first_run(OTHER))
    assert names(storage) == []


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
@pytest.mark.parametrize("action", ["list", "put"])
def test_a_storage_that_fails_leaves_nothing_half_made(storage: FaultyStorage, action: Action, kind: Kind) -> None:
    """Stored or not: the next attempt goes on."""
    faulty = FaultyStorage(storage, [Fault(kind, action=action)])
    with pytest.raises(UnavailableError):
        declare_tables(faulty, RECORD, StoredTables.of_first_run(WIDE))
    assert stored_tables(storage, RECORD).held == (WIDE if (action, kind) == ("put", "lose_reply") else A)
    declare_tables(storage, RECORD, StoredTables.of_first_run(WIDE))
    assert stored_tables(storage, RECORD).held == WIDE
    assert len(names(storage)) == 1


def test_of_two_runs_that_declare_what_cannot_both_be_one_is_told(storage: FaultyStorage) -> None:
    """Claims keep them apart; should they meet all the same, no state is written that nobody can read."""
    first = table("c", n=pa.int64())
    second = table("c", n=pa.string())

    def meanwhile() -> None:
        declare_tables(storage, RECORD, StoredTables.of_first_run({**A, **first}))

    faulty = FaultyStorage(storage, [Fault("delay", action="put", wait=meanwhile)])
    with pytest.raises(ConflictError, match="one run at a time"):
        declare_tables(faulty, RECORD, StoredTables.of_first_run({**A, **second}))
    assert stored_tables(storage, RECORD).held == {**A, **first}
    declare_tables(storage, RECORD, StoredTables.of_first_run({**A, **first, **B}))
    assert stored_tables(storage, RECORD).held == {**A, **first, **B}


def encoded(**columns: pa.DataType) -> dict[str, list[str]]:
    return encode_schemas({**table("a", **columns), **B})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"operator": "others"}, "belongs elsewhere"),
        ({"query_id": "another"}, "belongs elsewhere"),
        ({"number": 2}, "belongs elsewhere"),
        ({"held": {"a": ["", ""]}}, "cannot be read"),
        ({"held": {"a": [encode_schema(KEY), encode_schema(pa.schema([("s", pa.int8())] * 2))]}}, "one name"),
        ({"latest": {"a": [1, 2]}}, "invalid field, field=latest"),
        ({"held": []}, "invalid field, field=held"),
        ({"colour": "red"}, "has other fields"),
        ({"names": {"a": {}}}, "other tables than it holds"),
        ({"names": {"a": {"n": 1}, "b": {"s": "s"}}}, "invalid field, field=names found=1"),
        ({"names": {"a": {"n": "m"}, "b": {"s": "s"}}}, "columns that its table does not hold, table=a"),
        ({"names": {"a": {"n": "n", "m": "n"}, "b": {"s": "s"}}}, "columns that its table does not hold, table=a"),
        ({"latest": encoded(n=pa.int32(), m=pa.int32())}, "columns that its table does not hold, table=a"),
        ({"latest": encoded(n=pa.int64())}, "columns that its table does not hold, table=a"),
        ({"latest": encoded(n=pa.string())}, "columns that its table does not hold, table=a"),
        ({"latest": encode_schemas(A)}, "other tables than it holds"),
        ({"last": ["c"]}, "other tables than it holds"),
        ({"left_out": ["c"]}, "other tables than it holds"),
        ({"last": "a"}, "invalid field, field=last"),
    ],
    ids=str,
)
def test_an_object_that_says_what_none_says_is_damaged(
    storage: FaultyStorage, changed: dict[str, object], said: str
) -> None:
    """Each reader may rely on what it gets, whoever has written it; what is not named as ours is left alone."""
    storage.put("totals/schemas/notes.txt", b"not ours")
    assert stored_tables(storage, RECORD).held == A
    both = StoredTables.of_first_run({**A, **B})
    put_tables(storage, both)
    assert stored_tables(storage, RECORD) == both
    put_tables(storage, both, **changed)
    for ask in (stored_tables, lambda *asked: declare_tables(*asked, both)):
        with pytest.raises(CorruptionError, match=said):
            ask(storage, RECORD)


def test_the_newest_object_says_all(storage: FaultyStorage) -> None:
    """A start reads one, however often the tables have changed."""
    for declared in ({**A, **B}, B, WIDE):
        declare_tables(storage, RECORD, StoredTables.of_first_run(declared))
    found = stored_tables(storage, RECORD)
    storage.delete([f"totals/schemas/{number:020d}" for number in (1, 2)])
    storage.operations.clear()
    assert stored_tables(storage, RECORD) == found
    assert [one.action for one in storage.operations] == ["list", "get"]


def test_what_two_programs_declare_in_turn_does_not_pile_up(storage: FaultyStorage) -> None:
    """Two versions of a program, started in turn for years; and the state of both can be read all the while."""
    kept = {**WIDE, **B}
    for number in range(70):
        declare_tables(storage, RECORD, StoredTables.of_first_run(WIDE if number % 2 else B))
        assert len(names(storage)) < 32
        assert stored_tables(storage, RECORD).held.keys() <= kept.keys()
    assert stored_tables(storage, RECORD).held == kept
    assert names(storage)[-1] == f"{70:020d}"


@pytest.mark.parametrize("nth", range(1, 5))
def test_who_sleeps_while_old_objects_are_deleted_declares_upon_the_newest(storage: FaultyStorage, nth: int) -> None:
    """What it puts under a number that is free again counts for nobody, also not for itself."""

    def others() -> None:
        for number in range(40):
            declare_tables(storage.inner, RECORD, StoredTables.of_first_run(WIDE if number % 2 else B))

    declare_tables(storage, RECORD, StoredTables.of_first_run(B))
    late = {**WIDE, **table("late", x=pa.int64())}
    asked = FaultyStorage(storage.inner, [Fault("delay", nth=nth, wait=others)])
    declare_tables(asked, RECORD, StoredTables.of_first_run(late))
    asked.assert_all_hit()
    assert stored_tables(storage, RECORD).held == {**late, **B}


def test_what_was_never_null_is_kept(storage: FaultyStorage) -> None:
    """Of a value or a key, while every run that declares the table declares it so; in record and later objects."""
    columns = pa.schema([pa.field("n", pa.int32(), nullable=False), pa.field("s", pa.string(), nullable=False)])
    fixed = {"f": TableSchema.of("f", pa.schema([pa.field("k", pa.string(), nullable=False)]), columns)}
    loose = {"f": TableSchema.of("f", KEY, pa.schema([*columns][:1]))}
    other = replace(RECORD, operator="others", schemas=encode_schemas(fixed))
    every, some = {"f": {"key.k", "value.n", "value.s"}}, {"f": {"value.n"}}
    assert stored_tables(storage, other).never_null == every
    for declared, never in ((A, every), (fixed, every), (loose, some), (fixed, some)):
        declare_tables(storage, other, StoredTables.of_first_run(declared))
        found = stored_tables(storage, other)
        assert {"f": found.never_null["f"]} == never
        assert not any(field.nullable is False for field in found.held["f"].columns if field.name in every["f"])


def test_queries_do_not_share_what_they_declare(storage: FaultyStorage) -> None:
    other = replace(RECORD, operator="totals@query-2", query_id="query-2")
    declare_operator(storage, other)
    declare_tables(storage, other, StoredTables.of_first_run(B))
    assert stored_tables(storage, RECORD).held == A
