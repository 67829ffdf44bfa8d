"""Run files stay mapped from one call to the next: as long as they are needed, unchanged, and not too many."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run import TableSchema
from holdfast.backends.run_files import run_reader
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.backends.run_files.run_reader import KEPT
from holdfast.errors import CorruptionError
from holdfast.testing.state_rows import COUNTS, P1, P2, P3, TABLES, contents, counts, users
from tests.faults.elsewhere import finish, run_elsewhere

MANY = counts(*((f"user {i}", i) for i in range(10_000)))


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """What earlier tests have opened is not counted."""
    KEPT.forget()
    yield
    KEPT.forget()


@pytest.fixture
def shard(tmp_path: Path) -> FilesystemBackend:
    """Return a shard of one large run."""
    backend = FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id)
    backend.apply(None, P1, MANY, {})
    return backend


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are mapped from now on."""
    names: list[str] = []
    map_stored_file = run_reader.map_stored_file

    def noted(path: Path, *args: object, **how: object) -> object:
        names.append(path.name)
        return map_stored_file(path, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(run_reader, "map_stored_file", noted)
    return names


def maps_of(directory: Path) -> list[str]:
    """Return the run files below a directory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(directory) in line and ".arrow" in line]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def read(backend: FilesystemBackend, pointer: Pointer) -> dict[tuple[object, ...], tuple[object, ...]]:
    with backend.view(pointer) as view:
        return contents(view, "counts")


def test_a_run_is_mapped_once_also_by_the_next_call_of_its_shard(shard: FilesystemBackend, mapped: list[str]) -> None:
    """Each micro-batch opens the shard anew, and finds the run in another folder."""
    read(shard, P1)
    shard.apply(P1, P2, counts(("ann", 1)), {})
    shard.drop([P1])
    again = FilesystemBackend(shard.directory, TABLES, clock.new_id)
    assert len(read(again, P2)) == 10_001
    read(again, P2)
    assert len(mapped) == len(set(mapped)) == 2


def test_the_space_of_a_run_that_nobody_needs_is_freed(shard: FilesystemBackend) -> None:
    """On a RAM file system a mapping holds the memory of a file without a name; whoever took the name away."""
    read(shard, P1)
    assert maps_of(shard.directory)
    finish(run_elsewhere(replace_version, shard.directory))
    read(shard, P2)
    assert [line for line in maps_of(shard.directory) if "(deleted)" in line] == []
    shard.drop([P2])
    assert maps_of(shard.directory) == []


def replace_version(directory: Path) -> None:
    with FilesystemBackend(directory, TABLES, clock.new_id) as backend:
        backend.apply(P1, P2, counts(*((f"user {i}", -i) for i in range(10_000))), {})
        backend.drop([P1])


def test_a_view_outlives_the_file_and_what_keeps_it(shard: FilesystemBackend) -> None:
    """Views are immutable: a clean-up in the middle of a look-up takes nothing away."""
    with shard.view(P1) as view:
        shard.drop([P1])
        KEPT.forget()
        assert users(view, "user 7", "nobody") == [(7,), None]


def test_only_so_many_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with hundreds of shards holds neither their files nor descriptors."""
    monkeypatch.setattr(run_reader, "MOST_KEPT", 3)
    files = open_files()
    for i in range(9):
        with FilesystemBackend(tmp_path / f"shard-{i}", TABLES, clock.new_id) as backend:
            backend.apply(None, P1, counts(("ann", i)), {})
            assert read(backend, P1) == {("ann",): (i,)}
    assert open_files() == files + 2 * 3


def test_little_is_kept_where_addresses_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`spark.executor.pyspark.memory` limits a worker's addresses; what is kept would be missing elsewhere."""
    limits = {resource.RLIMIT_NOFILE: (10_000, 10_000), resource.RLIMIT_AS: (10_000, 10_000)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    for i in range(9):
        with FilesystemBackend(tmp_path / f"shard-{i}", TABLES, clock.new_id) as backend:
            backend.apply(None, P1, counts(("ann", i)), {})
            assert read(backend, P1) == {("ann",): (i,)}
    assert 1 <= len(KEPT._kept) <= 3
    assert sum(kept.size_bytes for kept in KEPT._kept.values()) <= 2_500


def test_what_is_kept_makes_room_for_what_is_read(
    shard: FilesystemBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may open no more files, because of those it keeps, goes on without them."""
    read(shard, P1)
    other = FilesystemBackend(tmp_path / "other", TABLES, clock.new_id)
    other.apply(None, P1, counts(("ann", 1)), {})
    _, hard = limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    free = [number for number in range(hard) if number not in used][2]
    try:
        # One for the view's lock, and one of the two that a run takes.
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        assert read(other, P1) == {("ann",): (1,)}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert len(read(shard, P1)) == 10_000


def test_a_forked_process_begins_with_none(shard: FilesystemBackend) -> None:
    """It may live long, and does not hear of what its parent lets go; nor may it inherit a lock."""
    read(shard, P1)
    with KEPT._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if not KEPT._kept and len(read(shard, P1)) == 10_000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(read(shard, P1)) == 10_000


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("damage", ["written to", "cut", "its end, with its time set back"])
def test_damage_to_a_kept_file_is_noticed_as_before(shard: FilesystemBackend, damage: str) -> None:
    """What was whole an hour ago may be damaged now."""
    read(shard, P1)
    (path,) = shard.directory.glob("versions/*/*.arrow")
    found = path.stat()
    if damage == "cut":
        os.truncate(path, found.st_size // 2)
    else:
        flip(path, found.st_size - 20 if damage != "written to" else 700)
        if damage != "written to":
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(CorruptionError, match="arrow"):
        shard.view(P1)
    assert shard.versions() == []


def test_a_kept_file_is_read_whole_before_it_is_merged(shard: FilesystemBackend) -> None:
    """Damage that no time of modification tells would get a new digest."""
    read(shard, P1)
    (path,) = shard.directory.glob("versions/*/*.arrow")
    found = path.stat()
    flip(path, found.st_size // 2)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(CorruptionError, match="arrow"):
        shard.apply(P1, P2, MANY, {})
    assert shard.versions() == []


def test_a_table_with_new_columns_reads_its_old_runs(shard: FilesystemBackend) -> None:
    """A restarted query in a reused worker declares other columns than the run was opened with."""
    read(shard, P1)
    wider = TableSchema.of("counts", COUNTS.key, COUNTS.value.append(pa.field("note", pa.string())))
    backend = FilesystemBackend(shard.directory, {**TABLES, "counts": wider}, clock.new_id)
    assert read(backend, P1)[("user 7",)] == (7, None)
    assert read(shard, P1)[("user 7",)] == (7,)
    assert P3 not in backend.versions()
