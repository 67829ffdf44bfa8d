"""Applications of their own, each with a JVM and the state of its queries below one folder.

A program calls `start_spark`; the test that needs one calls `start_program`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]


def settings_of(folder: Path) -> dict[str, str]:
    """Return what an application needs to keep its state below a folder, and to start fast."""
    return {
        "spark.holdfast.state.dir": str(folder / "durable"),
        "spark.holdfast.local.dir": str(folder / "local"),
        # Workers are forked from a process that has imported the libraries: six seconds of CPU time less.
        "spark.python.daemon.module": "tests.spark_daemon",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }


def start_spark(folder: Path, settings: dict[str, str] | None = None) -> SparkSession:
    """Return the session of this process, with further settings if any."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    here = {"spark.master": "local[2]", "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    builder = SparkSession.builder.appName("an application of its own")
    for key, value in (here | settings_of(folder) | (settings or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def start_program(
    program: Path, folder: Path, *arguments: str, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start a program with a folder, in which it works, and further arguments; `options` are those of `Popen`."""
    paths = [str(ROOT), *filter(None, [(environment or {}).get("PYTHONPATH")])]
    variables = {**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(program), str(folder), *arguments]
    return subprocess.Popen(command, cwd=folder, env=variables, text=True, **options)


def run_program(
    program: Path, folder: Path, *arguments: str, environment: dict[str, str] | None = None
) -> tuple[str, str]:
    """Run a program to its end, which must be a good one; return what follows ``RESULT``, and what it logged."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_program(program, folder, *arguments, environment=environment, **pipes) as process:
        out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-5000:]
    return out.split("RESULT ")[1], err
