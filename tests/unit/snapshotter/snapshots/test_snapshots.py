"""Snapshots: what is sent and what is not, restoring on every backend, carried commits, and a way around damage."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, HoldfastError, StateLostError, UnavailableError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.snapshots import transfer
from holdfast.snapshotter.snapshots.manifest import Manifest
from holdfast.snapshotter.storage.object_storage import ObjectStorage, open_storage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.testing.state_rows import COUNTS, contents, keys_of, values_of
from tests.model.built_in import BUILT_IN, open_backend

SHARD = "totals/shard-0003"
TABLES = {"counts": COUNTS}
_numbers = itertools.count()
Opener = Callable[..., "Shard"]


class Shard:
    """A shard on one executor."""

    def __init__(
        self, storage: ObjectStorage, executor: Executor, directory: Path, backend_name: str, carried_bytes: int
    ) -> None:
        self.storage = storage
        self.backend = open_backend(backend_name, directory, TABLES)
        self.log = ObjectCommitLog(storage, SHARD, TABLES, executor, directory, backend_name, carried_bytes)
        self.store = VersionedStore(self.backend, self.log)

    def write(self, base: Pointer | None, users: range, n: int) -> Pointer:
        with self.store.begin(base) as transaction:
            keys = keys_of(COUNTS, [(f"user {i}",) for i in users])
            transaction.put("counts", keys, values_of(COUNTS, [(n,)] * len(users)))
            pointer = transaction.commit()
        assert pointer is not None
        return pointer

    def state(self, pointer: Pointer) -> dict[str, int]:
        with self.store.read_at(pointer) as view:
            return {str(key[0]).removeprefix("user "): int(value[0]) for key, value in contents(view, "counts").items()}

    def lineage(self, pointer: Pointer) -> Lineage:
        with self.store.read_at(pointer) as view:
            return Lineage.of(view.properties)

    def snapshot(self, pointer: Pointer) -> tuple[ChainEntry, Manifest]:
        return self.log.write_snapshot(self.backend, pointer)


def states(*written: tuple[range, int]) -> dict[str, int]:
    return {str(i): n for users, n in written for i in users}


@pytest.fixture
def storage() -> Iterator[ObjectStorage]:
    with open_storage(f"memory://snapshots-{next(_numbers)}") as opened:
        yield opened


@pytest.fixture
def shard_of(storage: ObjectStorage, tmp_path: Path) -> Iterator[Opener]:
    """Open the shard on one more executor, which has nothing locally."""
    opened: list[Shard] = []
    with ThreadPoolExecutor(4) as executor:

        def open_shard(backend_name: str = "memory", carried_bytes: int = 0) -> Shard:
            shard = Shard(storage, executor, tmp_path / f"executor-{len(opened)}", backend_name, carried_bytes)
            opened.append(shard)
            return shard

        yield open_shard
        for shard in opened:
            shard.backend.close()


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


# Carried commits.


def test_small_commits_cost_no_requests_and_become_an_object_when_they_are_large(
    shard_of: Opener, storage: ObjectStorage
) -> None:
    one = shard_of(carried_bytes=3000)
    pointers: list[Pointer] = []
    for n in range(150):
        pointers.append(one.write(pointers[-1] if pointers else None, range(n, n + 2), n))
    objects = [info.key for info in storage.list(f"{SHARD}/commits/")]
    assert 1 < len(objects) < 40
    assert all(len(data) <= 3000 for data in one.log.carried.values())
    for pointer in pointers[::10]:
        other = shard_of(carried_bytes=3000)
        carried = one.log.carried.get(pointer)
        other.log.carried.update({pointer: carried} if carried else {})
        n = pointers.index(pointer)
        assert other.state(pointer) == {str(i): min(i, n) for i in range(n + 2)}
        after = other.write(pointer, range(1), 999)
        assert other.state(after)["0"] == 999


def test_a_carried_commit_goes_on_over_a_snapshot(shard_of: Opener, storage: ObjectStorage) -> None:
    """Versions whose commits are carried have snapshots too, and the next chain begins there."""
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
    storage.delete([f"{SHARD}/{entry.key}"])
    third_executor = shard_of(carried_bytes=4000)
    third_executor.log.carried = {third: one.log.carried[third]}
    assert third_executor.state(third) == wanted, "the commit objects and the carried one are enough"


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
    data = bytearray(one.log.carried[pointer])
    data[40] ^= 1
    other.log.carried[pointer] = bytes(data)
    with pytest.raises(CorruptionError, match="the commit that the query carries"):
        other.store.begin(pointer)


# A way around damage.


def damage_of(storage: ObjectStorage, key: str, how: str) -> None:
    data = bytearray(storage.get(key))
    storage.delete([key])
    if how != "gone":
        data[len(data) // 3] ^= 1
        storage.put(key, bytes(data[: len(data) // 2] if how == "cut" else data))


@pytest.mark.parametrize("how", ["gone", "cut", "altered"])
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
    damage_of(storage, f"{SHARD}/{entry.key if what == 'manifest' else new[-1]}", how)
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
    storage.delete([f"{SHARD}/commits/{base}"])
    with pytest.raises(CorruptionError, match=r"a backend that cannot be used here: no backend named 'gone'"):
        shard_of().store.begin(last)


def test_where_nothing_stands_in_the_damaged_object_is_named_and_nothing_local_changes(
    shard_of: Opener, storage: ObjectStorage, tmp_path: Path
) -> None:
    one = shard_of()
    base = one.write(None, range(30), 1)
    entry, _ = one.snapshot(base)
    last = one.write(base, range(10), 2)
    storage.delete([f"{SHARD}/{entry.key}", f"{SHARD}/commits/{base}"])
    other = shard_of()
    with pytest.raises(CorruptionError, match=entry.key) as caught:
        other.store.begin(last)
    assert f"commits/{base}" in "".join(caught.value.__notes__)
    assert other.backend.versions() == []
    assert not [path for path in (tmp_path / "executor-1").rglob("*") if path.is_file()]


def test_every_request_of_a_restore_may_fail_and_the_next_one_is_whole(
    shard_of: Opener, storage: ObjectStorage, tmp_path: Path
) -> None:
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
    """No manifest names what was not stored; the next snapshot is whole."""
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
            assert not storage.list(f"{SHARD}/snapshots/")
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
    monkeypatch.setattr("holdfast.snapshotter.snapshots.snapshots.SURE_FOR_MS", 0)
    one = shard_of()
    base = one.write(None, range(30), 1)

    def clean_up() -> None:
        storage.delete([info.key for info in storage.list(f"{SHARD}/files/")])

    one.log.storage = FaultyStorage(storage, [Fault("stop_after", action="put", key="*/files/*")], stop=clean_up)
    with pytest.raises(UnavailableError, match="took so long"):
        one.snapshot(base)
    assert not storage.list(f"{SHARD}/snapshots/")
    one.log.storage = storage
    entry, _ = one.snapshot(base)
    assert one.lineage(one.write(base, range(1), 2)).snapshot == entry


# Manifests that somebody else wrote.


def forged(storage: ObjectStorage, entry: ChainEntry, change: Callable[[dict[str, object]], None]) -> ChainEntry:
    """Store an altered manifest under the name that its bytes ask for."""
    stored = stored_file.decode(storage.get(f"{SHARD}/{entry.key}"), source="it", kind="snapshot")
    header = json.loads(json.dumps(stored.header))
    change(header)
    data, digest = stored_file.encode("snapshot", header)
    made = replace(entry, size_bytes=data.size, digest=digest)
    storage.put(f"{SHARD}/{made.key}", data)
    return made


def _path(name: str) -> Callable[[dict[str, object]], None]:
    return lambda header: header["files"][0].update(name=name)  # type: ignore[index]


def _key(key: str) -> Callable[[dict[str, object]], None]:
    return lambda header: header["files"][0]["parts"][0].update(key=key)  # type: ignore[index]


def _size(size_bytes: object) -> Callable[[dict[str, object]], None]:
    return lambda header: header["files"][0].update(size_bytes=size_bytes)  # type: ignore[index]


FORGERIES = {
    "a path": _path("../../outside"),
    "an absolute path": _path("/tmp/outside"),
    "a hidden name": _path(".profile"),
    "no name": _path(""),
    "a name twice": lambda header: header["files"].append(header["files"][0]),  # type: ignore[attr-defined]
    "a part elsewhere": _key("../shard-0004/files/aaaaaaaaaaaaaaaa-0"),
    "a part that is a commit": _key("commits/1-aa"),
    "a size below zero": _size(-1),
    "an absurd size": _size(1 << 61),
    "a size that is none": _size("1"),
    "a size that the parts do not have": _size(9),
    "parts of nothing": lambda header: header.update(part_bytes=0),
    "no files": lambda header: header.pop("files"),
    "another version": lambda header: header.update(pointer="9-aa"),
    "another shard": lambda header: header.update(shard="totals/shard-0004"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_manifest_leads_nowhere_else(shard_of: Opener, storage: ObjectStorage, tmp_path: Path, name: str) -> None:
    """Opening stored state writes into the shard's folder only, whatever the manifest says."""
    one = shard_of()
    base = one.write(None, range(30), 1)
    entry, _ = one.snapshot(base)
    made = forged(storage, entry, FORGERIES[name])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CorruptionError, match=r"snapshots/|files/"), one.log.snapshots.downloaded(made):
        pass
    assert [p for p in sorted(tmp_path.rglob("*")) if p not in before and p.name != "restoring"] == []


def test_a_snapshot_that_does_not_fit_on_the_disk_says_so_before_it_begins(
    shard_of: Opener, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = shard_of()
    entry, _ = one.snapshot(one.write(None, range(3000), 1))
    usage = transfer.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UnavailableError, match="no space left") as caught, one.log.snapshots.downloaded(entry):
        pass
    assert caught.value.facts["free_bytes"] == 1000


def test_what_a_killed_process_left_is_swept(shard_of: Opener, tmp_path: Path) -> None:
    one = shard_of()
    for folder in ("uploading/1", "restoring/2"):
        (tmp_path / "executor-0" / folder).mkdir(parents=True)
    assert one.log.snapshots.remove_leftovers(0) == 0
    assert one.log.snapshots.remove_leftovers(2**63) == 2


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


def test_a_database_that_is_copied_keeps_its_files(shard_of: Opener) -> None:
    """What is undone in the copy must not make it merge all: the files would be new to the storage."""
    one = shard_of("rocksdb")
    pointer = one.write(None, range(20_000), 0)
    for n in range(1, 12):
        pointer = one.write(pointer, range(n), n)
        one.snapshot(pointer)
        one.write(pointer, range(500), 99)  # the present is another one: an attempt that is dropped
        _, manifest = one.snapshot(pointer)
        assert manifest.new_bytes < manifest.stored_bytes / 5, n
