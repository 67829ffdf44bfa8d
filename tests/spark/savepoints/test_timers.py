"""Timers and times to live by each API and clock: what is overdue in a savepoint is due in what is restored."""

from __future__ import annotations

import pytest

from holdfast import savepoints
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import restored
from tests.spark.savepoints.waiting import CASES, KEYS, Case, feed, run_once, state
from tests.tiers import cases

pytestmark = pytest.mark.spark


@pytest.mark.all
@pytest.mark.parametrize("case", cases(CASES, quick=1), ids=str)
def test_what_is_overdue_in_quiet_shards_is_due_at_once(lab: Lab, case: Case) -> None:
    """Each timer fires once, in the first micro-batch, and rows live as long as they would have in the original."""
    with configured(lab.spark, case.settings):
        feed(lab, KEYS, 10)
        run_once(lab, case, "query", "durable")
        savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
        before = state(lab, case, "query", "durable")
        restored(lab, shards=3)
        feed(lab, "z", 20)
        original = run_once(lab, case, "query", "durable")
        assert run_once(lab, case, "again", "durable-again") == original
        due = [row for row in original if "'is_due': True" in row and "'key': 'z'" not in row]
        assert len(due) == len(KEYS) + case.begins
        after = state(lab, case, "again", "durable-again")
        assert after == state(lab, case, "query", "durable")
        if case.api != "by key":
            assert set(before["kept"]) < set(after["kept"])
            has_expired = len(after["lost"]) <= 1 < len(before["lost"])
            assert has_expired == (case.api == "vectorised" or case.clock == "ProcessingTime")
        feed(lab, "y", 30)
        again = run_once(lab, case, "again", "durable-again")
        assert again == run_once(lab, case, "query", "durable")
        assert not any("'key': 'b'" in row for row in again), "it has fired"
