"""Restarts: on another backend or other partitions, after failures, of an emptied directory, of timers and TTL."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

import holdfast
from holdfast import savepoints
from holdfast.commands.savepoint import savepoint
from holdfast.spark_integration.client.connection import client_of
from holdfast.spark_integration.executor.local_dirs import LOCK_NAME
from tests.input_files import add_file
from tests.servers.programs import wait_until
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.tiers import cases

pytestmark = pytest.mark.spark


# What each keeps of a query below an executor's directory.
LOCAL_FILES = {
    "memory": "memory/{query}/totals/shard-*/versions/*",
    "filesystem": "disk/{query}/totals/shard-*/versions/*",
    "rocksdb": "disk/{query}/totals/shard-*/versions/*",
}


def test_a_query_goes_on_with_another_backend(lab: Lab) -> None:
    """Commits do not know who wrote them: nothing is lost or counted twice, also on the way back to old local files."""
    seen: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for step, backend in enumerate(["memory", "rocksdb", "filesystem", "memory", "rocksdb"]):
        lab.configure({"backend": backend})
        for batch in range(2):
            # Some keys come with every step, some with one only, and must be carried over.
            rows = [(key, 10 * step + batch) for key in ("always", f"step {step}", f"step {step - 2}", "always")]
            lab.feed(rows)
            for key, value in rows:
                seen[key] += 1
                total[key] += value
        outputs = lab.run(lab.totals())
        assert len(outputs) == 2
        assert {row["key"]: (row["n"], row["total"]) for row in outputs[-1]} == {
            key: (seen[key], total[key]) for key, _ in rows
        }
        query = json.loads((lab.folder / "query" / "metadata").read_text())["id"]
        assert list(lab.local.glob(f"*/executor-*/{LOCAL_FILES[backend].format(query=query)}"))
        assert lab.state() == {key: (seen[key], total[key]) for key in seen}


@pytest.mark.all
@pytest.mark.slow(25)
def test_a_killed_worker_is_a_restart_and_sigterm_an_end(tmp_path: Path) -> None:
    """Spark ends a query of which a task is lost; it goes on where it was, and on SIGTERM it is stopped."""
    add_file(tmp_path / "input", 0, pa.table({"key": ["a"], "v": [1]}))
    log = tmp_path / "log"
    program = [sys.executable, "-m", "tests.spark.restarts.restarted_query", str(tmp_path)]
    with log.open("w") as said, subprocess.Popen(program, stderr=said, stdout=said) as running:
        try:
            wait_until((tmp_path / "shown/0").exists, list)
            (tmp_path / "fails").touch()
            add_file(tmp_path / "input", 1, pa.table({"key": ["a", "b"], "v": [10, 5]}))
            wait_until(lambda: any(tmp_path.glob("worker-*")), list)
            (tmp_path / "fails").unlink()
            (worker,) = tmp_path.glob("worker-*")
            os.kill(int(worker.name.partition("-")[2]), signal.SIGKILL)
            wait_until((tmp_path / "shown/1").exists, list)
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0, log.read_text()[-3000:]
        finally:
            running.kill()
    assert (tmp_path / "restarts").read_text() == "1 0.1\n"
    assert (tmp_path / "shown/1").read_text() == "[('a', 2, 11), ('b', 1, 5)]"
    assert (tmp_path / "ended").read_text() == "0", "no query runs any more"
    assert "the query restarts in 0.1 s" in log.read_text()


def test_a_query_whose_state_directory_was_emptied_stops(lab: Lab) -> None:
    """It would go on with the executor's copies, and lose all state with the executor."""
    lab.configure({"commit.carriedBytes": "0"})
    lab.feed([("a", 1), ("b", 2)])
    lab.run(lab.totals())
    shutil.move(lab.folder / "durable", lab.folder / "kept")
    lab.feed([("a", 3)])
    with pytest.raises(StreamingQueryException, match="the state directory has no state for the query's pointer"):
        lab.run(lab.totals())
    shutil.rmtree(lab.folder / "durable")
    shutil.move(lab.folder / "kept", lab.folder / "durable")
    (rows,) = lab.run(lab.totals())
    assert rows == [{"key": "a", "n": 2, "total": 4}]


def test_state_that_the_pointers_carry_survives_its_directory(lab: Lab) -> None:
    """Of a young query, whose commits are small: it goes on, with a warning in the worker's log."""
    lab.feed([("a", 1), ("b", 2)])
    lab.run(lab.totals())
    shutil.rmtree(lab.folder / "durable")
    lab.lose_local_state()
    lab.feed([("a", 3)])
    (rows,) = lab.run(lab.totals())
    assert rows == [{"key": "a", "n": 2, "total": 4}]
    assert lab.state() == {"a": (2, 4), "b": (1, 2)}


KEYS = 450_000


@pytest.mark.all
@pytest.mark.slow(90)
def test_ten_restarts_each_on_another_backend(lab: Lab) -> None:
    """With so many keys that RocksDB's databases have most: none is lost, doubled or old at any restart."""
    lab.configure({"rocksdb.memory": "16m", "shards": "2", "snapshot.maxCommits": "4"})
    state = {f"key {i}": (1, i) for i in range(KEYS)}
    lab.feed(pa.table({"key": list(state), "v": [total for _, total in state.values()]}))
    for restart, backend in zip(range(11), itertools.cycle(["rocksdb", "memory", "filesystem"]), strict=False):
        lab.configure({"backend": backend})
        rows = {f"key {i}": 10 + restart for i in [*range(restart, KEYS, KEYS // 50), KEYS + restart]}
        lab.feed(list(rows.items()))
        [*_, output] = lab.run(lab.totals())
        known = {key: state.get(key, (0, 0)) for key in rows}
        changed = {key: (n + 1, total + rows[key]) for key, (n, total) in known.items()}
        assert {row["key"]: (row["n"], row["total"]) for row in output} == changed
        state |= changed
        wait_for_servers(lab)
        assert lab.state() == state
    assert list(lab.local.glob("*/executor-*/disk/*/totals/shard-*/generations/*/generation"))


def wait_for_servers(lab: Lab) -> None:
    """Wait until what state servers do in the background is done."""
    for lock in lab.local.glob(f"**/{LOCK_NAME}"):
        server = client_of(lock.parent)
        server.require_server()  # it may still be starting
        assert server.call("drain", b'{"timeout_seconds": 60.0}', 90.0)


@pytest.mark.slow
def test_cold_keys_are_counted_on(lab: Lab) -> None:
    """Moved by the state server, read and replaced by workers, uploaded, and restored elsewhere."""
    lab.configure({"backend": "rocksdb", "rocksdb.memory": "16m", "shards": "2", "snapshot.maxCommits": "4"})
    lab.feed(pa.table({"key": [f"key {i}" for i in range(KEYS)], "v": list(range(KEYS))}))
    few = [(f"key {i}", 1) for i in range(0, KEYS, KEYS // 50)]
    for _ in range(4):
        lab.feed(few)
        lab.run(lab.totals())
        wait_for_servers(lab)
    assert list(lab.local.glob("*/executor-*/disk/*/totals/shard-*/generations/*/generation"))
    expected = {f"key {i}": (1, i) for i in range(KEYS)}
    expected |= {key: (5, int(key.split()[1]) + 4) for key, _ in few}
    assert lab.state() == expected
    lab.lose_local_state()
    lab.feed(few)
    lab.run(lab.totals())
    assert lab.state() == expected | {key: (n + 1, total + 1) for key, (n, total) in expected.items() if n == 5}


REPARTITIONED = [f"key {i}" for i in range(40)]


@pytest.mark.slow(15)
@pytest.mark.since("4.2")
@pytest.mark.all
def test_a_query_goes_on_with_its_state_in_more_partitions(lab: Lab) -> None:
    """As many shards as before, each with its state; a savepoint of it is whole."""
    with configured(lab.spark, NEEDED):
        lab.feed([(key, 1) for key in REPARTITIONED])
        lab.run(lab.totals())
        location = lab.folder / "query"
        lab.spark._streamingCheckpointManager.repartition(str(location), 3)  # as Spark 4.2 has it
        assert len([folder for folder in (location / "state" / "0").iterdir() if folder.name.isdigit()]) == 3
        lab.feed([(key, 2) for key in REPARTITIONED])
        [*_, last] = lab.run(lab.totals())
        assert sorted((row["key"], row["n"], row["total"]) for row in last) == [
            (key, 2, 3) for key in sorted(REPARTITIONED)
        ]
        assert lab.state() == dict.fromkeys(REPARTITIONED, (2, 3))
        made = savepoints.create(lab.spark, location, lab.folder / "savepoints", "after")
    assert [(operator.name, operator.shards) for operator in made.operators] == [("totals", 2)]
    with holdfast.open_query(location, lab.folder / "durable") as query:
        found = query.get("totals", [{"key": key} for key in REPARTITIONED])["state"]
    assert {row["key"]: (row["n"], row["total"]) for row in found.to_pylist()} == dict.fromkeys(REPARTITIONED, (2, 3))
    arguments = ["create", str(location), "--to", str(lab.folder / "savepoints"), "--name", "without-spark"]
    assert CliRunner().invoke(savepoint, arguments).exit_code == 0
    assert savepoints.diff(lab.folder / "savepoints", "after", "without-spark")[1][0].differs is False


OUT = "key string, due_ms long, n long"
LAST = 2**63 - 1


def feed(lab: Lab, *rows: tuple[str, int]) -> None:
    """Add a micro-batch of keys, each at a second."""
    times = [dt.datetime.fromtimestamp(second, dt.UTC) for _, second in rows]
    at = pa.array(times, pa.timestamp("us", "UTC"))
    lab.feed(pa.table({"key": pa.array([key for key, _ in rows]), "at": at}))


def keep(timers: Mapping[str, int]) -> Callable[[holdfast.ShardBatch], pa.Table]:
    """Return a function that counts, sets these timers, and gives out what is due."""

    def count(batch: holdfast.ShardBatch) -> pa.Table:
        n = pc.add(pc.coalesce(batch.state.get()["n"], 0), batch.groups.count())
        batch.state.put(n=n)
        times = pa.array([timers.get(key) for key in batch.keys["key"].to_pylist()], pa.int64())
        batch.timers.set(times, where=pc.greater(batch.groups.count(), 0))
        return batch.keys.append_column("due_ms", batch.timers.due_ms).append_column("n", n)

    return count


def query(lab: Lab, function: Any) -> DataFrame:
    source = lab.source("key string, at timestamp").withWatermark("at", "0 seconds")
    grouped = holdfast.stream(source).groupBy("key")
    return grouped.applyInArrowWithState(function, OUT, "n long", "update", name="totals", timeMode="EventTime")


def due(batches: list[list[dict[str, Any]]]) -> dict[str, int]:
    return {row["key"]: row["due_ms"] for batch in batches for row in batch if row["due_ms"] is not None}


@pytest.mark.slow(20)
@pytest.mark.parametrize("backend", cases(["memory", "filesystem", "rocksdb"]))
def test_timers_outlive_a_restart_without_local_files(lab: Lab, backend: str) -> None:
    """At 0, at the watermark itself, and at the end of time; restored from a snapshot, or from commits."""
    lab.configure({"backend": backend, "snapshot.maxCommits": "2"})
    function = keep({"zero": 0, "at": 20_000, "next": 20_001, "last": LAST})
    feed(lab, ("zero", 10), ("at", 10), ("next", 10), ("last", 10))
    found = [lab.run(query(lab, function))]
    for second in (20, 21, 22):
        lab.lose_local_state()
        feed(lab, ("other", second))
        found.append(lab.run(query(lab, function)))
    assert [due(batches) for batches in found] == [{"zero": 0}, {}, {"at": 20_000, "next": 20_001}, {}]
    timers = holdfast.read_state(lab.spark, lab.folder / "query", "totals", table="timers")
    assert {row["key"]: row["due_ms"] for row in timers.to_pylist()} == {"last": LAST}
