"""Run files on bad ground: a full disk, one without rights, a directory that vanishes or never was one."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run_files.backend import FilesystemBackend, RunFilesBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.backends.run_files.version_file import RunFile
from holdfast.errors import NotFoundError, UnavailableError
from holdfast.testing.state_rows import TABLES, contents, counts, users
from tests.faults.elsewhere import finish, run_elsewhere


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


def test_a_full_disk_is_named_and_changes_nothing(
    small_disk: Path, kind: type[RunFilesBackend], many: dict[str, Any]
) -> None:
    """Nothing half-written, the old version whole, and work goes on when there is space again."""
    backend = open_backend(small_disk / "shard", kind)
    first, second = Pointer(1, "aa"), Pointer(2, "bb")
    backend.apply(None, first, counts(("ann", 1)), {})
    before = backend.statistics()
    for attempt in (
        lambda: backend.apply(first, second, many, {}),
        lambda: backend.load(second, many, {}),
    ):
        with pytest.raises(UnavailableError, match=r"no space left for local state at .*shard.*local\.dir"):
            attempt()
        assert backend.statistics() == before
        assert backend.remove_leftovers(2**63) == 0
    backend.apply(first, second, counts(("bob", 2)), {})
    with backend.view(second) as view:
        assert contents(view, "counts") == {("ann",): (1,), ("bob",): (2,)}


def test_a_limit_of_the_process_on_file_sizes(
    tmp_path: Path, kind: type[RunFilesBackend], many: dict[str, Any]
) -> None:
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
    """The error names the directory and the setting."""
    directory = tmp_path / "readonly"
    open_backend(directory / "shard")
    for folder in [tmp_path, *tmp_path.parents]:
        if not folder.stat().st_mode & 1 and folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o011)
    for folder in [directory, *directory.rglob("*")]:
        folder.chmod(0o555)
    finish(run_elsewhere(try_in_readonly_directory, directory))


def test_a_file_where_a_directory_should_be(tmp_path: Path, kind: type[RunFilesBackend]) -> None:
    """A misconfigured path is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="file"):
        open_backend(tmp_path / "file" / "shard", kind)


def test_a_vanished_directory_is_a_lost_state_and_a_good_place(tmp_path: Path, kind: type[RunFilesBackend]) -> None:
    """A cleaner removed everything: what was there is not found, what comes is stored."""
    backend = open_backend(tmp_path / "shard", kind)
    first, second = Pointer(1, "aa"), Pointer(2, "bb")
    backend.apply(None, first, counts(("ann", 1)), {})
    shutil.rmtree(tmp_path / "shard")
    for ask in (backend.view, backend.freeze, backend.maintain):
        with pytest.raises(NotFoundError):
            ask(first)
    with pytest.raises(NotFoundError):
        backend.apply(first, second, counts(("ann", 1)), {})
    assert backend.versions() == []
    assert backend.statistics().local_bytes == 0
    backend.drop([first])
    assert backend.remove_leftovers(2**63) == 0
    backend.load(first, counts(("ann", 1)), {})
    backend.apply(first, second, counts(("bob", 1)), {})
    with backend.view(second) as view:
        assert contents(view, "counts") == {("ann",): (1,), ("bob",): (1,)}


def test_a_directory_in_whose_place_stands_a_file(tmp_path: Path, kind: type[RunFilesBackend]) -> None:
    """Nothing is here any more, and what cannot be made says where."""
    backend = open_backend(tmp_path / "shard", kind)
    first, second = Pointer(1, "aa"), Pointer(2, "bb")
    backend.apply(None, first, counts(("ann", 1)), {})
    shutil.rmtree(tmp_path / "shard")
    (tmp_path / "shard").write_text("no directory")
    for ask in (backend.view, backend.freeze, backend.maintain):
        with pytest.raises(NotFoundError):
            ask(first)
    assert (backend.versions(), backend.verify()) == ([], [])
    for attempt in (lambda: backend.load(second, counts(("ann", 1)), {}), lambda: backend.drop([first])):
        with pytest.raises(UnavailableError, match=r"shard.*local\.dir"):
            attempt()


def test_a_directory_that_vanishes_while_it_is_written(
    tmp_path: Path, kind: type[RunFilesBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt fails as one that may be tried again, not as a version that is absent."""
    backend = open_backend(tmp_path / "shard", kind)
    first, second = Pointer(1, "aa"), Pointer(2, "bb")
    backend.apply(None, first, counts(("ann", 1)), {})
    push = backend._push

    def push_and_vanish(*args: Any, **kwargs: Any) -> list[RunFile]:
        pushed = push(*args, **kwargs)
        shutil.rmtree(tmp_path / "shard" / "staging")
        return pushed

    monkeypatch.setattr(backend, "_push", push_and_vanish)
    with pytest.raises(UnavailableError, match=r"vanished.*local\.dir"):
        backend.apply(first, second, counts(("ann", 2)), {})
    monkeypatch.undo()
    backend.apply(first, second, counts(("ann", 2)), {})
    with backend.view(second) as view:
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
    """State is nobody else's business."""
    backend = open_backend(tmp_path / "a" / "shard", kind)
    backend.apply(None, Pointer(1, "aa"), counts(("ann", 1)), {})
    for path in (tmp_path / "a").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
