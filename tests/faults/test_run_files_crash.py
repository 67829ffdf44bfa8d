"""Crashes at each call that changes a folder of runs, and races for it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.local_files import DURABLE
from holdfast.backends.run_files import backend as run_files
from holdfast.backends.run_files.backend import FilesystemBackend, RunFilesBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.backends.run_files.version_file import VERSION
from holdfast.errors import NotFoundError, StateLostError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.state_rows import COUNTS, TABLES, contents, counts, keys_of, users, values_of
from tests.faults.elsewhere import finish, run_elsewhere
from tests.tiers import LONG, cases

STEPS = 4


def open_backend(directory: Path, backend: type[RunFilesBackend] = FilesystemBackend) -> RunFilesBackend:
    return backend(directory, TABLES, clock.new_id)


def expected(version: int) -> dict[tuple[str], tuple[int]]:
    return {(f"user {i}",): (version * (i >= 10),) for i in range(20 + version) if i != version}


def work(directory: Path, accepted: Any, kind: type[RunFilesBackend] = FilesystemBackend) -> None:
    """Commits, background merges, retention, clean-up; tells each pointer to `accepted` as a query would keep it."""
    run_files.COMMIT_MERGE_LIMIT_BYTES = 0
    backend = open_backend(directory, kind)
    store = VersionedStore(backend)
    pointer = None
    for version in range(1, STEPS + 1):
        with store.begin(pointer) as transaction:
            names = [(f"user {i}",) for i in range(20 + version)]
            values = [(version * (i >= 10),) for i in range(20 + version)]
            transaction.put("counts", keys_of(COUNTS, names), values_of(COUNTS, values))
            transaction.delete("counts", keys_of(COUNTS, [(f"user {version}",)]))
            pointer = transaction.commit()
        assert pointer is not None
        accepted(pointer)
        if version % 2 == 0:
            backend.maintain(pointer)
            backend.remove_leftovers(0)
            store.prune(pointer)


EVENTS = {"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir"}


def die_at(operation: int) -> None:
    """End this process without any clean-up before its n-th operation: a call, a part of a write, or an fsync."""
    left = operation

    def count(event: str, _: object = None) -> None:
        nonlocal left
        if event in EVENTS:
            left -= 1
            if left == 0:
                os._exit(9)

    def counted(function: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            count("open")
            return function(*args)

        return wrapper

    os.fsync = counted(os.fsync)
    stored_file._DigestingSink.write = counted(stored_file._DigestingSink.write)  # type: ignore[method-assign]
    sys.addaudithook(count)


# A process dies at each so many of the operations.
STRIDE = 1 if LONG else 9


# A power cut.


def record_syncs(record: Path) -> None:
    """Note what each fsync made durable: the size of a file, the entries of a folder."""
    out = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    fsync = os.fsync

    def recording(fd: int) -> None:
        fsync(fd)
        found = os.fstat(fd)
        durable: Any = os.listdir(fd) if stat.S_ISDIR(found.st_mode) else found.st_size
        os.write(out, f"{json.dumps([found.st_ino, durable])}\n".encode())

    os.fsync = recording


def losing_power(root: Path, kind: str) -> None:
    """Run the work in forked processes that die ever later, noting what was synced, until one survives."""
    for operation in itertools.count(1, STRIDE):
        pid = os.fork()
        if pid == 0:
            directory = root / f"{operation:04d}"
            out = os.open(f"{directory}.pointers", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            die_at(operation)
            record_syncs(Path(f"{directory}.synced"))
            if kind == DURABLE:
                directory.mkdir()
                (directory / DURABLE).touch()
            backend = MemoryBackend if kind == "memory" else FilesystemBackend
            work(directory, lambda pointer, out=out: os.write(out, f"{pointer}\n".encode()), backend)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
            return


def cut_power(directory: Path, *, lose_entries: bool) -> None:
    """Take away what was not synced, as a file system may: entries of folders; content becomes zeros or nothing."""
    lines = Path(f"{directory}.synced").read_text().splitlines()
    durable: dict[int, Any] = dict(map(json.loads, lines))
    published = [directory / "versions", directory / "merges"]
    if lose_entries:
        for folder in [*published, *(f for p in published for f in p.glob("*"))]:
            kept = durable.get(folder.stat().st_ino, []) if folder.exists() else []
            for entry in [p for p in folder.glob("*") if p.name not in kept]:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for file in [p for folder in published for p in folder.rglob("*") if p.is_file()]:
        found = file.stat()
        if durable.get(found.st_ino) != found.st_size:
            file.write_bytes(b"\0" * (found.st_size if found.st_ino % 2 else 0))
            os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lose_entries"),
    cases(
        [
            pytest.param("filesystem", True, id="filesystem"),
            pytest.param("filesystem", False, id="filesystem with a journal"),
            pytest.param(DURABLE, False, id="filesystem of a durable shard"),
            pytest.param("memory", False, id="memory"),
        ],
        quick=2,
    ),
)
def test_a_power_cut_never_shows_another_state(tmp_path: Path, kind: str, lose_entries: bool) -> None:
    """The filesystem backend loses nothing that exists there alone; what was not synced is set aside."""
    finish(run_elsewhere(losing_power, tmp_path, kind))
    damaged = 0
    recorded = sorted(tmp_path.glob("*.synced"))
    assert len(recorded) > 100 / STRIDE, "the work has so many operations"
    for record in recorded:
        directory = record.with_suffix("")
        pointers = [Pointer.parse(line) for line in Path(f"{directory}.pointers").read_text().splitlines()]
        cut_power(directory, lose_entries=lose_entries)
        backend = open_backend(directory)
        damaged += len(backend.verify())
        if kind == "filesystem":
            assert set(pointers[-1:]) <= set(backend.versions())
        for pointer in backend.versions():
            with backend.view(pointer) as view:
                assert contents(view, "counts") == expected(pointer.version)
        backend.load(Pointer(9, "restored"), counts(("ann", 1)), {})
        with backend.view(Pointer(9, "restored")) as view:
            assert users(view, "ann") == [(1,)]
    assert bool(damaged) == (kind != "filesystem"), "a version appears after all that it consists of was synced"


@pytest.mark.parametrize("loss", ["zeros", "empty", "absent"])
def test_a_power_cut_after_a_restore_is_found_out(tmp_path: Path, loss: str) -> None:
    """Restored files are not synced: who takes the directory over finds what was lost, and restores once more."""
    restored, after = Pointer(1, "aa"), Pointer(2, "bb")
    with open_backend(tmp_path / "other") as other:
        other.apply(None, restored, counts(*((f"user {i}", i) for i in range(1_000))), {})
        frozen = [shutil.copy2(path, tmp_path) for path in other.freeze(restored)]

    def restore(backend: RunFilesBackend) -> None:
        folder = tmp_path / "fetched"
        folder.mkdir()
        for path in frozen:
            shutil.copy2(path, folder)
        backend.thaw(restored, folder)
        backend.apply(restored, after, counts(("user 7", -7)), {})

    backend = open_backend(tmp_path / "shard")
    restore(backend)
    for name in {Path(path).name for path in frozen if not path.endswith(VERSION)}:
        for place in (tmp_path / "shard" / "versions").glob(f"*/{name}"):
            found = place.stat()
            place.write_bytes(b"\0" * found.st_size if loss == "zeros" else b"")
            os.utime(place, ns=(found.st_atime_ns, found.st_mtime_ns))
            if loss == "absent":
                place.unlink()

    backend = open_backend(tmp_path / "shard")
    assert backend.verify()
    assert backend.versions() == []
    restore(backend)
    assert backend.verify() == []
    with backend.view(after) as view:
        assert contents(view, "counts") == {(f"user {i}",): (-7 if i == 7 else i,) for i in range(1_000)}


@pytest.mark.parametrize("loss", ["zeros", "empty", "half", "absent"])
def test_a_durable_shard_syncs_nothing_and_is_restored_after_a_power_cut(
    tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commits are in the state directory: waiting for the local disk as well would protect nothing."""
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    directory = tmp_path / "shard"
    directory.mkdir()
    (directory / DURABLE).touch()
    with ThreadPoolExecutor(2) as threads, open_storage(str(tmp_path / "log")) as storage:
        log = ObjectCommitLog(storage, "op/shard-0000", TABLES, threads, tmp_path / "local")
        pointer = None
        for version in range(1, 4):
            backend = open_backend(directory)
            with VersionedStore(backend, log).begin(pointer) as transaction:
                names = [(f"user {i}",) for i in range(0, 3_000, version)]
                transaction.put("counts", keys_of(COUNTS, names), values_of(COUNTS, [(version,)] * len(names)))
                pointer = transaction.commit()
            assert pointer is not None
            backend.maintain(pointer)
        assert synced, "the state directory's objects are"
        assert not [path for path in synced if path.startswith(str(directory))]
        # The newest run of each version: others may have been written long before.
        for folder in (directory / "versions").iterdir():
            lose(max(folder.glob("*.arrow"), key=lambda path: path.stat().st_mtime_ns), loss)
        backend = open_backend(directory)
        assert backend.verify()
        assert backend.versions() == []
        with VersionedStore(backend, log).begin(pointer) as transaction:
            expected = {(f"user {i}",): (3 if i % 3 == 0 else 2 if i % 2 == 0 else 1,) for i in range(3_000)}
            assert contents(transaction, "counts") == expected


def lose(path: Path, loss: str) -> None:
    """Take a file's bytes away as a power cut does: its size and its time may have been kept."""
    found = path.stat()
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes({"zeros": bytes(len(data)), "half": data[:half] + bytes(len(data) - half)}.get(loss, b""))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    if loss == "absent":
        path.unlink()


def open_raced(directory: Path) -> MemoryBackend:
    return MemoryBackend(directory, TABLES, clock.new_id)


def commit_many(directory: Path, base: str, name: str, number: int) -> None:
    """Commit beside others at one base, and say which versions were made."""
    backend = open_raced(directory)
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
    backend = open_raced(directory)
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
    store = VersionedStore(open_raced(directory))
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
    backend = open_raced(directory)
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
    backend = open_raced(tmp_path / "shard")
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
