"""An application is killed while it saves or restores: there is nothing or the whole, and nothing else is disturbed."""

from __future__ import annotations

import random
import threading

import pytest

from holdfast import savepoints
from holdfast.errors import ConflictError
from tests.spark.conftest import Lab
from tests.spark.savepoints import killed_program
from tests.spark.savepoints.killed import application, has_ended, undo
from tests.spark.savepoints.queries import restored
from tests.spark.savepoints.totals import expected, feed, saved, totals
from tests.tiers import cases, repetitions

pytestmark = [pytest.mark.spark, pytest.mark.slow(30), pytest.mark.timeout(600)]

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
