"""A SIGKILL at any write to disk, on every backend: what the query was told is there, and nothing is mixed.

The victim commits, deletes, rolls back, restores, merges, prunes, freezes, closes and opens again. It is killed
before or after one of its system calls, and what it leaves is opened by another process, as a new worker does.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd  # noqa: F401  pyarrow imports it when it is first needed: once here, not in every victim
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.rocksdb import backend as rocksdb
from holdfast.backends.run_files import backend as run_files
from holdfast.mvcc import VersionedStore
from holdfast.testing.state_rows import COUNTS, contents, keys_of, values_of
from tests.faults.stopped_process import kills, traced  # noqa: F401  a fixture
from tests.model.built_in import BUILT_IN, copy_directory, open_backend
from tests.model.steps import STEPS, TABLES, commit_log, look_after, state_after, step_of, take_step, version_of
from tests.tiers import LONG, cases


def work(backend_name: str, folder: Path) -> None:
    """The victim; tells each pointer as the query would keep it, in a file outside of `folder`."""
    run_files.COMMIT_MERGE_LIMIT_BYTES = 0
    rocksdb.RocksDBBackend.share_bytes = lambda _: 0
    pointers: dict[int, Pointer] = {}
    told = os.open(f"{folder}.told", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with commit_log(folder, backend_name) as log:
        for first, last in ((1, 19), (20, STEPS)):
            with open_backend(backend_name, folder / "shard", TABLES) as backend:
                for step in range(first, last + 1):
                    take_step(backend, log, step, pointers)
                    os.write(told, f"{step} {pointers[step]}\n".encode())
                    look_after(backend, log, step, pointers[step])


# What is left.


def told_by(path: Path) -> dict[Pointer, int]:
    """Return the steps that the query knows of, by pointer, oldest first."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {Pointer.parse(pointer): int(step) for step, pointer in lines}


def check_alone(backend_name: str, directory: Path, told: dict[Pointer, int]) -> str:
    """Without the commit log: what is claimed is whole, and of a step that was taken; tell what is held."""
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
            assert pointer in held, "files that are in place are not lost by a kill"
    return "newest" if set(list(told)[-1:]) <= set(held) else "older" if held else "nothing"


def check_with_log(backend_name: str, folder: Path, told: dict[Pointer, int]) -> None:
    """With the commit log: the query goes on at exactly the state it was told of."""
    pointer = list(told)[-1] if told else None
    with commit_log(folder, backend_name) as log:
        elsewhere = open_backend(backend_name, folder / "elsewhere", TABLES)
        with elsewhere, VersionedStore(elsewhere, log).begin(pointer) as transaction:
            assert step_of(transaction) == (told[pointer] if pointer else 0), "what was told is durable"
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
@pytest.mark.parametrize("backend_name", cases(BUILT_IN))
def test_a_process_killed_at_any_write_loses_nothing(backend_name: str, ram_path: Path) -> None:
    """Evenly chosen system calls of every kind; all of them in the long tier."""
    killed: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    held: Counter[str] = Counter()
    missed = 0
    for record in kills(f"{__name__}:work", backend_name, ram_path, how_many=400 if LONG else 36):
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
        held[check_alone(backend_name, folder / "alone", told)] += 1
        check_with_log(backend_name, folder, told)
        shutil.rmtree(folder)
    # With several threads the same work makes a call more or less.
    assert missed <= killed.total() // 10
    assert killed.total() >= 30
    assert {"write", "mkdir", "fsync"} <= killed.keys()
    assert {"rename", "unlink", "unlinkat"} & killed.keys()
    assert folders.keys() >= {"shard", "durable"}
    assert held["newest"] >= 5


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
def test_a_process_is_killed_exactly_where_it_was_meant(ram_path: Path) -> None:
    """A call that was killed on its way in did nothing, and one on its way out did all."""
    found = {}
    for record in kills(f"{__name__}:touch_files", "", ram_path, how_many=0):
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
