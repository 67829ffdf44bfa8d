"""Run files under several hands at once: attempts side by side, a worker beside the one that merges and drops."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run_files import backend as run_files
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import NotFoundError, StateLostError
from holdfast.mvcc import VersionedStore
from holdfast.testing.state_rows import COUNTS, TABLES, contents, counts, keys_of, users, values_of
from tests.faults.elsewhere import finish, run_elsewhere
from tests.tiers import LONG


def open_backend(directory: Path) -> MemoryBackend:
    return MemoryBackend(directory, TABLES, clock.new_id)


def commit_many(directory: Path, base: str, name: str, number: int) -> None:
    """Commit beside others at one base, and say which versions were made."""
    backend = open_backend(directory)
    store = VersionedStore(backend)
    made = []
    for i in range(number):
        with store.begin(Pointer.parse(base)) as transaction:
            transaction.put("counts", keys_of(COUNTS, [(name,)]), values_of(COUNTS, [(i,)]))
            made.append(str(transaction.commit()))
    Path(f"{directory}.{name}").write_text("\n".join(made))


def test_two_processes_commit_at_one_base(tmp_path: Path) -> None:
    """Attempts of a retry and a zombie: each gets its own whole version."""
    directory = tmp_path / "shard"
    backend = open_backend(directory)
    base = Pointer(1, "base")
    backend.apply(None, base, counts(*((f"user {i}", i) for i in range(100))), {})
    processes = {name: run_elsewhere(commit_many, directory, str(base), name, 40) for name in ("a", "b")}
    while any(process.is_alive() for process in processes.values()):
        backend.maintain(base)
        backend.remove_leftovers(0)
    for name, process in processes.items():
        finish(process)
        made = Path(f"{directory}.{name}").read_text().splitlines()
        assert len(set(made)) == 40
        for i, pointer in enumerate(made):
            with backend.view(Pointer.parse(pointer)) as view:
                assert users(view, name, "user 99", "b" if name == "a" else "a") == [(i,), (99,), None]


def churn(directory: Path, seconds: float) -> None:
    """A worker: commits one version after another, each the sum of the last and one more row."""
    run_files.COMMIT_MERGE_LIMIT_BYTES = 0
    store = VersionedStore(open_backend(directory))
    end = time.monotonic() + seconds
    pointer = None
    while time.monotonic() < end:
        with store.begin(pointer) as transaction:
            names = [(f"user {i}",) for i in range(transaction.version % 40)]
            transaction.put("counts", keys_of(COUNTS, names), values_of(COUNTS, [(transaction.version,)] * len(names)))
            transaction.put("counts", keys_of(COUNTS, [("all",)]), values_of(COUNTS, [(transaction.version,)]))
            pointer = transaction.commit()
        _publish(directory, str(pointer))


def _publish(directory: Path, text: str) -> None:
    temporary = Path(f"{directory}.new")
    temporary.write_text(text)
    temporary.rename(f"{directory}.accepted")


def check_version(view: Any, version: int) -> None:
    """A version of `churn` is whole: the newest value of each user is the last version that wrote it."""
    written: dict[tuple[str], tuple[int]] = {("all",): (version,)}
    for v in range(1, version + 1):
        written |= {(f"user {i}",): (v,) for i in range(v % 40)}
    assert contents(view, "counts") == written


@pytest.mark.slow
def test_a_worker_commits_while_another_process_merges_and_drops(tmp_path: Path) -> None:
    """The two roles of an executor: no pointer that was handed out names a version with a missing run."""
    directory = tmp_path / "shard"
    worker = run_elsewhere(churn, directory, 6.0 if LONG else 1.5)
    backend = open_backend(directory)
    store = VersionedStore(backend)
    checked = merged = 0
    while worker.is_alive():
        accepted = Path(f"{directory}.accepted")
        if not accepted.exists():
            continue
        pointer = Pointer.parse(accepted.read_text())
        try:
            view = backend.view(pointer)
        except NotFoundError:
            raise AssertionError(f"the accepted version {pointer} is not whole") from None
        merged += backend.maintain(pointer)
        store.prune(pointer)
        check_version(view, pointer.version)
        checked += 1
    finish(worker)
    assert checked > 3
    assert merged > 3


def test_a_begin_that_loses_the_race_against_drop_is_told_so(tmp_path: Path) -> None:
    """Readers beside a dropping thread see the right state or a typed error, never another state."""
    backend = open_backend(tmp_path / "shard")
    store = VersionedStore(backend)
    pointers: list[Pointer] = []
    stop = threading.Event()

    def turn_over() -> None:
        last = None
        for version in itertools.count(1):
            if stop.is_set():
                return
            pointer = Pointer(version, f"{version:x}")
            backend.apply(last, pointer, counts(*((f"user {i}", version) for i in range(50))), {})
            pointers.append(pointer)
            backend.drop(pointers[-6:-2])
            last = pointer

    thread = threading.Thread(target=turn_over)
    thread.start()
    good = lost = 0
    try:
        while good + lost < 400:
            for pointer in pointers[-4:]:
                try:
                    with store.begin(pointer) as transaction:
                        assert contents(transaction, "counts") == {
                            (f"user {i}",): (pointer.version,) for i in range(50)
                        }
                    good += 1
                except StateLostError:
                    lost += 1
    finally:
        stop.set()
        thread.join()
    assert good
    assert lost
