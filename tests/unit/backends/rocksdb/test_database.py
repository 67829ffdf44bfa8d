"""One database: what is left of it after failures and kills, and after it was closed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.rocksdb import database as rocksdb_database
from holdfast.backends.rocksdb import options as rocksdb_options
from holdfast.backends.rocksdb import writes as rocksdb_writes
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.rocksdb.marker import UNDO_END, UNDO_PREFIX
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.testing.backend_files_contract import StoredElsewhere
from holdfast.testing.state_rows import (
    P1,
    P2,
    P3,
    TABLES,
    contents,
    counts,
    no_counts,
)
from tests.model.built_in import ram_directory
from tests.unit.backends.rocksdb.shards import (
    State,
    abandon,
    check,
    check_frozen,
    fail_in_batch,
    open_shard,
)


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_failure_between_batches_leaves_the_old_versions(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """Out of memory, say, when half of a version is written: it is undone by whatever comes next."""
    state: State = {(f"u{i}",): (0,) for i in range(40)}
    with open_shard(tmp_path / "shard") as backend:
        backend.apply(None, P1, counts(*((key[0], 0) for key in state)), {})
        fail_in_batch(monkeypatch, fail_at)
        with pytest.raises(MemoryError):
            backend.apply(P1, P2, counts(*((f"u{i}", 1) for i in range(10, 40))), {})
        monkeypatch.undo()
        assert backend.versions() == [P1]
        with backend.view(P1) as view:
            check(view, state)
        check_frozen(backend, P1, {P1: state})
    with open_shard(tmp_path / "shard") as backend, backend.view(P1) as view:
        check(view, state)
        backend.apply(P1, P3, counts(("u39", 5)), {})
        with backend.view(P3) as new:
            check(new, state | {("u39",): (5,)})


def test_half_a_version_on_disk_is_not_used(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between two batches of one version, after RocksDB has flushed the first."""
    backend = open_shard(tmp_path / "shard")
    backend.apply(None, P1, counts(*((f"u{i}", 0) for i in range(40))), {})
    fail_in_batch(monkeypatch, 3, flush=True)
    with pytest.raises(MemoryError):
        backend.apply(P1, P2, counts(*((f"u{i}", 1) for i in range(40))), {})
    abandon(backend)
    with open_shard(tmp_path / "shard") as backend:
        assert backend.versions() == []
        with pytest.raises(NotFoundError):
            backend.view(P1)
        backend.load(P1, counts(("u1", 7)), {})
        with backend.view(P1) as view:
            assert contents(view, "counts") == {("u1",): (7,)}
        assert backend.remove_leftovers(2**63) == 1


@pytest.mark.slow(0.5)
@pytest.mark.parametrize(
    ("fail_at", "left"), [(0, [P2]), (2, []), (3, [P1, P2]), (6, [])], ids=["closing", "closed", "opening", "opened"]
)
def test_a_kill_while_closing_or_opening_again(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, fail_at: int, left: list[Pointer]
) -> None:
    """The rows that keep a second version over a restart are never mistaken for state, or for the other version."""
    model: dict[Pointer, State] = {P1: {(f"u{i}",): (0,) for i in range(40)}}
    model[P2] = model[P1] | {(f"u{i}",): (1,) for i in range(20)}
    backend = open_shard(tmp_path / "shard")
    backend.apply(None, P1, counts(*((f"u{i}", 0) for i in range(40))), {})
    backend.apply(P1, P2, counts(*((f"u{i}", 1) for i in range(20))), {})
    killed = 0
    for _ in range(3):
        fail_in_batch(monkeypatch, fail_at, flush=True)
        try:
            backend.close()
        except MemoryError:
            killed += 1
        backend = open_shard(tmp_path / "shard")
        try:
            backend.versions()
        except MemoryError:
            killed += 1
        monkeypatch.undo()
        assert backend.versions() == left
        for pointer in left:
            with backend.view(pointer) as view:
                check(view, model[pointer])
            check_frozen(backend, pointer, model)
    assert killed
    backend.close()


@pytest.mark.parametrize("rows", [1, 40])
def test_undo_rows_of_no_version_are_removed_when_a_database_is_opened(tmp_path: Path, small: None, rows: int) -> None:
    """Also where they fill several batches, and the process is killed right after: the version stays."""
    state: State = {("ann",): (1,), ("bob",): (2,)}

    def opened() -> RocksDBBackend:
        backend = open_shard(tmp_path / "shard")
        assert backend.versions() == [P1]
        return backend

    def undo_rows(backend: RocksDBBackend) -> list[bytes]:
        (rdict,) = (database._rdict for database in backend._shard.opened)
        assert rdict is not None
        keys: Iterator[bytes] = rdict.keys(from_key=UNDO_PREFIX)  # type: ignore[assignment]
        return list(takewhile(lambda key: key < UNDO_END, keys))

    with open_shard(tmp_path / "shard") as backend:
        backend.apply(None, P1, counts(("ann", 1), ("bob", 2)), {})
        (rdict,) = (database._rdict for database in backend._shard.opened)
        assert rdict is not None
        for i in range(rows):
            rdict.put(UNDO_PREFIX + b"\1" + f"left over by a close that was killed: {i}".encode(), b"\0")
        assert len(undo_rows(backend)) == rows
    backend = opened()
    assert undo_rows(backend) == []
    (rdict,) = (database._rdict for database in backend._shard.opened)
    assert rdict is not None
    rdict.flush()
    abandon(backend)
    with opened() as backend:
        assert undo_rows(backend) == []
        with backend.view(P1) as view:
            check(view, state)


def test_a_clean_close_keeps_the_oldest_version_and_another(tmp_path: Path) -> None:
    """Spark may have accepted the newest attempt or not: either way the next start finds what it needs."""
    with open_shard(tmp_path / "shard") as backend:
        for version in range(1, 6):
            base = Pointer(version - 1, "a") if version > 1 else None
            backend.apply(base, Pointer(version, "a"), counts(("ann", version), (f"u{version}", 0)), {"at": version})
        backend.drop([Pointer(1, "a"), Pointer(2, "a")])
    for _ in range(3):
        with open_shard(tmp_path / "shard") as backend:
            assert backend.versions() == [Pointer(3, "a"), Pointer(5, "a")]
            for version in (3, 5):
                with backend.view(Pointer(version, "a")) as view:
                    assert contents(view, "counts") == {("ann",): (version,)} | {
                        (f"u{i}",): (0,) for i in range(1, version + 1)
                    }
                    assert view.properties == {"at": version}


def test_a_database_with_another_version_beside_its_own_is_no_frozen_one(tmp_path: Path) -> None:
    """A restore and a look-up agree on it; FORMAT.md section 7."""
    with open_shard(tmp_path / "shard") as backend:
        backend.apply(None, P1, counts(("ann", 1)), {})
        backend.apply(P1, P2, counts(("ann", 2)), {})
    (home,) = (tmp_path / "shard" / "databases").iterdir()
    with open_shard(tmp_path / "other") as backend:
        paths = [path for pattern in ("*.sst", "MANIFEST-*", "CURRENT") for path in home.glob(pattern)]
        for pointer in (P2, P1):
            files = StoredElsewhere(paths, tmp_path / f"elsewhere-{pointer}")
            with (
                pytest.raises(CorruptionError, match="names another version"),
                backend.open_frozen(pointer, TABLES, files, clock.new_id),
            ):
                pass
            with pytest.raises(CorruptionError, match="names another version"):
                backend.thaw(pointer, Path(shutil.copytree(home, tmp_path / f"copy-{pointer}")))


def test_a_clean_close_after_the_newest_version_was_dropped(tmp_path: Path) -> None:
    """The rows are of no version then: an older one is written back, and the other differs from it by all between."""
    with open_shard(tmp_path / "shard") as backend:
        backend.apply(None, P1, counts(("ann", 1), ("bob", 1), ("cem", 1)), {})
        backend.apply(P1, P2, counts(("bob", 2), ("new", 2)), {})
        backend.apply(P2, P3, counts(("cem", 3)), {})
        backend.drop([P3])
    expected: dict[Pointer, State] = {P1: {("ann",): (1,), ("bob",): (1,), ("cem",): (1,)}}
    expected[P2] = expected[P1] | {("bob",): (2,), ("new",): (2,)}
    for _ in range(2):
        with open_shard(tmp_path / "shard") as backend:
            assert backend.versions() == [P1, P2]
            for pointer in (P1, P2):
                with backend.view(pointer) as view:
                    assert contents(view, "counts") == expected[pointer]


@pytest.mark.slow(1)
def test_a_large_version_is_on_disk_whole_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocksDB flushes in the middle of it: a kill after the commit must not find half a version there."""
    monkeypatch.setattr(rocksdb_writes, "BATCH_BYTES", 10_000)
    backend = open_shard(tmp_path / "shard")
    backend.apply(None, P1, counts(("ann", 0)), {})
    (database,) = backend._shard.opened
    monkeypatch.setattr(database, "_write_buffer_bytes", lambda: 65_536)
    backend.apply(P1, P2, counts(*((f"u{i}", i) for i in range(20_000))), {})
    assert database._rdict is not None
    deadline = clock.monotonic_ms() + 20_000
    in_memory = [f"rocksdb.num-{kind}" for kind in ("entries-active-mem-table", "immutable-mem-table")]
    while any(database._rdict.property_int_value(name) for name in in_memory):
        assert clock.monotonic_ms() < deadline
    copied = shutil.copytree(tmp_path / "shard", tmp_path / "killed")
    backend.close()
    with open_shard(copied) as killed:
        assert killed.versions() == [P2]
        with killed.view(P2) as view:
            assert len(contents(view, "counts")) == 20_001


@pytest.mark.slow(1)
def test_what_rocksdb_notes_about_its_files_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list of files and its logs have entries for each flush, and a shard may be open for months."""
    monkeypatch.setattr(rocksdb_writes, "LOG_BYTES", 0)
    monkeypatch.setattr(rocksdb_options, "MANIFEST_BYTES_MAX", 500)
    monkeypatch.setattr(rocksdb_options, "INFO_LOG_BYTES_MAX", 40_000)
    noted: dict[str, list[int]] = {"MANIFEST-*": [], "LOG*": []}
    last = Pointer(400, "aa")
    with ram_directory() as path:
        with open_shard(path / "shard") as backend:
            backend.apply(None, Pointer(1, "aa"), counts(("ann", 1)), {})
            for n in range(2, last.version + 1):
                base, new = Pointer(n - 1, "aa"), Pointer(n, "aa")
                backend.apply(base, new, counts(("ann", n)), {})
                backend.drop([base])
                backend.maintain(new)
                for pattern, sizes in noted.items():
                    sizes.append(sum(map(_size_bytes, backend.directory.glob(f"databases/*/{pattern}"))))
            check_frozen(backend, last, {last: {("ann",): (last.version,)}})
        with open_shard(path / "shard") as backend, backend.view(last) as view:
            check(view, {("ann",): (last.version,)})
    # The least of many: what a new one replaces goes a little later.
    assert min(noted["MANIFEST-*"][-100:]) < 1_200
    assert min(noted["LOG*"][-100:]) < 2 * 45_000
    assert max(noted["MANIFEST-*"]) > 500, "its limit was met"


def _size_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # RocksDB has just removed it
        return 0


def test_maintenance_flushes_after_many_versions(shard: RocksDBBackend) -> None:
    """After a kill no more than so many commits need be replayed, however little each of them wrote."""
    shard.apply(None, P1, counts(("ann", 0)), {})
    pointer = P1
    for version in range(2, 2 + rocksdb_database.FLUSH_VERSIONS):
        assert shard.maintain(pointer) == 0
        pointer, base = Pointer(version, "a"), pointer
        shard.apply(base, pointer, no_counts("nobody"), {})
    assert shard.maintain(pointer) == 1
    assert shard.maintain(pointer) == 0
    abandon(shard)
    with open_shard(shard.directory) as again:
        assert again.versions() == [pointer]
