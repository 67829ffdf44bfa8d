"""A standalone cluster of Spark on this machine: a master, and workers with an address each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from tests import spark_classes
from tests.faults.killings import RUN_MARK

ROOT = Path(__file__).parents[2]
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
START_S = 120


@contextmanager
def daemon(folder: Path, name: str, *arguments: str, host: str = "127.0.0.1") -> Iterator[None]:
    """Run one of Spark's daemons, and end it and what it has started."""
    environment = {
        **os.environ,
        "SPARK_LOCAL_IP": host,
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_DAEMON_JAVA_OPTS": spark_classes.java_options(),
        # Of the executors' own files: each has a directory below, which the worker removes with the application.
        "SPARK_LOCAL_DIRS": str(folder / "spark-local"),
        # Where executors find `tests.spark_daemon`.
        "PYTHONPATH": str(ROOT),
        RUN_MARK: str(folder),
    }
    with (folder / f"{name.rpartition('.')[2]}-{host}.log").open("ab") as log:
        process = subprocess.Popen(
            [str(SPARK_CLASS), f"org.apache.spark.deploy.{name}", "--host", host, "--webui-port", "0", *arguments],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def cluster(folder: Path, hosts: int = 1) -> Iterator[str]:
    """Run a master, and workers on so many hosts with cores for two executors in all; give the master's URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        stack.enter_context(daemon(folder, "master.Master", "--port", str(port)))
        wait_for(port)
        for n in range(1, hosts + 1):
            work = ("--cores", str(2 // hosts), "--memory", "1200m", "--work-dir", str(folder / f"worker-{n}"))
            stack.enter_context(daemon(folder, "worker.Worker", *work, url, host=f"127.0.0.{n}"))
        yield url


def wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the master does not listen"
            time.sleep(0.1)
        else:
            return
