"""Credentials are in no file and no output of a query, also where requests fail; Spark's own event log redacts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.servers.s3 import BUCKET, SECRET_KEY, Moto

pytestmark = [pytest.mark.spark, pytest.mark.s3, pytest.mark.timeout(600), pytest.mark.all]

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
