"""Snapshots: when one is made, what is sent, how each backend restores it, and the way around damaged ones."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typing_extensions import Buffer

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.clock import new_id
from holdfast.errors import CorruptionError, HoldfastError, StateLostError, UnavailableError
from holdfast.snapshotter import snapshots as snapshots_module
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage, WrappedStorage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.damage import flipped
from tests.fuzz.forge import digest_of, put_together, take_apart, with_header
from tests.model.built_in import BUILT_IN
from tests.tiers import cases
from tests.unit.snapshotter.conftest import PREFIX, Shard
from tests.unit.snapshotter.snapshots.conftest import Opener, states


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
    parts = {info.key for info in storage.list(f"{PREFIX}/files/")}
    named = {f"{PREFIX}/{p.key}" for m in (first, second, third) for file in m.files for p in file.parts}
    assert parts == named, "nothing was stored that no manifest names"


@pytest.mark.parametrize("backend_name", BUILT_IN)
def test_parts_that_are_gone_are_sent_again(shard_of: Opener, storage: ObjectStorage, backend_name: str) -> None:
    """Where somebody has a doubt: a later restore finds them."""
    one = shard_of(backend_name)
    base = one.write(None, range(5000), 1)
    _, first = one.snapshot(base)
    small = one.write(base, range(3), 2)
    lost = max(first.files, key=lambda file: file.size_bytes)
    storage.delete([f"{PREFIX}/{lost.parts[0].key}"])
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

    shard = PrefixedStorage(Cutting(storage), PREFIX)
    with ThreadPoolExecutor(1) as executor, pytest.raises(UnavailableError, match="was truncated while it was"):
        snapshots_module.upload_files([path], 1000, shard, executor, new_id)


@pytest.mark.parametrize("going", ["*", "*.arrow"])
def test_vanished_files_are_not_left_out(shard_of: Opener, storage: ObjectStorage, going: str) -> None:
    """Another program tidies the temporary directory up: a snapshot without them looked whole to all but a restore."""
    one = shard_of("memory")
    pointer = one.write(None, range(10), 1)
    with one.log.snapshots.frozen(one.backend, pointer) as frozen:
        for path in frozen.folder.glob(going):
            path.unlink()
        with pytest.raises(UnavailableError, match="vanished during its upload"):
            one.log.snapshots.store(frozen, "memory")
    assert not storage.list(f"{PREFIX}/snapshots/")


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
    monkeypatch.setattr("holdfast.snapshotter.snapshots.PART_BYTES", 1000)
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
    assert not storage.list(f"{PREFIX}/snapshots/")


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


@pytest.mark.slow(1)
def test_small_commits_cost_no_requests_until_they_are_large(shard_of: Opener, storage: ObjectStorage) -> None:
    one = shard_of(carried_bytes=3000)
    pointers: list[Pointer] = []
    for n in range(150):
        pointers.append(one.write(pointers[-1] if pointers else None, range(n, n + 2), n))
    objects = [info.key for info in storage.list(f"{PREFIX}/commits/")]
    assert 1 < len(objects) < 40
    assert all(len(data) <= 3000 for data in one.log.carried.values())
    for pointer in pointers[::10]:
        other = shard_of(carried_bytes=3000)
        carried = one.log.carried.get(pointer)
        other.log.carried.update({pointer: carried} if carried else {})
        n = pointers.index(pointer)
        assert other.state(pointer) == {f"user {i}": min(i, n) for i in range(n + 2)}
        after = other.write(pointer, range(1), 999)
        assert other.state(after)["user 0"] == 999


def test_a_carried_commit_goes_on_over_a_snapshot(shard_of: Opener, storage: ObjectStorage) -> None:
    one = shard_of(carried_bytes=4000)
    first = one.write(None, range(2000), 1)  # an object
    second = one.write(first, range(5), 2)
    entry, _ = one.snapshot(second)
    third = one.write(one.write(second, range(3), 3), range(1), 4)
    lineage = one.lineage(third)
    assert lineage.chain == (entry,)
    assert lineage.since[0] == second
    other = shard_of(carried_bytes=4000)
    other.log.carried = {third: one.log.carried[third]}
    wanted = states((range(2000), 1), (range(5), 2), (range(3), 3), (range(1), 4))
    assert other.state(third) == wanted
    storage.delete([f"{PREFIX}/{entry.key}"])
    third_executor = shard_of(carried_bytes=4000)
    third_executor.log.carried = {third: one.log.carried[third]}
    assert third_executor.state(third) == wanted, "the commit objects and the carried one are enough"


def test_what_a_snapshot_of_a_carried_version_has_stored_stays_known(shard_of: Opener) -> None:
    """A process that looks for the snapshots of others finds this one again; all was then sent anew."""
    one = shard_of(carried_bytes=4000)
    second = one.write(one.write(None, range(2000), 1), range(5), 2)
    one.snapshot(second)
    third = one.write(second, range(3), 3)
    one.log.snapshots.discover(one.lineage(third))
    _, manifest = one.snapshot(third)
    assert 0 < manifest.new_bytes < manifest.stored_bytes / 4


def test_a_carried_commit_that_did_not_come_is_an_error(shard_of: Opener) -> None:
    """Never a state without it."""
    one, other = shard_of(carried_bytes=4000), shard_of(carried_bytes=4000)
    second = one.write(one.write(None, range(3), 1), range(3), 2)
    with pytest.raises(StateLostError):
        other.store.begin(second)
    one.log.carried.clear()
    with pytest.raises(StateLostError, match="its own checkpoint location"):
        one.write(second, range(1), 3)


def test_a_carried_commit_that_was_altered_is_refused(shard_of: Opener) -> None:
    one, other = shard_of(carried_bytes=4000), shard_of(carried_bytes=4000)
    pointer = one.write(None, range(3), 1)
    other.log.carried[pointer] = flipped(one.log.carried[pointer])
    with pytest.raises(CorruptionError, match="the commit that the query carries"):
        other.store.begin(pointer)


# A way around damage.


def damage_of(storage: ObjectStorage, key: str, how: str) -> None:
    data = bytearray(storage.get(key))
    storage.delete([key])
    if how != "gone":
        data[len(data) // 3] ^= 1
        storage.put(key, bytes(data[: len(data) // 2] if how == "cut" else data))


@pytest.mark.parametrize("how", cases(["altered", "gone", "cut"]))
@pytest.mark.parametrize("what", ["manifest", "part"])
@pytest.mark.parametrize("backend_name", BUILT_IN)
def test_an_older_snapshot_and_the_commits_stand_in_for_a_damaged_one(
    shard_of: Opener, storage: ObjectStorage, caplog: pytest.LogCaptureFixture, backend_name: str, what: str, how: str
) -> None:
    """They give exactly the same version, and it is said."""
    one = shard_of(backend_name)
    base = one.write(None, range(300), 1)
    one.snapshot(base)
    newer = one.write(one.write(base, range(200), 2), range(200, 250), 3)
    entry, manifest = one.snapshot(newer)
    last = one.write(newer, range(10), 4)
    assert one.lineage(last).chain[0] == entry
    new = [p.key for file in manifest.files for p in file.parts if file.size_bytes]
    damage_of(storage, f"{PREFIX}/{entry.key if what == 'manifest' else new[-1]}", how)
    wanted = states((range(300), 1), (range(200), 2), (range(200, 250), 3), (range(10), 4))
    other = shard_of(backend_name)
    assert other.state(last) == wanted
    assert "restored without a damaged snapshot" in caplog.text
    assert (entry.key if what == "manifest" else new[-1]) in caplog.text
    assert other.state(other.write(last, range(1), 5)) == wanted | states((range(1), 5))


def test_a_snapshot_of_a_backend_that_is_not_installed_is_gone_around(
    shard_of: Opener, storage: ObjectStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """A plug-in may be gone, and a file may say anything: the commits do."""
    one = shard_of()
    base = one.write(None, range(30), 1)
    one.log.backend_name = "gone"
    entry, _ = one.snapshot(base)
    last = one.write(base, range(10), 2)
    assert one.lineage(last).chain[0] == entry
    assert shard_of().state(last) == states((range(30), 1), (range(10), 2))
    assert "no backend named 'gone'" in caplog.text
    storage.delete([f"{PREFIX}/commits/{base}"])
    with pytest.raises(CorruptionError, match=r"a backend that cannot be used here: no backend named 'gone'"):
        shard_of().store.begin(last)


def freeze_unreadable(shard: Shard, folder: Path) -> None:
    """Let a shard freeze files that are whole, but that no backend of this release opens."""
    freeze = shard.backend.freeze

    def altered(pointer: Pointer) -> list[Path]:
        home = folder / str(pointer)
        home.mkdir(parents=True)
        for path in freeze(pointer):
            data = path.read_bytes()
            if path.name == "version":
                data = put_together(*take_apart(data), version=2)
            elif path.name == "CURRENT":
                data = b"MANIFEST-999999\n"
            (home / path.name).write_bytes(data)
        return sorted(home.iterdir())

    shard.backend.freeze = altered  # type: ignore[method-assign]


@pytest.mark.parametrize(("writer", "reader"), cases([(w, r) for w in BUILT_IN for r in BUILT_IN], quick=3))
def test_snapshots_that_cannot_be_opened_are_gone_around(
    shard_of: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture, writer: str, reader: str
) -> None:
    """Another release wrote them, or they were damaged before their digests were taken; more of them than tries."""
    one = shard_of(writer)
    freeze_unreadable(one, tmp_path / "altered")
    pointer, wanted = one.write(None, range(30), 0), states((range(30), 0))
    for n in range(1, 7):
        entry, _ = one.snapshot(pointer)
        pointer = one.write(pointer, range(n), n)
        wanted |= states((range(n), n))
    assert one.lineage(pointer).chain[0] == entry
    other = shard_of(reader)
    assert other.state(pointer) == wanted
    assert "restored without a damaged snapshot" in caplog.text
    assert other.state(other.write(pointer, range(1), 9)) == wanted | states((range(1), 9))


@pytest.mark.parametrize("how", ["gone", "unreadable"])
def test_where_nothing_stands_in_the_damaged_object_is_named_and_nothing_local_changes(
    shard_of: Opener, storage: ObjectStorage, tmp_path: Path, how: str
) -> None:
    """The error names the commit that is missing, too; a second try is told the same."""
    one = shard_of()
    if how == "unreadable":
        freeze_unreadable(one, tmp_path / "altered")
    base = one.write(None, range(30), 1)
    entry, _ = one.snapshot(base)
    last = one.write(base, range(10), 2)
    storage.delete([f"{PREFIX}/commits/{base}", *[f"{PREFIX}/{entry.key}"] * (how == "gone")])
    other = shard_of()
    message = f"{entry.key} cannot be used: .*a different format" if how == "unreadable" else entry.key
    for _ in range(2):
        with pytest.raises(CorruptionError, match=message) as caught:
            other.store.begin(last)
        assert f"commits/{base}" in "".join(caught.value.__notes__)
    assert other.backend.versions() == []
    assert not [path for path in (tmp_path / "executor-1").rglob("*") if path.is_file()]


@pytest.mark.slow(0.5)
def test_every_request_of_a_restore_may_fail(shard_of: Opener, storage: ObjectStorage, tmp_path: Path) -> None:
    """A half-finished restore is never taken for a whole one, and leaves no file."""
    one = shard_of("rocksdb")
    base = one.write(None, range(300), 1)
    one.snapshot(base)
    last = one.write(base, range(10), 2)
    for nth in range(1, 100):
        other = shard_of("rocksdb")
        faulty = FaultyStorage(storage, [Fault("fail", action="get", nth=nth)])
        other.log.storage = faulty
        try:
            assert other.state(last) == states((range(300), 1), (range(10), 2))
            break
        except UnavailableError:
            faulty.assert_all_hit()
            other.log.storage = storage
            assert other.backend.versions() == []
            assert other.state(last) == states((range(300), 1), (range(10), 2))
    assert nth > 3
    assert not list(tmp_path.glob("executor-*/restoring/*"))


def test_every_request_of_a_snapshot_may_fail_and_commits_go_on(shard_of: Opener, storage: ObjectStorage) -> None:
    one = shard_of()
    pointer = one.write(None, range(300), 1)
    for nth in range(1, 100):
        faulty = FaultyStorage(storage, [Fault("fail", action="put", nth=nth)])
        one.log.storage = faulty
        try:
            entry, _ = one.snapshot(pointer)
            break
        except UnavailableError:
            faulty.assert_all_hit()
            one.log.storage = storage
            assert not storage.list(f"{PREFIX}/snapshots/")
            pointer = one.write(pointer, range(nth), nth)
            assert one.lineage(pointer).snapshot is None
    assert nth > 2
    one.log.storage = storage
    last = one.write(pointer, range(1), 1000)
    assert one.lineage(last).snapshot == entry
    assert shard_of().state(last) == one.state(last)


def test_an_upload_that_was_overtaken_by_a_clean_up_is_given_up(
    shard_of: Opener, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No manifest is stored that names what is gone."""
    monkeypatch.setattr("holdfast.snapshotter.snapshots.SURE_FOR_MS", 0)
    one = shard_of()
    base = one.write(None, range(30), 1)

    def clean_up() -> None:
        storage.delete([info.key for info in storage.list(f"{PREFIX}/files/")])

    one.log.storage = FaultyStorage(storage, [Fault("stop_after", action="put", key="*/files/*")], stop=clean_up)
    with pytest.raises(UnavailableError, match="took so long"):
        one.snapshot(base)
    assert not storage.list(f"{PREFIX}/snapshots/")
    one.log.storage = storage
    entry, _ = one.snapshot(base)
    assert one.lineage(one.write(base, range(1), 2)).snapshot == entry


def test_a_clean_up_that_took_long_before_the_upload_counts(
    shard_of: Opener, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last snapshot has stored may be gone by then, if the shard has moved: its new executor cleans up too."""
    one = shard_of()
    base = one.write(None, range(5000), 1)
    one.snapshot(base)
    pointer = one.write(base, range(3), 2)
    with one.log.snapshots.frozen(one.backend, pointer) as frozen:
        hour_later_ms = clock.monotonic_ms() + 3600_000
        monkeypatch.setattr(clock, "monotonic_ms", lambda: hour_later_ms)
        storage.delete([info.key for info in storage.list(f"{PREFIX}/files/")])
        with pytest.raises(UnavailableError, match="took so long"):
            one.log.snapshots.store(frozen, "memory")


# Manifests that somebody else wrote.


def forged(storage: ObjectStorage, entry: ChainEntry, change: Callable[[dict[str, object]], None]) -> ChainEntry:
    """Store an altered manifest under the name that its bytes ask for."""
    data = with_header(bytes(storage.get(f"{PREFIX}/{entry.key}")), change)
    made = replace(entry, size_bytes=len(data), digest=digest_of(data))
    storage.put(f"{PREFIX}/{made.key}", data)
    return made


def _path(name: str) -> Callable[[dict[str, object]], None]:
    return lambda header: header["files"][0].update(name=name)  # type: ignore[index]


def _key(key: str) -> Callable[[dict[str, object]], None]:
    return lambda header: header["files"][0]["parts"][0].update(key=key)  # type: ignore[index]


def _size(size_bytes: int) -> Callable[[dict[str, object]], None]:
    return lambda header: header["files"][0].update(size_bytes=size_bytes)  # type: ignore[index]


FORGERIES = {
    "a path": _path("../../outside"),
    "an absolute path": _path("/tmp/outside"),
    "a hidden name": _path(".profile"),
    "no name": _path(""),
    "a name twice": lambda header: header["files"].append(header["files"][0]),  # type: ignore[attr-defined]
    "a part elsewhere": _key("../shard-0004/files/aaaaaaaaaaaaaaaa-0"),
    "a part that is a commit": _key("commits/1-aa"),
    "an absurd size": _size(1 << 61),
    "a size that the parts do not have": _size(9),
    "parts of nothing": lambda header: header.update(part_bytes=0),
    "another version": lambda header: header.update(pointer="9-aa"),
    "another shard": lambda header: header.update(shard="totals/shard-0004"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_manifest_leads_nowhere_else(shard_of: Opener, storage: ObjectStorage, tmp_path: Path, name: str) -> None:
    one = shard_of()
    base = one.write(None, range(30), 1)
    entry, _ = one.snapshot(base)
    made = forged(storage, entry, FORGERIES[name])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CorruptionError, match=r"snapshots/|files/"), one.log.snapshots.downloaded(made):
        pass
    assert [p for p in sorted(tmp_path.rglob("*")) if p not in before and p.name != "restoring"] == []


def test_the_policy_looks_at_commits_their_bytes_and_the_time() -> None:
    commit = ChainEntry("commit", Pointer(1, "aa"), 100, "00")
    snapshot = replace(commit, kind="snapshot")

    def of(commits: int) -> Lineage:
        return Lineage((snapshot, *[commit] * commits), (), commit)

    policy = SnapshotPolicy(max_commits=3)
    assert [policy.is_due(of(n), 1e9) for n in (2, 3)] == [False, True]
    assert [policy.is_overdue(of(n)) for n in (11, 12)] == [False, True]
    assert [policy.is_full(of(n)) for n in (47, 48)] == [False, True]
    assert [SnapshotPolicy(max_bytes=200).is_due(of(n)) for n in (1, 2)] == [False, True]
    by_time = SnapshotPolicy(interval_seconds=60)
    assert [by_time.is_due(of(1), age) for age in (59.0, 60.0)] == [False, True]
    assert by_time.is_due(Lineage((snapshot,), (Pointer(2, "bb"),), commit), 60.0), "a carried commit is something new"
    assert not by_time.is_due(Lineage((snapshot,), (), commit), 60.0), "nothing was written since"


MIB = 1 << 20


@pytest.mark.parametrize(
    ("snapshot_mib", "commits_mib", "is_due"),
    [
        (None, [63], False),  # too little to count
        *((None, [64], True), (None, [900], True)),  # a first load
        *((1, [30, 30], False), (1, [30, 40], True)),
        *((1000, [300, 300], False), (1000, [300, 300, 400], True), (1000, [1000], True)),
    ],
)
def test_the_bytes_of_a_chain_follow_state(snapshot_mib: int | None, commits_mib: list[int], is_due: bool) -> None:
    """What is restored is about twice the snapshot at most, or 64 MiB more."""
    lineage = grown(snapshot_mib, commits_mib)
    assert SnapshotPolicy().is_due(lineage) is is_due


def grown(snapshot_mib: int | None, commits_mib: list[int]) -> Lineage:
    commits = [ChainEntry("commit", Pointer(i, "aa"), mib * MIB, "00") for i, mib in enumerate(commits_mib, start=2)]
    snapshot = ChainEntry("snapshot", Pointer(1, "aa"), 0, "00", (snapshot_mib or 0) * MIB)
    return Lineage((*([snapshot] if snapshot_mib else []), *commits), (), commits[-1])


def test_a_chain_cannot_grow_without_bound_in_bytes() -> None:
    """Large commits wait for a snapshot, and then fail, as many commits do; a few never fail, however large."""
    policy = SnapshotPolicy()
    assert [policy.is_overdue(grown(100, [100] * n)) for n in (3, 4)] == [False, True]
    assert [policy.is_full(grown(100, [100] * n)) for n in (15, 16)] == [False, True]
    assert not policy.is_overdue(grown(100, [5000] * 3)), "there must be time for a snapshot"
    assert [policy.is_full(grown(100, [5000] * n)) for n in (15, 16)] == [False, True]
    assert not policy.is_full(grown(None, [100] * 15))
    early = SnapshotPolicy(max_bytes=MIB)
    assert early.is_due(grown(100, [1]))
    assert not early.is_full(grown(100, [1] * 100)), "who wants snapshots early does not want to fail early"
    assert not SnapshotPolicy(max_commits=1000).is_overdue(grown(100, [1] * 399))
