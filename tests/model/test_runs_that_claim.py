"""Runs of one query that claim one directory, of which any may stand still between any two of its requests.

Time passes only where a test says so: the store's, and that of each run's own clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConflictError, FencedError
from holdfast.snapshotter.ownership.claims import ALIVE_MS, ENDING_MS, RENEW_EVERY_MS, Claims, Tenure
from tests.model.shard_history import TimedStorage
from tests.model.sink_target import CrashingStorage, Killed
from tests.model.turns import Actor, Turns
from tests.tiers import ALL, cases
from tests.unit.snapshotter.ownership.conftest import claimant, record

LOOKS = 4


@dataclass(frozen=True)
class Told:
    """That a call has told a run that it holds the directory, with a claim of its own; when, in steps of all runs."""

    run: str
    number: int
    asked: int
    answered: int


@dataclass
class World:
    """What runs share: the state directory, the time, and what is known of who lives."""

    storage: TimedStorage = field(default_factory=TimedStorage)
    #: By run its machine; of runs on another one nothing is known.
    machines: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    told: list[Told] = field(default_factory=list)
    monotonic_ms: int = 0
    steps: int = 0

    def pass_ms(self, milliseconds: int) -> None:
        self.storage.now_ms += milliseconds
        self.monotonic_ms += milliseconds

    def lives(self, process: str, seen_from: str) -> bool | None:
        run = process.removeprefix("driver of ")
        is_seen = process != run and self.machines[run] == self.machines[seen_from]
        return run not in self.ended if is_seen else None

    def tick(self) -> int:
        self.steps += 1
        return self.steps


class Run(Actor):
    """A run's executor: it claims, and looks several times after that; each request, and each look, waits its turn."""

    def __init__(self, world: World, name: str, machine: int, looks: int = LOOKS, executor: int = 0) -> None:
        self.executor = f"executor {executor} of {name}"
        self.world, self.looks = world, looks
        world.machines[name] = machine
        self.held: Tenure | None = None
        self.looked = 0
        super().__init__(self._work, name)

    def _work(self, turns: Turns) -> None:
        world, storage = self.world, CrashingStorage(self.world.storage, turns)
        lives = lambda process: world.lives(process, self.name)  # noqa: E731
        claims = Claims(
            storage, claimant(run=self.name, application="", executor=self.executor), lives, lambda: world.monotonic_ms
        )
        with turns.around():
            asked = world.tick()
        self._note(asked, claims.take(record(run=self.name), world.storage.now_ms))
        for _ in range(self.looks):
            with turns.around():
                asked = world.tick()
            assert self.held is not None
            self._note(asked, claims.renew(self.held))

    def _note(self, asked: int, held: Tenure) -> None:
        self.held = held
        self.looked += 1
        if held.since_ms is None:
            self.world.told.append(Told(self.name, held.claim.number, asked, self.world.tick()))

    def kill(self) -> None:
        self.world.ended.add(self.name)
        super().kill()


def judge(world: World, *runs: Run) -> None:
    """Whoever lost says so; who was told that it holds the directory, is told so no more once another one was."""
    for run in runs:
        if run.error is not None and not isinstance(run.error, ConflictError | Killed):
            raise AssertionError(f"{run.name} ended otherwise than as the loser") from run.error
    for one, other in itertools.permutations(world.told, 2):
        is_past = one.run != other.run and one.answered < other.asked and other.number < one.number
        assert not is_past, f"{other} though {one}"
    by_number = {told.number: told.run for told in world.told}
    assert all(by_number[told.number] == told.run for told in world.told), "two hold one number"
    holders = [run for run, _ in itertools.groupby(by_number[number] for number in sorted(by_number))]
    assert len(holders) == len(set(holders)), f"one has come back: {holders}"


def length() -> int:
    """Return how many turns a run takes that is alone."""
    alone = Run(World(), "alone", 1)
    alone.go()
    assert alone.error is None, repr(alone.error)
    return alone.steps


@pytest.mark.parametrize("machine", [1, 2], ids=["its driver is seen to have ended", "nothing is known of it"])
@pytest.mark.parametrize("later_ms", cases([ENDING_MS + 1, 0, ALIVE_MS + 1], quick=2))
def test_a_run_that_stands_still_anywhere(machine: int, later_ms: int) -> None:
    """One that was frozen, or whose executors outlive their driver, wakes before any of its requests."""
    turns = length()
    for first, second in itertools.product(range(turns), range(1, turns, 1 if ALL else 2)):
        world = World()
        one = Run(world, "one", 1)
        one.go(first)
        world.ended.add("one")
        world.pass_ms(later_ms)
        other = Run(world, "other", machine)
        other.go(second)
        world.pass_ms(later_ms)
        one.go()
        other.go()
        judge(world, one, other)


def test_a_run_that_sleeps_until_the_number_after_its_own_is_free_again() -> None:
    """Old claims are deleted: what it puts then, nobody reads, and it is told so."""
    for first in range(length()):
        world = World()
        one = Run(world, "one", 1)
        one.go(first)
        world.ended.add("one")
        other = Run(world, "other", 1, looks=40)
        other.go()
        assert other.error is None
        one.go()
        judge(world, one, other)


@pytest.mark.parametrize("machine", [1, 2], ids=["on its machine", "on another"])
def test_a_copy_never_stops_the_original(machine: int) -> None:
    """Whenever it begins, and however their requests meet, as long as the original looks every two minutes."""
    outcomes = set()
    for looks, each, of_copy in itertools.product(range(1, LOOKS), range(1, 6), range(5)):
        world = World()
        original = Run(world, "original", 1, looks=3 * LOOKS)
        while len(world.told) < looks:
            original.go(1)
        copy = Run(world, "copy", machine, looks=2 * LOOKS)
        copy.go(of_copy)
        while not original.has_ended:
            before = len(world.told)
            original.go(each)
            copy.go(of_copy)
            world.pass_ms(RENEW_EVERY_MS if len(world.told) > before else 0)
        copy.go()
        judge(world, original, copy)
        assert original.error is None, repr(original.error)
        assert {told.run for told in world.told} == {"original"}
        outcomes.add(type(copy.error))
    assert outcomes == {ConflictError} if machine == 1 else FencedError in outcomes <= {FencedError, type(None)}


def looks_in_time(world: World, original: Run, copy: Run, each: int, of_copy: int) -> None:
    """Let an original look every two minutes, and a copy go between its requests, until the original has ended."""
    while not original.has_ended:
        looked = original.looked
        original.go(each)
        copy.go(of_copy)
        world.pass_ms(RENEW_EVERY_MS if original.looked > looked else 0)


def begin(world: World, name: str, machine: int, looks: int = 3 * LOOKS) -> Run:
    """Return a run that has its place, and has not looked yet."""
    run = Run(world, name, machine, looks)
    while not run.looked:
        assert not run.has_ended, repr(run.error)
        run.go(1)
    return run


@pytest.mark.parametrize("dead", cases([("one", "two"), ("one",), ("one", "two", "three", "four", "five")]), ids=len)
@pytest.mark.parametrize("later_ms", [0, RENEW_EVERY_MS, ALIVE_MS - 1000])
def test_a_copy_never_stops_an_original_whoever_died_before(dead: Sequence[str], later_ms: int) -> None:
    """Runs die one after the other, each on another machine or where the one before did; the last one lives.

    A copy begins after that one, on a third machine, whenever that is and however their requests meet.
    """
    for wait, each, of_copy in itertools.product(range(6), range(1, 5, 1 if ALL else 2), range(5)):
        world = World()
        for name in dead:
            begin(world, name, len(world.machines) + 4).kill()
            world.pass_ms(later_ms)
        original = begin(world, "original", 2)
        for _ in range(wait):
            looked = original.looked
            while original.looked == looked and not original.has_ended:
                original.go(1)
            world.pass_ms(RENEW_EVERY_MS // 2)
        copy = Run(world, "copy", 3, looks=3 * LOOKS)
        copy.go(of_copy)
        looks_in_time(world, original, copy, each, of_copy)
        assert original.error is None, (wait, each, of_copy, repr(original.error))
        assert {told.run for told in world.told} <= {"original", *dead}
        copy.go()
        judge(world, original, copy)


@pytest.mark.parametrize("before", range(3))
def test_a_run_beside_a_dead_one_takes_its_place_though_copies_come_and_go(before: int) -> None:
    """However many begin, and die, before and after it: nobody waits for ten minutes."""
    for of_copy in range(length()):
        world = World()
        begin(world, "one", 1).kill()
        for number in range(before):
            begin(world, f"copy {number} before", 3 + number).kill()
            world.pass_ms(1000)
        last, began_ms = begin(world, "last", 2, looks=40), world.storage.now_ms
        while not any(told.run == "last" for told in world.told):
            looked = last.looked
            while last.looked == looked:
                last.go(1)
                assert not last.has_ended, repr(last.error)
                copy = Run(world, f"copy at {world.steps}", 9)
                copy.go(of_copy)
                copy.kill()
            world.pass_ms(RENEW_EVERY_MS)
        assert world.storage.now_ms - began_ms <= 2 * ALIVE_MS
        last.go()
        assert last.error is None, repr(last.error)
        assert not [key for key in world.storage.objects if "beside" in key], "old ones are deleted"


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 3)), max_size=30),
    st.sampled_from([("a", "b", "c"), ("a", "b", "a"), ("a", "a", "b")]),
    st.tuples(*3 * [st.integers(1, 2)]),
    st.integers(-1, 2),
)
def test_three_in_any_order(
    schedule: Sequence[tuple[int, int, int]], names: Sequence[str], machines: Sequence[int], killed: int
) -> None:
    """Three runs, or executors of two: each begins at its first turn, while time passes; one may be killed."""
    world, runs = World(), {}
    for number, steps, passes in schedule:
        if number not in runs:
            runs[number] = Run(world, names[number], machines[ord(names[number]) - ord("a")], executor=number)
        runs[number].go(steps)
        world.pass_ms((0, ENDING_MS, RENEW_EVERY_MS, ALIVE_MS)[passes] + passes)
    if killed in runs:
        runs[killed].kill()
    for run in runs.values():
        run.go()
        world.ended.add(run.name)
    judge(world, *runs.values())
    world.pass_ms(ALIVE_MS + 1)
    last = Run(world, "last", 1)
    last.go()
    assert last.error is None, "the next start goes on"
    judge(world, *runs.values(), last)
