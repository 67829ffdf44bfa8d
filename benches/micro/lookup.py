"""Looking up one key among ten million, 1 GB, on S3: how long it takes, and how much of the version it reads.

Each look-up is one of its own: nothing that an earlier one has read is kept. The baseline reads the whole version, as
without look-ups everybody would. The share of bytes says more than the times: these are those of a server in Python
on the same machine. Run with ``make bench-micro``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Keys, TableSchema
from holdfast.benches.instruments.object_store import BUCKET, ObjectStore
from holdfast.clock import new_id
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.version_reader import At, VersionReader
from holdfast.snapshotter.version_rows import read_tables
from holdfast.spark_integration.executor.takeover import own_directory

ROWS, SHARDS, COMMITS, ROUNDS = 10_000_000, 4, 5, 10
Benchmark = Any
_SCHEMA = TableSchema.of(
    "state",
    pa.schema([("user", pa.string())]),
    pa.schema([("n", pa.int64()), ("total", pa.float64()), ("note", pa.string())]),
)
_TABLES = {"state": _SCHEMA}
_NOTE_BYTES = 48


@dataclass(frozen=True)
class Version:
    """One shard of a version.

    Attributes
    ----------
    storage : ObjectStorage
    shard : str
    at : At
    keys : Keys
        Some of its keys.
    stored_bytes : int
        Of all shards of the version: snapshots and the commits since.
    """

    storage: ObjectStorage
    shard: str
    at: At
    keys: Keys
    stored_bytes: int


def write_version(storage: ObjectStorage, backend: str, rows: int) -> Version:
    """Store a version of so many rows in `SHARDS` shards: each a snapshot and some commits, of a hundredth each."""
    stored_bytes, each = 0, rows // SHARDS
    versions = []
    for shard in range(SHARDS):
        chance = np.random.default_rng(shard)
        prefix = f"totals/shard-{shard:04d}"
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-bench-") as home,
            ThreadPoolExecutor(8) as executor,
            find_backend(backend)(Path(home), _TABLES, new_id) as held,
        ):
            log = ObjectCommitLog(storage, prefix, _TABLES, executor, Path(home), backend)
            store = VersionedStore(held, log)
            keys, pointer = _commit(store, None, chance, each, shard)
            entry, _ = log.write_snapshot(held, pointer)
            for _ in range(COMMITS):
                _, pointer = _commit(store, pointer, chance, each // 100, shard)
        stored_bytes += entry.stored_bytes
        stored_bytes += sum(o.size_bytes for o in storage.list(f"{prefix}/commits/")[1:])
        versions.append(Version(storage, prefix, At(pointer), keys, 0))
    return Version(storage, versions[0].shard, versions[0].at, versions[0].keys, stored_bytes)


def _commit(
    store: VersionedStore, base: Pointer | None, chance: np.random.Generator, rows: int, shard: int
) -> tuple[Keys, Pointer]:
    width = 2**64 // SHARDS
    hashes = np.sort(chance.integers(shard * width, (shard + 1) * width - 1, rows, dtype=np.uint64))
    users = pa.table({"user": np.char.add("user-", chance.integers(0, 10**9, rows).astype("U9"))})
    keys = Keys.of(_SCHEMA, hashes, users)
    notes = pa.array(
        chance.integers(33, 126, (rows, _NOTE_BYTES), np.uint8).view(f"S{_NOTE_BYTES}").ravel().astype("U")
    )
    with store.begin(base) as transaction:
        values = {"n": chance.integers(0, 10**6, rows), "total": chance.random(rows), "note": notes}
        transaction.put("state", keys, pa.table(values))
        pointer = transaction.commit()
    assert pointer is not None
    return keys.take(np.arange(0, rows, max(1, rows // 100))), pointer


def look_up(version: Version, number: int) -> None:
    """Find one key."""
    key = version.keys.take(np.array([number % len(version.keys)]))
    with ThreadPoolExecutor(16) as executor:
        reader = VersionReader(version.storage, version.shard, _TABLES, executor, own_directory)
        assert len(reader.find(version.at, "state", key)) == 1
        reader.close()


def read_all(version: Version) -> None:
    """Read the whole shard, and find one key there."""
    with ThreadPoolExecutor(16) as executor, tempfile.TemporaryDirectory(prefix="holdfast-bench-") as home:
        log = ObjectCommitLog(version.storage, version.shard, _TABLES, executor, Path(home))
        rows = read_tables(log, version.at.pointer, ["state"])["state"]
        assert len(rows.with_prefixes(version.keys.take(np.array([0])))) == 1


@pytest.fixture(scope="module", params=["filesystem", "rocksdb"])
def version(request: pytest.FixtureRequest) -> Iterator[Version]:
    """Return a version on S3."""
    with ObjectStore() as store:
        os.environ.update(store.environment)
        with open_storage(f"s3://{BUCKET}/app") as storage:
            yield write_version(storage, request.param, ROWS)


def test_one_key_of_ten_million(benchmark: Benchmark, version: Version) -> None:
    """By a look-up."""
    numbers = iter(range(10**9))
    before = version.storage.requests
    benchmark.pedantic(lambda: look_up(version, next(numbers)), rounds=ROUNDS, warmup_rounds=1)
    after = version.storage.requests
    each = {name: (after[name] - before[name]) / (ROUNDS + 1) for name in ("get", "get_bytes")}
    benchmark.extra_info["version_bytes"] = version.stored_bytes
    benchmark.extra_info["requests"] = each["get"]
    benchmark.extra_info["share_of_bytes"] = each["get_bytes"] / version.stored_bytes
    print(
        f"\n{version.stored_bytes:,} bytes, {each['get']:.1f} requests, {each['get_bytes'] / version.stored_bytes:.2%}"
    )


def test_all_of_one_shard(benchmark: Benchmark, version: Version) -> None:
    """By a read of the whole shard that has it, a quarter of the version."""
    benchmark.pedantic(lambda: read_all(version), rounds=2)
