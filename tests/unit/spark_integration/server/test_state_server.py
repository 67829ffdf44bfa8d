"""Until when a state server works: its executor ends, or workers do not find it any more."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.executor.processes import ProcessId
from holdfast.spark_integration.server import state_server
from holdfast.spark_integration.server.housekeeping import Housekeeping
from tests.unit.spark_integration.executor.damaged_disk import fail_at

ROUNDS = 3


class Tidying(Housekeeping):
    """Housekeeping of nothing, in whose second turn something happens; the executor ends after `ROUNDS`."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.turns = 0
        self._happens = happens

    def tidy_up(self) -> None:
        self.turns += 1
        if self.turns == 2:
            self._happens()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return local_dirs.executor_directory(tmp_path, ProcessId.of(os.getpid()))


@pytest.fixture
def lock(directory: Path) -> Iterator[int]:
    descriptor = local_dirs.take_lock(directory)
    assert descriptor is not None
    local_dirs.socket_path(directory).touch()
    yield descriptor
    os.close(descriptor)


def has_served_to_the_end(directory: Path, lock: int, happens: Callable[[], object]) -> bool:
    tidying = Tidying(happens)
    executor = ProcessId.of(os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessId, "wait", lambda *_: tidying.turns >= ROUNDS)
        socket = local_dirs.socket_path(directory)
        has_ended = state_server._tidy_up_until_the_end(tidying, directory, executor, socket, lock)
    assert tidying.turns == (ROUNDS if has_ended else 2)
    return has_ended


def test_it_works_until_its_executor_ends(directory: Path, lock: int) -> None:
    assert has_served_to_the_end(directory, lock, lambda: None)


def test_its_lock_never_looks_old(directory: Path, lock: int) -> None:
    """Who cleans /tmp by age leaves it alone: else a server of ten days would end, with what it has not flushed."""
    assert has_served_to_the_end(directory, lock, lambda: os.utime(lock, (0, 0)))
    assert (directory / local_dirs.LOCK_NAME).stat().st_mtime > 0


def test_it_ends_where_another_server_may_run_beside_it(directory: Path, lock: int) -> None:
    """A program that cleans /tmp by age takes the lock's file after ten days: nobody writes to it.

    Each of two would let go, as no longer used, what is announced to the other.
    """

    def lose_the_lock() -> None:
        (directory / local_dirs.LOCK_NAME).unlink()
        another = local_dirs.take_lock(directory)
        assert another is not None, "whoever wants a server starts one"
        os.close(another)

    assert not has_served_to_the_end(directory, lock, lose_the_lock)


def test_it_ends_where_nobody_can_reach_it(directory: Path, lock: int) -> None:
    """It would keep the lock, and so whoever needs a server from starting one."""
    assert not has_served_to_the_end(directory, lock, local_dirs.socket_path(directory).unlink)


@pytest.mark.parametrize("hidden", ["lock", "socket"])
def test_it_stays_where_a_damaged_disk_hides_it(
    directory: Path, lock: int, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """Each server after it would end as well, every five minutes; what it has open goes on."""
    paths = {"lock": directory / local_dirs.LOCK_NAME, "socket": local_dirs.socket_path(directory)}
    assert has_served_to_the_end(directory, lock, lambda: fail_at(paths[hidden], "stat", monkeypatch))


def test_it_ends_where_its_directory_is_gone(directory: Path, lock: int) -> None:
    assert not has_served_to_the_end(directory, lock, lambda: shutil.rmtree(directory))
