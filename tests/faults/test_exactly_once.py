"""Exactly once: processes are killed at random moments; results, sessions and timeouts are as if nobody had been."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import holdfast
from holdfast import savepoints
from tests.faults import killed_chain, killed_sessions
from tests.faults.killed_driver import OPERATOR, Job
from tests.faults.killed_sessions import OPERATOR as SESSIONS
from tests.faults.killed_sessions import expected as expected_sessions
from tests.faults.killings import Killings, expected, found_output, input_of, micro_batches
from tests.input_files import add_file
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.tiers import ALL, kills, repetitions

pytestmark = [pytest.mark.spark, pytest.mark.slow(60), pytest.mark.timeout(3000)]


# At least one of each: driver, worker, server.
KILLS = kills(quick=3)
# The sessions below and test_exactly_once_processor kill others.
BACKENDS = [pytest.param("memory", marks=pytest.mark.smoke)]
ALL_BACKENDS = ["memory", "filesystem", "rocksdb"]


@pytest.mark.parametrize("backend", ALL_BACKENDS if ALL else BACKENDS)
@pytest.mark.parametrize("seed", repetitions(1, 2))
def test_kills_change_nothing(backend: str, seed: int, spark: SparkSession, tmp_path: Path) -> None:
    run = Killings(Job(str(tmp_path), backend), random.Random(f"{seed} {backend}"))
    run.run(KILLS)
    check_result(run, spark)
    print(f"\n{backend}, seed {seed}: killed {run.done}, the query failed {run.failures} times")


@pytest.mark.all
def test_a_query_outlives_its_state_server(spark: SparkSession, tmp_path: Path) -> None:
    """Spark in local mode gives a task one attempt, and each shard of a batch loses its owner in the middle.

    `tests/spark/executor/test_local_ground.py` shows the same at chosen moments.
    """
    job = Job(str(tmp_path), "rocksdb", master="local[2]")
    run = Killings(job, random.Random("server"), victims=("server",), once_a_batch=True)
    run.run(KILLS)
    assert run.failures == 0, run.describe()
    check_result(run, spark)


def check_result(run: Killings, spark: SparkSession) -> None:
    """Compare state and output with what comes of the same rows, one after the other; then remove the folder."""
    folder = run.job.path
    batches = micro_batches(folder)
    assert sum(len(batch.files) for batch in batches) == run.files
    state, output = expected(batches)
    with configured(spark, {"spark.holdfast.state.dir": str(folder / "durable")}):
        stored = holdfast.read_state(spark, folder / "query", OPERATOR).to_pylist()
    found = {row["key"]: (row["n"], row["total"], row["last"]) for row in stored}
    story = f"{run.job}: {run.describe()}"
    assert len(found) == len(stored), story
    assert found == state, story
    written = found_output(folder)
    wrong = [batch for batch in output if written.get(batch) != output[batch]]
    assert not wrong, f"wrong output in micro-batches {wrong}; {story}"
    assert set(written) == set(output), story
    run.stop_servers()
    shutil.rmtree(folder)


# The tests above kill others.
SESSIONS_BACKENDS = ["rocksdb"]
ALL_SESSIONS_BACKENDS = [*SESSIONS_BACKENDS, "memory", "filesystem"]


@pytest.mark.all
@pytest.mark.parametrize("backend", ALL_SESSIONS_BACKENDS if ALL else SESSIONS_BACKENDS)
@pytest.mark.parametrize("seed", repetitions(1, 2))
def test_kills_close_each_session_once(backend: str, seed: int, spark: SparkSession, tmp_path: Path) -> None:
    job = Job(str(tmp_path), backend, compiles=ALL)
    run = Killings(job, random.Random(f"{seed} {backend} timeouts"), program=killed_sessions.__name__)
    run.run(KILLS)
    check_sessions(run, spark)
    print(f"\n{backend}, seed {seed}: killed {run.done}, the query failed {run.failures} times")


def check_sessions(run: Killings, spark: SparkSession) -> None:
    """Compare sessions, states and timeouts with what comes of the same rows, one after the other."""
    folder = run.job.path
    batches = micro_batches(folder)
    assert sum(len(batch.files) for batch in batches) == run.files
    open_sessions, closed = expected_sessions(batches)
    story = f"{run.job}: {run.describe()}"
    with configured(spark, {"spark.holdfast.state.dir": str(folder / "durable")}):
        tables = [holdfast.read_state(spark, folder / "query", SESSIONS, table=name) for name in ("state", "timers")]

    state, timers = ({row.pop("user"): tuple(row.values()) for row in table.to_pylist()} for table in tables)
    assert [table.num_rows for table in tables] == [len(state), len(timers)], story
    assert state == {user: session[:3] for user, session in open_sessions.items()}, story
    assert timers == {user: session[3:] for user, session in open_sessions.items()}, story
    # The sink's own log says which of its files count.
    written = [tuple(row) for row in spark.read.parquet(str(folder / "output")).collect()]
    assert sorted(written, key=repr) == sorted(closed, key=repr), story
    assert len(closed) > len(open_sessions) / 2, "hardly a session has been closed: this shows nothing"
    run.stop_servers()
    shutil.rmtree(folder)


CHAIN_KILLS = kills(quick=1, long=25)
#: By backend that on which the query is restored.
CHAIN_BACKENDS = {"memory": "rocksdb", "filesystem": "memory", "rocksdb": "filesystem"}
#: Beside those that come while processes are killed: before the savepoint, sessions must be over.
FILES = 16
DAY_US = 86_400_000_000


@pytest.mark.all
@pytest.mark.slow(120)
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("backend", CHAIN_BACKENDS)
def test_kills_change_nothing_in_a_chain(backend: str, spark: SparkSession, tmp_path: Path) -> None:
    """A dedup, a join and sessions: what both queries show is what one computation over all input finds."""
    job = Job(str(tmp_path), backend)
    run = Killings(job, random.Random(f"{backend} chain"), program=killed_chain.__name__)
    run.add_files(FILES)
    run.run(CHAIN_KILLS)
    run.stop_servers()
    story = f"{job}: {run.describe()}"
    with configured(spark, settings_of(tmp_path, "durable", backend)):
        made = savepoints.create(spark, tmp_path / "query", tmp_path / "savepoints", "one")
    require_state_as_computed(tmp_path, made)
    last_us = add_a_later_day(run)
    with configured(spark, settings_of(tmp_path, "again", CHAIN_BACKENDS[backend])):
        savepoints.restore(spark, tmp_path / "savepoints", "one", tmp_path / "restored", shards=3)
        killed_chain.run(spark, tmp_path, "restored", "restored-output")
    before, after = (shown_in(tmp_path / name) for name in ("output", "restored-output"))
    right = [row for row in killed_chain.expected(tmp_path) if row[1] < last_us]
    assert sorted(before + after, key=repr) == sorted(right, key=repr), story
    assert min(len(before), len(after)) > 50, f"hardly a session is over, which shows nothing: {len(before)} before"
    print(f"\n{backend}: killed {run.done}, {len(before)} and {len(after)} sessions, failed {run.failures} times")
    shutil.rmtree(tmp_path)


def require_state_as_computed(folder: Path, made: savepoints.Savepoint) -> None:
    """Check the state of deduplication and sessions, as DuckDB reads it, by what it finds in all input."""
    named = {of.name: of for of in made.operators}
    files = {
        name: [piece.key for piece in named[name].of_table(table)]
        for name, table in (("visits", "state"), ("sessions", "s.state"))
    }
    state = killed_chain.stored(folder / "savepoints" / "one", files)
    watermark_us = json.loads(made.query.batch)["batchWatermarkMs"] * 1000
    assert sorted(state["visits"], key=repr) == sorted(killed_chain.visits(folder, watermark_us), key=repr)
    assert len(state["visits"]) > 50
    # The join holds rows back, so that an open session is a part of one that is computed.
    whole = killed_chain.expected(folder)
    assert state["sessions"]
    for user, start, end, n, _ in state["sessions"]:
        assert any(of == user and a <= start and end <= b and n <= all_of for of, a, b, all_of, _ in whole)


def add_a_later_day(run: Killings) -> int:
    """Add a file by which all other sessions are over; return a time between them and its own."""
    file = input_of(run.files)
    later = pc.add(file["at"], pa.scalar(DAY_US, pa.duration("us")))
    file = file.set_column(file.column_names.index("at"), "at", later)
    add_file(run.job.path / "input", run.files, file)
    first_us: int = pc.min(later.cast(pa.int64())).as_py()
    return first_us - DAY_US // 2


def settings_of(folder: Path, state_dir: str, backend: str) -> dict[str, str]:
    own = {"state.dir": str(folder / state_dir), "local.dir": str(folder / "local"), "backend": backend}
    return NEEDED | {f"spark.holdfast.{name}": value for name, value in own.items()}


def shown_in(folder: Path) -> list[tuple[Any, ...]]:
    """Return the sessions that a query has shown; the sink's own log says which of its files count.

    Spark refuses to read by that log what a restored query has written, which begins with micro-batch 1.
    """
    logs = [log.read_text().splitlines()[1:] for log in (folder / "_spark_metadata").glob("[0-9]*")]
    names = {Path(json.loads(line)["path"]).name for lines in logs for line in lines}
    files = [pq.read_table(folder / name, coerce_int96_timestamp_unit="us") for name in sorted(names)]
    columns = pa.concat_tables(files).columns
    columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in columns]
    return list(zip(*(column.to_pylist() for column in columns), strict=True))
