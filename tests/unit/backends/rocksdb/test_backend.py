"""What the rocksdb backend does beyond the contract: branches, concurrent readers, reopening, changes kept."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends.base import Pointer, View
from holdfast.backends.rocksdb import marker as rocksdb_marker
from holdfast.backends.rocksdb import reads as rocksdb_reads
from holdfast.backends.rocksdb import view as rocksdb_view
from holdfast.backends.rocksdb.backend import RocksDBBackend, RowCounts
from holdfast.backends.rocksdb.database import Database
from holdfast.errors import ClosedError, CorruptionError, NotFoundError
from holdfast.testing.state_rows import (
    COUNTS,
    P1,
    P2,
    P3,
    Row,
    contents,
    counts,
    run_of,
    users,
)
from tests.tiers import repetitions
from tests.unit.backends.rocksdb.shards import (
    State,
    check,
    check_frozen,
    databases,
    open_shard,
)


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


@pytest.mark.slow
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


@pytest.mark.slow(1)
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


def test_a_view_ends_with_its_backend(tmp_path: Path) -> None:
    """Whatever is still open: the directory can be opened again at once, and old views say that they are closed."""
    backend = open_shard(tmp_path / "shard")
    backend.apply(None, P1, counts(*((f"u{i}", i) for i in range(40))), {})
    view = backend.view(P1)
    unfinished = view.scan("counts")
    next(unfinished)
    backend.close()
    backend.close()
    for use in (
        lambda: users(view, "u1"),
        lambda: list(view.scan("counts")),
        lambda: backend.view(P1),
        backend.versions,
    ):
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


@pytest.mark.parametrize(
    "use",
    [
        lambda shard: shard.apply(P1, P2, counts(("bob", 2)), {}),
        lambda shard: shard.freeze(P1),
        lambda shard: shard.maintain(P1),
    ],
    ids=["apply", "freeze", "maintain"],
)
def test_a_version_that_is_dropped_while_a_call_begins_is_not_there(
    shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch, use: Callable[[RocksDBBackend], object]
) -> None:
    """Its database goes with it; who hears that a database was closed would expect the version from the next one."""
    find = shard._shard.find

    def find_too_early(pointer: Pointer) -> Database:
        found = find(pointer)
        shard.drop([pointer])
        return found

    shard.apply(None, P1, counts(("ann", 1)), {})
    monkeypatch.setattr(shard._shard, "find", find_too_early)
    with pytest.raises(NotFoundError, match="no such version"):
        use(shard)
    assert databases(shard) == []


@pytest.mark.slow(2)
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

    def used() -> list[int]:
        """Return the fewest descriptors and threads of half a second: RocksDB's own hold a file for a moment."""
        seen = []
        for _ in range(50):
            seen.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
            time.sleep(0.01)
        return [min(numbers) for numbers in zip(*seen, strict=True)]

    def cycled(cycles: Iterable[int]) -> int:
        """Return the most files that were there after a cycle: compaction makes and removes some."""
        most = 0
        for _ in cycles:
            cycle()
            most = max(most, len([*tmp_path.rglob("*")]))
        return most

    files, before = cycled(range(8)), used()
    assert cycled(repetitions(15, 1000)) < files + 8  # a compaction that is late leaves four
    assert used() == before


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


def test_what_one_thread_finds_damaged_is_damage_to_all(shard: RocksDBBackend) -> None:
    """A snapshot finds it while a micro-batch reads: whose call begins again after damage, and after nothing else."""
    shard.apply(None, P1, counts(*((f"user {i}", i) for i in range(2000))), {})
    view = shard.view(P1)
    (table,) = databases(shard)[0].glob("*.sst")
    with table.open("r+b") as file:
        file.seek(5000)
        file.write(bytes(100))
    with pytest.raises(CorruptionError) as found:
        shard.freeze(P1)
    with pytest.raises(CorruptionError, match="damaged and was set aside"):
        users(view, "user 1")
    assert shard.versions() == []
    assert Path(str(found.value.facts["file"])).name == table.name


def test_a_frozen_version_brings_no_other(tmp_path: Path) -> None:
    """A database that was closed holds two versions; of one that comes as frozen, nobody has asked for the other."""
    with open_shard(tmp_path / "one") as one:
        one.apply(None, P1, counts(("ann", 1)), {})
        one.apply(P1, P2, counts(("ann", 2)), {})
    (closed,) = databases(one)
    shutil.copytree(closed, tmp_path / "frozen")
    with open_shard(tmp_path / "other") as other:
        with pytest.raises(CorruptionError, match="its marker names another version"):
            other.thaw(P2, tmp_path / "frozen")
        assert other.versions() == []


def test_schemas_are_compared_once(shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by each read and write: a table that has changed often has hundreds of them."""
    compared = []
    monkeypatch.setattr(rocksdb_marker, "require_readable", lambda *_, **__: compared.append(1))
    shard.apply(None, P1, counts(("ann", 1)), {})
    for base, new in ((P1, P2), (P2, P3)):
        shard.apply(base, new, counts(("bob", 2)), {})
        with shard.view(new) as view:
            assert contents(view, "counts") == {("ann",): (1,), ("bob",): (2,)}
    assert len(compared) == 1


def test_a_count_of_rows_that_takes_long_is_kept_for_a_while() -> None:
    """Deleted rows that are not compacted yet are stepped over: a million at the head of a table take a second."""
    now_ns, counted = [0], [0]

    def count(takes_ns: int) -> int:
        now_ns[0] += takes_ns
        counted[0] += 1
        return counted[0]

    counts_of = RowCounts(lambda: now_ns[0], lambda: now_ns[0])
    short = [counts_of.of("counts", lambda: count(1_000_000)) for _ in range(3)]
    assert short == [1, 2, 3], "a short one is made each time"
    found = []
    for _ in range(100):
        found.append(counts_of.of("pairs", lambda: count(600_000_000)))
        now_ns[0] += 1_000_000_000
    assert found == [4] * 60 + [5] * 40, "once a minute, with a micro-batch a second"
    assert counts_of.of("counts", lambda: count(1)) == 6, "of this table only"
