"""Some rows of a version are those that the whole version has, and cost by what was asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.base import Backend, Pointer
from holdfast.backends.frozen_files import ByteRange
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.backends.run_files import written_run
from holdfast.clock import new_id
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.snapshots import Manifest, upload_files
from holdfast.snapshotter.storage.local import LocalStorage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.version_reader import At, StoredFiles, VersionReader, read_tables
from tests.tiers import cases

PREFIX = "totals/shard-0000"
COUNTS = TableSchema.of(
    "counts", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64()), ("s", pa.string())])
)
ENTRIES = TableSchema.of(
    "entries", pa.schema([("user", pa.string()), ("entry", pa.int64())]), pa.schema([("v", pa.list_(pa.int64()))])
)
TABLES = {"counts": COUNTS, "entries": ENTRIES}
#: Two keys of one hash are told apart.
USERS = 400


def keys(schema: TableSchema, users: list[int], entries: list[int] | None = None) -> Keys:
    columns = {"user": [f"user-{user}" for user in users]}
    hashes = np.array([(user // 2) * 0x9E3779B97F4A7C15 % 2**64 for user in users], np.uint64)
    if entries is not None:
        return Keys.of(schema, hashes, pa.table(columns | {"entry": entries}))
    prefix = schema.prefix(1)
    return Keys.of(prefix, hashes, pa.table(columns))


@contextmanager
def work_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@dataclass
class Lab:
    storage: ObjectStorage
    executor: Executor
    backend: Backend
    log: ObjectCommitLog
    store: VersionedStore
    chance: np.random.Generator

    def commit(self, base: Pointer | None, rows: int) -> Pointer:
        """Write some keys, delete others, and give some a few entries."""
        users = self.chance.integers(0, USERS, rows).tolist()
        with self.store.begin(base) as transaction:
            values = pa.table({"n": self.chance.integers(0, 99, rows), "s": [f"{user}" * 9 for user in users]})
            transaction.put("counts", keys(COUNTS, users), values)
            transaction.delete("counts", keys(COUNTS, users[: rows // 4]))
            entries = self.chance.integers(0, 5, rows).tolist()
            lists = pa.table({"v": pa.array([[n] * n for n in entries], pa.list_(pa.int64()))})
            transaction.put("entries", keys(ENTRIES, users, entries), lists)
            transaction.delete_prefix("entries", keys(ENTRIES, users[:3]))
            made = transaction.commit()
        assert made is not None
        return made

    def whole(self, at: At, table: str, home: Path) -> Run:
        carried = {} if at.carried is None else {at.pointer: at.carried}
        log = ObjectCommitLog(self.storage, PREFIX, TABLES, self.executor, home, carried=carried)
        return read_tables(log, at.pointer, [table])[table]

    def at(self, pointer: Pointer) -> At:
        return At(pointer, self.log.carried.get(pointer))


@pytest.fixture(params=cases(["rocksdb", "filesystem", "memory"], quick=2))
def lab(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(written_run, "STRETCH_BYTES", 4000)  # files of many stretches
    with (
        LocalStorage(str(tmp_path / "durable")) as storage,
        ThreadPoolExecutor(4) as executor,
        find_backend(request.param)(tmp_path / "local", TABLES, new_id) as backend,
    ):
        log = ObjectCommitLog(storage, PREFIX, TABLES, executor, tmp_path / "local", request.param, 6000)
        yield Lab(storage, executor, backend, log, VersionedStore(backend, log), np.random.default_rng(7))


def same(found: Run, wanted: Run) -> None:
    assert found.batch.to_pylist() == wanted.batch.to_pylist()


@pytest.mark.slow(1)
def test_rows_of_keys_are_those_of_the_whole_version(lab: Lab, tmp_path: Path) -> None:
    """Tombstones, carried commits, commits since a snapshot and the snapshot itself: equal for every key."""
    versions = [lab.commit(None, 300)]
    for step, rows in enumerate((200, 3, 2, 150, 2)):
        versions.append(lab.commit(versions[-1], rows))
        if step in (1, 3):
            lab.log.write_snapshot(lab.backend, versions[-1])
    assert lab.log.carried
    reader = VersionReader(lab.storage, PREFIX, TABLES, lab.executor, work_folder)
    for pointer in versions:
        at = lab.at(pointer)
        for table, schema in TABLES.items():
            whole = lab.whole(at, table, tmp_path / "whole")
            every = keys(schema, list(range(USERS + 4)))
            same(reader.find(at, table, every), whole)
            for users in ([0], [1, 0], [7, 399], [USERS + 2]):
                wanted = keys(schema, users)
                same(reader.find(at, table, wanted), whole.with_prefixes(wanted))
            scanned = [row for run in reader.scan(at, table, 1 << 63) for row in run.batch.to_pylist()]
            by_hash = whole.slice(1 << 63, 2**64 - 1)
            assert sorted(map(repr, scanned)) == sorted(map(repr, by_hash.batch.to_pylist()))
            assert [row["hash"] for row in scanned] == by_hash.hashes.tolist()
    reader.close()


@pytest.mark.slow(0.5)
def test_versions_of_some_keys_are_read_once(lab: Lab) -> None:
    """A history costs little more than one look-up: what an object holds of a key is asked of it once."""
    pointer = lab.commit(None, 300)
    lab.log.write_snapshot(lab.backend, pointer)
    versions = [pointer := lab.commit(pointer, 60) for _ in range(6)]
    reader = VersionReader(lab.storage, PREFIX, TABLES, lab.executor, work_folder)
    wanted = keys(COUNTS, [1])
    before = lab.storage.requests["get"]
    first = reader.find(lab.at(versions[-1]), "counts", wanted)
    once = lab.storage.requests["get"] - before
    for version in reversed(versions):
        reader.find(lab.at(version), "counts", wanted)
    assert lab.storage.requests["get"] - before == once
    same(reader.find(lab.at(versions[-1]), "counts", wanted), first)
    reader.close()


def damaged(lab: Lab, folder: Path, change: Callable[[bytes], bytes]) -> tuple[At, Run, VersionReader]:
    """Damage all files of the snapshot below a version; return that, its rows as they were, and a reader."""
    pointer = lab.commit(lab.commit(None, 300), 100)
    lab.log.write_snapshot(lab.backend, pointer)
    newest = lab.at(lab.commit(pointer, 50))
    wanted = lab.whole(newest, "counts", folder / "whole")
    for part in (folder / "durable" / PREFIX / "files").iterdir():
        part.write_bytes(change(part.read_bytes()))
    return newest, wanted, VersionReader(lab.storage, PREFIX, TABLES, lab.executor, work_folder)


def test_a_damaged_snapshot_is_gone_around(lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a restore does: the same rows, from older objects, and a line in the log."""
    newest, wanted, reader = damaged(lab, tmp_path, lambda data: data[:-40] + bytes(40))
    same(reader.find(newest, "counts", keys(COUNTS, list(range(USERS)))), wanted)
    assert "ignoring the damaged snapshot" in caplog.text
    assert sum(len(run) for run in reader.scan(newest, "counts")) == len(wanted)
    reader.close()


def test_a_scan_that_meets_damage_says_so_and_the_next_one_goes_around_it(lab: Lab, tmp_path: Path) -> None:
    """Rows that were yielded cannot be taken back, so a scan never goes on as if nothing had been."""
    newest, wanted, reader = damaged(lab, tmp_path, lambda data: bytes(len(data)))
    with pytest.raises(CorruptionError):
        list(reader.scan(newest, "counts"))
    assert sum(len(run) for run in reader.scan(newest, "counts")) == len(wanted)
    reader.close()


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_version_that_was_cleaned_up_is_told_from_a_damaged_one(lab: Lab, is_gone: bool) -> None:
    """Where its commit is carried: a key's history then ended with the error of a damaged snapshot."""
    first = lab.commit(None, 300)
    entry, _ = lab.log.write_snapshot(lab.backend, first)
    small = lab.commit(first, 2)
    assert small in lab.log.carried
    if is_gone:
        lab.log.objects.delete([entry.key])
    else:
        lab.log.objects.put(entry.key, bytes(100))
    lab.log.objects.delete([f"commits/{first}"])
    with closing(VersionReader(lab.storage, PREFIX, TABLES, lab.executor, work_folder)) as reader:
        with pytest.raises(CorruptionError) as caught:
            reader.find(lab.at(small), "counts", keys(COUNTS, [1]))
        assert isinstance(caught.value.__cause__, NotFoundError) == is_gone
        assert any("without that snapshot" in note for note in caught.value.__notes__)


def test_a_part_that_is_verified_stays_so(tmp_path: Path) -> None:
    """A range of a compressed object holds anything: a reader that notices asks for the whole part."""
    (tmp_path / "file").write_bytes(b"ab" * 125)
    (tmp_path / "here").mkdir()
    shard = PrefixedStorage(LocalStorage(str(tmp_path / "durable")), PREFIX)
    with ThreadPoolExecutor(1) as executor:
        files = upload_files([tmp_path / "file"], 100, shard, executor, new_id)
        manifest = Manifest(Pointer(1, "aa"), PREFIX, "memory", 100, tuple(files), (), 0, 0)
        found = StoredFiles(manifest, shard, tmp_path / "here", executor)
        found.bring([ByteRange("file", 100, 200), ByteRange("file", 120, 150)])
        found.require("file", 100, 200)
    assert (tmp_path / "here/file").read_bytes()[100:200] == b"ab" * 50
