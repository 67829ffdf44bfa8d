"""Spark in this process, and a standalone cluster on this machine whose executors have one core each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from holdfast.errors import UnavailableError
from holdfast.spark_integration.java import ensure_java

_HOST = "127.0.0.1"
_START_S = 120
_LOOK_EVERY_S = 0.1
EXECUTOR_MEMORY_MB = 1024


def session(settings: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("holdfast bench")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


@contextmanager
def standalone_cluster(folder: Path, executors: int) -> Iterator[str]:
    """Run a master and a worker for these executors; yield the master's URL. Logs go to the folder."""
    folder.mkdir()
    with socket.create_server((_HOST, 0)) as free:
        port = free.getsockname()[1]
    url = f"spark://{_HOST}:{port}"
    with ExitStack() as stack:
        master = stack.enter_context(_daemon(folder, "master.Master", "--port", str(port)))
        _wait_for(port, master, folder)
        work = ("--cores", str(executors), "--memory", f"{executors * EXECUTOR_MEMORY_MB}m")
        stack.enter_context(_daemon(folder, "worker.Worker", *work, "--work-dir", str(folder / "work"), url))
        yield url


@contextmanager
def _daemon(folder: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of Spark's daemons; kill its process group at the end."""
    import pyspark

    environment = {
        **os.environ,
        "JAVA_HOME": str(ensure_java()),
        "SPARK_LOCAL_DIRS": str(folder / "spark-local"),
        "SPARK_LOCAL_IP": _HOST,
        "SPARK_NO_DAEMONIZE": "1",
    }
    program = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    command = [program, f"org.apache.spark.deploy.{name}", "--host", _HOST, "--webui-port", "0", *arguments]
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(port: int, master: subprocess.Popen[bytes], folder: Path) -> None:
    end_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((_HOST, port)).close()
        except ConnectionRefusedError as exc:
            if master.poll() is not None or time.monotonic() > end_s:
                log = (folder / "master.Master.log").read_text()[-2000:]
                raise UnavailableError(f"the cluster's master did not start:\n{log}", port=port) from exc
            time.sleep(_LOOK_EVERY_S)
        else:
            return
