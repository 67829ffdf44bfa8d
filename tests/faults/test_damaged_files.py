"""Damaged local files on every backend: an error that names the file, or a clean restore; never wrong data.

Every kind of file that a backend leaves, after a clean close and after a kill, has bytes flipped and is cut. Then a
worker opens the shard in one of three ways, goes on from the query's pointer, commits and freezes:

rot      a file changed silently since a former process wrote it; the new one verifies what it finds
touched  something wrote to a file that is in use; nobody verifies
upload   a file changed silently, and nobody verifies before an upload
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.backends.base import Backend, Pointer
from holdfast.errors import CorruptionError, HoldfastError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from tests.damage import flip
from tests.model.built_in import BUILT_IN, copy_at_rest, copy_directory, open_backend
from tests.model.steps import TABLES, commit_log, look_after, step_of, take_step, write
from tests.tiers import ALL, LONG, cases

STEPS = 7  # no step, nor the next one, begins at another than the one before
FLIPS, FILES = (25, 3) if LONG else (5, 1)

# The files that make up a version: their damage must be noticed.
RUNS = {"versions/version", "versions/.arrow"}
MERGES = {"merges/merge", "merges/.arrow"}
GENERATIONS = {f"generations/{name}" for name in (".sst", "MANIFEST", "CURRENT", "generation")}


class Shard(NamedTuple):
    """What a process left: the directory, its log, and what the query knows."""

    backend_name: str
    directory: Path
    log: ObjectCommitLog
    steps: dict[Pointer, int]

    @property
    def state(self) -> set[str]:
        """The files that make up its versions: with no share at all, runs are moved, and none is merged."""
        return RUNS | (GENERATIONS if self.backend_name == "rocksdb" else MERGES)

    @property
    def last(self) -> Pointer:
        return list(self.steps)[-1]


@pytest.fixture(params=cases(list(itertools.product(BUILT_IN, ["killed", "closed"]))), ids="-".join)
def shard(request: pytest.FixtureRequest, ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shard]:
    """Make a shard with several versions, merges and frozen files, closed cleanly or as a kill leaves it."""
    backend_name, end = request.param
    monkeypatch.setattr("holdfast.backends.run_files.backend.COMMIT_MERGE_LIMIT_BYTES", 0)
    monkeypatch.setattr("holdfast.backends.rocksdb.backend.RocksDBBackend.share_bytes", lambda _: 0)
    pointers: dict[int, Pointer] = {}
    with commit_log(ram_path, backend_name) as log:
        with open_backend(backend_name, ram_path / "shard", TABLES) as backend:
            for step in range(1, STEPS + 1):
                take_step(backend, log, step, pointers)
                look_after(backend, log, step, pointers[step])
            backend.freeze(pointers[STEPS])
            copy_at_rest(ram_path / "shard", ram_path / "killed")
        directory = ram_path / "shard" if end == "closed" else ram_path / "killed"
        yield Shard(backend_name, directory, log, {pointer: step for step, pointer in pointers.items()})


def kind_of(file: Path, directory: Path) -> str:
    """Return what a file is: its folder's name and its own, without what chance or a counter chose."""
    parts = file.relative_to(directory).parts
    name = re.sub(r"[0-9a-f]{16}", "", parts[-1])
    return f"{parts[0]}/{re.sub(r'[-.]?[0-9]{4,}', '', name)}" if len(parts) > 1 else name


class Damage(NamedTuple):
    """A change to a file: flip one bit of the byte at an offset, or cut it there."""

    kind: str
    file: Path
    offset: int
    is_cut: bool

    def inflict(self, directory: Path, *, keep_time: bool) -> None:
        """Change the file in place, so in all its links."""
        path = directory / self.file
        times = path.stat()
        if self.is_cut:
            os.truncate(path, self.offset)
        else:
            flip(path, self.offset)
        if keep_time:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def damages(shard: Shard, chance: random.Random) -> Iterator[Damage]:
    """Yield damages to some files of every kind: flips from the first byte to the last one, and cuts."""
    by_kind: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(shard.directory.rglob("*")):
        if file.stat().st_size and file.is_file():
            by_kind[kind_of(file, shard.directory)].append(file)
    for kind, files in sorted(by_kind.items()):
        for file in sorted(files, key=lambda file: -file.stat().st_size)[:FILES]:
            size = file.stat().st_size
            flips = {0, size - 1, *(chance.randrange(size) for _ in range(FLIPS - 2))}
            cuts = {0, 1, size // 2, size - 1} - {size}
            if kind not in shard.state and not ALL:
                flips, cuts = {size // 2}, {0}  # logs, locks, copies of options: of no consequence
            for offset in sorted(flips):
                yield Damage(kind, file.relative_to(shard.directory), offset, is_cut=False)
            for offset in sorted(cuts):
                yield Damage(kind, file.relative_to(shard.directory), offset, is_cut=True)


# What a worker does with it.


def check_held(backend: Backend, shard: Shard) -> None:
    for pointer in backend.versions():
        with backend.view(pointer) as view:
            assert shard.steps[pointer] == step_of(view)


def go_on(backend: Backend, shard: Shard) -> None:
    with VersionedStore(backend, shard.log).begin(shard.last) as transaction:
        assert step_of(transaction) == STEPS
        write(transaction, STEPS + 1)
        new = transaction.commit()
    assert new is not None
    with backend.view(new) as view:
        assert step_of(view) == STEPS + 1
    backend.maintain(new)
    check_frozen(backend, new, STEPS + 1)


def check_frozen(backend: Backend, pointer: Pointer, step: int) -> None:
    """Frozen files are whole: thawed in a directory of their own, they are the version."""
    home = backend.directory.parent / f"thawed-{backend.new_id()}"
    folder = home / "frozen copies"
    folder.mkdir(parents=True)
    for file in backend.freeze(pointer):
        shutil.copyfile(file, folder / file.name)
    with type(backend)(home, TABLES, backend.new_id) as thawed:
        thawed.thaw(pointer, folder)
        assert thawed.verify() == [], "a damaged copy was frozen"
        assert thawed.versions() == [pointer]
        with thawed.view(pointer) as view:
            assert step_of(view) == step
    shutil.rmtree(home)


def rot(backend: Backend, shard: Shard) -> list[Path]:
    damaged = backend.verify()
    check_held(backend, shard)
    go_on(backend, shard)
    check_frozen(backend, shard.last, STEPS)
    return damaged


def touched(backend: Backend, shard: Shard) -> list[Path]:
    check_held(backend, shard)
    go_on(backend, shard)
    return []


def upload(backend: Backend, shard: Shard) -> list[Path]:
    for pointer in reversed(backend.versions()):
        check_frozen(backend, pointer, shard.steps[pointer])
    return []


WAYS: list[Callable[[Backend, Shard], list[Path]]] = [rot, touched, upload]


def outcome_of(damage: Damage, way: Callable[[Backend, Shard], list[Path]], shard: Shard, directory: Path) -> str:
    """Inflict a damage on a copy of the shard, go on, and say how it went; wrong data fails."""
    copy_directory(shard.directory, directory)
    damage.inflict(directory, keep_time=way is not touched)
    outcome, message = "harmless", ""
    # Each error sets something aside, or says what stands in the way of it: so the next attempt gets further.
    for _ in range(4):
        try:
            with open_backend(shard.backend_name, directory, TABLES) as backend:
                named = way(backend, shard)
            if named:
                outcome, message = "verified", " ".join(map(str, named))
            break
        except CorruptionError as exc:
            outcome, message = "refused", str(exc)
    else:
        raise AssertionError("the error came again and again")
    assert outcome == "harmless" or damage.file.name in message, f"not named, but: {message}"
    with open_backend(shard.backend_name, directory, TABLES) as backend:
        if way is upload:
            check_held(backend, shard)
            go_on(backend, shard)
    shutil.rmtree(directory)
    return outcome


@pytest.mark.slow
@pytest.mark.timeout(3600 if LONG else 300)
def test_a_damaged_file_is_never_wrong_data(shard: Shard, ram_path: Path) -> None:
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for damage in damages(shard, random.Random(1)):
        for way in WAYS:
            try:
                outcome = outcome_of(damage, way, shard, ram_path / "damaged")
            except (AssertionError, HoldfastError) as exc:
                exc.add_note(f"{way.__name__}: {damage}")
                raise
            outcomes[damage.kind][outcome] += 1
    print(shard.backend_name, {kind: dict(counted) for kind, counted in outcomes.items()})
    assert shard.state <= outcomes.keys(), "every kind of file was hit"
    for kind in shard.state:
        # What a merge says is the same as its inputs.
        least = 1 if kind == "merges/merge" else outcomes[kind].total()
        assert outcomes[kind]["verified"] + outcomes[kind]["refused"] >= least, kind
