"""A cluster of two hosts: executors are killed, attempts run at once, and savepoints and sinks stay right."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

import holdfast
from holdfast import savepoints
from tests.cluster import held_query, sink_speculating
from tests.cluster.held_query import AGAIN, ENDED, ONE_TASK, OTHER, PREPARED, SHUFFLED, WRITTEN, Moment
from tests.cluster.standalone import EXECUTOR, START_S, cluster
from tests.faults.killed_driver import OPERATOR, Job
from tests.faults.killings import RUN_MARK, Killings, expected, found_output, micro_batches
from tests.faults.sinks.judging import census, right_totals
from tests.faults.sinks.killed_query import KEYS
from tests.faults.sinks.killed_query import Job as SinkJob
from tests.faults.sinks.killing import SinkKillings
from tests.faults.sinks.targets import target_of
from tests.spark.application import run_program
from tests.spark.conftest import Lab, configured
from tests.spark.processors import speculating
from tests.spark.savepoints.killed import application, has_ended, undo
from tests.spark.savepoints.totals import expected as expected_totals
from tests.spark.savepoints.totals import feed, saved, totals
from tests.tiers import ALL, LONG, cases, kills

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow(60), pytest.mark.timeout(900)]


SERVER = "holdfast.spark_integration.server.state_server"
SPECULATING = Path(speculating.__file__)
#: Backend, the largest commit that travels with the pointer, and whether the dead executor's disk is lost as well.
LOSSES = [("memory", "6k", False), ("memory", "0", False), ("rocksdb", "6k", True), ("rocksdb", "0", False)]


@pytest.mark.parametrize(("backend", "carried", "loses_disk"), cases(LOSSES))
def test_executors_are_killed_between_success_and_commit(
    backend: str, carried: str, loses_disk: bool, spark: SparkSession, tmp_path: Path
) -> None:
    """What a task gave to Spark before its executor died counts once, whether Spark keeps it or repeats the task."""
    names = (ONE_TASK, SHUFFLED, WRITTEN, AGAIN) if ALL else (ONE_TASK, WRITTEN)
    with cluster(tmp_path) as master:
        job = held_query.Job(
            str(tmp_path), backend, master, compiles=ALL, way="plain", names=names, carried_bytes=carried
        )
        run_killing(job, loses_disk=loses_disk)
    require_totals(spark, job)
    found = census(ds.dataset(job.output, format="parquet").to_table(), job.batches, upserts=False)
    assert found.is_right, found


@pytest.mark.timeout(1800)
@pytest.mark.all
@pytest.mark.parametrize("target", cases(["parquet", "delta", "postgres", "postgres upsert", "kafka"]))
def test_executors_are_killed_between_success_and_a_sinks_decision(
    target: str, spark: SparkSession, tmp_path: Path
) -> None:
    """What the dead had prepared is shown once decided, and not before."""
    with cluster(tmp_path) as master, target_of(target).served(tmp_path) as place:
        job = held_query.Job(
            str(tmp_path), "rocksdb", master, target=target, place=place, names=(ONE_TASK, PREPARED, WRITTEN)
        )
        run_killing(job)
        rows = target_of(target).read(place)
    require_totals(spark, job)
    found = census(rows, job.batches, upserts=target_of(target).upserts)
    assert found.is_right, found


def run_killing(job: held_query.Job, *, loses_disk: bool = False) -> None:
    """Run the query, and at each of its moments kill the executors whose tasks have ended."""
    job.add_input()
    run, dead = Killings(job, random.Random(0), program=held_query.__name__), list[Path]()
    with run.cleaned_up():
        run.start_driver()
        for moment in job.moments.values():
            assert run.reach(lambda at=moment: at.is_reached, patience_s=START_S), run.describe()
            left = kill_at(run, job, moment)
            for directory in left if loses_disk else ():
                shutil.rmtree(directory)
            dead += left
            assert run.reach(lambda: len(run.processes(EXECUTOR)) == 2, patience_s=START_S), run.describe()
            moment.end()
        run.wait_for_the_end()
        assert run.ended_well(), run.describe()
    if job.backend == "memory":
        assert not [directory for directory in dead if directory.exists()], "others remove what the dead had in memory"
    for moment in job.moments.values():
        is_repeated = len(moment.attempts(ENDED)) > 1
        assert is_repeated == (moment.name in (SHUFFLED, AGAIN)), f"{moment.name}; {run.describe()}"


def kill_at(run: Killings, job: held_query.Job, moment: Moment) -> list[Path]:
    """Kill the executors whose tasks have ended, with their workers and state servers; return their directories."""
    partitions = [ENDED] if moment.holds_a_task else [ENDED, OTHER]
    executors = [attempt.executor for partition in partitions for attempt in moment.attempts(partition)]
    assert len(set(executors)) == len(partitions), run.describe()
    for partition in partitions:
        state = job.path / "query" / "state" / "0" / str(partition)
        assert list(state.glob(f"**/{moment.batch + 1}.*")), "Spark has the pointers of the tasks that have ended"
    assert not (job.path / "query" / "commits" / str(moment.batch)).exists(), "and has committed nothing"
    if job.way != "plain":
        shown = moment.batch in target_of(job.target).read(job.place or {})["batch"].to_pylist()
        assert shown == (moment.name == WRITTEN)
    directories = [path for pid in executors for path in (job.path / "local").glob(f"*/executor-{pid}-*")]
    assert len(directories) == len(executors)
    # State servers first: they would remove what their executors leave.
    victims = [server for server in map(psutil.Process, run.processes(SERVER)) if serves(server, directories)]
    assert len(victims) == len(executors)
    for executor in map(psutil.Process, executors):
        victims += [executor, *executor.children(recursive=True)]
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    _, alive = psutil.wait_procs(victims, START_S)
    assert not alive
    run.tell(f"{moment.name}: killed executors {executors} with all that is theirs")
    return directories


def serves(server: psutil.Process, directories: list[Path]) -> bool:
    return any(Path(file.path).is_relative_to(each) for file in server.open_files() for each in directories)


def require_totals(spark: SparkSession, job: held_query.Job) -> None:
    """Require the state of a query that nobody disturbed."""
    newest = job.batches - 1
    found = {row["key"]: (row["batch"], row["n"], row["total"]) for row in stored_state(spark, job.path)}
    assert found == {key: (newest, *right_totals(key, newest)) for key in range(KEYS)}


@pytest.mark.all
def test_an_executor_without_a_local_directory_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    """Local state then lies among the executor's own files, and goes with them."""
    with cluster(tmp_path) as master:
        job = Job(str(tmp_path), "filesystem", master, names_local_dir=False, compiles=ALL)
        run = Killings(job, random.Random(0))
        with run.cleaned_up():
            executors = executors_at_work(run)
            assert local_state(tmp_path), run.describe()
            os.kill(executors[0], signal.SIGKILL)
            run.tell(f"killed executor {executors[0]}")
            run.wait_for_the_end()
            assert run.ended_well(), run.describe()
            deadline = time.monotonic() + START_S
            while local_state(tmp_path):
                assert time.monotonic() < deadline, "the worker has not removed the application's files"
                time.sleep(0.1)
    require_exact(spark, run)


def executors_at_work(run: Killings) -> list[int]:
    """Start the query, and return its two executors when both have state."""
    run.add_files(14 if LONG else 10)
    run.start_driver()
    committed = run.reach(lambda: run.count("query/commits/[0-9]*") >= 4, patience_s=START_S)
    executors = list(run.processes(EXECUTOR))
    assert committed, run.describe()
    assert len(executors) == 2, run.describe()
    return executors


def local_state(folder: Path) -> list[Path]:
    return list((folder / "spark-local").glob("**/shard-*"))


def require_exact(spark: SparkSession, run: Killings) -> None:
    """Require state and output as of a query that nobody disturbed."""
    folder = run.job.path
    state, output = expected(micro_batches(folder))
    found = {row["key"]: (row["n"], row["total"], row["last"]) for row in stored_state(spark, folder)}
    assert found == state, run.describe()
    assert found_output(folder) == output, run.describe()


def stored_state(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    spark.conf.set("spark.holdfast.state.dir", str(folder / "durable"))
    try:
        return holdfast.read_state(spark, folder / "query", OPERATOR).to_pylist()
    finally:
        spark.conf.unset("spark.holdfast.state.dir")


@pytest.mark.timeout(600)
@pytest.mark.all
@pytest.mark.parametrize("backend", cases(["memory", "filesystem", "rocksdb"]))
def test_two_attempts_at_a_shard_at_once(backend: str, tmp_path: Path) -> None:
    """With speculation both run, on two hosts; Spark takes one, and each row counts once in each micro-batch."""
    with cluster(tmp_path, hosts=2) as master:
        told, _ = run_program(SPECULATING, tmp_path, master, backend)
    found = json.loads(told)
    keys = range(speculating.KEYS)
    assert found["second"] == speculating.BATCHES, "each micro-batch was attempted twice"
    assert found["output"] == [[n] * len(keys) for n in range(1, speculating.BATCHES + 1)]
    assert found["counts"] == [[key, speculating.BATCHES] for key in keys]
    assert found["batches"] == [[key, batch] for key in keys for batch in range(speculating.BATCHES)]


@pytest.mark.slow(90)
@pytest.mark.timeout(1800)
@pytest.mark.all
@pytest.mark.parametrize("target", cases(["parquet", "postgres", "postgres upsert"]))
def test_executors_are_killed_under_a_sink(target: str, java_home: Path, tmp_path: Path) -> None:
    """What they had prepared and nobody knows of is ended; another executor's attempt counts."""
    with cluster(tmp_path) as master, target_of(target).served(tmp_path) as place:
        job = SinkJob(str(tmp_path), master=master, target=target, place=place)
        run = SinkKillings(job, random.Random(target))
        run.run(kills(quick=2), ["executor"])
        found = run.judged()
    print(f"\n{target}: killed {run.done}; {found}")
    assert found.is_right, f"{found}; {run.describe()}"


@pytest.mark.slow(90)
@pytest.mark.timeout(1800)
@pytest.mark.all
@pytest.mark.parametrize("target", cases(["csv", "parquet", "postgres", "postgres upsert"]))
def test_two_attempts_at_a_task_show_one(target: str, java_home: Path, tmp_path: Path) -> None:
    """With speculation both write and may prepare: the rows are those of one, and nothing of the other is left."""
    with cluster(tmp_path, hosts=2) as master, target_of(target).served(tmp_path) as place:
        told, _ = run_program(Path(sink_speculating.__file__), tmp_path, master, target, json.dumps(place))
        rows = target_of(target).read(place)
    found = json.loads(told)
    assert found["twins"] == sink_speculating.BATCHES - 1
    assert found["left"] == 0, "attempts that did not count are ended"
    newest = sink_speculating.BATCHES - 1
    batches = [newest] if target_of(target).upserts else range(newest + 1)
    shown = sorted(zip(rows["batch"].to_pylist(), rows["key"].to_pylist(), strict=True))
    assert shown == [(batch, key) for batch in batches for key in range(sink_speculating.KEYS)]
    attempts = {tuple(row[name] for name in ("batch", "part", "attempt")) for row in rows.to_pylist()}
    assert len(attempts) == len({attempt[:2] for attempt in attempts}), "a partition has rows of one attempt"
    print(f"\n{target}: {found}")


EXECUTORS = {"spark.cores.max": "2", "spark.executor.cores": "1", "spark.executor.memory": "512m"}
PATIENCE_S = 3.0
TRIES = 8


@pytest.fixture
def lab(spark: SparkSession, tmp_path: Path) -> Iterator[Lab]:
    found = Lab(spark, tmp_path, tmp_path / "local")
    with configured(found):
        yield found


def executors(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if EXECUTOR in process.cmdline() and process.environ().get(RUN_MARK) == str(folder):
                found.append(process.pid)
    return found


def kill_an_executor(folder: Path, chance: random.Random) -> bool:
    """Kill one of the executors; tell whether there was any."""
    try:
        os.kill(chance.choice(executors(folder)), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return False
    return True


def kill_one(lab: Lab, what: str, chance: random.Random) -> None:
    """Kill an executor in the middle of what the application does; where that was over by then, do it once more."""
    patience_s = PATIENCE_S
    for _ in range(TRIES):
        wait_s = chance.random() * patience_s
        with (
            cluster(lab.folder) as master,
            application(lab.folder, what, EXECUTORS | {"spark.master": master}) as process,
        ):
            threading.Event().wait(wait_s)
            killed = kill_an_executor(lab.folder, chance)
            # Asked only now: finding executors takes a while, and those of an application that is through are gone.
            was_over = has_ended(lab.folder)
            assert killed or was_over, "it has executors while it is at work"
            said, _ = process.communicate(timeout=300)
        assert (said, process.returncode) == ("END\n", 0), (lab.folder / "application.log").read_text()[-3000:]
        if not was_over:
            return
        undo(lab.folder, what)
        patience_s = wait_s
    raise AssertionError(f"{what} was over each time before an executor could be killed")


@pytest.mark.all
@pytest.mark.parametrize("what", cases(["create", "restore"]))
def test_an_executor_is_killed_beside_a_savepoint(lab: Lab, what: str) -> None:
    chance = random.Random(what)
    feed(lab)
    if what == "restore":
        lab.run(totals(lab.spark, lab.folder))
        savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    kill_one(lab, what, chance)
    assert saved(lab)
    if what == "create":
        lab.configure({"state.dir": str(lab.folder / "durable-again")})
        savepoints.restore(lab.spark, lab.folder / "savepoints", "one", lab.folder / "again", shards=3)
    feed(lab, 1)
    for query, durable in (("query", "durable"), ("again", "durable-again")):
        lab.configure({"state.dir": str(lab.folder / durable)})
        lab.run(totals(lab.spark, lab.folder), query)
        assert lab.state(query=query) == expected_totals(range(lab.files))
