"""Damaged, unfinished and forged snapshots: the way around them, and where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, UnavailableError
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.fuzz.forge import put_together, take_apart
from tests.model.built_in import BUILT_IN
from tests.unit.snapshotter.snapshots.shard import SHARD, Opener, Shard, states

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


@pytest.mark.parametrize("reader", BUILT_IN)
@pytest.mark.parametrize("writer", BUILT_IN)
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


def test_where_nothing_stands_in_for_a_snapshot_that_cannot_be_opened_it_is_named(
    shard_of: Opener, storage: ObjectStorage, tmp_path: Path
) -> None:
    one = shard_of()
    freeze_unreadable(one, tmp_path / "altered")
    base = one.write(None, range(30), 1)
    entry, _ = one.snapshot(base)
    last = one.write(base, range(10), 2)
    storage.delete([f"{SHARD}/commits/{base}"])
    other = shard_of()
    for _ in range(2):
        with pytest.raises(CorruptionError, match=f"{entry.key} cannot be used: .*a different format") as caught:
            other.store.begin(last)
        assert f"commits/{base}" in "".join(caught.value.__notes__)
    assert other.backend.versions() == []


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


@pytest.mark.slow(0.5)
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
        storage.delete([info.key for info in storage.list(f"{SHARD}/files/")])
        with pytest.raises(UnavailableError, match="took so long"):
            one.log.snapshots.store(frozen, "memory")


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
