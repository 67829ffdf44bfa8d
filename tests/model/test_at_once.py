"""Two at once, in all orders: declaring schemas, making savepoints, and copies of a checkpoint location."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.evolution import require_readable
from holdfast.backends.run import TableSchema
from holdfast.errors import ConflictError, HoldfastError, NotFoundError
from holdfast.snapshotter.ownership.claims import Tenure
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.stored_tables import StoredTables, declare_tables, stored_tables
from holdfast.snapshotter.savepoints.manifest import Savepoint
from holdfast.snapshotter.savepoints.pieces import write_pieces
from holdfast.snapshotter.savepoints.savepoints import delete_savepoint, find_savepoint, making, verify_savepoint
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.retention import run_retention
from holdfast.testing.faulty_storage import Fault, FaultyStorage, Kind
from tests.model.shard_history import ShardHistory, TimedStorage, Version
from tests.model.turns import by_turns
from tests.ram import storage_in_ram
from tests.tiers import cases, repetitions
from tests.unit.snapshotter.ownership.conftest import claimant
from tests.unit.snapshotter.savepoints.conftest import STATE, a_run, a_savepoint

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
    storage: ObjectStorage, pair: tuple[Tables | StoredTables, Tables | StoredTables], plan: tuple[int, int, int]
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


@dataclass(frozen=True)
class Declaring:
    """As much of a `ShardFunction` as is asked at a restart; takes any schemas that rows can be read with."""

    declared: Mapping[str, TableSchema]
    columns: Mapping[str, ColumnChanges] = field(default_factory=dict)

    def tables(self) -> Mapping[str, TableSchema]:
        return self.declared

    def changes(self) -> Mapping[str, ColumnChanges]:
        return self.columns

    def configuration(self) -> Mapping[str, str]:
        return {}

    def require_restartable(self, stored: StoredTables, configuration: Mapping[str, str]) -> None:
        """Leave it to `StoredTables.with_declared`."""


RETAINED = 10


def lost(history: ShardHistory, versions: list[Version]) -> list[str]:
    """Return what is missing of the versions that the query may return to, by either way of restoring them."""
    there = history.stored()
    recent = versions[-RETAINED - 1 :]
    missing = [key for version in recent for key in history.missing(version, there)]
    without = [
        str(version.pointer)
        for version in recent
        for first in version.chain[:1]
        if first.kind == "snapshot" and not history.restores_without(version, first, there)
    ]
    return missing + without


def copied(chance: random.Random, *, is_beside: bool) -> int:
    """Run a query and its copy by turns, the copy far ahead; return how often a clean-up took what the query needs."""
    history = ShardHistory(TimedStorage())
    query = history.grow(None, chance.randrange(30, 90), snapshot_every=chance.choice((5, 20)))
    copy = [*query]
    history.notes[1] = dict(history.notes.get(0, {}))
    every = {0: chance.choice((3, 10, 40)), 1: chance.choice((2, 20))}
    took = 0
    query += [history.commit(query[-1]) for _ in range(chance.randrange(15))]  # before the copy was started
    for _ in range(25):
        for executor, versions, steps in ((0, query, chance.randrange(4)), (1, copy, chance.randrange(1, 12))):
            for _ in range(steps):
                versions.append(history.commit(versions[-1], executor=executor))
                if len(versions) % every[executor] == 0:
                    history.snapshot(versions[-1], executor)
        newest = copy[-1]
        at = newest.pointer.version
        held = Tenure(claimant(), since_ms=0 if is_beside else None)
        retained = held.retained(RETAINED, at)
        run_retention(history.objects, newest.pointer, newest.chain, retained=retained, grace_ms=0)
        if lost(history, query):
            took += 1
            break
    return took


@pytest.mark.parametrize("seed", repetitions(2, 60))
def test_a_copy_beside_the_query_takes_nothing_from_it(seed: int) -> None:
    assert copied(random.Random(seed), is_beside=True) == 0


def test_a_copy_in_its_place_would() -> None:
    """So the test above can fail."""
    assert sum(copied(random.Random(seed), is_beside=False) for seed in range(4)) > 1


NAME = "nightly"
MAKERS_REQUESTS = 7
"""As many as a maker makes: a look for a savepoint, two pieces, a list, the manifest, a list, and deletes."""
TEMPLATE = a_savepoint(TimedStorage(), NAME, (STATE,))


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as opened:
        yield opened


def make(storage: FaultyStorage, comment: str) -> Savepoint | HoldfastError:
    """Make a savepoint of two pieces; return it, or what its maker is told."""
    try:
        new = making(storage, NAME)
        pieces = [piece for shard in (0, 1) for piece in write_pieces(new.folder, "totals", shard, a_run(STATE, 3))]
        operator = replace(TEMPLATE.operators[0], pieces=tuple(pieces))
        query = replace(TEMPLATE.query, sources=(), planned=None)
        made = replace(TEMPLATE, comment=comment, operators=(operator,), query=query)
        new.finish(made)
    except ConflictError as exc:
        return exc
    assert len(storage.operations) <= MAKERS_REQUESTS, "else not every order is tried"
    return made


def delete(storage: FaultyStorage) -> HoldfastError | None:
    try:
        delete_savepoint(storage, NAME)
    except NotFoundError as exc:
        return exc
    return None


def require_whole(storage: TimedStorage, threads: ThreadPoolExecutor, made: Savepoint, when: object) -> None:
    assert verify_savepoint(storage, made, threads) == [], when


@pytest.mark.slow
def test_of_two_makers_the_first_one_has_the_name(threads: ThreadPoolExecutor) -> None:
    """Its savepoint is whole, and the other one is told; whichever of its requests each stands still before."""
    plans = cases(list(itertools.product(range(MAKERS_REQUESTS + 1), repeat=3)), quick=80)
    for first, second, third in plans:
        storage, plan = TimedStorage(), ((0, first), (1, second), (0, third))
        told = by_turns(storage, [lambda s: make(s, "one"), lambda s: make(s, "other")], plan)
        (made,) = [one for one in told if isinstance(one, Savepoint)]
        assert find_savepoint(storage, NAME) == made, plan
        require_whole(storage, threads, made, plan)


TURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=20)


@given(TURNS)
def test_who_is_told_nothing_has_a_whole_savepoint_or_it_was_deleted(plan: Sequence[tuple[int, int]]) -> None:
    """Two makers, and somebody who deletes: what stands although its maker was told so is never taken for a success."""
    storage = TimedStorage()
    acts = [lambda s: make(s, "one"), lambda s: make(s, "other"), delete]
    with ThreadPoolExecutor(4) as threads:
        told = by_turns(storage, acts, plan)
        for made in told:
            if isinstance(made, Savepoint) and find_savepoint(storage, NAME) == made:
                require_whole(storage, threads, made, plan)
        again = make(FaultyStorage(storage), "again")
        if find_savepoint(storage, NAME) == again:
            assert isinstance(again, Savepoint)
            require_whole(storage, threads, again, plan)
