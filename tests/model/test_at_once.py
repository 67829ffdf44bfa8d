"""Several at once, in all orders: a fence, schemas, making savepoints; and copies of a checkpoint location."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.evolution import require_readable
from holdfast.backends.run import TableSchema
from holdfast.errors import ConflictError, FencedError, HoldfastError, NotFoundError
from holdfast.snapshotter.fence import Fence, looks
from holdfast.snapshotter.ownership.claims import Tenure
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.stored_tables import StoredTables, declare_tables, stored_tables
from holdfast.snapshotter.savepoints.manifest import Savepoint
from holdfast.snapshotter.savepoints.savepoints import (
    begin_savepoint,
    delete_savepoint,
    find_savepoint,
    savepoint_folder,
    unnamed_keys,
    verify_savepoint,
    write_pieces,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.retention import run_retention
from tests.model.shard_history import ShardHistory, TimedStorage, Version
from tests.model.turns import Act, Moment, Objects, OverwritingStorage, Replay, end_of, every_order
from tests.tiers import ALL, repetitions
from tests.unit.snapshotter.ownership.conftest import claimant
from tests.unit.snapshotter.savepoints.conftest import STATE, a_run, a_savepoint

if TYPE_CHECKING:
    from typing_extensions import Buffer


def act(storage: Replay, name: str, fence_of: Callable[[ObjectStorage, str], Fence] = Fence) -> list[int]:
    """Begin, and act under a fence unless somebody else has begun; return the numbers that were taken.

    All old objects are deleted, so that their numbers are free for whoever has slept.
    """
    fence, taken = fence_of(storage, "log"), list[int]()

    def take(after: int, what: str) -> None:
        numbers = storage.as_one(lambda: fence.take(after + 1, f"{name} {what}".encode()))
        taken.append(numbers[-1])
        storage.as_one(lambda: fence.delete(numbers[:-1]))

    with suppress(ConflictError):
        for _ in looks(fence.url):
            with suppress(ConflictError):
                take(storage.as_one(lambda: fence.newest()[0]), "begins")
                break
        take(taken[-1], "acts")
    return taken


def judge_fence(moment: Moment) -> None:
    """Each number is one actor's; who has begun ends whoever began before; and the newest object is who was told so."""
    by_number: dict[int, str] = {}
    for actor, told in zip(moment.actors, moment.returned(), strict=True):
        for number in told or ():
            assert by_number.setdefault(number, actor.name) == actor.name, f"two have {number} {moment}"
    holders = [name for name, _ in itertools.groupby(by_number[number] for number in sorted(by_number))]
    assert len(holders) == len(set(holders)), f"one has come back: {holders} {moment}"
    newest, data = Fence(moment.storage(), "log").newest()
    assert newest >= max(by_number, default=0), str(moment)
    if moment.has_ended():
        assert bytes(data or b"").startswith(by_number[newest].encode()), str(moment)


def search_fence(looks: int, names: Sequence[str], fence_of: Callable[[ObjectStorage, str], Fence] = Fence) -> None:
    acts = {name: partial(act, name=name, fence_of=fence_of) for name in names}
    for moment in every_order(acts, are_alike=True, looks=looks):
        judge_fence(moment)


@pytest.mark.slow(20 if ALL else 1)
def test_of_three_each_that_begins_ends_those_before() -> None:
    """Wherever any of them stands still, for a while or for ever."""
    search_fence(2 if ALL else 1, ("one", "other", "third"))


class TrustingFence(Fence):
    """Does not look whether later numbers stand."""

    def take(self, number: int, data: Buffer) -> list[int]:
        try:
            return super().take(number, data)
        except FencedError:
            raise
        except ConflictError:
            return [number]


@pytest.mark.parametrize(
    "fence_of",
    [lambda storage, folder: Fence(OverwritingStorage(storage), folder), TrustingFence],
    ids=["an unconditional put", "no list after the put"],
)
def test_of_two_under_half_a_fence_each_goes_on(fence_of: Callable[[ObjectStorage, str], Fence]) -> None:
    """So the test above can fail."""
    with pytest.raises(AssertionError, match=r"two have|come back"):
        search_fence(2, ("one", "other"), fence_of)


KEY = pa.schema([("k", pa.string())])
Tables = dict[str, TableSchema]


def table(name: str, **columns: pa.DataType) -> Tables:
    return {name: TableSchema.of(name, KEY, pa.schema(list(columns.items())))}


BEGUN = table("a", n=pa.int32())
RECORD = OperatorRecord("totals", "query", "def-1", "run-1", 2, BEGUN, 100)
TEXT, NUMBER = table("c", x=pa.string()), table("c", x=pa.int64())
NARROW = table("c", x=pa.int32(), note=pa.string())
BESIDE = table("d", y=pa.string())
# By name two declarations that cannot both be, or in one order only.
APART = {"text and number": (TEXT, NUMBER), "wide and narrow": (NUMBER, NARROW)}
APART |= {f"{name}, the other way round": (second, first) for name, (first, second) in APART.items()}


def outcome(storage: ObjectStorage, declared: Tables | StoredTables) -> ConflictError | None:
    planned = declared if isinstance(declared, StoredTables) else StoredTables.of_first_run({**BEGUN, **declared})
    try:
        declare_tables(storage, RECORD, planned)
    except ConflictError as exc:
        return exc
    return None


BEGINNING = end_of(lambda storage: declare_operator(storage, RECORD))


def orders(*declared: Tables | StoredTables) -> Iterator[Moment]:
    """Let writers declare tables in all orders."""
    return every_order({f"run{n}": partial(outcome, declared=one) for n, one in enumerate(declared)}, BEGINNING)


def require_held(moment: Moment, declared: Tables) -> None:
    """Check that rows of these tables can be read for ever, with all their columns."""
    held = stored_tables(moment.storage(), RECORD).held
    for name, schema in declared.items():
        require_readable(schema, held[name], source=f"state {moment}")


@pytest.mark.parametrize("name", list(APART))
def test_of_two_that_cannot_both_be_one_is_told(name: str) -> None:
    """Before it writes state; what the other has declared counts."""
    for moment in filter(Moment.has_ended, orders(*APART[name])):
        for tables, error in zip(APART[name], moment.returned(), strict=True):
            if error is None:
                require_held(moment, tables)
        assert None in moment.returned(), f"both were told: {moment}"


def test_those_that_go_together_do_not_hinder_each_other() -> None:
    """Whoever comes first; one that is overtaken again and again is asked to start again, not to change anything."""
    for moment in filter(Moment.has_ended, orders(TEXT, BESIDE, TEXT)):
        assert {str(error).partition(":")[0] for error in moment.returned()} <= {
            "None",
            "other processes were first at every attempt",
        }, str(moment)
        assert None in moment.returned(), str(moment)
        assert stored_tables(moment.storage(), RECORD).held == {**BEGUN, **TEXT, **BESIDE}, str(moment)


def test_tasks_of_one_run_write_one_object() -> None:
    """Whatever the order of their tables' names, which may be that of a set."""
    for moment in filter(Moment.has_ended, orders({**TEXT, **BESIDE}, {**BESIDE, **TEXT}, TEXT | BESIDE)):
        assert moment.returned() == [None, None, None], str(moment)
        assert len(moment.storage().list("totals/schemas/")) == 1, str(moment)


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


@pytest.mark.parametrize("name", list(BESIDE_A_RENAME))
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_beside_a_rename_nobody_declares(name: str, is_first: bool) -> None:
    """Whoever is last told nothing finds its columns where it put them."""
    other = BESIDE_A_RENAME[name]
    pair = (RENAMING, other) if is_first else (other, RENAMING)
    for moment in filter(Moment.has_ended, orders(*pair)):
        won = [planned for planned, error in zip(pair, moment.returned(), strict=True) if error is None]
        stored = stored_tables(moment.storage(), RECORD)
        assert any(stored.declared == p.declared and stored.places(p.declared) == p.places(p.declared) for p in won), (
            str(moment)
        )
        assert len(won) < 2 or other.made == {}, f"two changes were made: {moment}"


def test_a_killed_writer_blocks_nobody() -> None:
    """Its tables are stored, or never will be: whoever comes next goes by what stands."""
    found = set()
    for moment in orders(TEXT):
        storage = moment.storage()
        assert outcome(storage, BESIDE) is None, str(moment)
        is_stored = "c" in stored_tables(storage, RECORD).held
        assert isinstance(outcome(storage, NUMBER), ConflictError) == is_stored, str(moment)
        found.add(is_stored)
    assert found == {True, False}


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
TEMPLATE = a_savepoint(TimedStorage(), NAME, (STATE,))


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as opened:
        yield opened


def make(storage: ObjectStorage, comment: str) -> Savepoint | HoldfastError:
    """Make a savepoint of two pieces; return it, or what its maker is told."""
    try:
        new = begin_savepoint(storage, NAME)
        write = partial(write_pieces, new.folder, "totals", run=a_run(STATE, 3), maker=new.id)
        repeated = [*write(0)] if comment == "one" else []
        pieces = [piece for shard in (0, 1) for piece in write(shard)]
        assert not {piece.key for piece in repeated} & {piece.key for piece in pieces}
        operator = replace(TEMPLATE.operators[0], pieces=tuple(pieces))
        query = replace(TEMPLATE.query, sources=(), planned=None)
        made = replace(TEMPLATE, comment=comment, operators=(operator,), query=query)
        new.finish(made)
    except ConflictError as exc:
        return exc
    return made


def delete(storage: ObjectStorage) -> HoldfastError | None:
    try:
        delete_savepoint(storage, NAME)
    except NotFoundError as exc:
        return exc
    return None


MAKERS: Mapping[str, Act] = {name: partial(make, comment=name) for name in ("one", "other")}


def require_whole(moment: Moment, threads: ThreadPoolExecutor) -> None:
    """Check that a savepoint that its maker takes for made, and that stands, is whole."""
    for made in moment.returned():
        if isinstance(made, Savepoint) and find_savepoint(moment.storage(), NAME) == made:
            assert verify_savepoint(moment.storage(), made, threads) == [], str(moment)


def test_of_two_makers_the_first_one_has_the_name(threads: ThreadPoolExecutor) -> None:
    """Its savepoint is whole, the other one is told and leaves nothing, whichever requests they stand still before."""
    for moment in filter(Moment.has_ended, every_order(MAKERS)):
        (made,) = [one for one in moment.returned() if isinstance(one, Savepoint)]
        assert find_savepoint(moment.storage(), NAME) == made, str(moment)
        assert unnamed_keys(savepoint_folder(moment.storage(), NAME).list(""), made) == [], str(moment)
        require_whole(moment, threads)


@pytest.mark.slow
def test_who_is_told_nothing_has_a_whole_savepoint_or_it_was_deleted(threads: ThreadPoolExecutor) -> None:
    """Two makers, and somebody who deletes, after which the name may be used again.

    What is not whole is never taken for a success: not by its maker, nor by who makes one after that.
    """
    known, reused = set[Objects](), 0
    for moment in every_order({**MAKERS, "nobody": delete}, looks=3):
        if moment.has_ended():
            require_whole(moment, threads)
            reused += sum(isinstance(made, Savepoint) for made in moment.returned()) == 2
        if moment.objects not in known:  # all three may stand still for ever
            known.add(moment.objects)
            storage = moment.storage()
            made = make(storage, "again")
            if find_savepoint(storage, NAME) == made:
                assert isinstance(made, Savepoint)
                assert verify_savepoint(storage, made, threads) == [], str(moment)
    assert reused
