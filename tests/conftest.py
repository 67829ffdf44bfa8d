"""What all tests share: tiers, the Spark session, servers, an environment without Java, and two rules of the run.

The rules: a run in which not one test ran is a failure, also when all were skipped; and after
``HOLDFAST_TEST_BUDGET_S`` seconds, where that is set, the remaining tests are skipped and counted.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import importing, parts, spark_classes
from tests.servers import downloads
from tests.tiers import ALL, LONG, TIER, examples

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from pyspark.sql import SparkSession

    from tests.servers.hdfs import Hdfs
    from tests.servers.kafka import Kafka
    from tests.servers.postgres import Postgres
    from tests.servers.s3 import Moto, Versitygw

# The same examples each time; the long tier draws new ones, and prints how to draw one again.
hypothesis.settings.register_profile(
    TIER, max_examples=examples(), derandomize=not LONG, print_blob=True, deadline=None
)
hypothesis.settings.load_profile(TIER)

spark_classes.use_defaults()

_STARTED_S = time.monotonic()
_BUDGET_S = float(os.environ.get("HOLDFAST_TEST_BUDGET_S", "inf"))


@pytest.fixture(scope="session")
def java_home() -> Path:
    """Return the home of the Java that Spark runs on here."""
    from holdfast.spark_integration.java import ensure_java

    return ensure_java()


@pytest.fixture(scope="session")
def spark(java_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Return the one local session of the run: two task slots, two shuffle partitions, nothing adaptive."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("holdfast tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.python.daemon.module", "tests.spark_daemon")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    from tests.servers import s3

    with s3.moto() as server:
        yield server


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versitygw]:
    """Return the S3 server of a process of its own; who kills it starts it again."""
    from tests.servers import s3

    with downloads.skipped_where_missing():
        downloads.versitygw()
    with s3.versitygw(tmp_path_factory.mktemp("versitygw")) as server:
        yield server


@pytest.fixture(scope="session")
def hdfs(java_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """Return the HDFS of this run; who kills a part of it starts it again."""
    from tests.servers import hdfs

    with downloads.skipped_where_missing():
        downloads.hadoop()
    with hdfs.hdfs(tmp_path_factory.mktemp("hdfs"), java_home) as server:
        yield server


@pytest.fixture(scope="session")
def kafka(java_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Return the Kafka of this run; tests have topics of their own."""
    from tests.servers import kafka

    with downloads.skipped_where_missing():
        downloads.kafka()
    with kafka.kafka(tmp_path_factory.mktemp("kafka"), java_home) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Return the PostgreSQL of this run; tests have tables of their own, and who kills it starts it again."""
    from tests.servers import postgres

    with postgres.postgres() as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from tests.browser import chromium

    with downloads.skipped_where_missing():
        downloads.chromium()
    with chromium() as browser:
        yield browser


@pytest.fixture
def ram_path() -> Iterator[Path]:
    """Return a folder in RAM where there is room: databases sync their files, and some tests do thousands of times."""
    from tests.model.built_in import ram_directory

    with ram_directory() as path:
        yield path


@pytest.fixture
def environment_without_java(tmp_path: Path) -> dict[str, str]:
    """Return environment variables under which a new process finds every program but Java."""
    programs = tmp_path / "programs-without-java"
    programs.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            link = programs / program.name
            if program.name != "java" and not link.is_symlink():
                link.symlink_to(program)
    kept = {name: value for name, value in os.environ.items() if name not in {"JAVA_HOME", "SPARK_HOME"}}
    changed = {"PATH": str(programs), "PYSPARK_PYTHON": sys.executable, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return kept | changed


def pytest_report_header() -> str:
    part = f", part {parts.PART}" if parts.PART else ""
    return f"holdfast: make test-{TIER}{part}".replace("test-test", "test")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than there are cores: tests spend a fifth of their time waiting."""
    return min(4, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> parts.Scheduling:
    return parts.Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    import pyspark

    if pyspark.__version__.startswith(("4.0.", "4.1.")):
        # Their collect() leaves its socket to the garbage collector, which says so in whatever test it runs.
        unclosed = r"ignore:Exception ignored in. <socket\.socket:pytest.PytestUnraisableExceptionWarning"
        config.addinivalue_line("filterwarnings", unclosed)
        config.addinivalue_line("filterwarnings", r"ignore:unclosed <socket\.socket:ResourceWarning")


def pytest_collection(session: pytest.Session) -> None:
    importing.import_all(importing.share(session.config, Path(__file__).parent))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from pyspark import __version__

    from holdfast.spark_integration.spark_versions import minor_version

    for item in items:
        for since in item.iter_markers("since"):
            if minor_version(__version__) < minor_version(since.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"needs Spark {since.args[0]} or newer"))
    # The smoke tests of another Spark leave nothing out.
    runs = {"all": ALL or config.option.markexpr == "smoke", "long": LONG}
    _deselect(
        config, items, {item for item in items if any(item.get_closest_marker(name) for name in runs if not runs[name])}
    )
    parts.longest_first(items)
    _deselect(config, items, parts.of_other_parts(items))


def _deselect(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what stays to the end: modules, and six thousand tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        run = [item for item in session.items if not item.get_closest_marker("skip")]
        markers = {mark.name for item in run for mark in item.iter_markers()}
        downloads.prefetch(markers)
        if "spark" in markers:
            _archive.append(spark_classes.use_archive())


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Another process was making it.
    if _archive == [False] and item.get_closest_marker("spark"):
        _archive[:] = [spark_classes.use_archive()]
    if time.monotonic() - _STARTED_S > _BUDGET_S:
        pytest.skip(f"the time budget of {_BUDGET_S:.0f} s is spent")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and not report.skipped:
        _ran.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and not _ran and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


_ran: list[str] = []
_archive: list[bool] = []
