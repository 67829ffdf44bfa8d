"""Two real queries on one directory of state: each has its own place, the dead make way, an older run stops.

One application runs the first query of each test, since a JVM starts slowly. The tests that want it dead come last. By
turns with the application of `test_partitions.py`; the same of claims and directories, without Spark and always:
`tests/unit/snapshotter/ownership`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from holdfast.snapshotter.ownership.claims import ALIVE_MS, RENEW_EVERY_MS, ClaimingRun, find_claim
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, read_operator
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.executor.processes import ProcessId, place_of
from tests.spark.application import start_program
from tests.spark.conftest import Lab, age, claims, configured
from tests.tiers import ALL, cases

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1500)]

STARTED = r"started=20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ host=\S+"
PROGRAM = Path(__file__).with_name("endless_query.py")
#: ``make test`` has only the test of the first one.
QUERIES = cases(["copied", "works", "hangs"])


class Application:
    """Endless queries in a process group of their own, each with a lab in its folder."""

    def __init__(self, spark: SparkSession, folder: Path, local: Path) -> None:
        self.local = folder / "local"
        self.labs = {name: Lab(spark, folder / name, local) for name in QUERIES}
        for lab in self.labs.values():
            lab.folder.mkdir()
            lab.feed([("a", 1)])
        self._output = (folder / "output.txt").open("a+")
        pipes = {"stdout": self._output, "stderr": subprocess.DEVNULL}
        self._process = start_program(PROGRAM, folder, *QUERIES, **pipes, start_new_session=True)

    def wait_for(self, words: str, number: int = 1) -> str:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            self._output.seek(0)
            lines = [line for line in self._output if line.startswith(words)]
            if len(lines) >= number:
                return lines[-1]
            assert self._process.poll() is None, "the application has ended"
            time.sleep(0.1)
        raise AssertionError(f"{words} has not come {number} times")

    def kill(self) -> None:
        """Kill driver, JVM and workers at once, as the end of a machine does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


@pytest.fixture(scope="module")
def application(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, local_state: Path
) -> Iterator[Application]:
    running = Application(spark, tmp_path_factory.mktemp("application"), local_state)
    try:
        if ALL:  # and at once: some minutes later the query that hangs looks dead
            with configured(lab := running.labs["hangs"]):
                running.wait_for("READY hangs")
                lab.run(lab.totals(), query="second")
                assert not (lab.folder / "durable/totals/operator").exists(), "the first one has the name"
        yield running
    finally:
        if running._process.returncode is None:
            running.kill()


@pytest.fixture(scope="module")
def killed(application: Application) -> Application:
    """Run a second query where one of the application's is at work; then kill the application."""
    with configured(lab := application.labs["works"]):
        application.wait_for("READY works")
        lab.run(lab.totals(), query="second")
        lab.feed([("a", 10)])
        application.wait_for("READY works", 2)
    application.kill()
    return application


def record_of(lab: Lab, directory: str) -> OperatorRecord:
    with open_storage(str(lab.folder / "durable")) as storage:
        return read_operator(storage, directory)


def holder(lab: Lab) -> ClaimingRun:
    with open_storage(str(lab.folder / "durable")) as storage:
        claim = find_claim(storage, "totals")
        assert claim is not None
        return claim.holder


def refused(lab: Lab, message: str, query: str) -> None:
    with pytest.raises(StreamingQueryException, match=f"(?s)ConflictError.*{message}"):
        lab.run(lab.totals(), query=query)


def objects(lab: Lab) -> set[Path]:
    return {path for path in (lab.folder / "durable").glob("*/shard-*/**/*") if path.is_file()}


def test_a_copy_is_refused_and_an_older_run_stops_when_it_sees_a_newer_one(application: Application) -> None:
    """Somebody copied the checkpoint location: one query id, two applications, and Spark sees no conflict.

    A copy that has the state copied with it runs. One that has not begins, and the first one stops, only after that one
    had nothing to do for so long that it may be dead.
    """
    with configured(lab := application.labs["copied"]):
        application.wait_for("READY copied")
        while not (lab.folder / "first/commits/0").exists():
            time.sleep(0.05)
        for copy in ("copy", "copy-with-state"):
            shutil.copytree(lab.folder / "first", lab.folder / copy)
        lab.feed([("a", 10)])
        application.wait_for("READY copied", 2)
        before = objects(lab)
        refused(lab, rf"another application is running.*location was copied.*name=copied {STARTED}", query="copy")
        age(application.local.glob("*/executor-*/*/*/totals/runs/*-claim"), RENEW_EVERY_MS)
        lab.feed([("a", 100)])
        application.wait_for("READY copied", 3)
        assert objects(lab) >= before
        shutil.copytree(lab.folder / "durable", lab.folder / "own", ignore=shutil.ignore_patterns("claims"))
        lab.configure({"state.dir": str(lab.folder / "own")})
        lab.run(lab.totals(), query="copy-with-state")
        assert lab.state(query="copy-with-state") == {"a": (3, 111)}
        lab.configure({"state.dir": str(lab.folder / "durable")})
        first = holder(lab)
        age(claims(lab), ALIVE_MS)
        lab.run(lab.totals(), query="copy")
        assert holder(lab).driver == place_of(ProcessId.of(os.getpid())) != first.driver != ""
        age(application.local.glob("*/executor-*/*/*/totals/runs/*-claim"), RENEW_EVERY_MS)
        lab.feed([("a", 1000)])
        assert "FencedError: a newer run of this query has taken over" in application.wait_for("FAILED copied")
        lab.run(lab.totals(), query="copy")
        assert lab.state(query="copy") == {"a": (4, 1111)}


@pytest.mark.all
def test_a_second_query_has_a_directory_of_its_own_and_a_killed_one_begins_again_at_once(killed: Application) -> None:
    """Neither loses anything by the other: while both are at work, after a kill, and when one is long dead."""
    with configured(lab := killed.labs["works"]):
        lab.run(lab.totals(), query="second")
        lab.feed([("b", 100)])
        lab.run(lab.totals(), query="first")
        assert holder(lab).driver == place_of(ProcessId.of(os.getpid())), "the other one is seen to have ended"
        assert lab.state(query="first") == {"a": (2, 11), "b": (1, 100)}
        assert lab.state(query="second") == {"a": (2, 11)}
        age(claims(lab), ALIVE_MS)
        lab.lose_local_state()
        lab.run(lab.totals(), query="second")
        assert lab.state(query="first") == lab.state(query="second") == {"a": (2, 11), "b": (1, 100)}
        ids = {q: json.loads((lab.folder / q / "metadata").read_text())["id"] for q in ("first", "second")}
        assert record_of(lab, "totals").query_id == ids["first"]
        assert record_of(lab, f"totals@{ids['second']}").query_id == ids["second"]


@pytest.mark.all
def test_a_query_that_was_killed_before_it_stored_anything_makes_way(killed: Application) -> None:
    with configured(lab := killed.labs["hangs"]):
        age(claims(lab), ALIVE_MS)
        lab.run(lab.totals(), query="third")
        assert (lab.folder / "durable/totals/operator").exists()
        assert lab.state(query="second") == lab.state(query="third") == {"a": (1, 1)}
