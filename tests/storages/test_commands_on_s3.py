"""Storages of real servers: the commands, reads of versions, servers to try, and the store of a bench."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Keys
from holdfast.benches.instruments.measured import spark_kind, store_kind
from holdfast.benches.instruments.object_store import BUCKET as OWN_BUCKET
from holdfast.benches.instruments.object_store import RequestCounts, delayed_store
from holdfast.clock import new_id
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.local import LocalStorage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.version_reader import At, VersionReader
from tests.model.shard_history import ShardHistory
from tests.servers.hdfs import Hdfs
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Moto, S3Server, Versitygw
from tests.unit.holdfast.commands.conftest import put_record, run
from tests.unit.snapshotter.test_version_reader import COUNTS, PREFIX, TABLES, work_folder


@pytest.fixture(
    params=[
        pytest.param("moto", marks=pytest.mark.s3),
        pytest.param("versitygw", marks=[pytest.mark.s3, pytest.mark.all]),
    ]
)
def server(request: pytest.FixtureRequest) -> S3Server:
    found: Moto | Versitygw = request.getfixturevalue(request.param)
    return found


def test_on_s3_with_options_from_the_environment(server: S3Server) -> None:
    """All four commands; credentials come from the environment and are in no output."""
    url = f"s3://{BUCKET}/commands"
    with open_storage(url, server.options()) as storage:
        put_record(storage)
        history = ShardHistory(storage)
        made = history.grow(None, 29, snapshot_every=10)
        time.sleep(1.1)  # time stamps are in whole seconds
        history.grow(made[-1], 1)
    options = (
        f"key={ACCESS_KEY} secret={SECRET_KEY} client_kwargs.endpoint_url={server.url} "
        "client_kwargs.region_name=us-east-1"
    )
    outputs = []
    for command in (["inspect"], ["log"], ["verify"], ["gc", "--retain", "5", "--grace", "0", "--yes"], ["verify"]):
        for as_json in ([], ["--json"]):
            result = run(command[0], url, *command[1:], *as_json, HOLDFAST_STORAGE_OPTIONS=options)
            assert result.exit_code == 0, (command, result.output, result.exception)
            outputs.append(result.output)
    assert "9 objects deleted" in outputs[6]
    assert not [o for o in outputs if SECRET_KEY in o or ACCESS_KEY in o]
    with open_storage(url, server.options()) as storage:
        left = {info.key for info in storage.list("")}
        storage.delete(left)
    assert not [key for key in left if "probes" in key]
    assert len([key for key in left if "/commits/" in key]) == 21


@pytest.mark.all
@pytest.mark.slow(7)
@pytest.mark.parametrize("backend", ["filesystem", "rocksdb"])
def test_a_key_in_a_large_snapshot_reads_a_small_part_of_it(backend: str, tmp_path: Path) -> None:
    """What is read follows the number of keys, not the size of the version."""
    with LocalStorage(str(tmp_path / "durable")) as storage:
        share = share_read(storage, backend, tmp_path)
        assert share < (0.6 if backend == "filesystem" else 0.1), share  # a part has 8 MiB of these 75


@pytest.mark.all
@pytest.mark.hdfs
@pytest.mark.slow(15)
def test_a_key_on_hdfs_reads_a_small_part_of_it(hdfs: Hdfs, tmp_path: Path) -> None:
    """A range of a file comes without the rest of it: told by the DataNode, not by the client."""
    with open_storage(f"{hdfs.url}/look-up", hdfs.options()) as storage:
        before = hdfs.bytes_read()
        share = share_read(storage, "rocksdb", tmp_path)
        read = hdfs.bytes_read() - before
        stored = sum(info.size_bytes for info in storage.list(""))
    assert share < 0.1, share
    assert 0 < read < 0.1 * stored, (read, stored)


def share_read(storage: ObjectStorage, backend: str, tmp_path: Path) -> float:
    """Store a version of 400,000 rows, look one up, and return which share of the version's bytes that took."""
    rows = 400_000
    options = {"memory": "16m"} if backend == "rocksdb" else {}
    with ThreadPoolExecutor(4) as executor, find_backend(backend)(tmp_path / "local", TABLES, new_id, options) as held:
        log = ObjectCommitLog(storage, PREFIX, TABLES, executor, tmp_path / "local", backend)
        store = VersionedStore(held, log)
        chance = np.random.default_rng(3)
        hashes = np.sort(chance.integers(0, 2**64, rows, np.uint64))
        columns = pa.table({"user": [f"{n}" for n in range(rows)]})
        random = [chance.bytes(75).hex() for _ in range(rows)]
        with store.begin(None) as transaction:
            transaction.put("counts", Keys.of(COUNTS, hashes, columns), pa.table({"n": np.arange(rows), "s": random}))
            pointer = transaction.commit()
        assert pointer is not None
        if backend == "rocksdb":
            assert held.maintain(pointer), "rows beyond the memory for runs go into a database"
            with store.begin(pointer) as transaction:
                transaction.put("counts", Keys.of(COUNTS, hashes[:1], columns[:1]), pa.table({"n": [-1], "s": [""]}))
                pointer = transaction.commit()
            assert pointer is not None
        entry, _ = log.write_snapshot(held, pointer)
        newest = At(log_one(store, pointer))
        wanted = Keys.of(COUNTS, hashes[123_456:123_457], columns.slice(123_456, 1))
        reader = VersionReader(storage, PREFIX, TABLES, executor, work_folder)
        before = storage.requests["get_bytes"]
        (row,) = reader.find(newest, "counts", wanted).values.to_pylist()
        assert row == {"n": 123_456, "s": random[123_456]}
        reader.close()
        return (storage.requests["get_bytes"] - before) / entry.content_bytes


def log_one(store: VersionedStore, pointer: Pointer) -> Pointer:
    """Return a version on a snapshot: one more commit, of another key."""
    with store.begin(pointer) as transaction:
        other = Keys.of(COUNTS, np.array([5], np.uint64), pa.table({"user": ["other"]}))
        transaction.put("counts", other, pa.table({"n": [1], "s": ["?"]}))
        made = transaction.commit()
    assert made is not None
    return made


@pytest.mark.s3
def test_its_secret_can_be_typed() -> None:
    """The tests' own looks like one that got out."""
    command = [sys.executable, "-m", "tests.servers", "s3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as server:
        try:
            assert server.stdout is not None
            given = dict(pair.split("=", 1) for pair in shlex.split(server.stdout.readline())[1:])
            assert (given["AWS_ACCESS_KEY_ID"], given["AWS_SECRET_ACCESS_KEY"]) == ("holdfast", "holdfast")
            client = {"endpoint_url": given["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
            options = {"key": "holdfast", "secret": "holdfast", "client_kwargs": client}
            with open_storage(f"s3://{BUCKET}/app", options) as storage:
                storage.put("one", b"1")
                assert bytes(storage.get("one")) == b"1"
        finally:
            server.terminate()


_FAR_MS = 100


@pytest.fixture(scope="module")
def far() -> Iterator[RequestCounts]:
    with delayed_store(_FAR_MS) as store:
        yield store


@pytest.mark.s3
@pytest.mark.slow
def test_a_client_finds_a_store_that_is_far_away(far: RequestCounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a bench passes on is the environment, which wins; each request waits once, and is done."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")  # the user's
    for name, value in far.environment.items():
        monkeypatch.setenv(name, value)
    with open_storage(f"s3://{OWN_BUCKET}/jobs") as storage:
        storage.put("totals/shard-0001/commits/1-a", b"first")  # opens the connection
        start_s = time.monotonic()
        storage.put("totals/shard-0001/commits/2-b", b"second")
        assert bytes(storage.get("totals/shard-0001/commits/2-b")) == b"second"
        assert time.monotonic() - start_s >= 2 * _FAR_MS / 1000
    counts = far.so_far()
    assert (counts["PUT commits"], counts["GET commits"]) == (2, 1)


@pytest.mark.s3
@pytest.mark.slow
def test_the_store_of_a_bench_is_no_process_of_the_query(far: RequestCounts) -> None:
    """Its memory and CPU time are another machine's."""
    (server,) = [p for p in psutil.Process().children() if "holdfast.benches.instruments.object_store" in p.cmdline()]
    assert spark_kind(server) is None
    assert store_kind(server) is None


def test_requests_pass_unchanged_and_are_counted_by_what_they_are_for(server: S3Server) -> None:
    data = os.urandom(3 << 20)
    shard = "totals/shard-0007"
    with RequestCounts(server.url) as counts:
        with open_storage(f"s3://{BUCKET}/counted", server.options(counts.url)) as storage:
            for version in range(5):
                storage.put(f"{shard}/commits/{version}-a", data)
            storage.put(f"{shard}/files/b-0", data)
            storage.put("totals/probes/c", b"")
            assert bytes(storage.get(f"{shard}/files/b-0")) == data
            found = [info.key for info in storage.list("")]
            assert len(found) == 7
            storage.delete(found)
            assert not list(storage.list(""))
        so_far = counts.so_far()
    assert 18 << 20 <= so_far.pop("bytes up") < 19 << 20
    assert 3 << 20 <= so_far.pop("bytes down") < 4 << 20
    assert so_far == {
        "PUT commits": 5, "PUT files": 1, "PUT probes": 1, "GET files": 1, "LIST": 2, "DELETE many": 1
    }  # fmt: skip
