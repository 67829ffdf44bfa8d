"""Makers of one savepoint name, and somebody who deletes it, who make their requests by turns, in any order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConflictError, HoldfastError, NotFoundError
from holdfast.snapshotter.savepoints.manifest import Savepoint
from holdfast.snapshotter.savepoints.pieces import write_pieces
from holdfast.snapshotter.savepoints.savepoints import delete_savepoint, find_savepoint, making, verify_savepoint
from holdfast.testing.faulty_storage import FaultyStorage
from tests.model.shard_history import TimedStorage
from tests.model.turns import by_turns
from tests.tiers import cases
from tests.unit.snapshotter.savepoints.sample import STATE, a_run, a_savepoint

NAME = "nightly"
REQUESTS = 7
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
    assert len(storage.operations) <= REQUESTS, "else not every order is tried"
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
    plans = cases(list(itertools.product(range(REQUESTS + 1), repeat=3)), quick=80)
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
