"""Two makers of one savepoint name: one of them has it, and loses nothing, on storages that overwrite."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import ConflictError, HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.snapshotter.savepoints.making import making
from holdfast.snapshotter.savepoints.manifest import Savepoint
from holdfast.snapshotter.savepoints.savepoints import (
    delete_savepoint,
    find_savepoint,
    list_savepoints,
    read_savepoint,
    savepoint_folder,
    unnamed,
    verify_savepoint,
)
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.model.shard_history import TimedStorage
from tests.unit.snapshotter.savepoints.sample import KEY_OF_MANIFEST, a_savepoint

if TYPE_CHECKING:
    from typing_extensions import Buffer

LATER, EARLIER = "the later one", "the earlier one"


class _Overwriting(TimedStorage):
    """Two that look at once both find a key free, and then put."""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.put(key, data)


@pytest.fixture
def target() -> TimedStorage:
    """Return a storage that overwrites, as some do."""
    return _Overwriting()


def stored(target: TimedStorage, comment: str) -> Savepoint:
    """Store what a maker stores before it finishes."""
    made = replace(a_savepoint(target), comment=comment)
    target.delete([f"one/{KEY_OF_MANIFEST}"])
    return made


@pytest.mark.parametrize("first", [EARLIER, LATER])
def test_the_one_that_began_last_has_the_name(target: TimedStorage, threads: ThreadPoolExecutor, first: str) -> None:
    """Whoever finishes first; the other one is told, and none of the winner's pieces is gone."""
    with ExitStack() as both:
        makers = {comment: both.enter_context(making(target, "one")) for comment in (EARLIER, LATER)}
        made = {comment: stored(target, comment) for comment in makers}
        for comment in sorted(makers, reverse=first != EARLIER):
            if comment == LATER:
                makers[comment].finish(made[comment])
            else:
                with pytest.raises(ConflictError, match="somebody else"):
                    makers[comment].finish(made[comment])
    found = read_savepoint(target, "one")
    assert found.comment == LATER
    assert verify_savepoint(target, found, threads) == []
    assert {info.key for info in savepoint_folder(target, "one").list("")} == {KEY_OF_MANIFEST, *found.keys}


def test_of_two_that_begin_at_once_one_gives_up_at_once(target: TimedStorage) -> None:
    """Both have looked for a savepoint before either has put its mark."""
    with ExitStack() as both:
        other = Fault("delay", "list", wait=lambda: both.enter_context(making(target, "one")))
        with pytest.raises(ConflictError, match="somebody else"), making(FaultyStorage(target, [other]), "one"):
            pass
        assert len(target.objects) == 1, "the other one's mark"


def test_one_that_finishes_meanwhile_is_seen(target: TimedStorage) -> None:
    """It was finished between a look for it and the mark."""
    other = a_savepoint(target)
    manifest = bytes(target.get(f"one/{KEY_OF_MANIFEST}"))
    target.delete([f"one/{KEY_OF_MANIFEST}"])
    finished = Fault("delay", "put", wait=lambda: target.put(f"one/{KEY_OF_MANIFEST}", manifest))
    with pytest.raises(ConflictError, match="somebody else"), making(FaultyStorage(target, [finished]), "one"):
        pass
    assert read_savepoint(target, "one") == other
    assert set(target.objects) == {f"one/{key}" for key in (KEY_OF_MANIFEST, *other.keys)}


def test_a_maker_that_was_killed_blocks_nothing(target: TimedStorage, threads: ThreadPoolExecutor) -> None:
    """Its mark lies there; the folder is unfinished, and whoever makes the savepoint anew removes it."""
    target.put(f"one/making-{'f' * 16}", b"")
    (listed,) = list_savepoints(target, threads)
    assert (listed.name, listed.objects, listed.savepoint) == ("one", 1, None)
    with making(target, "one") as new:
        new.finish(stored(target, "again"))
    assert not [key for key in target.objects if "making" in key]
    target.put(f"two/making-{'f' * 16}", b"")
    assert delete_savepoint(target, "two") == 1


@pytest.mark.parametrize("error", [UnavailableError("the storage"), KeyboardInterrupt()])
def test_a_maker_that_fails_leaves_no_mark(target: TimedStorage, error: BaseException) -> None:
    with pytest.raises(type(error)), making(target, "one"):
        raise error
    assert target.objects == {}


def test_a_savepoint_that_is_deleted_meanwhile_is_not_finished(target: TimedStorage) -> None:
    """Even if it has no pieces that could be missing."""
    with making(target, "one") as new:
        made = stored(target, "mine")
        nothing = replace(
            made, operators=(replace(made.operators[0], pieces=()),), query=replace(made.query, sources=())
        )
        delete_savepoint(target, "one")
        with pytest.raises(ConflictError, match="somebody else is deleting"):
            new.finish(nothing)
    assert find_savepoint(target, "one") is None


@pytest.mark.parametrize("error", [InvalidArgumentError("access denied"), UnavailableError("the storage is away")])
def test_what_cannot_be_deleted_is_no_failure(
    target: TimedStorage, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, error: HoldfastError
) -> None:
    """The manifest stands: who is told of a failure would make it again, and hear that the name is taken."""
    never = Fault("fail", "delete", times=None, error=lambda: error)
    with making(FaultyStorage(target, [never]), "one") as new:
        made = stored(target, "mine")
        new.finish(made)
    found = read_savepoint(target, "one")
    assert found == made
    assert verify_savepoint(target, found, threads) == []
    assert unnamed(savepoint_folder(target, "one").list(""), found) == [new.mark]
    (warning,) = caplog.messages
    assert all(words in warning for words in ("timed://test/one is finished and whole, but", new.mark, str(error)))


def held_up(target: TimedStorage, meanwhile: Callable[[], object]) -> FaultyStorage:
    """Return the storage of a maker, something happens to which between its last look and its put of the manifest."""
    return FaultyStorage(target, [Fault("delay", "put", key=f"one/{KEY_OF_MANIFEST}", wait=meanwhile)])


def test_a_manifest_that_lands_late_is_no_success(target: TimedStorage, threads: ThreadPoolExecutor) -> None:
    """Another maker has finished meanwhile: its pieces stay; the damage is seen, and mended as the error says."""

    def another() -> None:
        with making(target, "one") as other:
            made[LATER] = stored(target, LATER)
            other.finish(made[LATER])

    made: dict[str, Savepoint] = {}
    with making(held_up(target, another), "one") as new:
        made[EARLIER] = stored(target, EARLIER)
        with pytest.raises(ConflictError, match=r"run holdfast savepoint verify; unless it is whole, delete it"):
            new.finish(made[EARLIER])
    keys = {info.key for info in savepoint_folder(target, "one").list("")}
    assert keys == {KEY_OF_MANIFEST, *made[LATER].keys}
    assert verify_savepoint(target, read_savepoint(target, "one"), threads)
    delete_savepoint(target, "one")
    assert target.objects == {}


def test_a_manifest_that_lands_late_replaces_no_other(threads: ThreadPoolExecutor) -> None:
    """Where the storage can refuse it, the other maker's savepoint is whole."""

    def another() -> None:
        with making(target, "one") as other:
            other.finish(stored(target, LATER))

    target = TimedStorage()
    with making(held_up(target, another), "one") as new:
        made = stored(target, EARLIER)
        with pytest.raises(ConflictError, match="make it again, under another name"):
            new.finish(made)
    found = read_savepoint(target, "one")
    assert found.comment == LATER
    assert verify_savepoint(target, found, threads) == []


def test_another_one_that_begins_before_the_manifest_lands_keeps_its_pieces(target: TimedStorage) -> None:
    """It may finish, or give up: so nothing of it is deleted, and no success is told."""
    with ExitStack() as both:
        begun = held_up(target, lambda: both.enter_context(making(target, "one")))
        theirs = f"one/operators/totals/state/0000-0-{'f' * 16}.arrow"
        new = both.enter_context(making(begun, "one"))
        made = stored(target, "mine")
        target.put(theirs, b"a piece of the other one")
        with pytest.raises(ConflictError, match="one process at a time"):
            new.finish(made)
        assert theirs in target.objects


def test_a_savepoint_that_is_deleted_before_its_manifest_lands_is_not_finished(target: TimedStorage) -> None:
    with making(held_up(target, lambda: delete_savepoint(target, "one")), "one") as new:
        made = stored(target, "mine")
        with pytest.raises(ConflictError, match=r"somebody else deleted.*missing=\S+"):
            new.finish(made)


def test_one_that_is_finished_while_it_is_deleted_is_deleted(target: TimedStorage) -> None:
    """It was unfinished when the deletion listed it: no manifest may stand whose pieces are gone."""
    with ExitStack() as making_it:
        new = making_it.enter_context(making(target, "one"))
        made = stored(target, "mine")
        before_the_deletes = Fault("delay", "delete", wait=lambda: new.finish(made))
        delete_savepoint(FaultyStorage(target, [before_the_deletes]), "one")
    assert target.objects == {}


def test_one_that_is_deleted_before_its_last_look_is_no_missing_object(target: TimedStorage) -> None:
    """What its maker is told is what happened."""
    deleted = Fault("delay", "get", f"one/{KEY_OF_MANIFEST}", nth=2, wait=lambda: delete_savepoint(target, "one"))
    storage = FaultyStorage(target, [deleted])
    with making(storage, "one") as new:
        made = stored(target, "mine")
        with pytest.raises(ConflictError, match="somebody else deleted this savepoint"):
            new.finish(made)
    storage.assert_all_hit()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("lose_reply", "put", f"one/{KEY_OF_MANIFEST}"),
        Fault("fail", "list", "one/", nth=3),
        Fault("fail", "get", f"one/{KEY_OF_MANIFEST}", nth=2),
    ],
    ids=["stored", "listed", "read"],
)
def test_a_manifest_of_which_nobody_knows_is_to_be_looked_for(target: TimedStorage, fault: Fault) -> None:
    """It stands: who made it again would hear that the name is taken."""
    storage = FaultyStorage(target, [fault])
    with making(storage, "one") as new:
        made = stored(target, "mine")
        with pytest.raises(UnavailableError, match=r"whether the savepoint is finished.*verify.*injected fault"):
            new.finish(made)
    storage.assert_all_hit()
    assert read_savepoint(target, "one") == made
