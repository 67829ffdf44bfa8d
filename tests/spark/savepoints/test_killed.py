"""Applications are killed while they save, restore, copy or drain a query: the next try succeeds."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from holdfast import savepoints, sinks
from holdfast.errors import ConflictError
from tests.faults.sinks.killed_at import STEPS
from tests.spark.application import start_program
from tests.spark.conftest import Lab
from tests.spark.savepoints import drained_program, killed_program
from tests.spark.savepoints.killed import application, has_ended, undo
from tests.spark.savepoints.queries import restored
from tests.spark.savepoints.test_drained import CLOSED, FIRST, LATER, QUERIES, drained, shown, writer
from tests.spark.savepoints.test_drained import feed as feed_clicks
from tests.spark.savepoints.totals import expected, feed, saved, totals
from tests.tiers import cases, repetitions

# Saving and restoring take about so long in an application that has just started.
PATIENCE_S = 8.0
TRIES = 8


def run_on(lab: Lab, query: str, durable: str) -> dict[str, tuple[int]]:
    """Run a query over what it has not read yet, and return its state."""
    lab.configure({"state.dir": str(lab.folder / durable)})
    lab.run(totals(lab.spark, lab.folder), query)
    return lab.state(query=query)


CASES = [(what, number) for number in repetitions(1, 17) for what in ("create", "stop", "restore")]


def kill(lab: Lab, what: str, chance: random.Random) -> None:
    """Kill the application in the middle of what it does; where that was over by then, undo it, and be faster."""
    patience_s = PATIENCE_S
    for _ in range(TRIES):
        wait_s = chance.random() * patience_s
        with application(lab.folder, what, {"spark.sql.streaming.minBatchesToRetain": "10"}):
            feed(lab)
            threading.Event().wait(wait_s)
        if not has_ended(lab.folder):
            return
        undo(lab.folder, what)
        patience_s = wait_s
    raise AssertionError(f"{what} was over each time before it could be killed")


@pytest.mark.spark
@pytest.mark.slow(30)
@pytest.mark.timeout(600)
@pytest.mark.all
@pytest.mark.parametrize(("what", "number"), cases(CASES))
def test_an_application_is_killed(lab: Lab, what: str, number: int) -> None:
    """The next try succeeds; the original and what is restored go on to the same end as if nothing had been."""
    chance = random.Random(f"{what} {number}")
    feed(lab)
    target = lab.folder / "savepoints"
    if what == "restore":
        run_on(lab, "query", "durable")
        savepoints.create(lab.spark, lab.folder / "query", target, "one")
    kill(lab, what, chance)
    finished = {found.name for found in savepoints.listed(target) if found.savepoint}
    lab.configure({"state.dir": str(lab.folder / "durable")})
    if "one" in finished and what != "restore":
        with pytest.raises(ConflictError):
            savepoints.create(lab.spark, lab.folder / "query", target, "one")
    elif what != "restore":
        savepoints.create(lab.spark, lab.folder / "query", target, "one")
    assert saved(lab)
    if not (lab.folder / "again/metadata").exists():
        restored(lab, shards=killed_program.SHARDS)
    assert run_on(lab, "query", "durable") == expected(range(lab.files))
    assert run_on(lab, "again", "durable-again") == expected(range(lab.files))


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


@pytest.mark.spark
@pytest.mark.slow(40)
@pytest.mark.timeout(600)
@pytest.mark.all
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
    feed_clicks(lab, *FIRST)
    killed(lab.folder, at)
    sink = sinks.parquet("out", url := str(lab.folder / "shown"))
    name = "again" if at.endswith("/savepoint") else "end"  # that one is made
    feed_clicks(lab, LATER[0])
    drained(lab, writer(lab, QUERIES[0], sink, "query"), name)
    assert shown(url) == CLOSED
    assert not (lab.folder / "query-draining/metadata").exists()
    savepoints.restore(lab.spark, lab.folder / "savepoints", name, lab.folder / "restored", continue_sinks=True)
    feed_clicks(lab, LATER[1])
    writer(lab, QUERIES[0], sink, "restored").start().awaitTermination()
    assert shown(url) == sorted([*CLOSED, ("ann", 62, 62, 1)])
