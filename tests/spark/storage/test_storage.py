"""Queries and savepoints on S3 and HDFS, and that credentials appear nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException

from holdfast import savepoints, sinks
from holdfast.commands.export import write
from holdfast.errors import ConflictError, InvalidArgumentError
from holdfast.spark_integration.copies import copy
from holdfast.spark_integration.sinks.delta.tables import storage_options
from tests.servers.hdfs import Hdfs
from tests.servers.s3 import BUCKET, SECRET_KEY, Moto, S3Server, Versitygw
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import CASES, Case, rows, without_spark
from tests.spark.savepoints.test_drained import CLOSED, FIRST, LATER, QUERIES, feed, shown, writer
from tests.tiers import cases

pytestmark = pytest.mark.spark


# ``make test`` has each of them once.
SERVERS = ["moto", "versitygw"]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


def use(lab: Lab, server: S3Server, options: dict[str, object], folder: str = "app") -> None:
    lab.configure(settings_of(server, options) | {"state.dir": f"s3://{BUCKET}/{folder}"})


def settings_of(server: S3Server, options: dict[str, object] | None = None) -> dict[str, str]:
    given = options or server.options()
    client = {"endpoint_url": server.url, "region_name": "us-east-1"}
    found = {"storage.key": str(given["key"]), "storage.secret": str(given["secret"])}
    return found | {f"storage.client_kwargs.{name}": value for name, value in client.items()}


@pytest.mark.s3
@pytest.mark.parametrize("server", cases(SERVERS), indirect=True)
def test_state_on_s3_outlives_local_state_and_wrong_credentials_stop_the_query(lab: Lab, server: S3Server) -> None:
    use(lab, server, server.options())
    lab.feed([("a", 1), ("b", 2), (None, 3)])
    lab.run(lab.totals())
    lab.lose_local_state()
    lab.feed([("a", 10)])
    with server.wrong_credentials() as wrong:
        use(lab, server, wrong)
        with pytest.raises(StreamingQueryException, match=r"(?s)InvalidArgumentError.*s3://bucket/app") as failed:
            lab.run(lab.totals())
    use(lab, server, server.options())
    assert SECRET_KEY not in str(failed.value)
    assert lab.state() == {"a": (1, 1), "b": (1, 2), None: (1, 3)}
    lab.run(lab.totals())
    assert lab.state() == {"a": (2, 11), "b": (1, 2), None: (1, 3)}


@pytest.mark.s3
@pytest.mark.all
@pytest.mark.parametrize("server", cases(SERVERS[::-1]), indirect=True)
def test_places_that_cannot_be_used(lab: Lab, server: S3Server) -> None:
    """Absent, or not to be written to: the first micro-batch names the action, the key and the remedy."""
    lab.feed([("a", 1)])
    use(lab, server, server.options(), "places")
    lab.configure({"state.dir": "s3://no-such-bucket/app"})
    with pytest.raises(StreamingQueryException, match=r"(?s)no such bucket: create it.*action=get key=totals/operator"):
        lab.run(lab.totals())
    with server.user_without("s3:PutObject") as limited:
        use(lab, server, limited, "places")
        with pytest.raises(StreamingQueryException, match=r"(?s)access denied.*permission=s3:PutObject") as failed:
            lab.run(lab.totals())
    assert str(limited["secret"]) not in str(failed.value)
    use(lab, server, server.options(), "places")
    lab.run(lab.totals())
    assert lab.state() == {"a": (1, 1)}


@pytest.mark.hdfs
@pytest.mark.all
def test_state_on_hdfs_outlives_local_state_and_its_daemons(lab: Lab, hdfs: Hdfs) -> None:
    lab.configure({"state.dir": f"{hdfs.url}/app", "storage.dfs.client.socket-timeout": "3000"})
    lab.feed([("a", 1), ("b", 2), (None, 3)])
    lab.run(lab.totals())
    lab.lose_local_state()
    hdfs.namenode.kill()
    hdfs.datanode.kill()
    hdfs.revive()
    lab.feed([("a", 10)])
    lab.run(lab.totals())
    assert lab.state() == {"a": (2, 11), "b": (1, 2), None: (1, 3)}
    assert not [path for path in hdfs.files("/app") if ".tmp-" in path or "/probes/" in path]


TOKEN = "TOKENCANARY/" * 3
PROGRAM = """
import logging, os, sys
from pathlib import Path
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
import holdfast
from tests.spark.conftest import OUTPUT, STATE, count_and_sum
folder, endpoint, secret, token = Path(sys.argv[1]), *os.environ.pop("PLACE").split()
logging.basicConfig(level=logging.DEBUG)
logging.getLogger("py4j").setLevel(logging.WARNING)
settings = {
    "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2", "spark.python.daemon.module": "tests.spark_daemon",
    "spark.eventLog.enabled": "true", "spark.eventLog.compress": "false", "spark.eventLog.dir": f"file://{folder}/events",
    "spark.holdfast.state.dir": "s3://bucket/secrets", "spark.holdfast.local.dir": f"{folder}/local",
    "spark.holdfast.storage.key": "AKIACANARYCANARY", "spark.holdfast.storage.secret": secret,
    "spark.holdfast.storage.token": token,
    "spark.holdfast.storage.client_kwargs.endpoint_url": endpoint,
    "spark.holdfast.storage.client_kwargs.region_name": "us-east-1",
}
builder = SparkSession.builder.master("local[2]")
for key, value in settings.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
def run(name):
    source = spark.readStream.schema("key string, v long").parquet(f"{folder}/input")
    totals = holdfast.stream(source).groupBy("key").applyInArrowWithState(count_and_sum, OUTPUT, STATE, "update", name)
    writer = totals.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", f"{folder}/{name}").start().awaitTermination()
run("fine")
spark.conf.set("spark.holdfast.state.dir", "s3://no-such-bucket/secrets")
try:
    run("broken")
except StreamingQueryException as exc:
    print("FAILED", exc)
spark.stop()
"""


@pytest.mark.s3
@pytest.mark.timeout(600)
def test_no_secret_is_written_anywhere(moto: Moto, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    (tmp_path / "events").mkdir()
    (tmp_path / "temporary").mkdir()
    pq.write_table(pa.table({"key": ["a", "b"], "v": [1, 2]}), tmp_path / "input/1.parquet")
    environment = {
        **os.environ,
        "PLACE": f"{moto.url} {SECRET_KEY} {TOKEN}",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "TMPDIR": str(tmp_path / "temporary"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, timeout=500, env=environment, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FAILED" in done.stdout
    assert "no such bucket" in done.stdout
    assert "put key=fine/" not in done.stdout, "workers log to stderr"
    written = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(b"spark.holdfast.storage.secret" in data for path, data in written.items() if "/events/" in path)
    assert any(path.endswith(".log") for path in written), "of the state server"
    with moto.client() as client:
        stored = client.list_objects_v2(Bucket=BUCKET, Prefix="secrets/")["Contents"]
        for entry in stored:
            written[entry["Key"]] = client.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
    assert any(key.startswith("secrets/fine/") for key in written)
    written |= {"stdout": done.stdout.encode(), "stderr": done.stderr.encode()}
    for secret in (SECRET_KEY, TOKEN):
        assert not [name for name, data in written.items() if secret.encode() in data]


ELSEWHERE = "another-bucket"


def run(lab: Lab, case: Case, location: str, state_dir: str) -> list[list[str]]:
    """Run a query over the files that it has not read yet; return its rows by micro-batch."""
    lab.configure({"state.dir": state_dir})
    batches: list[list[dict[str, Any]]] = []
    frame = case.query(lab.source(case.schema))
    writer = frame.writeStream.foreachBatch(lambda found, _: batches.append(found.toArrow().to_pylist()))
    writer = writer.outputMode(case.mode).trigger(availableNow=True).option("checkpointLocation", location)
    writer.start().awaitTermination()
    return rows(batches)


def copied(lab: Lab, case: Case, places: Mapping[str, str], how: str) -> list[list[str]]:
    """Run a query over the first files, clone or rescale it, and return what the original makes of the others."""
    files = case.files()
    for file in files[:2]:
        lab.feed(file)
    run(lab, case, places["query"], places["state"])
    if how == "clone":
        savepoints.clone(lab.spark, places["query"], places["again"], to_state_dir=places["state-again"])
    elif how == "clone without Spark":
        with without_spark(lab, places["state"]) as alone:
            copy(alone, places["query"], places["again"], to_state_dir=places["state-again"])
    else:
        options = {"shards": 3, "to_state_dir": places["state-again"]}
        savepoints.rescale(lab.spark, places["query"], places["again"], **options)
    for file in files[2:]:
        lab.feed(file)
    return run(lab, case, places["query"], places["state"])


def saved(lab: Lab, case: Case, location: str, state_dir: str, target: str) -> list[list[str]]:
    """Run a query over the first files, save it, and return what it makes of the others."""
    files = case.files()
    for file in files[:2]:
        lab.feed(file)
    run(lab, case, location, state_dir)
    savepoints.create(lab.spark, location, target, "one")
    for file in files[2:]:
        lab.feed(file)
    return run(lab, case, location, state_dir)


@pytest.mark.timeout(600)
@pytest.mark.all
@pytest.mark.s3
def test_a_query_on_s3_is_drained(lab: Lab, versitygw: Versitygw) -> None:
    """Its state, the savepoint and what its sink shows are there; what executors kept is gone when it is restored."""
    lab.configure(settings_of(versitygw) | {"state.dir": f"s3://{BUCKET}/drained", "commit.carriedBytes": "0"})
    url = str(lab.folder / "shown")
    sink, target = sinks.parquet("out", url), f"s3://{BUCKET}/savepoints"
    feed(lab, *FIRST)
    query = writer(lab, QUERIES[0], sink, "query").start()
    query.awaitTermination()
    feed(lab, LATER[0])
    location = lab.folder / "query"
    for name in ("end", "again"):
        savepoints.drain(lab.spark, query, writer(lab, QUERIES[0], sink, "query"), location, target, name)
        assert shown(url) == CLOSED
    lab.lose_local_state()
    savepoints.restore(lab.spark, target, "end", lab.folder / "restored", shards=3, continue_sinks=True)
    feed(lab, LATER[1])
    lab.configure({"shards": "3"})
    writer(lab, QUERIES[0], sink, "restored").start().awaitTermination()
    assert shown(url) == sorted([*CLOSED, ("ann", 62, 62, 1)])


@pytest.mark.timeout(600)
@pytest.mark.all
@pytest.mark.s3
def test_a_savepoint_on_s3_is_copied_to_another_bucket(lab: Lab, versitygw: Versitygw) -> None:
    """With the tools of S3; the query, its state and the first copy are gone when it is restored."""
    case, location = CASES[0], str(lab.folder / "query")
    lab.configure(settings_of(versitygw))
    original = saved(lab, case, location, f"s3://{BUCKET}/original", f"s3://{BUCKET}/savepoints")
    with versitygw.client() as plain:
        plain.create_bucket(Bucket=ELSEWHERE)
        for entry in plain.list_objects_v2(Bucket=BUCKET)["Contents"]:
            if entry["Key"].startswith("savepoints/one/"):
                copied = entry["Key"].replace("savepoints/one/", "archive/2026/one/")
                plain.copy_object(Bucket=ELSEWHERE, Key=copied, CopySource={"Bucket": BUCKET, "Key": entry["Key"]})
            plain.delete_object(Bucket=BUCKET, Key=entry["Key"])
    shutil.rmtree(location)
    lab.lose_local_state()
    lab.configure({"state.dir": f"s3://{BUCKET}/again"})
    again = str(lab.folder / "again")
    savepoints.restore(lab.spark, f"s3://{ELSEWHERE}/archive/2026", "one", again, shards=3)
    assert run(lab, case, again, f"s3://{BUCKET}/again") == original


@pytest.mark.timeout(600)
@pytest.mark.s3
@pytest.mark.all
@pytest.mark.parametrize("how", cases(["clone without Spark", "clone", "rescale"]))
def test_a_copy_of_a_query_on_s3_goes_on_without_it(lab: Lab, versitygw: Versitygw, how: str) -> None:
    lab.configure(settings_of(versitygw) | {"commit.carriedBytes": "0"})
    places, folder = {name: str(lab.folder / name) for name in ("query", "again")}, how.replace(" ", "-")
    places |= {name: f"s3://{BUCKET}/{folder}/{name}" for name in ("state", "state-again")}
    original = copied(lab, CASES[0], places, how)
    with versitygw.client() as plain:
        keys = [entry["Key"] for entry in plain.list_objects_v2(Bucket=BUCKET)["Contents"]]
        assert not [key for key in keys if "_rescaling/" in key]
        for key in keys:
            if key.startswith(f"{folder}/state/"):
                plain.delete_object(Bucket=BUCKET, Key=key)
    shutil.rmtree(places["query"])
    lab.lose_local_state()
    assert run(lab, CASES[0], places["again"], places["state-again"]) == original


@pytest.mark.timeout(600)
@pytest.mark.s3
@pytest.mark.all
def test_a_delta_table_is_exported_to_s3(lab: Lab, versitygw: Versitygw) -> None:
    """With the session's credentials, which tasks and the driver hand to different clients."""
    url, settings = f"s3://{BUCKET}/table", settings_of(versitygw)
    lab.configure(settings)
    write(lab.spark.range(5), url, "delta")
    given = {name.removeprefix("storage."): value for name, value in settings.items()}
    table = DeltaTable(url, storage_options=storage_options(url, given))
    assert sorted(pa.table(table.to_pyarrow_table())["id"].to_pylist()) == [0, 1, 2, 3, 4]
    with pytest.raises(ConflictError, match="is not empty"):
        write(lab.spark.range(5), url, "delta")
    lab.configure({"storage.secret": "wrong"})
    with pytest.raises(InvalidArgumentError) as denied:
        write(lab.spark.range(5), f"s3://{BUCKET}/another", "delta")
    assert "wrong" not in str(denied.value)


@pytest.mark.timeout(600)
@pytest.mark.hdfs
@pytest.mark.all
@pytest.mark.parametrize("how", cases(["clone without Spark", "clone", "rescale"]))
def test_a_copy_of_a_query_on_hdfs_goes_on_without_it(lab: Lab, hdfs: Hdfs, how: str) -> None:
    """Spark's location is there, too: of a processor it has metadata that names its own place."""
    case, root = CASES[3], f"/copy-{how}".replace(" ", "-")
    places = {name: f"{hdfs.url}{root}/{name}" for name in ("query", "state", "again", "state-again")}
    lab.configure({"storage.dfs.client.socket-timeout": "3000"})
    with configured(lab.spark, dict(case.settings)):
        original = copied(lab, case, places, how)
        for name in ("query", "state"):
            hdfs.client().delete(f"{root}/{name}", True)
        lab.lose_local_state()
        assert not [path for path in hdfs.files(root) if "restoring" in path or "_rescaling" in path]
        assert run(lab, case, places["again"], places["state-again"]) == original


@pytest.mark.timeout(600)
@pytest.mark.hdfs
@pytest.mark.all
@pytest.mark.parametrize("case", cases([CASES[1], CASES[3]]), ids=str)
def test_a_query_on_hdfs_is_saved_and_restored(lab: Lab, hdfs: Hdfs, case: Case) -> None:
    """Spark's location, the savepoint and the state are all there, and the original's are gone before the restore."""
    root = f"/{case.operator}"
    places = {name: f"{hdfs.url}{root}/{name}" for name in ("query", "state", "savepoints", "again", "state-again")}
    lab.configure({"storage.dfs.client.socket-timeout": "3000"})
    with configured(lab.spark, dict(case.settings)):
        original = saved(lab, case, places["query"], places["state"], places["savepoints"])
        for name in ("query", "state"):
            hdfs.client().delete(f"{root}/{name}", True)
        lab.lose_local_state()
        lab.configure({"state.dir": places["state-again"]})
        savepoints.restore(lab.spark, places["savepoints"], "one", places["again"], shards=3)
        assert not [path for path in hdfs.files(root) if "restoring" in path]
        assert run(lab, case, places["again"], places["state-again"]) == original
