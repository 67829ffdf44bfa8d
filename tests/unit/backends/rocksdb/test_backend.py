"""What the rocksdb backend does beyond the contract: generations come and go, memory is shared, options are read."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import clock
from holdfast.backends import run_stack
from holdfast.backends.base import Pointer
from holdfast.backends.local.folder_locks import lock_shared
from holdfast.backends.local_files import DURABLE
from holdfast.backends.rocksdb import backend as rocksdb
from holdfast.backends.rocksdb import generation, moving, options, reads
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.rocksdb.generation import OPEN, READERS, CacheShare, GenerationView, OpenGenerations
from holdfast.backends.rocksdb.generation_file import StoredTable
from holdfast.backends.rocksdb.reads import EncodedRows
from holdfast.backends.run import Run, TableSchema
from holdfast.backends.schema import KeyRanges
from holdfast.errors import ClosedError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.testing.backend_rows_contract import HASH_OF_USER, VISITS, Span, visits, visits_near
from holdfast.testing.state_rows import (
    P1,
    P2,
    P3,
    TABLES,
    answers,
    contents,
    counts,
    keys_of,
    no_counts,
    run_of,
    users,
)
from tests.tiers import repetitions

NAMES = [f"u{i}" for i in range(40)]


@pytest.fixture(autouse=True)
def everything_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb.RocksDBBackend, "share_bytes", lambda _: 0)


def open_shard(directory: Path) -> RocksDBBackend:
    return RocksDBBackend(directory, TABLES, clock.new_id)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[RocksDBBackend]:
    with open_shard(tmp_path / "shard") as backend:
        yield backend


def generations(backend: RocksDBBackend) -> list[Path]:
    return sorted((backend.directory / "generations").glob("*"))


def runs_of(backend: RocksDBBackend, pointer: Pointer) -> int:
    return len(list((backend.directory / "versions" / str(pointer)).glob("*.arrow")))


# Moving.


def test_what_all_versions_have_is_moved_and_taken_by_the_next_commit(shard: RocksDBBackend) -> None:
    """The run of the newest version stays: a commit may merge it, and Spark may drop it."""
    shard.apply(None, P1, counts(("ann", 1), ("bob", 1)), {})
    shard.apply(P1, P2, counts(("ann", 2)), {})
    before = {pointer: runs_of(shard, pointer) for pointer in (P1, P2)}
    shard.drop([P1])
    assert shard.maintain(P2) == 1
    assert {P2: runs_of(shard, P2)} == {P2: before[P2]}, "a version never changes"
    shard.apply(P2, P3, no_counts("bob"), {})
    assert runs_of(shard, P3) == 1
    shard.drop([P2])
    with shard.view(P3) as view:
        assert contents(view, "counts") == {("ann",): (2,)}
    assert len(generations(shard)) == 1
    shard.drop([P3])
    assert generations(shard) == [], "it goes with the last version that needs it, before any clean-up"


def test_a_run_that_a_held_version_lacks_stays(shard: RocksDBBackend) -> None:
    """It may be of an attempt that Spark drops."""
    shard.apply(None, P1, counts(*((name, 1) for name in NAMES)), {})
    shard.apply(P1, P2, counts(("ann", 2)), {})
    shard.apply(P1, Pointer(2, "other"), counts(("ann", 3)), {})
    shard.maintain(P2)
    shard.apply(P2, P3, {}, {})
    with shard.view(P3) as view:
        assert users(view, "ann", "u1") == [(2,), (1,)]
    with shard.view(Pointer(2, "other")) as view:
        assert users(view, "ann", "u1") == [(3,), (1,)]
    assert runs_of(shard, P3) == 1


def test_little_stays_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is smaller than its share never sees RocksDB."""
    monkeypatch.undo()
    with open_shard(tmp_path / "shard") as backend:
        backend.apply(None, P1, counts(("ann", 1)), {})
        assert backend.maintain(P1) == 0
        assert generations(backend) == []


def test_shards_of_an_executor_share_what_may_lie_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is the executor's, whatever the number of its shards, and whichever of its processes asks."""
    monkeypatch.undo()
    operator = tmp_path / "disk" / "query" / "totals"
    (operator / "runs").mkdir(parents=True)  # which definitions run, beside the shards

    def opened(number: int) -> RocksDBBackend:
        return RocksDBBackend(operator / str(number), TABLES, clock.new_id, {}, tmp_path)

    shards = [opened(number) for number in range(4)]
    whole = 4 * (128 << 20)
    assert shards[0].share_bytes() == whole // 4
    for long_ago in (False, True):  # a count that is kept must be as true as a fresh one
        for change, left in ((lambda: shutil.rmtree(shards[3].directory), 3), (lambda: opened(3), 4)):
            if long_ago:
                for folder in (operator, *operator.parents[:3]):
                    os.utime(folder, (1, 1))
                with monkeypatch.context() as kept:
                    assert shards[0].share_bytes() == whole // (7 - left)
                    kept.setattr(os, "listdir", lambda path: [] if Path(path).name == "generations" else None)
                    assert shards[1].share_bytes() == whole // (7 - left), "no shard is looked at"
            change()
            assert [shard.share_bytes() for shard in shards[:3]] == [whole // left] * 3
    for shard in shards[1:]:
        shutil.rmtree(shard.directory)
    assert shards[0].share_bytes() == whole
    (shards[0].directory / "generations/one").mkdir(parents=True)
    assert shards[0].share_bytes() == whole // 2, "block caches have the other half"


def test_runs_and_caches_stay_within_the_memory_of_an_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the first database is read, while all other shards have runs as if there were no caches."""
    monkeypatch.undo()
    monkeypatch.setattr(options, "MEMORY_BYTES_MIN", 0)
    monkeypatch.setattr(rocksdb, "OPEN", opened := OpenGenerations())
    memory_bytes, rows, chance = 200_000, 100, random.Random(0)
    settings = {"memory": str(memory_bytes)}
    shards = [RocksDBBackend(tmp_path / "disk" / str(n), TABLES, clock.new_id, settings, tmp_path) for n in range(4)]
    newest: dict[RocksDBBackend, Pointer] = {}
    caches = set()
    calls = [*shards[1:] * 11, *shards[:1] * 25, *chance.choices(shards, k=100)]
    for step, shard in enumerate(calls):
        accepted, new = newest.get(shard), Pointer(step + 1, "w")
        if accepted:
            with shard.view(accepted) as view:
                users(view, "ann")
            shard.drop([held for held in shard.versions() if held != accepted])
        run = counts(*((chance.randbytes(8).hex(), step) for _ in range(rows)))
        shard.apply(accepted, new, run, {})
        shard.maintain(new)
        newest[shard] = new
        runs_bytes = sum(file.size_bytes for held in newest for file in held._read_version(newest[held]).files)
        caches.add(cache_bytes := sum(share.size_bytes for share in opened._shares.values()))
        assert runs_bytes + cache_bytes <= memory_bytes + 2 * len(shards) * run["counts"].size_bytes
    assert max(caches) == memory_bytes // 2, "all databases are read"


class Yielding(dict[Any, Any]):
    """A mapping that lets other threads run before it changes."""

    def pop(self, *args: Any) -> Any:
        time.sleep(0.001)
        return super().pop(*args)

    def __setitem__(self, key: object, value: object) -> None:
        time.sleep(0.001)
        super().__setitem__(key, value)


def test_threads_may_ask_at_once_for_the_shares_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(rocksdb, "_COUNTED", Yielding())
    shard = RocksDBBackend(tmp_path / "shard", TABLES, clock.new_id, {}, tmp_path)
    os.utime(tmp_path, (1, 1))  # the count is kept
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(lambda _: shard.share_bytes(), range(100)))) == 1


def test_commits_that_rewrite_all_of_a_shard_leave_something_to_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the newest commit has just merged cannot be moved: without an end to that, runs grow beyond the budget."""
    limit_bytes = 20_000
    monkeypatch.setattr(RocksDBBackend, "share_bytes", lambda _: limit_bytes)
    accepted, written, floors = None, [(f"user {i}", i) for i in range(1000)], set()
    with open_shard(tmp_path / "shard") as backend:
        for version in range(1, 9):
            new = Pointer(version, "w")
            backend.apply(accepted, new, counts(*written), {})
            backend.drop([held for held in backend.versions() if held not in (accepted, new)])
            backend.maintain(new)
            accepted = new
            floors.add(backend._read_version(new).generation)
        assert len(floors) > 3
        runs = backend._read_version(new).files
        assert sum(file.size_bytes for file in runs) < limit_bytes + 3 * counts(*written)["counts"].size_bytes
        with backend.view(new) as view:
            assert len(contents(view, "counts")) == len(written)


# Generations that come and go.


def moved_shard(backend: RocksDBBackend) -> Pointer:
    """Make one version, which is a generation and nothing else."""
    backend.load(P1, counts(*((name, i) for i, name in enumerate(NAMES))), {})
    backend.maintain(P1)
    backend.apply(P1, P2, {}, {})
    backend.drop([P1])
    return P2


def test_a_generation_stays_while_it_is_read_or_taken(shard: RocksDBBackend) -> None:
    """And goes with the next clean-up after that: local disk holds what is needed."""
    pointer = moved_shard(shard)
    (folder,) = generations(shard)
    view = shard.view(pointer)
    with lock_shared(folder):  # as a commit has it
        shard.drop([pointer])
        view_of = dict(contents(view, "counts"))
    assert view_of == {(name,): (i,) for i, name in enumerate(NAMES)}
    assert generations(shard) == [folder]
    view.close()
    shard.remove_leftovers(0)
    assert generations(shard) == []
    assert os.listdir(shard.directory / "staging") == []


def test_a_version_whose_generation_is_gone_is_not_there(shard: RocksDBBackend) -> None:
    """Somebody has cleaned the directory: an error, never an empty state."""
    pointer = moved_shard(shard)
    (folder,) = generations(shard)
    os.rename(folder, shard.directory.parent / "elsewhere")
    for ask in (shard.view, shard.freeze, lambda p: shard.apply(p, P3, {}, {})):
        with pytest.raises(NotFoundError):
            ask(pointer)
    assert shard.verify() == [folder]
    assert shard.versions() == []


def test_many_move_and_commit_at_once(shard: RocksDBBackend) -> None:
    """The state server moves while workers commit and drop: none loses what it builds on."""
    stop = threading.Event()
    base, expected = moved_shard(shard), {(name,): (i,) for i, name in enumerate(NAMES)}

    def care() -> int:
        done = 0
        while not stop.is_set():
            for pointer in shard.versions():
                try:
                    done += shard.maintain(pointer)
                except NotFoundError:
                    continue
            shard.remove_leftovers(0)
        return done

    with ThreadPoolExecutor(2) as threads:
        working = [threads.submit(care) for _ in range(2)]
        try:
            for step in range(3, repetitions(40, 400).stop):
                new, name = Pointer(step, "w"), NAMES[step % 7]
                shard.apply(base, new, counts((name, step)), {})
                expected[name,] = (step,)
                with shard.view(new) as view:
                    assert contents(view, "counts") == expected
                shard.drop([base])
                base = new
        finally:
            stop.set()
        assert sum(each.result() for each in working) > 0


def test_the_first_rows_of_a_database_cost_little(shard: RocksDBBackend) -> None:
    """Each micro-batch looks for the earliest of a shard's timers: it must not read a thousand of them."""
    shard.load(P1, counts(*((f"user {i}", i) for i in range(2000))), {})
    shard.maintain(P1)
    shard.apply(P1, P2, {}, {})
    with shard.view(P2) as view:
        assert len(next(view.scan("counts"))) < 100
        assert len(contents(view, "counts")) == 2000


def test_a_few_rows_of_a_key_with_very_many_cost_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By time or by whole key, also beside many other keys: what is read follows them."""
    many, others = range(20_000), [f"user {i}" for i in range(300)]
    rows = [*((user, 0, 0) for user in others), *(("ann", 10 * i, 0) for i in many)]
    hashes = [*range(len(others)), *(1_000 for _ in many)]
    read: list[int] = []
    run_of_rows = generation.run_of

    def counted(schema: TableSchema, rows: EncodedRows, stored: Any) -> Run:
        read.append(len(rows.keys))
        return run_of_rows(schema, rows, stored)

    monkeypatch.setattr(generation, "run_of", counted)
    monkeypatch.setattr(reads, "RUN_ROWS", 1_000)
    with RocksDBBackend(tmp_path / "visits", {"visits": VISITS}, clock.new_id) as backend:
        backend.load(P1, {"visits": run_of(VISITS, [(row, ("old",)) for row in rows], hashes)}, {})
        backend.maintain(P1)
        backend.apply(P1, P2, {}, {})
        with backend.view(P2) as view:
            for wanted in ([("ann", 1_000)] * 100, [*zip(others, range(300), strict=True), ("ann", 1_000)]):
                keys = keys_of(VISITS.prefix(1), [(user,) for user, _ in wanted], [hash_ for _, hash_ in wanted])
                at = np.array([100 * (user == "ann") * i for i, (user, _) in enumerate(wanted)])
                read.clear()
                found = list(view.scan_prefix("visits", KeyRanges(keys.hashes, keys.columns, at, at + 5)))
                assert sum(map(len, found)) == len(wanted)
                assert sum(read) < 8_000
            assert answers(view, "visits", keys_of(VISITS, rows[-5_000::50], [1_000] * 100)) == [("old",)] * 100
            monkeypatch.setattr(reads, "read_rows", None)
            assert answers(view, "visits", keys_of(VISITS, rows[-100:], [1_000] * 100)) == [("old",)] * 100


def test_a_key_with_very_many_rows_is_moved_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs are merged by ranges of its times, also those before 1970, in RocksDB's order."""
    monkeypatch.setattr(run_stack, "STRETCH_BYTES", 200_000)
    moved: list[int] = []
    encoded = moving._encoded

    def watched(table: StoredTable, run: Run) -> Any:
        moved.append(run.size_bytes)
        return encoded(table, run)

    monkeypatch.setattr(moving, "_encoded", watched)
    old, gone = [("ann", i, i % 3) for i in range(-9_000, 9_000)], [("ann", i, i % 3) for i in range(-900, 9_000, 2)]
    with RocksDBBackend(tmp_path / "visits", {"visits": VISITS}, clock.new_id) as backend:
        backend.load(P1, visits(old, ("old",)), {})
        backend.apply(P1, P2, visits(gone, None), {})
        backend.drop([P1])
        backend.maintain(P2)
        backend.apply(P2, P3, {}, {})
        with backend.view(P3) as view:
            assert visits_near(view, [("ann", -10_000, 10_000)]) == sorted(set(old) - set(gone), key=repr)
    assert len(moved) > 4
    assert max(moved) < 250_000


class SeeksOf:
    """A database, or an iterator of one, that notes what its iterators seek."""

    def __init__(self, inner: Any, sought: list[bytes]) -> None:
        self._inner, self._sought = inner, sought

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def iter(self, options: Any) -> SeeksOf:
        return SeeksOf(self._inner.iter(options), self._sought)

    def seek(self, key: bytes) -> None:
        self._sought.append(key)
        self._inner.seek(key)


def test_ranges_between_two_rows_are_not_sought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranges of a key with few rows cost as the rows; so do those after the last row."""
    sought: list[bytes] = []
    opened = GenerationView._open
    monkeypatch.setattr(GenerationView, "_open", lambda view: SeeksOf(opened(view), sought))
    rows = [("ann", 1_000 * i, 0) for i in range(300)]
    spans: list[Span] = [("ann", at, at + 40) for at in range(-5_000, 400_000, 100)]
    with RocksDBBackend(tmp_path / "visits", {"visits": VISITS}, clock.new_id) as backend:
        backend.load(P1, visits([*rows, ("ann", 1_050, 0)], ("old",)), {})
        backend.maintain(P1)
        backend.apply(P1, P2, {}, {})
        with backend.view(P2) as view:
            assert visits_near(view, spans) == sorted(rows, key=repr)
    assert 0 < len(sought) < 320


def test_a_generation_has_the_crowds_of_the_one_before(tmp_path: Path) -> None:
    """They are met by reading all of a key once, not again whenever the state server has moved a few runs."""
    pointers = [Pointer(version, f"{version}aa") for version in range(1, 6)]
    ann = keys_of(VISITS.prefix(1), [("ann",)], [HASH_OF_USER["ann"]])
    with RocksDBBackend(tmp_path / "visits", {"visits": VISITS}, clock.new_id) as backend:
        backend.load(pointers[0], visits([("ann", at, 0) for at in range(2_000)], ("old",)), {})
        backend.maintain(pointers[0])
        backend.apply(*pointers[:2], {}, {})
        with backend.view(pointers[1]) as view:
            assert view.crowded("visits").tolist() == []
            assert sum(map(len, view.scan_prefix("visits", ann))) == 2_000
            assert view.crowded("visits").tolist() == [HASH_OF_USER["ann"]]
        backend.apply(*pointers[1:3], visits([("ann", 3_000, 0)], ("new",)), {})
        backend.apply(*pointers[2:4], {}, {})
        backend.drop(pointers[:2])
        assert backend.maintain(pointers[3]) == 1
        backend.apply(*pointers[3:], {}, {})
        assert len(generations(backend)) == 2
        with backend.view(pointers[4]) as view:
            assert view.crowded("visits").tolist() == [HASH_OF_USER["ann"]]


def test_rows_in_the_order_of_time_are_counted_like_others(shard: RocksDBBackend) -> None:
    """Times are not spread evenly as hashes are: one far away must not make thousands of rows billions."""
    near, far = range(20_000), 1 << 62
    by_time = run_of(TABLES["counts"], [((f"user {i}",), (i,)) for i in [*near, far]], [*near, far])
    by_hash = run_of(TABLES["members"], [((f"user {i}".encode(),), ()) for i in range(5000)])
    shard.load(P1, {"counts": by_time, "members": by_hash}, {})
    shard.maintain(P1)
    shard.apply(P1, P2, {}, {})
    rows = shard.statistics().rows
    assert rows["counts"] == pytest.approx(len(by_time), rel=0.1)
    assert rows["members"] == pytest.approx(len(by_hash), rel=0.1)


def test_tables_that_did_not_change_are_the_same_files(shard: RocksDBBackend) -> None:
    """An upload of the next generation sends what is new: by inode, as snapshots know files."""
    pointer = moved_shard(shard)
    first = {file.stat().st_ino for file in shard.freeze(pointer) if file.suffix == ".sst"}
    shard.apply(pointer, P3, {"members": run_of(TABLES["members"], [((b"x",), ())])}, {})
    shard.drop([pointer])
    shard.maintain(P3)
    last = Pointer(4, "x")
    shard.apply(P3, last, {}, {})
    second = {file.stat().st_ino for file in shard.freeze(last) if file.suffix == ".sst"}
    assert first
    assert first < second


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_generation_is_synced_if_its_rows_are_nowhere_else(
    shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch, is_durable: bool
) -> None:
    """After a power cut a query without a state directory still has its state; others restore it."""
    synced: dict[int, int] = {}

    def fsync(file: int) -> None:
        found = os.fstat(file)
        synced[found.st_ino] = found.st_size

    monkeypatch.setattr(os, "fsync", fsync)
    if is_durable:
        (shard.directory / DURABLE).touch()
    moved_shard(shard)
    (folder,) = generations(shard)
    files = [path.stat() for path in folder.iterdir() if not path.is_symlink()]
    assert [synced.get(file.st_ino) for file in files] == [None if is_durable else file.st_size for file in files]
    assert [path.stat().st_ino in synced for path in (folder, folder.parent)] == [not is_durable] * 2


# Processes, memory and disks.


def test_caches_of_an_executor_are_shared_out_among_its_processes(tmp_path: Path) -> None:
    """All have as much, and none takes what another still has; one that has ended does not count."""
    first = CacheShare(tmp_path / READERS, "first")
    first.share_out(64 << 20)
    assert first.size_bytes == 64 << 20
    second = CacheShare(tmp_path / READERS, "second")
    for share, size_bytes in ((second, 0), (first, 32 << 20), (second, 32 << 20), (first, 32 << 20)):
        share.share_out(64 << 20)
        assert share.size_bytes == size_bytes
    second.close()
    (tmp_path / READERS / "third.9").mkdir()  # of a process that was killed
    first.share_out(64 << 20)
    assert first.size_bytes == 64 << 20
    assert os.listdir(tmp_path / READERS) == [f"first.{64 << 20}"]
    third = CacheShare(tmp_path / READERS, "third")
    first.close()  # it has ended, and nobody else takes notice
    third.share_out(64 << 20)
    assert third.size_bytes == 64 << 20


def test_few_generations_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor with hundreds of shards: the most recently used ones do."""
    monkeypatch.setattr(generation, "MOST_OPEN", 3)
    monkeypatch.setattr(rocksdb, "OPEN", opened := OpenGenerations())
    shards = [open_shard(tmp_path / str(n)) for n in range(5)]
    for shard in [*shards, *shards]:
        pointer = max(shard.versions(), default=None) or moved_shard(shard)
        with shard.view(pointer) as view:
            assert len(contents(view, "counts")) == len(NAMES)
    assert len(opened._open) == 3


def open_files(folder: Path) -> int:
    """Return how many files below a folder this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(path.startswith(f"{folder}/") for path in found)


def test_open_tables_leave_descriptors_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Databases of many shards have thousands of tables, and a worker without descriptors fails in all it does."""
    for name, value in (("CHUNK_KEYS", 100), ("TABLE_BYTES", 1)):
        monkeypatch.setattr(moving, name, value)
    monkeypatch.setattr(rocksdb, "OPEN", opened := OpenGenerations())
    shards = [open_shard(tmp_path / str(n)) for n in range(6)]
    for shard in shards:
        shard.load(P1, counts(*((f"user {i}", i) for i in range(1000))), {})
        shard.maintain(P1)
        shard.apply(P1, P2, {}, {})
    limits = {resource.RLIMIT_NOFILE: (120, 120), resource.RLIMIT_AS: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    for shard in shards * 2:
        with shard.view(P2) as view:
            assert len(contents(view, "counts")) == 1000
    assert 1 < len(opened._open) < len(shards)
    assert 20 <= open_files(tmp_path) <= 30
    limits[resource.RLIMIT_NOFILE] = (resource.RLIM_INFINITY,) * 2
    for shard in shards:
        shard.view(P2).close()
    assert len(opened._open) == len(shards)


@pytest.mark.all
@pytest.mark.slow(30)
def test_two_hundred_shards_share_an_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the least memory: all answers are right, and what lies in runs, caches and open files is bounded."""
    monkeypatch.undo()
    monkeypatch.setattr(rocksdb, "OPEN", opened := OpenGenerations())
    home, settings = tmp_path / "disk" / "query" / "totals", {"memory": f"{options.MEMORY_BYTES_MIN}"}
    shards = [RocksDBBackend(home / str(n), TABLES, clock.new_id, settings, tmp_path) for n in range(200)]
    batches, accepted = range(1, 6), dict[RocksDBBackend, Pointer]()
    for shard in shards:
        (shard.directory / DURABLE).touch()  # nothing is synced
    many = [(f"user {i}", i) for i in range(3000)]  # more than a shard's part of the memory
    for batch in batches:
        for number, shard in enumerate(shards):
            base, new = accepted.get(shard), Pointer(batch, clock.new_id())
            if base is not None:
                with shard.view(base) as view:
                    assert users(view, "ann", "user 7", "bob") == [(number + batch - 1,), (7,), None]
            shard.drop([held for held in shard.versions() if held != base])
            shard.apply(base, new, counts(("ann", number + batch), *(many if batch < 3 else ())), {})
            shard.maintain(new)
            accepted[shard] = new
    runs_bytes = sum(file.size_bytes for shard in shards for file in shard._read_version(accepted[shard]).files)
    (share,) = opened._shares.values()
    assert runs_bytes + share.size_bytes <= options.MEMORY_BYTES_MIN
    assert len(opened._open) == generation.MOST_OPEN
    assert open_files(tmp_path) < 1000
    for number, shard in enumerate(shards):
        assert generations(shard)
        assert os.listdir(shard.directory / "staging") == []
        with shard.view(accepted[shard]) as view:
            assert users(view, "ann") == [(number + batches[-1],)]
            assert sum(map(len, view.scan("counts"))) == 1 + len(many)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_opens_its_own(shard: RocksDBBackend) -> None:
    """Spark's daemon forks its workers: a view of the parent says so, a new one works."""
    pointer = moved_shard(shard)
    view = shard.view(pointer)
    assert users(view, "u1") == [(1,)]
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            users(view, "u1")
        except ClosedError:
            with shard.view(pointer) as own:
                os._exit(users(own, "u2") == [(2,)])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert users(view, "u3") == [(3,)]
    view.close()
    OPEN.close_removed()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few blocks: the kernel refuses writes as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_a_move_and_nothing_else(shard: RocksDBBackend) -> None:
    """The version stays as it was, nothing is left behind, and when there is room the move is done."""
    rows = [(os.urandom(16).hex(), 1) for _ in range(20_000)]
    shard.load(P1, counts(*rows), {})
    with full_disk(), pytest.raises(UnavailableError, match=r"no space left.*free space"):
        shard.maintain(P1)
    assert generations(shard) == []
    assert os.listdir(shard.directory / "staging") == []
    assert shard.maintain(P1) == 1
    shard.apply(P1, P2, {}, {})
    with shard.view(P2) as view:
        assert len(contents(view, "counts")) == len(rows)


def test_options_are_read() -> None:
    found = RocksDBBackend.parse_options("rocksdb", {"memory": "1g", "compression": "ZSTD"})
    assert found == {"memory_bytes": 1 << 30, "compression": "zstd"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "15m"}, r"spark\.holdfast\.rocksdb\.memory is too small.*16m or more"),
        ({"memory": "much"}, "a size such as 512m"),
        ({"compression": "gzip"}, "must be one of none, lz4, zstd"),
        ({"blockSize": "4k"}, "unknown setting"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        RocksDBBackend.parse_options("rocksdb", options)
