"""Two makers of one savepoint name: the first that finishes has it, and loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from holdfast.errors import ConflictError, HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.snapshotter.savepoints.manifest import Savepoint
from holdfast.snapshotter.savepoints.savepoints import (
    delete_savepoint,
    find_savepoint,
    list_savepoints,
    making,
    read_savepoint,
    savepoint_folder,
    unnamed,
    verify_savepoint,
)
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.model.shard_history import TimedStorage
from tests.unit.snapshotter.savepoints.sample import KEY_OF_MANIFEST, a_savepoint

ANOTHER = f"one/operators/totals/state/0000-0-{'f' * 16}.arrow"


@pytest.fixture
def target() -> TimedStorage:
    return TimedStorage()


def stored(target: TimedStorage, comment: str) -> Savepoint:
    """Store what a maker stores before it finishes."""
    made = replace(a_savepoint(target), comment=comment)
    target.delete([f"one/{KEY_OF_MANIFEST}"])
    return made


def test_the_one_that_finishes_first_has_the_name(target: TimedStorage, threads: ThreadPoolExecutor) -> None:
    """The other one is told, and none of the winner's pieces is gone."""
    first, second = making(target, "one"), making(target, "one")
    made, too_late = stored(target, "first"), stored(target, "second")
    first.finish(made)
    with pytest.raises(ConflictError, match="another process"):
        second.finish(too_late)
    assert read_savepoint(target, "one") == made
    assert verify_savepoint(target, made, threads) == []
    assert {info.key for info in savepoint_folder(target, "one").list("")} == {KEY_OF_MANIFEST, *made.keys}
    with pytest.raises(ConflictError, match="there is a savepoint of this name"):
        making(target, "one")


def test_a_maker_that_was_killed_blocks_nothing(target: TimedStorage, threads: ThreadPoolExecutor) -> None:
    """The folder is unfinished, and whoever makes the savepoint anew removes what it has left."""
    target.put(ANOTHER, b"a piece")
    (listed,) = list_savepoints(target, threads)
    assert (listed.name, listed.objects, listed.savepoint) == ("one", 1, None)
    making(target, "one").finish(stored(target, "again"))
    assert ANOTHER not in target.objects


def test_a_savepoint_that_is_deleted_meanwhile_is_not_finished(target: TimedStorage) -> None:
    new = making(target, "one")
    made = stored(target, "mine")
    delete_savepoint(target, "one")
    with pytest.raises(ConflictError, match="another process has deleted"):
        new.finish(made)
    assert find_savepoint(target, "one") is None


@pytest.mark.parametrize("error", [InvalidArgumentError("access denied"), UnavailableError("the storage is away")])
def test_what_cannot_be_deleted_is_no_failure(
    target: TimedStorage, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, error: HoldfastError
) -> None:
    """The manifest stands: who is told of a failure would make it again, and hear that the name is taken."""
    never = Fault("fail", "delete", times=None, error=lambda: error)
    new = making(FaultyStorage(target, [never]), "one")
    made = stored(target, "mine")
    target.put(ANOTHER, b"a piece")
    new.finish(made)
    found = read_savepoint(target, "one")
    assert found == made
    assert verify_savepoint(target, found, threads) == []
    assert unnamed(savepoint_folder(target, "one").list(""), found) == [ANOTHER.removeprefix("one/")]
    (warning,) = caplog.messages
    left = ANOTHER.removeprefix("one/")
    assert all(words in warning for words in ("timed://test/one is finished and whole, but", left, str(error)))


def held_up(target: TimedStorage, meanwhile: Callable[[], object]) -> FaultyStorage:
    """Return the storage of a maker, something happens to which between its look at its pieces and its manifest."""
    return FaultyStorage(target, [Fault("delay", "put", key=f"one/{KEY_OF_MANIFEST}", wait=meanwhile)])


def test_a_manifest_that_lands_late_replaces_no_other(target: TimedStorage, threads: ThreadPoolExecutor) -> None:
    """Another maker has finished meanwhile: its savepoint is whole."""
    new = making(held_up(target, lambda: making(target, "one").finish(stored(target, "another"))), "one")
    made = stored(target, "mine")
    with pytest.raises(ConflictError, match="use another name"):
        new.finish(made)
    found = read_savepoint(target, "one")
    assert found.comment == "another"
    assert verify_savepoint(target, found, threads) == []


def test_a_savepoint_that_is_deleted_before_its_manifest_lands_is_not_finished(target: TimedStorage) -> None:
    new = making(held_up(target, lambda: delete_savepoint(target, "one")), "one")
    made = stored(target, "mine")
    with pytest.raises(ConflictError, match=r"another process has deleted.*missing=\S+"):
        new.finish(made)


@pytest.mark.parametrize(("before", "nth"), [(False, 1), (True, 2)])
def test_one_that_is_finished_while_the_name_is_deleted_goes_too(target: TimedStorage, before: bool, nth: int) -> None:
    """The deletion has listed its pieces, alone or beside a finished one: no manifest may stand without them."""
    new = making(target, "one")
    made = stored(target, "mine")
    if before:
        a_savepoint(target)
    between = Fault("delay", "delete", nth=nth, wait=lambda: new.finish(made))
    delete_savepoint(FaultyStorage(target, [between]), "one")
    assert between.hits == 1
    assert find_savepoint(target, "one") is None


def test_one_that_is_deleted_before_its_last_look_is_not_finished(target: TimedStorage) -> None:
    """What its maker is told is what happened."""
    storage = FaultyStorage(target, [Fault("delay", "list", nth=2, wait=lambda: delete_savepoint(target, "one"))])
    new = making(storage, "one")
    made = stored(target, "mine")
    with pytest.raises(ConflictError, match="another process has deleted this savepoint"):
        new.finish(made)
    storage.assert_all_hit()


@pytest.mark.parametrize(
    "fault",
    [Fault("lose_reply", "put", f"one/{KEY_OF_MANIFEST}"), Fault("fail", "list", "one/", nth=2)],
    ids=["stored", "listed"],
)
def test_a_manifest_of_which_nobody_knows_is_to_be_looked_for(target: TimedStorage, fault: Fault) -> None:
    """It stands: who made it again would hear that the name is taken."""
    storage = FaultyStorage(target, [fault])
    new = making(storage, "one")
    made = stored(target, "mine")
    with pytest.raises(UnavailableError, match=r"may or may not be finished.*verify.*injected fault"):
        new.finish(made)
    storage.assert_all_hit()
    assert read_savepoint(target, "one") == made
