"""What the shards of an executor hold in memory: known at the same cost however many there are, and never too low."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.local_files import StagedFolder, folder_bytes
from holdfast.backends.run_files.memory import MemoryBackend, MemoryUsage
from holdfast.errors import UnavailableError
from holdfast.testing.state_rows import P1, P2, P3, TABLES, counts, users

MANY = counts(*((f"user {i}", i) for i in range(20_000)))


def shard_of(executor: Path, number: int, limit: str | None = "100m") -> MemoryBackend:
    directory = executor / "memory" / "query" / "totals" / f"shard-{number:04d}"
    return MemoryBackend(directory, TABLES, clock.new_id, {"limit": limit} if limit else {}, executor)


def noted(executor: Path) -> int:
    return sum(int(name.partition(".")[2]) for name in os.listdir(executor / "memory-held"))


@pytest.fixture
def executor(tmp_path: Path) -> Path:
    return tmp_path / "executor"


def test_a_write_costs_the_same_however_many_shards_there_are(executor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 200 shards on an executor, to look at all of them took longer than everything else."""
    looked: list[str] = []
    walk = os.walk

    def counted(top: Any) -> Iterator[Any]:
        for found in walk(top):
            looked.append(found[0])
            yield found

    def cost(backend: MemoryBackend) -> int:
        backend.apply(None, P1, counts(("ann", 1)), {})
        looked.clear()
        backend.apply(P1, P2, counts(("bob", 2)), {})
        backend.drop([P1])
        return len(looked)

    monkeypatch.setattr(os, "walk", counted)
    few = cost(shard_of(executor, 0))
    for number in range(1, 40):
        shard_of(executor, number).apply(None, P1, counts(("ann", 1)), {})
    assert cost(shard_of(executor, 40)) <= 2 * few + 20


@pytest.mark.parametrize("limit", ["100m", None], ids=["with a limit", "of a query without a limit"])
def test_what_is_noted_is_what_is_held(executor: Path, limit: str | None) -> None:
    """Through commits, restores, drops and merges, of queries that have a limit and of others beside them."""
    shard_of(executor, 0).apply(None, P1, counts(("ann", 1)), {})
    backend = shard_of(executor, 1, limit)

    def check() -> None:
        held = sum(folder_bytes(path) for path in executor.glob("memory/query/totals/*"))
        assert noted(executor) == held

    backend.apply(None, P1, MANY, {})
    check()
    backend.apply(P1, P2, counts(("bob", 2)), {})
    check()
    backend.load(P3, MANY, {})
    check()
    backend.drop([P1, P2])
    check()
    backend.maintain(P3)
    check()
    backend.drop([P3])
    check()


@pytest.mark.parametrize("at", ["publish", "write"])
def test_a_killed_process_leaves_no_room_that_is_not_there(
    executor: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was about to write stays noted until the shard is looked at again; then it is right."""
    backend = shard_of(executor, 0, "2m")
    backend.apply(None, P1, MANY, {})
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(StagedFolder, at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        backend.apply(P1, P2, MANY, {})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    held = folder_bytes(backend.directory)
    assert noted(executor) >= held
    assert backend.remove_leftovers(2**63) == 1
    assert noted(executor) == folder_bytes(backend.directory)


def test_shards_that_are_gone_do_not_count(executor: Path) -> None:
    """Their query was stopped, or they moved to another executor; nobody tells the shards that are left."""
    for number in range(5):
        shard_of(executor, number, "4m").apply(None, P1, MANY, {})
    for number in range(1, 5):
        shutil.rmtree(shard_of(executor, number, "4m").directory)
    backend, pointers = shard_of(executor, 0, "4m"), [P1, *(Pointer(version, "aa") for version in range(2, 9))]
    for base, new in pairwise(pointers[:4]):
        backend.apply(base, new, MANY, {})
    with backend.view(pointers[3]) as view:
        assert users(view, "user 7") == [(7,)]
    with pytest.raises(UnavailableError, match="limit"):  # noqa: PT012  one of them has to
        for pointer in pointers[4:]:
            backend.load(pointer, MANY, {})


def test_entries_of_shards_that_are_gone_go_too(executor: Path) -> None:
    """Each write looks at one entry, so they do not gather, though no limit is ever met."""
    shards = [shard_of(executor, number) for number in range(20)]
    for shard in shards:
        shard.apply(None, P1, counts(("ann", 1)), {})
    for shard in shards[1:]:
        shutil.rmtree(shard.directory)
    for _ in range(400):
        shards[0].drop([])
    assert len(os.listdir(executor / "memory-held")) == 1


def test_entries_are_read_whatever_else_lies_there(tmp_path: Path) -> None:
    """A file that a user or a program has put there is no entry."""
    shard = tmp_path / "memory" / "shard"
    (shard / "versions").mkdir(parents=True)
    (shard / "versions" / "file").write_bytes(b"x" * 1000)
    held = MemoryUsage(tmp_path / "held", tmp_path / "memory", shard, clock.new_id)
    assert held.recount() == 1000
    for name in ("README", "a.b", ".hidden", "x."):
        (tmp_path / "held" / name).touch()
    assert held.note(24) == 1024
    assert held.note() == held.recount() == 1000
