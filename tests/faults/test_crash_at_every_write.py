"""A SIGKILL at any write to disk, on every backend: what the query was told is there, and nothing is mixed.

The victim commits, deletes, rolls back, restores, merges, prunes, freezes, closes and opens again. It is killed
before or after one of its system calls, and what it leaves is opened by another process, as a new worker does. Each
state tells by itself which step wrote it, so a version that mixes two of them is noticed.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd  # noqa: F401  pyarrow imports it when it is first needed: once here, not in every victim
import pytest

from holdfast.backends import run_files
from holdfast.backends.base import Backend, Pointer, View
from holdfast.errors import StateLostError
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage import open_storage
from holdfast.testing.state_rows import COUNTS, MEMBERS, contents, keys_of, values_of
from tests.faults.stopped_process import kills, traced  # noqa: F401  a fixture
from tests.model.built_in import BUILT_IN, copy_directory, open_backend
from tests.repetitions import LONG

TABLES = {table.name: table for table in (COUNTS, MEMBERS)}
State = dict[str, dict[tuple[Any, ...], tuple[Any, ...]]]
EMPTY: State = {name: {} for name in TABLES}

# Step → the step it begins at, where that is not the one before: a rollback of one attempt, one by several versions to
# one that is pruned by then, so that it is restored, and one right after the directory was opened again.
ROLLBACKS = {9: 7, 17: 12, 20: 18}
STEPS = 27


class Writes(NamedTuple):
    """What one step does; every step touches many rows, and every row is touched by many steps."""

    counts: dict[str, int]
    no_counts: list[str]
    members: list[bytes]
    no_members: list[bytes]


def writes_of(step: int) -> Writes:
    names = [f"user {i}" for i in range(40) if (i + step) % 3 == 0]
    gone = [f"user {i}" for i in range(40) if (i * 3 + step) % 11 == 0]
    members = [b"%d" % (i % 12) for i in range(step, step + 4)]
    return Writes(dict.fromkeys(names, step) | {"step": step}, gone, members, [b"%d" % ((step + 6) % 12)])


def write(transaction: Transaction, step: int) -> None:
    """Do what one step does."""
    counts, no_counts, members, no_members = writes_of(step)
    users = keys_of(COUNTS, [(name,) for name in counts])
    transaction.put("counts", users, values_of(COUNTS, [(n,) for n in counts.values()]))
    transaction.delete("counts", keys_of(COUNTS, [(name,) for name in no_counts]))
    transaction.put("members", keys_of(MEMBERS, [(m,) for m in members]), values_of(MEMBERS, [()] * len(members)))
    transaction.delete("members", keys_of(MEMBERS, [(m,) for m in no_members]))


@cache
def state_after(step: int) -> State:
    """Return the state of a step: what it writes, on the state of the step it begins at."""
    if not step:
        return EMPTY
    base = state_after(base_of(step))
    counts, no_counts, members, no_members = writes_of(step)
    n_by_user = base["counts"] | {(name,): (n,) for name, n in counts.items()}
    all_members = base["members"] | {(m,): () for m in members}
    return {
        "counts": {key: n for key, n in n_by_user.items() if key[0] not in no_counts},
        "members": {key: () for key in all_members if key[0] not in no_members},
    }


def base_of(step: int) -> int:
    return ROLLBACKS.get(step, min(step, STEPS + 1) - 1)


def version_of(step: int) -> int:
    return version_of(base_of(step)) + 1 if step else 0


def step_of(view: View | Transaction) -> int:
    """Return the step that a state is of, and fail where it holds anything else than that step's state."""
    state = {table: contents(view, table) for table in TABLES}
    (step,) = state["counts"].get(("step",), (0,))
    assert state == state_after(step), "a version mixes states"
    for table in TABLES:
        assert view.count(table) == len(state[table])
    return step


@contextmanager
def commit_log(folder: Path) -> Iterator[ObjectCommitLog]:
    """The log of the shard in `folder`, on the file system beside it."""
    with ThreadPoolExecutor(2) as executor, open_storage(f"file://{folder / 'durable'}") as storage:
        yield ObjectCommitLog(storage, "op/shard-0000", TABLES, executor, folder / "notes")


def work(backend_name: str, folder: Path) -> None:
    """The victim; tells each pointer as the query would keep it, in a file outside of `folder`."""
    run_files.COMMIT_MERGE_LIMIT_BYTES = 0
    pointers: dict[int, Pointer] = {}
    told = os.open(f"{folder}.told", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with commit_log(folder) as log:
        for first, last in ((1, 19), (20, STEPS)):
            with open_backend(backend_name, folder / "shard", TABLES) as backend:
                for step in range(first, last + 1):
                    take_step(backend, log, step, pointers)
                    os.write(told, f"{step} {pointers[step]}\n".encode())
                    look_after(backend, log, step, pointers[step])


def take_step(backend: Backend, log: ObjectCommitLog, step: int, pointers: dict[int, Pointer]) -> None:
    with VersionedStore(backend, log).begin(pointers.get(base_of(step))) as transaction:
        write(transaction, step)
        pointer = transaction.commit()
    assert pointer is not None
    pointers[step] = pointer


def look_after(backend: Backend, log: ObjectCommitLog, step: int, pointer: Pointer) -> None:
    """What the background does between commits."""
    if step % 3 == 0:
        backend.maintain(pointer)
    if step % 4 == 0:
        VersionedStore(backend, log).prune(pointer)
    if step % 7 == 0:
        backend.freeze(pointer)
    if step == 15:
        with backend.view(pointer) as view:
            log.write_snapshot(pointer, view)
    if step % 10 == 0:
        backend.remove_leftovers(2**63)


# What is left.


def told_by(path: Path) -> dict[Pointer, int]:
    """Return the steps that the query knows of, by pointer, oldest first."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {Pointer.parse(pointer): int(step) for step, pointer in lines}


def check_alone(backend_name: str, directory: Path, told: dict[Pointer, int]) -> bool:
    """Without the commit log: what is claimed is whole, and of a step that was taken; tell whether any is."""
    last_step = max(told.values(), default=0)
    with open_backend(backend_name, directory, TABLES) as backend:
        assert backend.verify() == [], "a killed process damages nothing"
        held = backend.versions()
        for pointer in held:
            with backend.view(pointer) as view:
                step = step_of(view)
            assert told.get(pointer, last_step + 1) == step
            assert pointer.version == version_of(step)
        for pointer in list(told)[-1:]:
            if not backend.has_one_owner:
                assert pointer in held, "files that are in place are not lost by a kill"
            if pointer not in held:
                with pytest.raises(StateLostError):
                    VersionedStore(backend).begin(pointer)
    return bool(held)


def check_with_log(backend_name: str, folder: Path, told: dict[Pointer, int]) -> None:
    """With the commit log: the query goes on at exactly the state it was told of."""
    pointer = list(told)[-1] if told else None
    with commit_log(folder) as log:
        with open_backend(backend_name, folder / "shard", TABLES) as backend:
            assert backend.verify() == []
            with VersionedStore(backend, log).begin(pointer) as transaction:
                assert step_of(transaction) == (told[pointer] if pointer else 0)
                transaction.put("counts", keys_of(COUNTS, [("new",)]), values_of(COUNTS, [(-1,)]))
                new = transaction.commit()
            assert new is not None
            backend.maintain(new)
            assert backend.freeze(new)
            VersionedStore(backend, log).prune(new)
            backend.remove_leftovers(2**63)
            assert new in backend.versions()
            assert not [p for p in backend.versions() if p.version <= new.version and p != new]
        expected = state_after(told[pointer] if pointer else 0)
        with open_backend(backend_name, folder / "shard", TABLES) as backend:
            view = VersionedStore(backend, log).read_at(new)
            assert contents(view, "counts") == expected["counts"] | {("new",): (-1,)}
            assert contents(view, "members") == expected["members"]
            view.close()


# The kills.


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("backend_name", BUILT_IN)
def test_a_process_killed_at_any_write_loses_nothing(backend_name: str, tmp_path: Path) -> None:
    """Evenly chosen system calls of every kind; all of them in the long profile."""
    killed: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    missed = held = 0
    for record in kills(f"{__name__}:work", backend_name, tmp_path, how_many=400 if LONG else 36):
        folder = Path(record["folder"])
        if record["killed_at"] is None:
            assert record["status"] == 0
            missed += record["place"] is not None
        else:
            name, number, path = record["killed_at"]
            assert record["status"] == -9
            assert [name, number] == record["place"][:2], "killed where it was meant"
            killed[name] += 1
            folders[path.split("/")[0]] += 1
        told = told_by(Path(f"{folder}.told"))
        (folder / "shard").mkdir(exist_ok=True)
        copy_directory(folder / "shard", folder / "alone")
        held += check_alone(backend_name, folder / "alone", told)
        check_with_log(backend_name, folder, told)
        shutil.rmtree(folder)
    # With several threads the same work makes a call more or less.
    assert missed <= killed.total() // 10
    assert killed.total() >= 30
    assert {"write", "mkdir", "fsync"} <= killed.keys()
    assert {"rename", "unlink", "unlinkat"} & killed.keys()
    assert folders.keys() >= {"shard", "durable"}
    assert held >= 10


# The tool.


def touch_files(_: str, folder: Path) -> None:
    """A victim with a second thread, and names of every form."""
    (folder / "a").write_bytes(b"data")
    os.rename(folder / "a", folder / "b")
    os.chdir(folder)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(os.mkdir, "folder").result()
    descriptor = os.open(folder, os.O_RDONLY)
    os.unlink("b", dir_fd=descriptor)
    Path(f"{folder}.told").write_text("alive")


@pytest.mark.usefixtures("traced")
def test_a_process_is_killed_exactly_where_it_was_meant(tmp_path: Path) -> None:
    """A call that was killed on its way in did nothing, and one on its way out did all."""
    found = {}
    for record in kills(f"{__name__}:touch_files", "", tmp_path, how_many=0):
        folder = Path(record["folder"])
        files = {p.name: p.read_bytes() if p.is_file() else None for p in folder.iterdir()}
        found[folder.name] = files
        assert Path(f"{folder}.told").exists() == (record["place"] is None)
        assert record["status"] == (-9 if record["place"] else 0)
        assert record["killed_at"] is None or record["killed_at"][:2] == record["place"][:2]
    assert found == {
        "whole": {"folder": None},
        "openat-1-before": {},
        "write-1-before": {"a": b""},
        "rename-1-before": {"a": b"data"},
        "mkdir-1-before": {"b": b"data"},
        "unlinkat-1-before": {"b": b"data", "folder": None},
        "unlinkat-1-after": {"folder": None},
    }
