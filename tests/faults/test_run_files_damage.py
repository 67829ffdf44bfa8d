"""Folders of runs on disks that damage, fill up or vanish: named, never other rows, and work goes on."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.run_files import backend as run_files
from holdfast.backends.run_files.backend import FilesystemBackend, RunFilesBackend, read_merges
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.backends.run_files.version_file import RunFile
from holdfast.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.state_rows import COUNTS, P1, P2, P3, TABLES, contents, counts, keys_of, users, values_of
from tests.damage import flip
from tests.faults.elsewhere import finish, run_elsewhere
from tests.tiers import LONG, cases

KINDS = ("merge", "merged run", "version", "run of one version", "run of two versions")
EXPECTED = {
    P1: {(f"user {i}",): (i,) for i in range(50)},
    P2: {(f"user {i}",): (-i if i < 30 else i,) for i in range(50)},
}
Filled = Callable[[], RunFilesBackend]


@pytest.fixture(params=[MemoryBackend, FilesystemBackend])
def filled(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Filled:
    """Return a function that makes a shard: two versions that share a run, and a merge of both runs."""
    monkeypatch.setattr(run_files, "COMMIT_MERGE_LIMIT_BYTES", 0)

    def fill() -> RunFilesBackend:
        backend: RunFilesBackend = request.param(tmp_path / clock.new_id(), TABLES, clock.new_id)
        backend.apply(None, P1, counts(*((f"user {i}", i) for i in range(50))), {})
        backend.apply(P1, P2, counts(*((f"user {i}", -i) for i in range(30))), {})
        assert backend.maintain(P2) == 1
        return backend

    return fill


def file_of(backend: RunFilesBackend, kind: str) -> Path:
    """Return a path of the file of this kind, of version P2 where it has one."""
    shared, own = sorted(backend.directory.glob(f"versions/{P2}/*.arrow"), key=lambda p: -p.stat().st_nlink)
    assert (shared.stat().st_nlink, own.stat().st_nlink) == (2, 1)
    (merged,) = backend.directory.glob("merges/*/*.arrow")
    files = (merged.parent / "merge", merged, own.parent / "version", own, shared)
    return files[KINDS.index(kind)]


def offsets(path: Path) -> Iterator[int]:
    """Yield offsets all over a file, and those of its tail."""
    size = path.stat().st_size
    yield from range(3, size, 1 + size // (300 if LONG else 8))
    yield from (size - 1, size - 10, size - 25, size - 27, size - 30, size - 40)


def check(backend: RunFilesBackend) -> int:
    """Check that each version is right, or an error and then not here; return how many are right."""
    right = 0
    for pointer, expected in EXPECTED.items():
        try:
            with backend.view(pointer) as view:
                assert contents(view, "counts") == expected
                right += 1
        except CorruptionError as exc:
            assert str(backend.directory) in str(exc)  # noqa: PT017  an error is one of two right answers
            with pytest.raises(NotFoundError):
                backend.view(pointer)
        except NotFoundError:
            assert pointer not in backend.versions()
    return right


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_named_and_what_shares_it_is_set_aside(filled: Filled, kind: str) -> None:
    """At any offset of any file; what does not need the file is as it was."""
    for offset in offsets(file_of(filled(), kind)):
        backend = filled()
        flip(file_of(backend, kind), offset)
        assert check(backend) == {"merge": 2, "merged run": 2, "run of two versions": 0}.get(kind, 1)
        if kind == "merged run":
            backend.apply(P2, P3, counts(("new", 1)), {})
            with pytest.raises(CorruptionError, match=r"arrow"):
                backend.view(P3)
        if P2 in backend.versions():
            backend.apply(P2, P3, counts(("new", 1)), {})
            with backend.view(P3) as view:
                assert contents(view, "counts") == EXPECTED[P2] | {("new",): (1,)}


@pytest.mark.parametrize("kind", cases(KINDS, quick=3))
def test_verify_finds_what_no_time_stamp_tells(filled: Filled, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that returns other bytes than were written: what a former process left is read as a whole."""
    for offset in offsets(file_of(filled(), kind)):
        backend = filled()
        damaged = file_of(backend, kind)
        inode = damaged.stat().st_ino
        flip(damaged, offset, unnoticed=True)
        (found,) = backend.verify()
        assert found.name == damaged.name
        assert str(found.parent) in caplog.text
        assert inode not in {
            p.stat().st_ino for part in ("versions", "merges") for p in (backend.directory / part).rglob("*")
        }
        assert check(backend) == {"merge": 2, "merged run": 2, "run of two versions": 0}.get(kind, 1)
        assert backend.verify() == []


def test_what_is_whole_passes(filled: Filled) -> None:
    """Also files that were copied to another disk and back, without their time stamps."""
    backend = filled()
    assert backend.verify() == []
    for path in backend.directory.rglob("*.arrow"):
        os.utime(path)
    assert check(backend) == 2
    assert backend.verify() == []
    assert check(backend) == 2


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def empty(path: Path) -> None:
    os.truncate(path, 0)


def replace_by_another(path: Path) -> None:
    """Put a good file of the same size in its place, with its time stamp."""
    found = path.stat()
    data = path.read_bytes()
    header = stored_file.decode(data, source="", kind="run").header
    other, _ = stored_file.encode("run", header, {"counts": lambda file: file.write(b"x" * found.st_size)})
    path.unlink()
    path.write_bytes(other.to_pybytes()[-found.st_size :])
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("break_it", [cut, grow, empty, replace_by_another])
def test_a_file_of_another_length_or_content(filled: Filled, break_it: Callable[[Path], None]) -> None:
    backend = filled()
    break_it(file_of(backend, "run of one version"))
    with pytest.raises(CorruptionError, match="arrow"):
        backend.view(P2)
    assert backend.versions() == [P1]
    assert check(backend) == 1


def test_a_version_that_lost_a_file_is_not_here_and_verify_says_so(filled: Filled) -> None:
    backend = filled()
    missing = file_of(backend, "run of one version")
    missing.unlink()
    with pytest.raises(NotFoundError):
        backend.view(P2)
    assert backend.verify() == [missing]
    assert backend.versions() == [P1]


@pytest.mark.parametrize("kind", ["version", "merge"])
def test_a_file_of_another_release_is_not_believed(filled: Filled, kind: str) -> None:
    """Local state outlives an upgrade: what this release cannot read is restored."""
    backend = filled()
    path = file_of(backend, kind)
    header = json.loads(json.dumps(stored_file.decode(path.read_bytes(), source="", kind=kind).header))
    name = "stacks" if kind == "version" else "output"
    header["renamed"] = header.pop(name)
    data, _ = stored_file.encode(kind, header)
    path.write_bytes(data.to_pybytes())
    (found,) = backend.verify()
    assert found == path
    assert check(backend) == (1 if kind == "version" else 2)


def test_damage_does_not_get_a_new_digest_by_a_merge(filled: Filled) -> None:
    """Whatever is merged is checked: of a merged run nobody could tell any more."""
    backend = filled()
    path = file_of(backend, "run of one version")
    size = path.stat().st_size
    flip(path, size // 2, unnoticed=True)
    for folder in (backend.directory / "merges").iterdir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    with pytest.raises(CorruptionError, match="arrow"):
        backend.maintain(P2)
    assert backend.versions() == [P1]
    assert not list((backend.directory / "merges").iterdir())


def test_a_damaged_run_is_neither_merged_nor_frozen(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, frozen = filled(), filled()
    flip(file_of(backend, "run of two versions"), 700, unnoticed=True)
    monkeypatch.setattr(run_files, "COMMIT_MERGE_LIMIT_BYTES", 1 << 20)
    backend.drop([P1])
    for merge in read_merges(backend._merges, backend._damaged):
        backend._retire(merge.folder)
    with pytest.raises(CorruptionError, match="arrow"):
        backend.apply(P2, P3, counts(*((f"user {i}", 9) for i in range(40))), {})
    assert backend.versions() == []
    flip(file_of(frozen, "run of two versions"), 700, unnoticed=True)
    with pytest.raises(CorruptionError, match="arrow"):
        frozen.freeze(P2)
    assert frozen.versions() == []


def test_what_was_set_aside_can_be_looked_at_and_is_removed_later(filled: Filled) -> None:
    """Nothing is deleted at the moment of the damage; nothing stays for ever."""
    backend = filled()
    flip(file_of(backend, "run of two versions"), 100)
    with pytest.raises(CorruptionError):
        backend.view(P1)
    aside = list((backend.directory / "set-aside").iterdir())
    assert sorted(path.name.partition("-")[2].partition("-")[0] for path in aside)[:2] == ["1", "2"]
    assert backend.remove_leftovers(clock.now_ms() * 1_000_000 - 60 * 10**9) == 0
    assert backend.remove_leftovers(2**63) == len(aside)
    assert not list((backend.directory / "set-aside").iterdir())


def test_the_store_restores_what_was_damaged(filled: Filled, tmp_path: Path) -> None:
    """The attempt that meets the damage fails; the next one finds the version in the commit log."""
    backend = filled()
    with ThreadPoolExecutor(2) as threads:
        log = ObjectCommitLog(open_storage(str(tmp_path / "log")), "op/shard-0000", TABLES, threads, tmp_path / "local")
        store = VersionedStore(backend, log)
        pointer = None
        for n in range(3):
            with store.begin(pointer) as attempt:
                attempt.put("counts", keys_of(COUNTS, [(f"u{n}",), ("all",)]), values_of(COUNTS, [(n,), (n,)]))
                pointer = attempt.commit()
        assert pointer is not None
        for path in backend.directory.glob(f"versions/{pointer}/*.arrow"):
            flip(path, 200)
        with pytest.raises(CorruptionError, match="arrow"):
            store.begin(pointer)
        with store.begin(pointer) as attempt:
            assert contents(attempt, "counts") == {("u0",): (0,), ("u1",): (1,), ("u2",): (2,), ("all",): (2,)}


def open_backend(directory: Path, backend: type[RunFilesBackend] = FilesystemBackend) -> RunFilesBackend:
    return backend(directory, TABLES, clock.new_id)


@pytest.fixture(params=[FilesystemBackend, MemoryBackend])
def kind(request: pytest.FixtureRequest) -> type[RunFilesBackend]:
    """A class of backend: where its files lie is somebody else's decision, so both meet every kind of ground."""
    chosen: type[RunFilesBackend] = request.param
    return chosen


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MB where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture(scope="module")
def many() -> dict[str, Any]:
    """Return rows that need more than a megabyte."""
    return counts(*((f"user {i}", i) for i in range(100_000)))


def held(directory: Path, kind: type[RunFilesBackend]) -> RunFilesBackend:
    """Return a shard with one version."""
    backend = open_backend(directory, kind)
    backend.apply(None, P1, counts(("ann", 1)), {})
    return backend


def test_a_full_disk_changes_nothing(small_disk: Path, kind: type[RunFilesBackend], many: dict[str, Any]) -> None:
    backend = held(small_disk / "shard", kind)
    before = backend.statistics()
    for attempt in (lambda: backend.apply(P1, P2, many, {}), lambda: backend.load(P2, many, {})):
        with pytest.raises(UnavailableError, match=r"no space left for local state at .*shard.*local\.dir"):
            attempt()
        assert backend.statistics() == before
        assert backend.remove_leftovers(2**63) == 0
    backend.apply(P1, P2, counts(("bob", 2)), {})
    with backend.view(P2) as view:
        assert contents(view, "counts") == {("ann",): (1,), ("bob",): (2,)}


def test_a_limit_of_file_sizes(tmp_path: Path, kind: type[RunFilesBackend], many: dict[str, Any]) -> None:
    """As a full disk, wherever the tests run."""
    backend = open_backend(tmp_path / "shard", kind)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(UnavailableError, match=r"shard.*File too large.*local\.dir"):
            backend.apply(None, Pointer(1, "aa"), many, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert backend.versions() == []
    assert not any((tmp_path / "shard" / "staging").iterdir())
    backend.apply(None, Pointer(1, "aa"), many, {})


def try_in_readonly_directory(directory: Path) -> None:
    """As a user without rights: root may write anywhere."""
    if os.geteuid() == 0:
        os.setuid(65534)
    for attempt in (
        lambda: open_backend(directory / "new"),
        lambda: open_backend(directory / "shard").apply(None, Pointer(1, "bb"), counts(("ann", 1)), {}),
    ):
        with pytest.raises(UnavailableError, match=r"Permission denied.*spark\.holdfast\.local\.dir") as caught:
            attempt()
        assert str(directory) in str(caught.value)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    directory = tmp_path / "readonly"
    open_backend(directory / "shard")
    for folder in [tmp_path, *tmp_path.parents]:
        if not folder.stat().st_mode & 1 and folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o011)
    for folder in [directory, *directory.rglob("*")]:
        folder.chmod(0o555)
    finish(run_elsewhere(try_in_readonly_directory, directory))


def test_a_file_where_a_directory_should_be(tmp_path: Path, kind: type[RunFilesBackend]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="file"):
        open_backend(tmp_path / "file" / "shard", kind)


@pytest.mark.parametrize("is_file", [False, True], ids=["nothing", "a file"])
def test_a_vanished_directory_is_a_lost_state(tmp_path: Path, kind: type[RunFilesBackend], is_file: bool) -> None:
    """A cleaner removed everything: what was there is not found; what comes is stored, unless a file is in the way."""
    backend = held(tmp_path / "shard", kind)
    shutil.rmtree(tmp_path / "shard")
    if is_file:
        (tmp_path / "shard").write_text("no directory")
    for ask in (backend.view, backend.freeze, backend.maintain):
        with pytest.raises(NotFoundError):
            ask(P1)
    assert (backend.versions(), backend.verify()) == ([], [])
    if is_file:
        for attempt in (lambda: backend.load(P2, counts(("ann", 1)), {}), lambda: backend.drop([P1])):
            with pytest.raises(UnavailableError, match=r"shard.*local\.dir"):
                attempt()
        return
    with pytest.raises(NotFoundError):
        backend.apply(P1, P2, counts(("ann", 1)), {})
    assert backend.statistics().local_bytes == 0
    backend.drop([P1])
    assert backend.remove_leftovers(2**63) == 0
    backend.load(P1, counts(("ann", 1)), {})
    backend.apply(P1, P2, counts(("bob", 1)), {})
    with backend.view(P2) as view:
        assert contents(view, "counts") == {("ann",): (1,), ("bob",): (1,)}


def test_a_directory_that_vanishes_while_it_is_written(
    tmp_path: Path, kind: type[RunFilesBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt fails as one that may be tried again, not as a version that is absent."""
    backend = held(tmp_path / "shard", kind)
    push = backend._push

    def push_and_vanish(*args: Any, **kwargs: Any) -> list[RunFile]:
        pushed = push(*args, **kwargs)
        shutil.rmtree(tmp_path / "shard" / "staging")
        return pushed

    monkeypatch.setattr(backend, "_push", push_and_vanish)
    with pytest.raises(UnavailableError, match=r"vanished.*local\.dir"):
        backend.apply(P1, P2, counts(("ann", 2)), {})
    monkeypatch.undo()
    backend.apply(P1, P2, counts(("ann", 2)), {})
    with backend.view(P2) as view:
        assert users(view, "ann") == [(2,)]


def test_attempts_under_way_are_no_leftovers(tmp_path: Path, kind: type[RunFilesBackend]) -> None:
    """An attempt that is being made stays, however old it looks; what one has left goes, after a while."""
    backend = open_backend(tmp_path / "shard", kind)
    with backend._stage() as staged:
        staged.write("x.arrow", "run", {})
        shutil.copytree(staged.path, staged.path.with_name("left"))
        assert backend.remove_leftovers(time.time_ns() - 3600 * 10**9) == 0
        assert backend.remove_leftovers(time.time_ns() + 10**9) == 1
        assert not staged.path.with_name("left").exists()
        staged.publish(tmp_path / "shard" / "versions" / "1-aa")
    assert [str(pointer) for pointer in backend.versions()] == ["1-aa"]


def test_local_folders_are_private(tmp_path: Path, kind: type[RunFilesBackend]) -> None:
    backend = open_backend(tmp_path / "a" / "shard", kind)
    backend.apply(None, Pointer(1, "aa"), counts(("ann", 1)), {})
    for path in (tmp_path / "a").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
