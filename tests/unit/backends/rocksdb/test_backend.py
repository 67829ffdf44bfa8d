"""What the rocksdb backend does beyond the contract: branches, concurrent readers, reopening, changes kept."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import Pointer, View
from holdfast.backends.rocksdb import database as rocksdb_database
from holdfast.backends.rocksdb import reads as rocksdb_reads
from holdfast.backends.rocksdb import view as rocksdb_view
from holdfast.backends.rocksdb import writes as rocksdb_writes
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.rocksdb.marker import UNDO_END, UNDO_PREFIX
from holdfast.backends.rocksdb.writes import ChangeLog, RowWriter, Written
from holdfast.errors import ClosedError, NotFoundError
from holdfast.testing.state_rows import (
    COUNTS,
    P1,
    P2,
    P3,
    PAIRS,
    TABLES,
    Row,
    contents,
    counts,
    keys_of,
    no_counts,
    run_of,
    users,
)
from tests.repetitions import repetitions

State = dict[Row, Row]


def open_shard(directory: Path) -> RocksDBBackend:
    return RocksDBBackend(directory, TABLES, clock.new_id)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[RocksDBBackend]:
    with open_shard(tmp_path / "shard") as backend:
        yield backend


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are many: every version is several batches, every read several chunks, every change a file."""
    monkeypatch.setattr(rocksdb_writes, "BATCH_BYTES", 200)
    monkeypatch.setattr(rocksdb_writes, "CHUNK_KEYS", 7)
    monkeypatch.setattr(rocksdb_view, "CHUNK_KEYS", 5)
    monkeypatch.setattr(rocksdb_reads, "RUN_ROWS", 11)
    monkeypatch.setattr(rocksdb_reads, "_STEP_ROWS", 4)
    monkeypatch.setattr(rocksdb_writes, "LOG_BYTES", 0)


def databases(backend: RocksDBBackend) -> list[Path]:
    return sorted((backend.directory / "databases").iterdir())


def check(view: View, state: State) -> None:
    """All ways of reading agree with a dictionary."""
    assert contents(view, "counts") == state
    assert view.count("counts") == len(state)
    everyone = [f"u{i}" for i in range(40)]
    for some in (everyone, everyone[::7]):
        assert users(view, *some) == [state.get((name,)) for name in some]
    prefixes = keys_of(COUNTS, [(name,) for name in everyone[::3]])
    found = {key: value for run in view.scan_prefix("counts", prefixes) for key, value in rows(run)}
    assert found == {key: value for key, value in state.items() if key[0] in everyone[::3]}


def rows(run: Any) -> Iterator[tuple[Row, Row]]:
    for key, value in zip(run.keys.column(0).to_pylist(), run.values.column(0).to_pylist(), strict=True):
        yield (key,), (value,)


def random_step(chance: random.Random, state: State) -> tuple[dict[str, Any], State]:
    """Return random writes and deletes, and the state after them."""
    after = dict(state)
    written: list[tuple[Row, Row | None]] = []
    for name in chance.sample([f"u{i}" for i in range(40)], chance.randrange(25)):
        value = (chance.randrange(1000),) if chance.random() < 0.7 else None
        written.append(((name,), value))
        if value is None:
            after.pop((name,), None)
        else:
            after[name,] = value
    return {"counts": run_of(COUNTS, written)}, after


@pytest.mark.parametrize("density", [0.0, 5.0], ids=["point reads", "mixed"])
@pytest.mark.parametrize("seed", repetitions(2, 40))
def test_any_branch_of_any_version(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, seed: int, density: float
) -> None:
    """Begin anywhere, drop, freeze, close and open again: every version held is exactly what was written."""
    monkeypatch.setattr(rocksdb_reads, "SCAN_ROWS_PER_KEY", density)
    monkeypatch.setattr(rocksdb_view, "_SPARSE_KEYS", 2)
    chance = random.Random(seed)
    model: dict[Pointer, State] = {}
    backend = open_shard(tmp_path / "shard")
    views: list[tuple[View, State]] = []
    for step in range(30):
        base = chance.choice([*backend.versions(), *backend.versions()[-2:]] or [None])
        writes, state = random_step(chance, model[base] if base else {})
        pointer = Pointer(base.version + 1 if base else 1, f"{step:04x}")
        if base or not chance.randrange(3):
            backend.apply(base, pointer, writes, {"step": step})
            model[pointer] = state
        if not backend.versions():
            continue
        if chance.random() < 0.8:
            views.append((backend.view(seen := chance.choice(backend.versions())), model[seen]))
        for view, expected in chance.sample(views, min(len(views), 2)):
            check(view, expected)
        if not chance.randrange(4):
            backend.drop(chance.sample(backend.versions(), chance.randrange(len(backend.versions()))))
            chance.shuffle(views)
            for view, _ in views[:1]:
                view.close()
            del views[:1]
        if not chance.randrange(8):
            check_frozen(backend, chance.choice(backend.versions()), model)
            backend, views = reopened(backend, model), []
    for view, expected in views:
        check(view, expected)
    backend.close()


def reopened(backend: RocksDBBackend, model: dict[Pointer, State]) -> RocksDBBackend:
    before = backend.versions()
    backend.close()
    backend = open_shard(backend.directory)
    assert set(backend.versions()) <= set(before)
    assert before[0] in backend.versions()
    for pointer in backend.versions():
        with backend.view(pointer) as view:
            check(view, model[pointer])
    return backend


def check_frozen(backend: RocksDBBackend, pointer: Pointer, model: dict[Pointer, State]) -> None:
    home = backend.directory.parent / f"copy-{clock.new_id()}" / "databases" / "copy"
    home.mkdir(parents=True)
    for file in backend.freeze(pointer):
        os.link(file, home / file.name)
    with open_shard(home.parent.parent) as copy, copy.view(pointer) as view:
        check(view, model[pointer])


def test_readers_see_their_version_while_others_write(shard: RocksDBBackend, small: None) -> None:
    """Reading takes no lock that a write waits for, so a read may run while rows change under it, forth and back."""
    names = [f"u{i}" for i in range(40)]
    shard.apply(None, P1, counts(*((name, 0) for name in names)), {})
    shard.apply(P1, P2, counts(*((name, 1) for name in names[::2])), {})
    expected: dict[Pointer, State] = {
        P1: {(name,): (0,) for name in names},
        P2: {(name,): (1 - i % 2,) for i, name in enumerate(names)},
    }
    stop = threading.Event()

    def read(pointer: Pointer) -> int:
        done = 0
        with shard.view(pointer) as view:
            while not stop.is_set():
                check(view, expected[pointer])
                done += 1
        return done

    with ThreadPoolExecutor(4) as executor:
        reads = [executor.submit(read, pointer) for pointer in (P1, P2, P1, P2)]
        for step in range(3, repetitions(40, 400).stop):
            base = (P1, P2)[step % 2]
            shard.apply(base, Pointer(step, "w"), counts(*((name, step) for name in names[step % 5 :: 2])), {})
            shard.drop([Pointer(step - 2, "w")])
        stop.set()
        assert all(read.result() > 1 for read in reads)


def test_attempts_at_once_make_versions_side_by_side(shard: RocksDBBackend) -> None:
    """Zombie tasks: two threads apply to one base."""
    shard.apply(None, P1, counts(("ann", 1)), {})
    with ThreadPoolExecutor(4) as executor:
        pointers = [Pointer(2, f"{i}") for i in range(20)]
        list(executor.map(lambda p: shard.apply(P1, p, counts(("ann", int(p.commit_id))), {}), pointers))
        list(executor.map(lambda i: shard.load(P3, counts(("bob", 3)), {}), range(4)))
    for pointer in pointers:
        with shard.view(pointer) as view:
            assert contents(view, "counts") == {("ann",): (int(pointer.commit_id),)}
    assert len(databases(shard)) == 2


# Failures in the middle.


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


def fail_in_batch(monkeypatch: pytest.MonkeyPatch, fail_at: int, flush: bool = False) -> None:
    write, numbers = RowWriter._write, iter(range(1000))

    def fail(writer: RowWriter, marker: bytes | None) -> None:
        if next(numbers) == fail_at:
            if flush:
                writer._database.flush()
            raise MemoryError
        write(writer, marker)

    monkeypatch.setattr(RowWriter, "_write", fail)


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


def abandon(backend: RocksDBBackend) -> None:
    """End a backend as a kill would, as far as its own doing goes."""
    for database in backend._shard.opened:
        database.abandon()
    backend._shard.opened.clear()
    backend.close()


@pytest.mark.parametrize("fail_at", [0, 2, 6, 9])
def test_a_kill_while_closing_or_opening_again(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """The rows that keep a second version over a restart are never mistaken for state, or for the other version."""
    model: dict[Pointer, State] = {P1: {(f"u{i}",): (0,) for i in range(40)}}
    model[P2] = model[P1] | {(f"u{i}",): (1,) for i in range(20)}
    backend = open_shard(tmp_path / "shard")
    backend.apply(None, P1, counts(*((f"u{i}", 0) for i in range(40))), {})
    backend.apply(P1, P2, counts(*((f"u{i}", 1) for i in range(20))), {})
    for _ in range(3):
        fail_in_batch(monkeypatch, fail_at, flush=True)
        with suppress(MemoryError):
            backend.close()
        backend = open_shard(tmp_path / "shard")
        with suppress(MemoryError):
            backend.versions()
        monkeypatch.undo()
        held = backend.versions()
        for pointer in held:
            with backend.view(pointer) as view:
                check(view, model[pointer])
            check_frozen(backend, pointer, model)
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


# Closing and opening.


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


def test_a_view_ends_with_its_backend(tmp_path: Path) -> None:
    """Whatever is still open: the directory can be opened again at once, and old views say that they are closed."""
    backend = open_shard(tmp_path / "shard")
    backend.apply(None, P1, counts(*((f"u{i}", i) for i in range(40))), {})
    view = backend.view(P1)
    unfinished = view.scan("counts")
    next(unfinished)
    backend.close()
    backend.close()
    for use in (lambda: users(view, "u1"), lambda: view.count("counts"), lambda: backend.view(P1), backend.versions):
        with pytest.raises(ClosedError):
            use()
    view.close()
    with open_shard(tmp_path / "shard") as backend:
        assert backend.versions() == [P1]


def test_a_database_goes_with_its_last_version_or_view(shard: RocksDBBackend) -> None:
    """Local disk holds what is needed: a restored version begins a new database, the old one goes."""
    shard.apply(None, P1, counts(("ann", 1)), {})
    shard.load(P2, counts(("bob", 2)), {})
    (shard.directory / "databases").stat()
    assert len(databases(shard)) == 2
    view = shard.view(P1)
    shard.drop([P1])
    assert len(databases(shard)) == 2
    assert contents(view, "counts") == {("ann",): (1,)}
    view.close()
    assert len(databases(shard)) == 1
    shard.drop([P2])
    assert databases(shard) == []
    assert os.listdir(shard.directory / "staging") == []


def test_opening_and_closing_leaks_nothing(tmp_path: Path) -> None:
    """A state server lives for months: descriptors, threads and log files of RocksDB stay bounded."""

    def cycle() -> None:
        with open_shard(tmp_path / "shard") as backend:
            newest = max(backend.versions(), default=None)
            new = Pointer(newest.version + 1 if newest else 1, "a")
            backend.apply(newest, new, counts(("ann", new.version)), {})
            backend.drop([p for p in backend.versions() if p != new])
            backend.view(new)
            backend.freeze(new)

    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in range(5):
        cycle()
    before, files = used(), len([*tmp_path.rglob("*")])
    for _ in repetitions(15, 1000):
        cycle()
    assert used() == before
    assert len([*tmp_path.rglob("*")]) < files + 12  # compaction makes and removes some


# Frozen files.


def test_frozen_files_are_made_once_and_shared(shard: RocksDBBackend) -> None:
    """An upload of the next version needs only what changed: unchanged tables are the same files, by inode."""
    shard.apply(None, P1, counts(*((f"u{i}", i) for i in range(1000))), {})
    first = shard.freeze(P1)
    shard.apply(P1, P2, counts(("u1", -1)), {})
    second = shard.freeze(P2)
    assert shard.freeze(P1) == first
    assert shard.freeze(P2) == second
    inodes = [{file.stat().st_ino for file in files if file.suffix == ".sst"} for files in (first, second)]
    assert inodes[0] < inodes[1]
    shard.drop([P1])
    assert not any(file.exists() for file in first)
    assert all(file.exists() for file in second)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (*second, second[0].parent))


# Reading.


def test_few_of_many_keys_and_many_of_few(shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point reads where keys are sparse, a scan where they are dense: the same answers."""
    names = [f"user {i}" for i in range(20_000)]
    shard.apply(None, P1, counts(*((name, i) for i, name in enumerate(names))), {})
    scanned: list[int] = []
    by_scan = rocksdb_reads.TableReader._get_by_scan

    def spied(reader: Any, keys: list[bytes], first: int, last: int) -> list[bytes | None]:
        scanned.append(len(keys))
        return by_scan(reader, keys, first, last)

    monkeypatch.setattr(rocksdb_reads.TableReader, "_get_by_scan", spied)
    with shard.view(P1) as view:
        assert users(view, *names[::100]) == [(i,) for i in range(0, 20_000, 100)]
        assert users(view, *names[:500]) == [(i,) for i in range(500)]
        assert not scanned
        assert users(view, *names[::2]) == [(i,) for i in range(0, 20_000, 2)]
        assert users(view, *names[::-1]) == [(i,) for i in range(19_999, -1, -1)]
        assert sum(scanned) == 30_000


def test_prefixes_are_sought_or_scanned(shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of few maps among many, and of most of them; at an older version too."""
    written: list[tuple[Row, Row | None]] = [((i % 300, float(i), "x"), (str(i), None)) for i in range(3000)]
    hashes = [(i % 300) << 55 for i in range(3000)]
    shard.apply(None, P1, {"pairs": run_of(PAIRS, written, hashes)}, {})
    gone: list[tuple[Row, Row | None]] = [(key, None) for key, _ in written[:600]]
    new: list[tuple[Row, Row | None]] = [((7, -1.0, None), ("new", None)), ((400, 1.0, "x"), ("other", None))]
    shard.apply(P1, P2, {"pairs": run_of(PAIRS, [*gone, *new], [*hashes[:600], 7 << 55, 400 << 55])}, {})
    for per_prefix in (0, 10**6):
        monkeypatch.setattr(rocksdb_view, "SCAN_ROWS_PER_PREFIX", per_prefix)
        for wanted in ([7], [299, 7, 7, 500], list(range(300))):
            prefixes = keys_of(PAIRS.prefix(1), [(i,) for i in wanted], [i << 55 for i in wanted])
            found = {}
            for pointer in (P1, P2):
                with shard.view(pointer) as view:
                    runs = list(view.scan_prefix("pairs", prefixes))
                hashes_found = np.concatenate([run.hashes for run in runs])
                assert (hashes_found[1:] >= hashes_found[:-1]).all()
                found[pointer] = sorted(note for run in runs for note in run.values.column(0).to_pylist())
            assert found[P1] == sorted(str(i) for i in range(3000) if i % 300 in wanted)
            kept = [str(i) for i in range(600, 3000) if i % 300 in wanted]
            assert found[P2] == sorted([*kept, "new"])


def test_the_largest_hash_and_the_last_table_have_an_end(shard: RocksDBBackend) -> None:
    """Bounds of ranges: nothing of a neighbouring table is taken in, and nothing left out."""
    top = 2**64 - 1
    rows_: list[tuple[Row, Row | None]] = [((None, None, "z" * i), ("n", None)) for i in range(5)]
    shard.apply(
        None,
        P1,
        {
            "counts": run_of(COUNTS, [(("a",), (1,)), (("b",), (2,))], [0, top]),
            "pairs": run_of(PAIRS, rows_, [0, 0, top, top, top]),
        },
        {},
    )
    with shard.view(P1) as view:
        assert view.count("counts", top, top) == 1
        assert view.count("pairs", top, top) == 3
        assert view.count("pairs", 1, top - 1) == 0
        assert view.count("counts", 1, 0) == 0
        assert view.count("members") == 0


# The change log.


def written(keys: list[bytes]) -> list[Written]:
    return Written.of(pa.array(keys, pa.large_binary()))


def keys_of_all(log: ChangeLog) -> list[bytes]:
    """In the order of hashes, which here is that of keys."""
    return [key for part in log.different_since(0) for key in part.keys.to_pylist()]


def is_mapped(folder: Path) -> bool:
    """Whether this process has files of a folder in its memory."""
    return f" {folder}/" in Path("/proc/self/maps").read_text()


def test_a_long_run_is_not_kept_for_its_keys(shard: RocksDBBackend) -> None:
    """The log holds copies: a commit's columns go when it has ended, however long its version is read."""
    shard.apply(None, P1, counts(("ann", 0)), {})
    many = counts(*((f"user {i}", i) for i in range(100_000)))
    before = pa.total_allocated_bytes()
    shard.apply(P1, P2, many, {})
    (database,) = shard._shard.opened
    columns = many["counts"].batch.column(0)
    starts = {part.hashes.ctypes.data for part in database._log.since(0)}
    assert not any(columns.buffers()[1].address <= at < columns.buffers()[1].address + columns.nbytes for at in starts)
    assert pa.total_allocated_bytes() - before < rocksdb_writes.LOG_BYTES


def test_many_branches_of_one_version_do_not_multiply_their_changes(shard: RocksDBBackend) -> None:
    """Each undoes what all before it wrote, and notes each key once."""
    shard.apply(None, P1, counts(("ann", 0)), {})
    for i in range(100):
        shard.apply(P1, Pointer(2, f"b{i}"), counts(("ann", i), (f"u{i % 7}", i)), {})
    (database,) = shard._shard.opened
    assert max(len(part.keys) for part in database._log.since(0)) == 8
    assert len(database._log.since(0)) == 199
    with shard.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (0,)}


def test_keys_without_those_that_are_written_again() -> None:
    """By table and by key: equal hashes of other keys, and ranges that touch, overlap or lie apart."""
    keys = [bytes([table]) + (i // 3).to_bytes(8, "big") + b"%d" % (i % 3) for table in (1, 2) for i in range(60)]
    first, second = written(keys)
    for rows in ([], [0], [59], range(10, 40), range(1, 60, 7), range(60)):
        again = [part for i in rows for part in written([keys[i]])] + written([b"\1" + b"\xff" * 9])
        expected = [key for i, key in enumerate(keys[:60]) if i not in rows]
        assert first.keys_without(again).to_pylist() == expected
        assert first.keys_without(written([keys[i] for i in rows])).to_pylist() == expected
        assert second.keys_without(again).to_pylist() == keys[60:]


@pytest.mark.usefixtures("small")
def test_a_repeated_attempt_leaves_nothing_of_the_dropped_one(shard: RocksDBBackend) -> None:
    """Some keys are written by both, some by one of them, some are deleted by either, in a version of many batches."""
    shard.apply(None, P1, counts(*((f"u{i}", i) for i in range(60))), {})
    dropped, kept = Pointer(2, "dropped"), Pointer(2, "kept")
    shard.apply(
        P1, dropped, {"counts": run_of(COUNTS, [((f"u{i}",), (-i,) if i % 4 else None) for i in range(50)])}, {}
    )
    shard.apply(dropped, P3, counts(*((f"new {i}", i) for i in range(20))), {})
    write = [((f"u{i}",), (1000,) if i % 3 else None) for i in range(20, 60)]
    shard.apply(P1, kept, {"counts": run_of(COUNTS, [*write, (("new 3",), (3,))])}, {})
    expected = {(f"u{i}",): (i if i < 20 else 1000,) for i in range(60) if i < 20 or i % 3} | {("new 3",): (3,)}
    with shard.view(kept) as view, shard.view(P1) as base, shard.view(P3) as other:
        assert contents(view, "counts") == expected
        assert contents(base, "counts") == {(f"u{i}",): (i,) for i in range(60)}
        assert len(contents(other, "counts")) == 60 + 20 - 13


def test_changes_beyond_the_limit_lie_in_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that stays for hours does not fill the memory, and its files go with the process."""
    log = ChangeLog(tmp_path)
    keys = [bytes([1]) + i.to_bytes(8, "big") + b"x" for i in range(100)]
    log.append(log.hold(written(keys[:50])))
    assert not is_mapped(tmp_path)
    monkeypatch.setattr(rocksdb_writes, "LOG_BYTES", 10)
    log.append(log.hold([*written(keys[50:60]), *written([]), *written(keys[60:])]))
    assert is_mapped(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert sorted(log.keys_since(0, 1, 40, 60)) == keys[40:61]
    assert sorted(log.keys_since(1, 1, 40, 60)) == keys[50:61]
    assert log.keys_since(2, 1, 0, 100) == log.keys_since(0, 2, 0, 100) == []
    log.append(log.hold(written(keys[:10] * 2)))
    assert keys_of_all(log) == keys
    log.trim(2)
    assert keys_of_all(log) == keys[:10]
    assert log.position == 3
    log.trim(3)
    assert not is_mapped(tmp_path)


def test_changes_are_forgotten_when_nobody_needs_them(shard: RocksDBBackend) -> None:
    """Versions that are dropped and closed leave nothing behind."""
    shard.apply(None, P1, counts(("ann", 0)), {})
    view = shard.view(P1)
    for version in range(2, 10):
        shard.apply(Pointer(version - 1, P1.commit_id) if version > 2 else P1, Pointer(version, P1.commit_id), {}, {})
        shard.drop([p for p in shard.versions() if p.version < version])
    (database,) = shard._shard.opened
    assert len(database._log._changes) == 8
    view.close()
    assert len(database._log._changes) == 0


# Flushing.


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
            assert view.count("counts") == 20_001


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
