"""An executor is killed while a query is saved, or a savepoint restored: its tasks are done by the other one."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from holdfast import savepoints
from tests.cluster.standalone import EXECUTOR, cluster
from tests.faults.killings import RUN_MARK
from tests.spark.conftest import Lab, configured
from tests.spark.savepoints.killed import application, has_ended, undo
from tests.spark.savepoints.totals import expected, feed, saved, totals
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow(60), pytest.mark.timeout(900)]

EXECUTORS = {"spark.cores.max": "2", "spark.executor.cores": "1", "spark.executor.memory": "512m"}
PATIENCE_S = 3.0
TRIES = 8


@pytest.fixture
def lab(spark: SparkSession, tmp_path: Path) -> Iterator[Lab]:
    found = Lab(spark, tmp_path, tmp_path / "local")
    with configured(found):
        yield found


def executors(folder: Path) -> list[int]:
    """Return the executors of the cluster in a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if EXECUTOR in process.cmdline() and process.environ().get(RUN_MARK) == str(folder):
                found.append(process.pid)
    return found


def kill_an_executor(folder: Path, chance: random.Random) -> bool:
    """Kill one of the executors; tell whether there was any."""
    try:
        os.kill(chance.choice(executors(folder)), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return False
    return True


def kill_one(lab: Lab, what: str, chance: random.Random) -> None:
    """Kill an executor in the middle of what the application does; where that was over by then, do it once more."""
    patience_s = PATIENCE_S
    for _ in range(TRIES):
        wait_s = chance.random() * patience_s
        with (
            cluster(lab.folder) as master,
            application(lab.folder, what, EXECUTORS | {"spark.master": master}) as process,
        ):
            threading.Event().wait(wait_s)
            killed = kill_an_executor(lab.folder, chance)
            # Asked only now: finding executors takes a while, and those of an application that is through are gone.
            was_over = has_ended(lab.folder)
            assert killed or was_over, "it has executors while it is at work"
            said, _ = process.communicate(timeout=300)
        assert (said, process.returncode) == ("END\n", 0), (lab.folder / "application.log").read_text()[-3000:]
        if not was_over:
            return
        undo(lab.folder, what)
        patience_s = wait_s
    raise AssertionError(f"{what} was over each time before an executor could be killed")


@pytest.mark.all
@pytest.mark.parametrize("what", cases(["create", "restore"]))
def test_an_executor_is_killed(lab: Lab, what: str) -> None:
    chance = random.Random(what)
    feed(lab)
    if what == "restore":
        lab.run(totals(lab.spark, lab.folder))
        savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    kill_one(lab, what, chance)
    assert saved(lab)
    if what == "create":
        lab.configure({"state.dir": str(lab.folder / "durable-again")})
        savepoints.restore(lab.spark, lab.folder / "savepoints", "one", lab.folder / "again", shards=3)
    feed(lab, 1)
    for query, durable in (("query", "durable"), ("again", "durable-again")):
        lab.configure({"state.dir": str(lab.folder / durable)})
        lab.run(totals(lab.spark, lab.folder), query)
        assert lab.state(query=query) == expected(range(lab.files))
