"""Servers and a browser that tests start, fetched once by the ordinary clients of Go, Maven and npm into a cache.

::

    ~/.cache/holdfast-test-servers/          (or below $XDG_CACHE_HOME)
        versitygw-1.8.0/versitygw
        hadoop-3.4.2/*.jar
        kafka-4.3.1/*.jar
        spark-kafka-4.2.0/*.jar
        prometheus-0.316.0/prometheus
        chromium-153.0.0-axe-4.14.1/         chromium, lib/, fonts/, fonts.conf, node_modules/axe-core/
        versitygw-1.8.0.lock                 held by the one process that fetches; the others wait

A folder appears by a rename when all of it is there, so it is whole or absent. Where a server cannot be had, the tests
that need it are skipped and say why; with HOLDFAST_TEST_MUST_SERVE set, as `.ci/run` does, they fail instead.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

VERSITYGW = "1.8.0"
PROMETHEUS = "0.316.0"
HADOOP = "3.4.2"
KAFKA, SPARK_KAFKA = "4.3.1", "4.2.0"
CHROMIUM, AXE = "153.0.0", "4.14.1"


class MissingServerError(Exception):
    """A server is not here and cannot be fetched; the message says why."""


@functools.cache
def versitygw() -> Path:
    """Return the program of versitygw, an S3 server that keeps its objects as files."""
    module = f"github.com/versity/versitygw/cmd/versitygw@v{VERSITYGW}"
    command = ["go", "install", "-trimpath", "-ldflags=-s -w", module]
    folder = _fetched(f"versitygw-{VERSITYGW}", command, lambda folder: {"GOBIN": str(folder), "CGO_ENABLED": "0"})
    return folder / "versitygw"


@functools.cache
def prometheus() -> Path:
    """Return the program of Prometheus, without its web interface and what finds targets; builds for minutes."""
    module = f"github.com/prometheus/prometheus/cmd/prometheus@v{PROMETHEUS}"
    command = ["go", "install", "-tags=remove_all_sd", "-trimpath", "-ldflags=-s -w", module]
    folder = _fetched(f"prometheus-{PROMETHEUS}", command, lambda folder: {"GOBIN": str(folder), "CGO_ENABLED": "0"})
    return folder / "prometheus"


@functools.cache
def hadoop() -> str:
    """Return the class path of a NameNode and a DataNode."""
    return ":".join(_jars("hadoop-pom.xml", f"hadoop-{HADOOP}", f"hadoop.version={HADOOP}", "HADOOP_JARS"))


@functools.cache
def kafka() -> str:
    """Return the class path of a broker; fetches Spark's connector, too, since nobody needs one without the other."""
    spark_kafka()
    return ":".join(_jars("kafka-pom.xml", f"kafka-{KAFKA}", f"kafka.version={KAFKA}", "KAFKA_JARS"))


@functools.cache
def spark_kafka() -> list[str]:
    connector = f"connector.version={SPARK_KAFKA}"
    return _jars("spark-kafka-pom.xml", f"spark-kafka-{SPARK_KAFKA}", connector, "CONNECTOR_JARS")


@functools.cache
def chromium() -> Path:
    """Return the folder of a headless Chromium, its libraries and fonts, and of the accessibility checker axe-core."""
    packages = f"@sparticuz/chromium@{CHROMIUM} axe-core@{AXE}"
    command = ["node", str(Path(__file__).with_name("fetch_chromium.mjs")), *packages.split()]
    return _fetched(f"chromium-{CHROMIUM}-axe-{AXE}", command, lambda folder: {"CHROMIUM_FOLDER": str(folder)})


_BY_MARKER = {"s3": versitygw, "hdfs": hadoop, "kafka": kafka, "browser": chromium, "prometheus": prometheus}


# Side by side, but for what Maven fetches: its repository is for one process at a time.
_TOGETHER = (("s3",), ("hdfs", "kafka"), ("browser",), ("prometheus",))


def prefetch(markers: Collection[str]) -> None:
    """Fetch what tests with these markers need, so that no test's time limit has to hold a download."""

    def fetch(some: Collection[str]) -> None:
        for marker in some:
            with suppress(MissingServerError):  # told by the tests that need it
                _BY_MARKER[marker]()

    with ThreadPoolExecutor(len(_TOGETHER)) as threads:
        list(threads.map(fetch, [[marker for marker in some if marker in markers] for some in _TOGETHER]))


@contextmanager
def skipped_where_missing() -> Iterator[None]:
    """Skip the test where its server cannot be had, or fail if HOLDFAST_TEST_MUST_SERVE is set."""
    try:
        yield
    except MissingServerError as exc:
        if os.environ.get("HOLDFAST_TEST_MUST_SERVE"):
            pytest.fail(str(exc))
        pytest.skip(str(exc))


def _jars(pom: str, name: str, version: str, variable: str) -> list[str]:
    """Return what Maven fetches for a POM, which takes the version, and the folder from an environment variable."""
    project = str(Path(__file__).with_name(pom))
    command = ["mvn", "-B", "-q", "-f", project, f"-D{version}", "dependency:copy-dependencies"]
    folder = _fetched(name, command, lambda folder: {variable: str(folder)})
    return [str(jar) for jar in sorted(folder.glob("*.jar"))]


def _fetched(name: str, command: list[str], environment: Callable[[Path], dict[str, str]]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast-test-servers"
    folder = cache / name
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _fetch(cache / f"{name}.partial", folder, command, environment)
    return folder


def _fetch(partial: Path, folder: Path, command: list[str], environment: Callable[[Path], dict[str, str]]) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise MissingServerError(f"{folder.name} is not in {folder.parent}, and there is no {command[0]} to fetch it")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    done = subprocess.run(
        [program, *command[1:]],
        env={**os.environ, **environment(partial)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-500:]
        raise MissingServerError(f"{command[0]} could not fetch {folder.name}: {said}")
    partial.rename(folder)


if __name__ == "__main__":
    # All but Prometheus, which only one test of the longer tiers needs.
    prefetch(_BY_MARKER.keys() - {"prometheus"})
