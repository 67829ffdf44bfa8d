"""Snapshots: what is sent and what is not, and restoring on every backend."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typing_extensions import Buffer

from holdfast.backends.base import Pointer
from holdfast.clock import new_id
from holdfast.errors import HoldfastError, UnavailableError
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.snapshots import snapshots as snapshots_module
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage, WrappedStorage
from tests.model.built_in import BUILT_IN
from tests.unit.snapshotter.snapshots.shard import SHARD, Opener, states


@pytest.mark.parametrize("writer", BUILT_IN)
@pytest.mark.parametrize("reader", BUILT_IN)
def test_every_backend_restores_what_any_backend_stored(shard_of: Opener, writer: str, reader: str) -> None:
    """A snapshot and commits on it, and the next commit and snapshot on that; nothing depends on who wrote it."""
    one, other = shard_of(writer), shard_of(reader)
    base = one.write(one.write(None, range(100), 1), range(50), 2)
    one.snapshot(base)
    last = one.write(one.write(base, range(10), 3), range(90, 120), 4)
    wanted = states((range(100), 1), (range(50), 2), (range(10), 3), (range(90, 120), 4))
    assert other.state(last) == wanted
    after = other.write(last, range(5), 5)
    other.snapshot(after)
    newest = other.write(after, range(1), 6)
    assert shard_of(writer).state(newest) == wanted | states((range(5), 5), (range(1), 6))


@pytest.mark.slow(0.5)
@pytest.mark.parametrize("backend_name", BUILT_IN)
def test_files_that_are_stored_are_not_sent_again(shard_of: Opener, storage: ObjectStorage, backend_name: str) -> None:
    """Also by the executor that restored them."""
    one = shard_of(backend_name)
    base = one.write(None, range(5000), 1)
    _, first = one.snapshot(base)
    assert first.new_bytes == first.stored_bytes > 10_000
    small = one.write(base, range(3), 2)
    _, second = one.snapshot(small)
    assert second.new_bytes < first.stored_bytes / 5
    assert second.stored_bytes > first.stored_bytes / 2
    last = one.write(small, range(2), 3)
    other = shard_of(backend_name)
    wanted = states((range(5000), 1), (range(3), 2), (range(2), 3))
    assert other.state(last) == wanted
    _, third = other.snapshot(last)
    assert third.new_bytes < first.stored_bytes / 5
    newest = other.write(last, range(1), 4)
    assert shard_of(backend_name).state(newest) == wanted | states((range(1), 4))
    parts = {info.key for info in storage.list(f"{SHARD}/files/")}
    named = {f"{SHARD}/{p.key}" for m in (first, second, third) for file in m.files for p in file.parts}
    assert parts == named, "nothing was stored that no manifest names"


@pytest.mark.parametrize("backend_name", BUILT_IN)
def test_parts_that_are_gone_are_sent_again(shard_of: Opener, storage: ObjectStorage, backend_name: str) -> None:
    """Where somebody has a doubt: a later restore finds them."""
    one = shard_of(backend_name)
    base = one.write(None, range(5000), 1)
    _, first = one.snapshot(base)
    small = one.write(base, range(3), 2)
    lost = max(first.files, key=lambda file: file.size_bytes)
    storage.delete([f"{SHARD}/{lost.parts[0].key}"])
    with one.log.snapshots.frozen(one.backend, small) as frozen:
        _, second = one.log.snapshots.store(frozen, backend_name, is_sure=False)
    assert second.new_bytes >= lost.stored_bytes
    last = one.write(small, range(1), 3)
    assert shard_of(backend_name).state(last) == states((range(5000), 1), (range(3), 2), (range(1), 3))


def test_a_file_that_is_cut_while_it_is_sent_is_no_snapshot(storage: ObjectStorage, tmp_path: Path) -> None:
    """Else a manifest would name a part that holds less than it says, and nobody would know before a restore."""
    path = tmp_path / "000001.sst"
    path.write_bytes(bytes(3000))

    class Cutting(WrappedStorage):
        def put(self, key: str, data: Buffer) -> None:
            super().put(key, data)
            os.truncate(path, 1500)

    shard = PrefixedStorage(Cutting(storage), SHARD)
    with ThreadPoolExecutor(1) as executor, pytest.raises(UnavailableError, match="was cut while it was stored"):
        snapshots_module.upload_files([path], 1000, shard, executor, new_id)


@pytest.mark.parametrize("going", ["*", "*.arrow"])
def test_files_that_vanish_before_they_are_sent_are_not_left_out(
    shard_of: Opener, storage: ObjectStorage, going: str
) -> None:
    """Another program tidies the temporary directory up: a snapshot without them looked whole to all but a restore."""
    one = shard_of("memory")
    pointer = one.write(None, range(10), 1)
    with one.log.snapshots.frozen(one.backend, pointer) as frozen:
        for path in frozen.folder.glob(going):
            path.unlink()
        with pytest.raises(UnavailableError, match="vanished during its upload"):
            one.log.snapshots.store(frozen, "memory")
    assert not storage.list(f"{SHARD}/snapshots/")


def test_a_file_of_the_same_name_and_size_is_sent(shard_of: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and sizes repeat after a rollback: only inode and time tell that a file is the one that was stored."""
    one, other = shard_of(), shard_of()
    base = one.write(None, range(100), 1)
    one.snapshot(base)
    after = one.write(base, range(100), 2)
    (path,) = (p for p in one.backend.freeze(after) if p.suffix == ".arrow")
    twin = path.with_name("twin")
    twin.write_bytes(path.read_bytes())
    twin.rename(path)
    _, manifest = one.snapshot(after)
    assert manifest.new_bytes == manifest.stored_bytes
    assert other.state(one.write(after, range(1), 3)) == states((range(100), 2), (range(1), 3))


def test_large_files_travel_in_parts(shard_of: Opener, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.snapshotter.snapshots.snapshots.PART_BYTES", 1000)
    one = shard_of()
    base = one.write(None, range(2000), 1)
    _, manifest = one.snapshot(base)
    assert max(len(file.parts) for file in manifest.files) > 20
    last = one.write(base, range(1), 2)
    monkeypatch.undo()  # a reader goes by what the manifest says
    assert shard_of().state(last) == states((range(2000), 1), (range(1), 2))


def test_a_snapshot_that_does_not_fit_on_the_disk_says_so_before_it_begins(
    shard_of: Opener, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = shard_of()
    entry, _ = one.snapshot(one.write(None, range(3000), 1))
    usage = snapshots_module.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(snapshots_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UnavailableError, match="no space left") as caught, one.log.snapshots.downloaded(entry):
        pass
    assert caught.value.facts["free_bytes"] == 1000


def test_what_a_killed_process_left_is_swept(shard_of: Opener, tmp_path: Path) -> None:
    one = shard_of()
    for folder in ("uploading/1", "restoring/2"):
        (tmp_path / "executor-0" / folder).mkdir(parents=True)
    assert one.log.snapshots.remove_leftovers(0) == 0
    assert one.log.snapshots.remove_leftovers(2**63) == 2


def test_a_note_that_does_not_fit_on_the_disk_leaves_nothing(shard_of: Opener) -> None:
    """Snapshots are tried again and again: each left half a note, which nobody lists, on a disk that was full."""
    one = shard_of("memory")
    base = one.write(None, range(10), 1)
    one.snapshot(base)
    notes = one.backend.directory / "snapshots"
    newer = one.write(base, range(10), 2)
    with (
        one.log.snapshots.frozen(one.backend, newer) as frozen,
        nothing_more_fits(),
        pytest.raises(UnavailableError, match="File too large"),
    ):
        one.log.snapshots.store(frozen, "memory")
    assert os.listdir(notes) == [str(base)]


def test_a_note_is_private_whatever_the_umask(shard_of: Opener) -> None:
    """A worker leaves one, too, once it has restored: it has the mask that its executor was started with."""
    one = shard_of("memory")
    before = os.umask(0)
    try:
        one.snapshot(one.write(None, range(10), 1))
    finally:
        os.umask(before)
    (note,) = (one.backend.directory / "snapshots").iterdir()
    assert note.stat().st_mode & 0o077 == 0


@contextmanager
def nothing_more_fits() -> Iterator[None]:
    """Let no file grow beyond a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_version_that_was_dropped_has_no_snapshot(shard_of: Opener, storage: ObjectStorage) -> None:
    one = shard_of()
    base = one.write(None, range(3), 1)
    after = one.write(base, range(3), 2)
    one.store.prune(after)
    with pytest.raises(HoldfastError):
        one.snapshot(base)
    assert not storage.list(f"{SHARD}/snapshots/")


def test_a_lineage_survives_json() -> None:
    entry = ChainEntry("commit", Pointer(1, "aa"), 3, "0" * 32)
    lineage = Lineage((replace(entry, kind="snapshot"), entry), (Pointer(2, "bb"),), entry)
    assert Lineage.of(json.loads(json.dumps(lineage.to_json()))) == lineage
    assert lineage.to_json()["last"] == asdict(entry) | {"pointer": "1-aa"}


@pytest.mark.slow(1)
def test_what_lies_in_a_generation_is_sent_once(shard_of: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of the versions above it has their runs, and the same files below."""
    monkeypatch.setattr("holdfast.backends.rocksdb.backend.RocksDBBackend.share_bytes", lambda _: 0)
    one = shard_of("rocksdb")
    pointer = one.write(None, range(20_000), 0)
    assert one.backend.maintain(pointer) == 1
    pointer = one.write(pointer, range(10), 1)
    one.snapshot(pointer)
    for n in range(2, 5):
        pointer = one.write(pointer, range(n, n + 200), n)
        _, manifest = one.snapshot(pointer)
        assert any(file.name.endswith(".sst") for file in manifest.files)
        assert manifest.new_bytes < manifest.stored_bytes / 5, n
    other = shard_of("rocksdb")
    assert other.state(pointer) == one.state(pointer)
