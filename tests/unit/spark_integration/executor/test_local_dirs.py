"""Where local state goes: into directories nobody else can enter, one for each kind of state."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.executor.processes import ProcessId

DEAD = ProcessId(2**22 + 1, 1)
AS_ROOT = os.getuid() == 0


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setattr(local_dirs, "_warned", set())
    return path


# Private directories


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_directory_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = local_dirs.executor_directory(tmp_path, DEAD)
    finally:
        os.umask(before)
    assert made == tmp_path / f"holdfast-{os.getuid()}" / f"executor-{DEAD}"
    assert [stat.S_IMODE(p.stat().st_mode) for p in (made, made.parent)] == [0o700, 0o700]
    assert local_dirs.executor_directory(tmp_path, DEAD) == made


@pytest.mark.parametrize("mode", [0o770, 0o701, 0o777, 0o750])
def test_one_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    """In a directory such as /dev/shm anybody could have made it first."""
    path = tmp_path / f"holdfast-{os.getuid()}"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(InvalidArgumentError, match="not a private directory") as caught:
        local_dirs.user_directory(tmp_path)
    assert caught.value.facts["mode"] == oct(mode)
    assert "spark.holdfast.local.dir" in str(caught.value)


def test_a_link_is_refused_also_to_a_private_directory(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(InvalidArgumentError, match="not a private directory"):
        local_dirs.private_directory(tmp_path / "link")


def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(InvalidArgumentError, match="not a private directory"):
        local_dirs.private_directory(path)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="not a private directory"):
        local_dirs.private_directory(tmp_path / "file")
    with pytest.raises(UnavailableError, match=r"file.*spark\.holdfast\.local\.dir"):
        local_dirs.private_directory(tmp_path / "file" / "below")


@pytest.mark.skipif(AS_ROOT, reason="root may write everywhere")
def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UnavailableError, match="writable"):
        local_dirs.user_directory(tmp_path)


# The root


def test_a_configured_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert local_dirs.choose_root(str(tmp_path), in_memory=True) == tmp_path


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [
        ("/disk1/spark,/disk2/spark", "/disk1/spark"),
        ("/disk1/blockmgr-7a8b,/disk2/blockmgr-9c0d", "/disk1"),  # the executor's blocks, deleted when it ends
        ("", None),
        (None, None),
        ("relative", os.path.abspath("relative")),
    ],
)
def test_disk_is_the_first_of_sparks_directories(
    variable: str | None, chosen: str | None, monkeypatch: pytest.MonkeyPatch, own_temporary_directory: Path
) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    if variable is not None:
        monkeypatch.setenv("SPARK_LOCAL_DIRS", variable)
    assert local_dirs.choose_root(None, in_memory=False) == Path(chosen or own_temporary_directory)


@pytest.mark.parametrize("why", ["small", "absent", "not writable"])
def test_without_enough_shared_memory_state_goes_to_disk_and_one_warning_says_so(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers often give 64 MB: a query would fail in the middle."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    free = 64 << 20 if why == "small" else 1 << 40
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 41, 0, free))
    if why == "absent":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: os.stat("/nowhere"))
    if why == "not writable":
        monkeypatch.setattr(os, "access", lambda *_: False)
    assert [local_dirs.choose_root(None, in_memory=True) for _ in range(3)] == [tmp_path] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "spark.holdfast.local.dir" in record.message
    assert str(tmp_path) in record.message


def test_enough_shared_memory_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_dirs, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 41, 0, local_dirs.SHARED_MEMORY_MIN_BYTES))
    assert local_dirs.choose_root(None, in_memory=True) == tmp_path


def test_a_place_of_another_user_is_no_error_before_anything_is_kept_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who makes the directory says what to do; nobody may even look into it."""

    asked: list[Path] = []

    def denied(path: Path) -> bool:
        asked.append(path)
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(local_dirs, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 41, 0, local_dirs.SHARED_MEMORY_MIN_BYTES))
    monkeypatch.setattr(Path, "is_dir", denied)
    assert local_dirs.choose_root(None, in_memory=True) == tmp_path
    assert asked


@pytest.mark.parametrize("began_in", ["shared memory", "disk"])
def test_an_executor_keeps_its_state_in_ram_where_it_began(
    began_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own state fills shared memory, others free it: chosen anew, the state of a running query would be gone."""
    shared_memory, disk = tmp_path / "shm", tmp_path / "disk"
    shared_memory.mkdir()
    monkeypatch.setattr(local_dirs, "SHARED_MEMORY", shared_memory)
    monkeypatch.setattr(local_dirs, "executor_process", lambda: DEAD)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(disk))
    enough, too_little = (local_dirs.SHARED_MEMORY_MIN_BYTES + extra for extra in (0, -1))
    chosen = []
    for free in (enough, too_little, enough) if began_in == "shared memory" else (too_little, enough, too_little):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(1 << 41, 0, free))
        chosen.append(local_dirs.choose_root(None, in_memory=True))
        local_dirs.shards_directory(local_dirs.executor_directory(chosen[-1], DEAD), in_memory=True)
        # State on disk decides nothing.
        local_dirs.shards_directory(local_dirs.executor_directory(disk, DEAD), in_memory=False)
    assert chosen == [shared_memory if began_in == "shared memory" else disk] * 3


# Names


def test_state_in_ram_and_on_disk_lies_apart(tmp_path: Path) -> None:
    """One goes with the executor, the other is kept."""
    memory, disk = (local_dirs.shards_directory(tmp_path, in_memory=in_memory) for in_memory in (True, False))
    assert (memory.name, disk.name) == ("memory", "disk")
    assert [stat.S_IMODE(p.stat().st_mode) for p in (memory, disk)] == [0o700, 0o700]


def test_the_name_of_a_shard_changes_with_what_its_versions_need() -> None:
    """Local versions on which no commit can build, or with other rows in them, must not be found."""
    name = local_dirs.shard_name(3, 4, "filesystem", "/data/app")
    assert name == local_dirs.shard_name(3, 4, "filesystem", "/data/app") == "shard-0003-ccf8803f"
    others = [
        local_dirs.shard_name(3, 4, "filesystem", None),
        local_dirs.shard_name(3, 4, "filesystem", "/data/other"),
        local_dirs.shard_name(3, 5, "filesystem", "/data/app"),
        local_dirs.shard_name(3, 4, "rocksdb", "/data/app"),
    ]
    assert len({name, *others}) == 5
