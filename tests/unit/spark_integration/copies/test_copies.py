"""What a clone is made of: Spark's files, and whole shards at the pointer's version; or there is no clone."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import Buffer

from holdfast.errors import ConflictError, CorruptionError, StateLostError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage, WrappedStorage
from holdfast.spark_integration import copies
from holdfast.spark_integration.copies import copy_location, copy_shard
from holdfast.spark_integration.spark_state.pointers import StatefulStep
from holdfast.spark_integration.spark_state.query_location import QueryLocation
from tests.damage import flip
from tests.unit.snapshotter.upkeep.conftest import Bench

BATCH = '{"batchWatermarkMs":5,"batchTimestampMs":1700000000000,"conf":{"spark.sql.shuffle.partitions":"2"}}'
OF_FIVE = {
    **{f"offsets/{n}": f'v1\n{BATCH}\n{{"logOffset":1}}' for n in range(3, 6)},
    **{f"commits/{n}": 'v1\n{"nextBatchWatermarkMs":0}' for n in range(3, 6)},
    **{f"sources/0/{n}": "v1" for n in range(2)},
    "state/0/0/5.zip": "old",
    "state/0/0/6_8c1e-77.zip": "the version after micro-batch 5",
    "state/0/0/SSTs/000008-8c1e.sst": "shared",
    "state/0/1/left-keyToNumValues/6.delta": "",
    "state/0/_metadata/v2/4": "v2\n{}",
    "state/0/0/_metadata/schema": "",
}
LATER = {
    "metadata": '{"id":"5d1f2c"}',
    "offsets/6": f'v1\n{BATCH}\n{{"logOffset":2}}',
    "sources/0/2": "v1",
    "state/0/0/7.zip": "",
    "state/0/1/7_8c1e.changelog": "",
    "state/0/_metadata/v2/6": "",
    "state/0/0/.5.zip.crc": "",
    "state/0/0/5.zip.crc": "",
    "state/0/0/.7.zip.8c1e.tmp": "",
}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[ObjectStorage]:
    for name, text in {**OF_FIVE, **LATER}.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    named = tmp_path / "source/state/0/_metadata/v2/5"
    named.write_text("v2\n" + json.dumps({"stateSchemaFilePaths": [f"file:{tmp_path}/source/state/0/_stateSchema/x"]}))
    with open_storage(str(tmp_path / "source")) as storage:
        yield storage


def test_what_belongs_to_a_micro_batch_is_copied(source: ObjectStorage, tmp_path: Path) -> None:
    """Nothing later, no leftovers; metadata that names its own files names those of the clone."""
    query = QueryLocation(source)
    with open_storage(str(tmp_path / "target")) as target:
        copy_location(source, target, query, query.batch(5))
        copied = {info.key: bytes(target.get(info.key)).decode() for info in target.list("")}
    described = copied.pop("state/0/_metadata/v2/5")
    assert copied == OF_FIVE
    assert f"{tmp_path}/target/state/0/_stateSchema/x" in described
    assert f"{tmp_path}/source" not in described


class SlowTarget(WrappedStorage):
    """A storage that takes its time, and remembers how many bytes it was given at once."""

    def __init__(self, inner: ObjectStorage) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()
        self.at_once: dict[str, int] = {}
        self.most = 0

    def put(self, key: str, data: Buffer) -> None:
        with self.lock:
            self.at_once[key] = memoryview(data).nbytes
            self.most = max(self.most, sum(self.at_once.values()))
        time.sleep(0.02)
        super().put(key, data)
        with self.lock:
            del self.at_once[key]


def test_files_in_memory_are_bounded(source: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads held a file each, of 4 GiB perhaps; a file that is too large for company goes alone."""
    monkeypatch.setattr(copies, "AT_ONCE_BYTES", 3000)
    sizes = {f"state/0/0/{n}.sst": 1000 for n in range(12)} | {"state/0/0/12.sst": 4000}
    for key, size_bytes in sizes.items():
        source.put(key, b"x" * size_bytes)
    query = QueryLocation(source)
    with open_storage(str(tmp_path / "target")) as inner:
        target = SlowTarget(inner)
        copy_location(source, target, query, query.batch(5))
        copied = {info.key: info.size_bytes for info in target.list("state/0/0/")}
    assert sizes.items() <= copied.items()
    assert target.most == 4000


def test_a_log_of_files_that_was_compacted_since_is_copied_as_it_was(source: ObjectStorage, tmp_path: Path) -> None:
    files = [json.dumps({"path": f"file:///input/{n}", "timestamp": 7, "batchId": n}) for n in range(10)]
    for number in range(3):
        (tmp_path / f"source/sources/0/{number}").unlink()
    (tmp_path / "source/sources/0/9.compact").write_text("\n".join(["v1", *files]))
    query = QueryLocation(source)
    with open_storage(str(tmp_path / "target")) as target:
        copy_location(source, target, query, query.batch(5))
        copied = {info.key: bytes(target.get(info.key)).decode() for info in target.list("sources/")}
    assert copied == {"sources/0/1.compact": "\n".join(["v1", *files[:2]])}


@pytest.mark.parametrize("lost", ["commits/5", "offsets/5"])
def test_a_micro_batch_that_is_purged_meanwhile_is_not_copied(source: ObjectStorage, tmp_path: Path, lost: str) -> None:
    """What its state needs may be gone with it."""
    query = QueryLocation(source)
    batch = query.batch(5)
    (tmp_path / "source" / lost).unlink()
    with (
        open_storage(str(tmp_path / "target")) as target,
        pytest.raises(UnavailableError, match="moved past the micro-batch"),
    ):
        copy_location(source, target, query, batch)


SHARD = "one/shard-0000"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A shard with snapshots, and commits after the newest one."""
    made = Bench(tmp_path)
    made.run(made.query(), made.executor(), 13)
    yield made
    made.close()


def copied(bench: Bench) -> set[str]:
    """Copy the shard anew, and return the keys of the copy."""
    pointer, _ = bench.queries[0].rows[0]
    target = bench.path / "copy"
    shutil.rmtree(target, ignore_errors=True)
    with open_storage(str(bench.place.path)) as source, open_storage(str(target)) as new:
        number = copy_shard(PrefixedStorage(source, SHARD), PrefixedStorage(new, SHARD), pointer, None)
        keys = {info.key.removeprefix(f"{SHARD}/") for info in new.list("")}
    assert all((target / SHARD / key).read_bytes() == stored(bench, key).read_bytes() for key in keys)
    assert number == len([key for key in keys if not key.startswith("files/")])
    return keys


def stored(bench: Bench, key: str) -> Path:
    return bench.place.path / SHARD / key


def by_age(bench: Bench, folder: str) -> list[str]:
    names = [path.name for path in stored(bench, folder).iterdir()]
    return [f"{folder}/{name}" for name in sorted(names, key=lambda name: int(name.partition("-")[0]))]


def test_what_the_version_builds_on_is_checked_byte_by_byte(bench: Bench) -> None:
    """One flipped byte has the right size: a clone of it would fail when the original is gone."""
    whole = copied(bench)
    assert whole == {
        str(path.relative_to(stored(bench, ""))) for path in stored(bench, "").rglob("*") if path.is_file()
    }
    needed = [*by_age(bench, "commits")[-2:], by_age(bench, "snapshots")[-1]]
    for key in needed:
        before = stored(bench, key).read_bytes()
        flip(stored(bench, key), 20)
        with pytest.raises(CorruptionError):
            copied(bench)
        stored(bench, key).unlink()
        with pytest.raises(StateLostError):
            copied(bench)
        stored(bench, key).write_bytes(before)
    assert copied(bench) == whole


def test_a_damaged_part_is_found(bench: Bench) -> None:
    refused = 0
    whole = copied(bench)
    for path in sorted(stored(bench, "files").iterdir()):
        before = path.read_bytes()
        flip(path, 20)
        try:
            left = copied(bench)
        except CorruptionError:
            refused += 1
        else:
            assert [key for key in whole - left if key.startswith("snapshots/")]
        path.write_bytes(before)
    assert refused


def test_another_object_in_its_place_is_found(bench: Bench) -> None:
    """Whole, but not the one that the commit builds on."""
    older, newer = by_age(bench, "commits")[-3:-1]
    stored(bench, newer).write_bytes(stored(bench, older).read_bytes())
    with pytest.raises(CorruptionError, match="altered or damaged"):
        copied(bench)


def test_the_originals_state_directory_is_refused_without_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both queries would begin their operators there under the original's id."""
    with open_storage(str(tmp_path / "query")) as location:
        location.put("metadata", b'{"id":"5d1f"}')
        location.put("offsets/0", b'v1\n{"conf":{}}\n-')
        location.put("commits/0", b'v1\n{"nextBatchWatermarkMs":0}')
    step = StatefulStep(0, "applyInPandasWithState", 0, (), is_ours=True, has_timeout=False, pointers={})
    monkeypatch.setattr(copies, "stored_steps", lambda *_: [step])
    durable = tmp_path / "durable"
    spark: Any = SimpleNamespace(conf=SimpleNamespace(getAll={"spark.holdfast.state.dir": str(durable)}))
    with pytest.raises(ConflictError, match="this one is the original's"):
        copies.clone(spark, tmp_path / "query", tmp_path / "clone", to_state_dir=f"{durable}/")
    assert not [path for folder in ("clone", "durable") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    copies.clone(spark, tmp_path / "query", tmp_path / "clone", to_state_dir=tmp_path / "green")
    assert (tmp_path / "clone/metadata").is_file()
