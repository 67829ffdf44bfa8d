"""Two real queries on one directory of state: each has its own place, the dead make way, an older run stops."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

from holdfast.snapshotter.ownership.claim_listing import ALIVE_MS
from holdfast.snapshotter.ownership.claims import RENEW_EVERY_MS
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, read_operator
from holdfast.snapshotter.storage.opening import open_storage
from tests.spark.application import start_program
from tests.spark.conftest import Lab, age, claims

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1500)]

STARTED = r"started=20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ host=\S+"
PROGRAM = Path(__file__).with_name("endless_query.py")


class Application:
    """An endless query in a process group of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._output = (folder / "output.txt").open("a+")
        pipes = {"stdout": self._output, "stderr": subprocess.DEVNULL}
        self._process = start_program(PROGRAM, folder, *arguments, **pipes, start_new_session=True)

    def wait_for(self, word: str, number: int = 1) -> str:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            self._output.seek(0)
            lines = [line for line in self._output if line.startswith(word)]
            if len(lines) >= number:
                return lines[-1]
            assert self._process.poll() is None, "the application has ended"
            time.sleep(0.1)
        raise AssertionError(f"{word} has not come {number} times")

    def kill(self) -> None:
        """Kill driver, JVM and workers at once, as the end of a machine does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


@contextmanager
def application(lab: Lab, *arguments: str) -> Iterator[Application]:
    running = Application(lab.folder, *arguments)
    try:
        yield running
    finally:
        if running._process.returncode is None:
            running.kill()


def record_of(lab: Lab, directory: str) -> OperatorRecord:
    with open_storage(str(lab.folder / "durable")) as storage:
        return read_operator(storage, directory)


def refused(lab: Lab, message: str, query: str = "second") -> None:
    with pytest.raises(StreamingQueryException, match=f"(?s)ConflictError.*{message}"):
        lab.run(lab.totals(), query=query)


def objects(lab: Lab) -> set[Path]:
    return {path for path in (lab.folder / "durable").glob("*/shard-*/**/*") if path.is_file()}


def test_a_second_query_has_a_directory_of_its_own_and_a_killed_one_begins_again_at_once(lab: Lab) -> None:
    """Neither loses anything by the other: while both are at work, after a kill, and when one is long dead."""
    lab.feed([("a", 1), ("b", 2)])
    with application(lab, "first") as first:
        first.wait_for("READY")
        lab.run(lab.totals(), query="second")
        lab.feed([("a", 10)])
        first.wait_for("READY", 2)
        first.kill()
    lab.run(lab.totals(), query="second")
    lab.feed([("a", 100)])
    lab.run(lab.totals(), query="first")
    assert lab.state(query="first") == {"a": (3, 111), "b": (1, 2)}
    assert lab.state(query="second") == {"a": (2, 11), "b": (1, 2)}
    age(claims(lab), ALIVE_MS)
    lab.lose_local_state()
    lab.run(lab.totals(), query="second")
    assert lab.state(query="first") == lab.state(query="second") == {"a": (3, 111), "b": (1, 2)}
    first_id, second_id = (json.loads((lab.folder / q / "metadata").read_text())["id"] for q in ("first", "second"))
    assert record_of(lab, "totals").query_id == first_id
    assert record_of(lab, f"totals@{second_id}").query_id == second_id


def test_a_query_that_was_killed_before_it_stored_anything_makes_way(lab: Lab) -> None:
    lab.feed([("a", 1)])
    with application(lab, "first", "hang") as first:
        first.wait_for("READY")
        lab.run(lab.totals(), query="second")
        assert not (lab.folder / "durable/totals/operator").exists(), "the first one lives, and the name is its own"
        first.kill()
    age(claims(lab), ALIVE_MS)
    lab.run(lab.totals(), query="third")
    assert (lab.folder / "durable/totals/operator").exists()
    assert lab.state(query="second") == lab.state(query="third") == {"a": (1, 1)}


def test_a_copy_is_refused_and_an_older_run_stops_when_it_sees_a_newer_one(lab: Lab) -> None:
    """Somebody copied the checkpoint location: one query id, two applications, and Spark sees no conflict.

    A copy that has the state copied with it runs. One that has not begins, and the first one stops, only after that one
    had nothing to do for so long that it may be dead.
    """
    lab.feed([("a", 1)])
    with application(lab, "first") as first:
        first.wait_for("READY")
        while not (lab.folder / "first/commits/0").exists():
            time.sleep(0.05)
        for copy in ("copy", "copy-with-state"):
            shutil.copytree(lab.folder / "first", lab.folder / copy)
        lab.feed([("a", 10)])
        first.wait_for("READY", 2)
        before = objects(lab)
        refused(lab, rf"another application is running.*location was copied.*name=first {STARTED}", query="copy")
        age((lab.folder / "local").glob("*/executor-*/*/*/totals/runs/*-claim"), RENEW_EVERY_MS)
        lab.feed([("a", 100)])
        first.wait_for("READY", 3)
        assert objects(lab) >= before
        shutil.copytree(lab.folder / "durable", lab.folder / "own", ignore=shutil.ignore_patterns("claims"))
        lab.configure({"checkpoint.dir": str(lab.folder / "own")})
        lab.run(lab.totals(), query="copy-with-state")
        assert lab.state(query="copy-with-state") == {"a": (3, 111)}
        lab.configure({"checkpoint.dir": str(lab.folder / "durable")})
        age(claims(lab), ALIVE_MS)
        lab.run(lab.totals(), query="copy")
        age((lab.folder / "local").glob("*/executor-*/*/*/totals/runs/*-claim"), RENEW_EVERY_MS)
        lab.feed([("a", 1000)])
        assert "FencedError: a newer run of this query has taken over" in first.wait_for("FAILED")
    lab.run(lab.totals(), query="copy")
    assert lab.state(query="copy") == {"a": (4, 1111)}
