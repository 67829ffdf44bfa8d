"""The demo, the examples, and Spark on the Java of PyPI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import confluent_kafka
import pytest

from tests.pages import ROOT, blocks, text
from tests.servers.s3 import BUCKET
from tests.tiers import cases

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs
    from tests.servers.kafka import Kafka
    from tests.servers.postgres import Postgres
    from tests.servers.s3 import Versitygw

COMMAND = [sys.executable, "-c", "from holdfast.cli import main; main()", "demo"]
SMALL = ["--flights", "3000", "--batches", "4"]


@contextmanager
def running_demo(folder: Path, environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the demo with its files below `folder`; whatever happens, it has ended afterwards."""
    with subprocess.Popen(
        [*COMMAND, *SMALL, "--work-dir", str(folder / "work"), *arguments],
        env=environment | {"COLUMNS": "100"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        try:
            yield demo
        finally:
            demo.kill()


def shown_by(demo: subprocess.Popen[str], folder: Path) -> str:
    """Wait for the demo's end, and return what it has shown."""
    out, err = demo.communicate(timeout=800)
    assert demo.returncode == 0, out + err
    assert err == ""
    assert not (folder / "work").exists()
    return out


def run_demo(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    """Run the demo with its files and its durable state below `folder`; return what it shows."""
    durable = folder / "durable"
    with running_demo(folder, environment, "--state-dir", str(durable), *arguments) as demo:
        shown = shown_by(demo, folder)
    assert not [path for path in durable.rglob("*") if path.is_file()]
    return shown


def require_right_totals(shown: str, backend: str, results: str = "output") -> None:
    assert f"backend {backend}," in shown
    assert "equal: state and plain pandas" in shown
    assert f"equal: {results} and plain pandas" in shown


def require_results_once(shown: str, results: str) -> None:
    """Check what the demo says of a sink: right at the end, and at the kill, which did happen."""
    require_right_totals(shown, "memory", results)
    assert "killed the driver" in shown
    assert "at the kill the state is after micro-batch 1, as Spark's log says" in shown
    assert f"once: each of 4 micro-batches in the {results}, all" in shown
    assert re.search(rf"equal: {results} at the kill and state after micro-batch [12], all", shown)
    assert "not the same" not in shown


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
@pytest.mark.smoke
def test_the_demo_survives_its_kill(environment_without_java: dict[str, str], tmp_path: Path) -> None:
    """On the Java from PyPI, as a user of a machine without Java would run it."""
    shown = run_demo(tmp_path, environment_without_java)
    require_right_totals(shown, "memory")
    assert "killed the driver" in shown
    assert "from durable storage" in shown


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
@pytest.mark.all
@pytest.mark.parametrize("backend", ["filesystem", "rocksdb"])
def test_every_backend_gives_the_same_totals(backend: str, tmp_path: Path) -> None:
    """Where state lives changes no result; what is on disk is used again after the kill.

    `test_local_ground.py` shows the latter, and `test_restarts.py` the former.
    """
    shown = run_demo(tmp_path, dict(os.environ), "--backend", backend)
    require_right_totals(shown, backend)
    assert "killed the driver" in shown
    assert "from local files" in shown


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
@pytest.mark.all
def test_the_query_moves_by_a_savepoint(tmp_path: Path) -> None:
    """Stopped half-way, and restored on another backend with twice the shards: the same totals at the end."""
    shown = run_demo(tmp_path, dict(os.environ), "--savepoint")
    require_right_totals(shown, "memory")
    assert re.search("stopped the query with a savepoint after [23] micro-batches", shown)
    assert "keys from 2 shards" in shown or os.cpu_count() != 2
    assert "restored it with backend filesystem and" in shown
    assert "killed" not in shown


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
@pytest.mark.all
@pytest.mark.parametrize(("sink", "results"), [("parquet", "Parquet files"), ("delta", "Delta table")])
def test_the_query_moves_and_its_sink_with_it(sink: str, results: str, tmp_path: Path) -> None:
    """A reader that knows of no query finds each micro-batch of both once."""
    shown = run_demo(tmp_path, dict(os.environ), "--savepoint", "--sink", sink)
    require_right_totals(shown, "memory", results)
    assert re.search("stopped the query with a savepoint after [23] micro-batches", shown)
    assert "restored it with backend filesystem and" in shown
    assert f"once: each of 4 micro-batches in the {results}, all" in shown


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
@pytest.mark.all
@pytest.mark.parametrize(
    ("sink", "results"), cases([("delta", "Delta table"), ("parquet", "Parquet files")]), ids=lambda given: given
)
def test_a_file_sink_holds_what_the_state_holds(sink: str, results: str, tmp_path: Path) -> None:
    """At the kill and at the end, by a reader that knows nothing of the query."""
    require_results_once(run_demo(tmp_path, dict(os.environ), "--sink", sink), results)


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
@pytest.mark.postgres
@pytest.mark.all
def test_a_table_of_postgres_holds_what_the_state_holds(postgres: Postgres, tmp_path: Path) -> None:
    """Found by libpq's environment and by a setting; the demo leaves nothing there, and prints no password."""
    environment = {**os.environ, **postgres.environment(), "PGPORT": "1"}
    setting = f"spark.holdfast.sink.demo.port={postgres.port}"
    shown = run_demo(tmp_path, environment, "--sink", "postgres", "--conf", setting)
    require_results_once(shown, "PostgreSQL table")
    with postgres.connect() as connection:
        left = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'holdfast_demo%'").fetchall()
        prepared = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE gid LIKE '%demo-%'").fetchall()
    assert (left, prepared) == ([], [])
    assert postgres.options["password"] not in shown


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
@pytest.mark.kafka
@pytest.mark.all
def test_a_topic_of_kafka_holds_what_the_state_holds(kafka: Kafka, tmp_path: Path) -> None:
    """In a topic in which somebody else's messages stand already."""
    topic = kafka.add_topic(3)
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.servers})
    producer.produce(topic, b"of somebody else", b"no JSON")
    producer.flush(30)
    environment = {**os.environ, "KAFKA_SERVERS": kafka.servers, "KAFKA_TOPIC": topic}
    require_results_once(run_demo(tmp_path, environment, "--sink", "kafka"), "Kafka topic")


@dataclass
class Store:
    """A storage server that can be away for a while, and how the demo reaches it."""

    state_dir: str
    environment: dict[str, str]
    kill: Callable[[], None]
    start: Callable[[], None]
    objects: Callable[[], list[str]]


@pytest.fixture(
    params=[pytest.param("s3", marks=pytest.mark.s3), pytest.param("hdfs", marks=[pytest.mark.hdfs, pytest.mark.all])]
)
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "hdfs":
        hdfs: Hdfs = request.getfixturevalue("hdfs")

        def kill() -> None:
            hdfs.namenode.kill()
            hdfs.datanode.kill()

        return Store(f"{hdfs.url}/demo", dict(os.environ), kill, hdfs.revive, lambda: list(hdfs.files("/demo")))
    s3: Versitygw = request.getfixturevalue("versitygw")

    def objects() -> list[str]:
        with s3.client() as client:
            listed = client.list_objects_v2(Bucket=BUCKET, Prefix="demo/")
        return [found["Key"] for found in listed.get("Contents", [])]

    return Store(f"s3://{BUCKET}/demo", {**os.environ, **s3.environment()}, s3.kill, s3.start, objects)


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
@pytest.mark.all
def test_a_machine_is_lost_and_its_storage_is_killed_once_more(store: Store, tmp_path: Path) -> None:
    """Nothing but Spark's checkpoint and the storage is left; then that one is away for a while, and comes back."""
    arguments = ["--state-dir", store.state_dir, "--backend", "filesystem", "--lose-local", "--restarts", "2"]
    # Large enough that each micro-batch must write to the storage, and several are left when it is killed.
    size = ["--flights", "24000", "--batches", "8"]
    with running_demo(tmp_path, store.environment, *size, *arguments) as demo:
        wait_for(lambda: committed(tmp_path) >= 5, demo)
        store.kill()
        try:
            wait_for(lambda: is_stuck(tmp_path), demo)
        finally:
            store.start()
        shown = shown_by(demo, tmp_path)
    require_right_totals(shown, "filesystem")
    assert "deleted its 2 local shards" in shown
    assert "from durable storage" in shown
    assert not store.objects()


def committed(folder: Path) -> int:
    return sum(path.name.isdigit() for path in (folder / "work" / "query" / "commits").glob("*"))


def is_stuck(folder: Path) -> bool:
    """Tell whether a micro-batch has begun, and does not end: without its storage none can."""
    before = committed(folder)
    begun = sum(path.name.isdigit() for path in (folder / "work" / "query" / "offsets").glob("*"))
    time.sleep(3)
    return committed(folder) == before < begun


def wait_for(condition: Callable[[], bool], demo: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 600
    while not condition():
        if demo.poll() is not None or time.monotonic() > end_s:
            raise AssertionError(demo.communicate(timeout=10) if demo.poll() is not None else "nothing happens")
        time.sleep(0.05)


#: The rows of all micro-batches.
PRINTED = {
    "sessions": [["ann", "2", "2026-03-02 09:50:00"], ["bob", "1", "2026-03-02 09:35:00"]],
    "top_n": [
        ["tea", "1", "30"],
        ["tea", "2", "20"],
        ["tea", "3", "10"],
        ["salt", "1", "5"],
        ["salt", "1", "7"],
        ["salt", "2", "5"],
    ],
    "deduplication": [["17", "tea"], ["18", "rice"], ["19", "salt"]],
}


def printed(example: str, java_home: Path, folder: Path) -> str:
    """Run an example by a Python whose environment is not activated: `python3` is one without PySpark."""
    (folder / "python3").symlink_to(Path(sys._base_executable))  # type: ignore[attr-defined]
    kept = {name: value for name, value in os.environ.items() if name not in {"PYSPARK_PYTHON", "VIRTUAL_ENV"}}
    here = {"PATH": f"{folder}:/usr/bin:/bin", "JAVA_HOME": str(java_home), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{example}.py"],
        env=kept | here | {"SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(shown: str) -> list[list[str]]:
    """Return the rows of the tables that Spark's console prints."""
    lines = [line.strip("|").split("|") for line in shown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


def test_the_readme_shows_the_quickstart_as_it_is() -> None:
    program = text("examples/quickstart.py")
    assert blocks("README.md", "python") == [program]
    assert len(program.splitlines()) <= 25


@pytest.mark.spark
@pytest.mark.slow(60)
def test_the_quickstart_prints_what_the_readme_shows(java_home: Path, tmp_path: Path) -> None:
    """The first thing that somebody tries: whole, with its output, from an environment that is not activated."""
    shown, *_ = blocks("README.md", "text")
    assert printed("quickstart", java_home, tmp_path).rstrip() == shown.rstrip()


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.all
@pytest.mark.parametrize("example", PRINTED)
def test_each_example_prints_its_result(example: str, java_home: Path, tmp_path: Path) -> None:
    rows = rows_of(printed(example, java_home, tmp_path))
    assert sorted(row for row in rows if row[0] not in {"user", "auction", "id"}) == sorted(PRINTED[example])


JOB = """
import sys
from holdfast.spark_integration.java import ensure_java
home = ensure_java()
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
         .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate())
total = spark.range(100).mapInArrow(lambda batches: batches, "id long").groupBy().sum("id").first()[0]
print("RESULT", home, total, spark._jvm.System.getProperty("java.version"))
spark.stop()
"""


@pytest.mark.all
@pytest.mark.spark
@pytest.mark.slow
def test_spark_runs_on_the_java_from_pypi(environment_without_java: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", JOB]
    done = subprocess.run(
        command, env=environment_without_java, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    home, total, version = done.stdout.split("RESULT ")[1].split()
    assert Path(home).is_relative_to(tmp_path / "cache")
    assert total == "4950"
    assert version.startswith("21.")
