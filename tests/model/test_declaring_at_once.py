"""Two runs of a query that declare tables at once, with every order of their requests up to three changes of turn.

Claims keep runs apart; should they meet all the same, no state may be written that nobody can read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import pyarrow as pa
import pytest

from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.evolution import require_readable
from holdfast.backends.run import TableSchema
from holdfast.errors import ConflictError
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.stored_tables import StoredTables, declare_tables, stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.testing.faulty_storage import Fault, FaultyStorage, Kind
from tests.model.turns import by_turns
from tests.storage_in_ram import storage_in_ram
from tests.tiers import cases

KEY = pa.schema([("k", pa.string())])
Tables = dict[str, TableSchema]
REQUESTS = 12
"""At least as many as a writer makes that finds itself second, or followed, at each change of turn."""


def table(name: str, **columns: pa.DataType) -> Tables:
    return {name: TableSchema.of(name, KEY, pa.schema(list(columns.items())))}


BEGUN = table("a", n=pa.int32())
RECORD = OperatorRecord.of("totals", "query", "def-1", "run-1", 2, BEGUN, 100)
TEXT, NUMBER = table("c", x=pa.string()), table("c", x=pa.int64())
NARROW = table("c", x=pa.int32(), note=pa.string())
BESIDE = table("d", y=pa.string())
# By name two declarations that cannot both be, or in one order only.
APART = {"text and number": (TEXT, NUMBER), "wide and narrow": (NUMBER, NARROW)}
APART |= {f"{name}, the other way round": (second, first) for name, (first, second) in APART.items()}


@contextmanager
def begun() -> Iterator[ObjectStorage]:
    with storage_in_ram() as storage:
        declare_operator(storage, RECORD)
        yield storage


def outcome(storage: ObjectStorage, declared: Mapping[str, TableSchema] | StoredTables) -> ConflictError | None:
    planned = declared if isinstance(declared, StoredTables) else StoredTables.of_first_run({**BEGUN, **declared})
    try:
        declare_tables(storage, RECORD, planned)
    except ConflictError as exc:
        return exc
    return None


def at_once(
    storage: ObjectStorage,
    pair: tuple[Tables | StoredTables, Tables | StoredTables],
    plan: tuple[int, int, int],
) -> list[ConflictError | None]:
    def write(asked: FaultyStorage, declared: Tables | StoredTables) -> ConflictError | None:
        found = outcome(asked, declared)
        assert len(asked.operations) <= REQUESTS, "else not every order is tried"
        return found

    acts = [partial(write, declared=declared) for declared in pair]
    return by_turns(storage, acts, zip((0, 1, 0), plan, strict=True))


def plans() -> Sequence[tuple[int, int, int]]:
    return cases(list(itertools.product(range(REQUESTS + 1), repeat=3)), quick=80)


def require_held(storage: ObjectStorage, declared: Tables, plan: object) -> None:
    """Check that rows of these tables can be read for ever, with all their columns."""
    held = stored_tables(storage, RECORD).held
    for name, schema in declared.items():
        require_readable(schema, held[name], source=f"state of {plan}")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(APART))
def test_of_two_that_cannot_both_be_one_is_told(name: str) -> None:
    """Before it writes state; what the other has declared counts."""
    for plan in plans():
        with begun() as storage:
            found = at_once(storage, APART[name], plan)
            for tables, error in zip(APART[name], found, strict=True):
                if error is None:
                    require_held(storage, tables, plan)
            assert None in found, f"both were told: {plan}"


@pytest.mark.slow
def test_two_that_go_together_do_not_hinder_each_other() -> None:
    """Whoever comes first; two tasks of one run write one object."""
    for plan in plans():
        with begun() as storage:
            assert at_once(storage, (TEXT, BESIDE), plan) == [None, None], plan
            assert stored_tables(storage, RECORD).held == {**BEGUN, **TEXT, **BESIDE}, plan
        with begun() as storage:
            assert at_once(storage, (TEXT, TEXT), plan) == [None, None], plan
            assert len(storage.list("totals/schemas/")) == 1, plan


def changing(declared: Tables, drop: tuple[str, ...] = (), **rename: str) -> StoredTables:
    """Return what a run plans that has seen the record, and drops or renames columns of ``a``."""
    changes = {"a": ColumnChanges(frozenset(drop), rename)}
    return StoredTables.of_first_run(BEGUN).with_changes(changes).with_declared(declared)


RENAMING = changing(table("a", total=pa.int32()), n="total")
# By name what another run plans at the same time.
BESIDE_A_RENAME = {
    "another rename": changing(table("a", sum=pa.int32()), n="sum"),
    "a drop": changing(table("a", x=pa.int32()), ("n",)),
    "another table": StoredTables.of_first_run({**BEGUN, **BESIDE}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BESIDE_A_RENAME))
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_beside_a_rename_nobody_declares(name: str, is_first: bool) -> None:
    """Whoever is last told nothing finds its columns where it put them."""
    other = BESIDE_A_RENAME[name]
    pair = (RENAMING, other) if is_first else (other, RENAMING)
    for plan in plans():
        with begun() as storage:
            found = at_once(storage, pair, plan)
            stored, won = stored_tables(storage, RECORD), [p for p, e in zip(pair, found, strict=True) if e is None]
            assert any(
                stored.declared == p.declared and stored.places(p.declared) == p.places(p.declared) for p in won
            ), plan
            assert len(won) < 2 or other.made == {}, f"two changes were made: {plan}"


class Killed(BaseException):
    """Ends a writer as a kill does: it does nothing more."""


def killed(storage: ObjectStorage, declared: Tables, kind: Kind, nth: int) -> bool:
    """Declare tables; tell whether the writer was killed before or after its n-th request."""

    def die() -> None:
        raise Killed

    try:
        outcome(FaultyStorage(storage, [Fault(kind, nth=nth)], stop=die), declared)
    except Killed:
        return True
    return False


@pytest.mark.parametrize("kind", ["stop", "stop_after"])
def test_a_killed_writer_blocks_nobody(kind: Kind) -> None:
    """Its tables are stored, or never will be: whoever comes next goes by what stands."""
    kills, stored = 0, 0
    for nth in range(1, REQUESTS + 1):
        with begun() as storage:
            if not killed(storage, TEXT, kind, nth):
                continue
            kills += 1
            assert outcome(storage, BESIDE) is None
            is_stored = "c" in stored_tables(storage, RECORD).held
            assert isinstance(outcome(storage, NUMBER), ConflictError) == is_stored
            stored += is_stored
    assert (kills, stored) == (3, 1 if kind == "stop" else 2)
