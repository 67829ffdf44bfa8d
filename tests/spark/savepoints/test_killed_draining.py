"""An application is killed while it drains a query: the next one ends what was begun, and nothing is shown twice."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from holdfast import savepoints, sinks
from tests.faults.sinks.killed_at import STEPS
from tests.spark.application import start_program
from tests.spark.conftest import Lab
from tests.spark.savepoints import drained_program
from tests.spark.savepoints.test_drained import CLOSED, FIRST, LATER, QUERIES, drained, feed, shown, writer

pytestmark = [pytest.mark.spark, pytest.mark.slow(40), pytest.mark.timeout(600), pytest.mark.all]

PROGRAM = Path(drained_program.__file__)


def killed(folder: Path, at: str) -> None:
    """Let an application drain the query until it dies of a step of the sink, or there is a file."""
    step = at if at in STEPS else ""
    with start_program(PROGRAM, folder, step, start_new_session=True) as program:
        while not step and program.poll() is None and not any(folder.glob(at)):
            threading.Event().wait(0.001)
        if not step and program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        assert program.wait(300) == -signal.SIGKILL
    assert (folder / "begun").exists()
    assert not (folder / "ended").exists()


@pytest.mark.parametrize(
    "at",
    [
        "query-draining/sources/*/*",
        "query-draining/metadata",
        "confirmed",
        "decided",
        "commit",
        "committed",
        "savepoints/end/*",
        "savepoints/end/savepoint",
    ],
)
def test_an_application_is_killed_while_it_drains(lab: Lab, at: str) -> None:
    """Copying, planning, in the last micro-batch and after it, and saving what is left."""
    feed(lab, *FIRST)
    killed(lab.folder, at)
    sink = sinks.parquet("out", url := str(lab.folder / "shown"))
    name = "again" if at.endswith("/savepoint") else "end"  # that one is made
    feed(lab, LATER[0])
    drained(lab, writer(lab, QUERIES[0], sink, "query"), name)
    assert shown(url) == CLOSED
    assert not (lab.folder / "query-draining/metadata").exists()
    savepoints.restore(lab.spark, lab.folder / "savepoints", name, lab.folder / "restored", continue_sinks=True)
    feed(lab, LATER[1])
    writer(lab, QUERIES[0], sink, "restored").start().awaitTermination()
    assert shown(url) == sorted([*CLOSED, ("ann", 62, 62, 1)])
