"""Savepoints on S3 and HDFS: made there, copied elsewhere, and restored after all else is gone."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from holdfast import savepoints
from tests.repetitions import sample
from tests.servers.hdfs import Hdfs
from tests.servers.s3 import BUCKET, SECRET_KEY, Versitygw
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import CASES, Case, rows

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

ELSEWHERE = "another-bucket"


def run(lab: Lab, case: Case, location: str, checkpoint_dir: str) -> list[list[str]]:
    """Run a query over the files that it has not read yet; return its rows by micro-batch."""
    lab.configure({"checkpoint.dir": checkpoint_dir})
    batches: list[list[dict[str, Any]]] = []
    frame = case.query(lab.source(case.schema))
    writer = frame.writeStream.foreachBatch(lambda found, _: batches.append(found.toArrow().to_pylist()))
    writer = writer.outputMode(case.mode).trigger(availableNow=True).option("checkpointLocation", location)
    writer.start().awaitTermination()
    return rows(batches)


def saved(lab: Lab, case: Case, location: str, checkpoint_dir: str, target: str) -> list[list[str]]:
    """Run a query over the first files, save it, and return what it makes of the others."""
    files = case.files()
    for file in files[:2]:
        lab.feed(file)
    run(lab, case, location, checkpoint_dir)
    savepoints.create(lab.spark, location, target, "one")
    for file in files[2:]:
        lab.feed(file)
    return run(lab, case, location, checkpoint_dir)


@pytest.mark.s3
@pytest.mark.turn(0, 4)
def test_a_savepoint_on_s3_is_copied_to_another_bucket(lab: Lab, versitygw: Versitygw) -> None:
    """With the tools of S3; the query, its state and the first copy are gone when it is restored."""
    case, location = CASES[0], str(lab.folder / "query")
    credentials = {"storage.key": str(versitygw.options()["key"]), "storage.secret": SECRET_KEY}
    client = {"endpoint_url": versitygw.url, "region_name": "us-east-1"}
    lab.configure(credentials | {f"storage.client_kwargs.{name}": value for name, value in client.items()})
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
    lab.configure({"checkpoint.dir": f"s3://{BUCKET}/again"})
    again = str(lab.folder / "again")
    savepoints.restore(lab.spark, f"s3://{ELSEWHERE}/archive/2026", "one", again, shards=3)
    assert run(lab, case, again, f"s3://{BUCKET}/again") == original


@pytest.mark.hdfs
@pytest.mark.turn(2, 4)
@pytest.mark.parametrize("case", sample([CASES[1], CASES[3]]), ids=str)
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
        lab.configure({"checkpoint.dir": places["state-again"]})
        savepoints.restore(lab.spark, places["savepoints"], "one", places["again"], shards=3)
        assert not [path for path in hdfs.files(root) if "restoring" in path]
        assert run(lab, case, places["again"], places["state-again"]) == original
