"""Savepoints on S3 and HDFS: made there, copied elsewhere, and restored after all else is gone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from holdfast import savepoints, sinks
from holdfast.commands.export import write
from holdfast.errors import ConflictError, InvalidArgumentError
from holdfast.spark_integration.copies.cloning import copy
from holdfast.spark_integration.sinks.delta.tables import storage_options
from tests.servers.hdfs import Hdfs
from tests.servers.s3 import BUCKET, SECRET_KEY, Versitygw
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import CASES, Case, rows, without_spark
from tests.spark.savepoints.test_drained import CLOSED, FIRST, LATER, QUERIES, feed, shown, writer
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

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


def settings_of(server: Versitygw) -> dict[str, str]:
    credentials = {"storage.key": str(server.options()["key"]), "storage.secret": SECRET_KEY}
    client = {"endpoint_url": server.url, "region_name": "us-east-1"}
    return credentials | {f"storage.client_kwargs.{name}": value for name, value in client.items()}


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


@pytest.mark.s3
@pytest.mark.all
@pytest.mark.parametrize("how", cases(["clone without Spark", "clone", "rescale"]))
def test_a_copy_of_a_query_on_s3_goes_on_without_it(lab: Lab, versitygw: Versitygw, how: str) -> None:
    """As the original did, which is gone by then, and what executors kept of it."""
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
