"""Spark on the Java that holdfast finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    """The demo runs on it, too."""
    command = [sys.executable, "-c", JOB]
    done = subprocess.run(
        command, env=environment_without_java, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    home, total, version = done.stdout.split("RESULT ")[1].split()
    assert Path(home).is_relative_to(tmp_path / "cache")
    assert total == "4950"
    assert version.startswith("21.")
