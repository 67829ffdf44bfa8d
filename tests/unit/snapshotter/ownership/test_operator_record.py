"""An operator's record: whose its directory is, and which tables and columns its state may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends import stored_file
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.run import TableSchema
from holdfast.backends.schema import decode_schemas, encode_schema, encode_schemas
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    InvalidArgumentError,
    NotFoundError,
    SchemaMismatchError,
    UnavailableError,
)
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator, read_operator, shard_prefix
from holdfast.snapshotter.ownership.queries import (
    FOLDER,
    QueryOrigin,
    declare_origin,
    find_origin,
    forget_origin,
    is_filling,
)
from holdfast.snapshotter.ownership.stored_tables import StoredTables, declare_tables, stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.shard.pointer_row import OPERATOR_NAME, operator_of
from holdfast.spark_integration.shard_call.claiming import require_restored
from holdfast.testing.faulty_storage import Action, Fault, FaultyStorage, Kind
from tests.ram import storage_in_ram

KEY = pa.schema([("user", pa.string())])
STATE = pa.schema([("n", pa.int64())])
TABLES = {"state": TableSchema.of("state", KEY, STATE)}
RECORD = OperatorRecord("totals", "query-1", "def-1", "run-1", 4, TABLES, 100)


@pytest.fixture
def storage() -> Iterator[ObjectStorage]:
    with storage_in_ram() as opened:
        yield opened


def test_the_first_claim_writes_what_the_later_ones_read(storage: ObjectStorage) -> None:
    """And operators of other names do not meet."""
    declare_operator(storage, RECORD)
    written = bytes(storage.get("totals/operator"))
    declare_operator(storage, RECORD)
    declare_operator(storage, replace(RECORD, run_id="run-2", definition_id="def-2"))
    assert bytes(storage.get("totals/operator")) == written
    assert read_operator(storage, "totals") == RECORD
    declare_operator(storage, replace(RECORD, operator="others", query_id="query-2"))
    assert read_operator(storage, "others").query_id == "query-2"


def test_no_state_is_kept_in_a_location_of_spark(storage: ObjectStorage) -> None:
    """An operator called ``state`` would share a folder with Spark's state."""
    storage.put("metadata", b'{"id":"query-1"}')
    with pytest.raises(InvalidArgumentError, match="is a query's checkpointLocation"):
        declare_operator(storage, RECORD)
    assert [info.key for info in storage.list("")] == ["metadata"]


TWO_OF_ONE_NAME = r"two operators of this query have the same name: pass each its own name=\. .* class"


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (replace(RECORD, query_id="query-2"), ConflictError, "state of another query: give the operator a different"),
        (replace(RECORD, definition_id="def-2"), ConflictError, TWO_OF_ONE_NAME),
        (replace(RECORD, run_id="run-2", shards=8), SchemaMismatchError, r"set spark\.holdfast\.shards"),
    ],
)
def test_a_claim_that_does_not_fit_is_refused_with_the_remedy(
    storage: ObjectStorage, other: OperatorRecord, error: type[Exception], message: str
) -> None:
    declare_operator(storage, RECORD)
    with pytest.raises(error, match=message) as caught:
        declare_operator(storage, other)
    assert storage.url in str(caught.value)
    assert read_operator(storage, "totals") == RECORD


def test_of_two_queries_that_claim_at_once_the_loser_is_told(storage: ObjectStorage) -> None:
    """Both have found none."""
    other = replace(RECORD, query_id="query-2")
    faulty = FaultyStorage(storage, [Fault("delay", action="put", wait=lambda: declare_operator(storage, other))])
    with pytest.raises(ConflictError, match="another query"):
        declare_operator(faulty, RECORD)
    faulty.assert_all_hit()
    assert read_operator(storage, "totals") == other


def _encode(record: OperatorRecord) -> pa.Buffer:
    return stored_file.encode("operator", record.to_json())[0]


def test_an_operator_that_is_not_there_and_a_damaged_record_are_named(storage: ObjectStorage) -> None:
    with pytest.raises(NotFoundError, match="check the name") as caught:
        read_operator(storage, "totals")
    assert caught.value.facts == {"operator": "totals", "storage": storage.url}
    storage.put("totals/operator", bytes(_encode(RECORD).to_pybytes()[:-1]))
    with pytest.raises(CorruptionError, match="totals/operator"):
        read_operator(storage, "totals")


def test_shards_sort_as_text_in_their_order() -> None:
    assert shard_prefix("totals", 7) == "totals/shard-0007"
    assert shard_prefix("totals", 12345) == "totals/shard-12345"


def test_the_record_lies_where_the_format_says(tmp_path: Path) -> None:
    with open_storage(str(tmp_path)) as storage:
        declare_operator(storage, RECORD)
    stored = stored_file.decode((tmp_path / "totals" / "operator").read_bytes(), source="it", kind="operator")
    (held,) = decode_schemas(stored.header["schemas"]).values()
    assert (held.key.names, held.value.names) == (["user"], ["n"])


FIELDS = RECORD.to_json()


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({}, "totals/operator has different fields"),
        (FIELDS | {"shards": 0}, r"invalid field, field=shards"),
        (FIELDS | {"schemas": {"state": [1]}}, r"invalid field, field=schemas"),
        (FIELDS | {"operator": "other"}, r"belongs elsewhere.*operator=other"),
    ],
)
def test_a_record_like_no_other_is_damaged(storage: ObjectStorage, header: dict[str, object], said: str) -> None:
    """Each reader may rely on what it gets, whoever has written it."""
    storage.put("totals/operator", stored_file.encode("operator", header)[0])
    for reads in (lambda: read_operator(storage, "totals"), lambda: declare_operator(storage, RECORD)):
        with pytest.raises(CorruptionError, match=said):
            reads()


ORIGIN = QueryOrigin("q-2", "q-1", "q-1", 7, {"totals": "q-1", "pairs@q-1": "q-1"}, ("fresh",))


def test_what_is_written_is_read(storage: ObjectStorage) -> None:
    """Of this query; others have none, and no operator has its folder's name."""
    declare_origin(storage, ORIGIN)
    assert find_origin(storage, "q-2") == ORIGIN
    assert find_origin(storage, "q-1") is None
    assert ORIGIN.operators == {"totals", "pairs"}
    assert not OPERATOR_NAME.fullmatch(FOLDER)
    assert operator_of(FOLDER) is None
    forget_origin(storage, ORIGIN)
    assert find_origin(storage, "q-2") is None


@pytest.mark.parametrize(
    "change",
    [
        *({"query_id": "q-3"}, {"state_id": "../q"}, {"empty": ["a/b"]}, {"surplus": 1}),
        *({"directories": {name: "q"}} for name in ("../totals", "_queries", "totals/shard-0001")),
    ],
)
def test_what_cannot_be_is_refused(storage: ObjectStorage, change: dict[str, Any]) -> None:
    values = {**asdict(ORIGIN), "empty": list(ORIGIN.empty), **change}
    storage.put(f"{FOLDER}/q-2", stored_file.encode(QueryOrigin.KIND, values)[0])
    with pytest.raises(CorruptionError, match="_queries/q-2"):
        find_origin(storage, "q-2")


@pytest.mark.parametrize("name", ["totals", "pairs", "fresh", "new"])
def test_operators_that_may_begin(name: str) -> None:
    """Restored ones, whose other shards have state; those that were reset; those that the session names."""
    require_restored(ORIGIN, name, ("new",))
    require_restored(replace(ORIGIN, unnamed=1), "anything", ())


def test_the_error_names_the_operator_and_the_restored_ones() -> None:
    wanted = r"allowNew to the operator's name.*operator=total restored='pairs, totals'"
    with pytest.raises(SchemaMismatchError, match=wanted):
        require_restored(ORIGIN, "total", ("tota",))


def test_a_state_directory_takes_one_clone_of_a_query(storage: ObjectStorage) -> None:
    """Both would write under its id, each pass for a newer run of the other, and clear what the other one filled."""
    first, other = (replace(ORIGIN, query_id=name) for name in ("q-3", "q-4"))
    declare_origin(storage, first)
    declare_origin(storage, first)  # the same request again, of which the reply was lost
    with pytest.raises(ConflictError, match=r"choose a different directory.*delete _queries/q-1\.fills"):
        declare_origin(storage, other)
    assert is_filling(storage, first)
    assert not is_filling(storage, other), "which is told apart though it has declared what it begins with"
    declare_origin(storage, replace(other, query_id="q-5", state_id="q-6"))
    restored = replace(ORIGIN, query_id="q-7", state_id="q-7", directories={"totals@q-7": "q-7"})
    declare_origin(storage, restored)
    assert is_filling(storage, restored), "nobody else writes records that name it"
    forget_origin(storage, other)
    assert is_filling(storage, first)
    forget_origin(storage, first)
    assert not is_filling(storage, first)
    declare_origin(storage, other)
    assert is_filling(storage, other)


@pytest.mark.parametrize("nth", range(1, 4))
def test_of_two_clones_at_once_one_is_told(storage: ObjectStorage, nth: int) -> None:
    one, other = (replace(ORIGIN, query_id=name) for name in ("q-3", "q-4"))
    told = []

    def begun(whose: QueryOrigin, asked: ObjectStorage) -> None:
        try:
            declare_origin(asked, whose)
        except ConflictError:
            forget_origin(storage, whose)
            told.append(whose.query_id)

    begun(one, FaultyStorage(storage, [Fault("delay", nth=nth, wait=lambda: begun(other, storage))]))
    if nth == 3:  # it makes two requests
        begun(other, storage)
    assert len(told) == 1
    assert {info.key for info in storage.list("")} == {
        "_queries/q-1.fills",
        f"_queries/{'q-4' if one.query_id in told else 'q-3'}",
    }


TABLE_KEY = pa.schema([("k", pa.string())])


def table(name: str, **columns: pa.DataType) -> dict[str, TableSchema]:
    return {name: TableSchema.of(name, TABLE_KEY, pa.schema(list(columns.items())))}


A, B = table("a", n=pa.int32()), table("b", s=pa.string())
WIDE = table("a", n=pa.int64(), note=pa.string())
OTHER = table("a", n=pa.string())
DECLARED = OperatorRecord("totals", "query", "def-1", "run-1", 2, A, 100)


@pytest.fixture
def recorded() -> Iterator[FaultyStorage]:
    with storage_in_ram() as recorded, FaultyStorage(recorded) as opened:
        declare_operator(opened, DECLARED)
        opened.operations.clear()
        yield opened


def names(recorded: ObjectStorage) -> list[str]:
    return [info.key.removeprefix("totals/schemas/") for info in recorded.list("totals/schemas/")]


def put_tables(recorded: ObjectStorage, tables: StoredTables, **changed: object) -> None:
    """Store what another run has declared, or what none would."""
    header = {"operator": "totals", "query_id": "query", "number": 1, **tables.to_json(), **changed}
    recorded.put(f"totals/schemas/{1:020d}", stored_file.encode("schemas", header)[0])


def test_what_is_held_grows_and_what_is_declared_changes(recorded: FaultyStorage) -> None:
    """Left out and found again; the order of the objects is that of the runs."""
    assert stored_tables(recorded, DECLARED).held == A
    for declared in ({**A, **B}, B, WIDE, WIDE):
        declare_tables(recorded, DECLARED, StoredTables.of_first_run(declared))
    found = stored_tables(recorded, DECLARED)
    assert found.held == {**WIDE, **B}
    assert found.declared == WIDE
    assert found.latest == {**WIDE, **B}
    assert [int(name) for name in names(recorded)] == [1, 2, 3], "the same again writes nothing"
    narrow = table("a", note=pa.string())
    declare_tables(recorded, DECLARED, StoredTables.of_first_run(narrow))
    found = stored_tables(recorded, DECLARED)
    assert (found.held, found.latest) == ({**WIDE, **B}, {**narrow, **B})


def change(
    recorded: ObjectStorage, declared: dict[str, TableSchema], drop: tuple[str, ...] = (), **rename: str
) -> StoredTables:
    """Do what a run does that drops and renames columns of `a`; return what is stored by then."""
    changes = {"a": ColumnChanges(frozenset(drop), rename)}
    declare_tables(recorded, DECLARED, stored_tables(recorded, DECLARED).with_changes(changes).with_declared(declared))
    return stored_tables(recorded, DECLARED)


def test_columns_are_renamed_and_dropped_for_good(recorded: FaultyStorage) -> None:
    """Each change is stored once, however often it is asked for; rows keep the names that they were stored under."""
    change(recorded, WIDE)
    total = table("a", total=pa.int64())
    for _ in range(2):
        found = change(recorded, total, ("note", "never"), n="total")
        assert (found.held, found.live, found.latest) == (WIDE, total, total)
    assert len(names(recorded)) == 2
    again = table("a", total=pa.int64(), note=pa.int32(), n=pa.string())
    found = change(recorded, again, n="total")
    assert found.names["a"] == {"total": "n", "note": "note#2", "n": "n#2"}
    assert found.held["a"].value.names == ["n", "note", "note#2", "n#2"]
    assert (found.live, found.latest) == (again, again)
    found = change(recorded, again)
    assert found.names["a"]["note"] == "note#2"


def test_a_column_that_is_hidden_is_dropped_too(recorded: FaultyStorage) -> None:
    """Though the run declares what the last one did."""
    for _ in range(2):
        change(recorded, table("a", x=pa.int8()))
    assert stored_tables(recorded, DECLARED).names["a"] == {"n": "n", "x": "x"}
    assert change(recorded, table("a", x=pa.int8()), ("n",)).names["a"] == {"x": "x"}


def test_what_was_never_null_goes_with_its_column(recorded: FaultyStorage) -> None:
    """Rows from before it was dropped have none of the new one."""

    def fixed(*names: str) -> dict[str, TableSchema]:
        columns = pa.schema([pa.field(name, pa.int32(), nullable=False) for name in names])
        return {"a": TableSchema.of("a", TABLE_KEY, columns)}

    other = replace(DECLARED, operator="others", tables=fixed("n", "m"))
    changed = stored_tables(recorded, other).with_changes({"a": ColumnChanges(frozenset({"m"}), {"n": "total"})})
    assert changed.live["a"].not_null == {"value.total"}
    declared = fixed("total", "m")
    assert changed.with_declared(declared).live["a"].not_null == {"value.total"}, "rows from before have no new m"


def test_who_began_before_a_rename_is_told(recorded: FaultyStorage) -> None:
    """Its rows would have the column where it is no more."""
    begun = stored_tables(recorded, DECLARED)
    change(recorded, table("a", total=pa.int32()), n="total")
    for planned in (begun.with_declared({**A, **B}), begun.with_declared(A)):
        with pytest.raises(ConflictError, match="one run at a time"):
            declare_tables(recorded, DECLARED, planned)
    assert stored_tables(recorded, DECLARED).live == table("a", total=pa.int32())


def test_who_has_seen_every_run_knows_it(recorded: FaultyStorage) -> None:
    """What was left out once was not looked after meanwhile: `StoredTables.is_continuous`."""
    for declared, is_continuous in (({**A, **B}, True), (B, True), ({**A, **B}, False), (B, True)):
        declare_tables(recorded, DECLARED, StoredTables.of_first_run(declared))
        assert stored_tables(recorded, DECLARED).is_continuous == is_continuous


def test_what_does_not_go_with_stored_rows_is_refused_before_anything_is_written(recorded: FaultyStorage) -> None:
    with pytest.raises(SchemaMismatchError, match="n: int32 → large_string"):
        stored_tables(recorded, DECLARED).with_declared(OTHER)
    with pytest.raises(ConflictError, match="one run at a time"):
        declare_tables(recorded, DECLARED, StoredTables.of_first_run(OTHER))
    assert names(recorded) == []


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
@pytest.mark.parametrize("action", ["list", "put"])
def test_a_storage_that_fails_leaves_nothing_half_made(recorded: FaultyStorage, action: Action, kind: Kind) -> None:
    """Stored or not: the next attempt goes on."""
    faulty = FaultyStorage(recorded, [Fault(kind, action=action)])
    with pytest.raises(UnavailableError):
        declare_tables(faulty, DECLARED, StoredTables.of_first_run(WIDE))
    assert stored_tables(recorded, DECLARED).held == (WIDE if (action, kind) == ("put", "lose_reply") else A)
    declare_tables(recorded, DECLARED, StoredTables.of_first_run(WIDE))
    assert stored_tables(recorded, DECLARED).held == WIDE
    assert len(names(recorded)) == 1


NOT_HELD = "columns that its table does not hold, table=a"


def encoded(**columns: pa.DataType) -> dict[str, list[str]]:
    return encode_schemas({**table("a", **columns), **B})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *((other, "belongs elsewhere") for other in ({"operator": "others"}, {"query_id": "another"}, {"number": 2})),
        ({"held": {"a": ["", ""]}}, "cannot be read"),
        ({"held": {"a": [encode_schema(TABLE_KEY), encode_schema(pa.schema([("s", pa.int8())] * 2))]}}, "share a name"),
        ({"names": {"a": {}}}, "different tables than it holds"),
        ({"names": {"a": {"n": 1}, "b": {"s": "s"}}}, "invalid field, field=names found=1"),
        *(({"names": {"a": names, "b": {"s": "s"}}}, NOT_HELD) for names in ({"n": "m"}, {"n": "n", "m": "n"})),
        ({"latest": encoded(n=pa.int32(), m=pa.int32())}, NOT_HELD),
        *(({"latest": encoded(n=kind)}, NOT_HELD) for kind in (pa.int64(), pa.string())),
        *((other, "different tables than it holds") for other in ({"last": ["c"]}, {"left_out": ["c"]})),
        ({"latest": encode_schemas(A)}, "different tables than it holds"),
    ],
    ids=str,
)
def test_an_object_like_no_other_is_damaged(recorded: FaultyStorage, changed: dict[str, object], said: str) -> None:
    """Each reader may rely on what it gets, whoever has written it; what is not named as ours is left alone."""
    recorded.put("totals/schemas/notes.txt", b"not ours")
    assert stored_tables(recorded, DECLARED).held == A
    both = StoredTables.of_first_run({**A, **B})
    put_tables(recorded, both)
    assert stored_tables(recorded, DECLARED) == both
    put_tables(recorded, both, **changed)
    for ask in (stored_tables, lambda *asked: declare_tables(*asked, both)):
        with pytest.raises(CorruptionError, match=said):
            ask(recorded, DECLARED)


def test_the_newest_object_says_all(recorded: FaultyStorage) -> None:
    """A start reads one, however often the tables have changed."""
    for declared in ({**A, **B}, B, WIDE):
        declare_tables(recorded, DECLARED, StoredTables.of_first_run(declared))
    found = stored_tables(recorded, DECLARED)
    recorded.delete([f"totals/schemas/{number:020d}" for number in (1, 2)])
    recorded.operations.clear()
    assert stored_tables(recorded, DECLARED) == found
    assert [one.action for one in recorded.operations] == ["list", "get"]


def test_what_two_programs_declare_in_turn_does_not_pile_up(recorded: FaultyStorage) -> None:
    """Two versions of a program, started in turn for years; and the state of both can be read all the while."""
    kept = {**WIDE, **B}
    for number in range(70):
        declare_tables(recorded, DECLARED, StoredTables.of_first_run(WIDE if number % 2 else B))
        assert len(names(recorded)) < 32
        assert stored_tables(recorded, DECLARED).held.keys() <= kept.keys()
    assert stored_tables(recorded, DECLARED).held == kept
    assert names(recorded)[-1] == f"{70:020d}"


@pytest.mark.parametrize("nth", range(1, 5))
def test_who_sleeps_while_old_objects_are_deleted_declares_upon_the_newest(recorded: FaultyStorage, nth: int) -> None:
    """What it puts under a number that is free again counts for nobody, also not for itself."""

    def others() -> None:
        for number in range(40):
            declare_tables(recorded.inner, DECLARED, StoredTables.of_first_run(WIDE if number % 2 else B))

    declare_tables(recorded, DECLARED, StoredTables.of_first_run(B))
    late = {**WIDE, **table("late", x=pa.int64())}
    asked = FaultyStorage(recorded.inner, [Fault("delay", nth=nth, wait=others)])
    declare_tables(asked, DECLARED, StoredTables.of_first_run(late))
    asked.assert_all_hit()
    assert stored_tables(recorded, DECLARED).held == {**late, **B}


def test_what_was_never_null_is_kept(recorded: FaultyStorage) -> None:
    """Of a value or a key, while every run that declares the table declares it so; in record and later objects."""
    columns = pa.schema([pa.field("n", pa.int32(), nullable=False), pa.field("s", pa.string(), nullable=False)])
    fixed = {"f": TableSchema.of("f", pa.schema([pa.field("k", pa.string(), nullable=False)]), columns)}
    loose = {"f": TableSchema.of("f", TABLE_KEY, pa.schema([*columns][:1]))}
    other = replace(DECLARED, operator="others", tables=fixed)
    every, some = {"f": {"key.k", "value.n", "value.s"}}, {"f": {"value.n"}}
    assert stored_tables(recorded, other).never_null == every
    for declared, never in ((A, every), (fixed, every), (loose, some), (fixed, some)):
        declare_tables(recorded, other, StoredTables.of_first_run(declared))
        found = stored_tables(recorded, other)
        assert {"f": found.never_null["f"]} == never
        assert not any(field.nullable is False for field in found.held["f"].columns if field.name in every["f"])


def test_queries_do_not_share_what_they_declare(recorded: FaultyStorage) -> None:
    other = replace(DECLARED, operator="totals@query-2", query_id="query-2")
    declare_operator(recorded, other)
    declare_tables(recorded, other, StoredTables.of_first_run(B))
    assert stored_tables(recorded, DECLARED).held == A
