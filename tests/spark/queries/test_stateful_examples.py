"""The stateful examples in Spark: by processor and vectorised, a query gives the same in each micro-batch.

`tests/unit/examples/test_stateful.py` has what they compute.
"""

from __future__ import annotations

import re
from datetime import datetime
from types import ModuleType
from typing import Any

import pytest

import holdfast
from holdfast.examples.stateful import deduplication, fraud, local, migration, sessions, top_bids
from tests.spark.conftest import Lab
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.slow(20), pytest.mark.usefixtures("state_store")]

# By example: its two queries, its columns, and how many rows it prints.
EXAMPLES: list[tuple[ModuleType, Any, Any, str, int]] = [
    (sessions, sessions.sessions, sessions.vectorised_sessions, sessions.CLICKS, 4),
    (
        deduplication,
        deduplication.first_deliveries,
        deduplication.vectorised_first_deliveries,
        deduplication.ORDERS,
        4,
    ),
    (fraud, fraud.alerts, fraud.vectorised_alerts, fraud.EVENTS, 3),
    (top_bids, top_bids.top_bids, top_bids.vectorised_top_bids, top_bids.BIDS, 9),
]


@pytest.mark.all
@pytest.mark.parametrize("example", cases(EXAMPLES), ids=lambda example: example[0].__name__.rpartition(".")[2])
def test_both_forms_give_the_same(lab: Lab, example: tuple[ModuleType, Any, Any, str, int]) -> None:
    """What a user copies runs: it prints what it says, in the same micro-batches, by key and for a whole shard."""
    module, by_key, vectorised, columns, count = example
    forms = [(by_key, module is not deduplication), (vectorised, True)]
    found = []
    for query, ends in forms:
        lab.configure({"state.dir": str(lab.folder / f"state-of-{query.__name__}")})
        batches = local.run(lab.spark, query, columns, module.BATCHES, lab.folder, ends=ends)
        found.append([sorted(rows, key=repr) for rows in batches])
    longest = max(map(len, found))
    first, second = ([*rows, *[[]] * (longest - len(rows))] for rows in found)
    assert first == second
    assert sum(map(len, first)) == count
    [(number, row)] = re.findall(r"micro-batch (\d+): (.*)", module.__doc__ or "")
    assert row in [str(one.asDict()) for one in first[int(number)]]


@pytest.mark.all
def test_sessions_in_one_line_are_those_by_hand(lab: Lab) -> None:
    by_hand = local.run(lab.spark, sessions.vectorised_sessions, sessions.CLICKS, sessions.BATCHES, lab.folder)
    in_one_line = local.run(lab.spark, sessions.sessions_by_operator, sessions.CLICKS, sessions.BATCHES, lab.folder)

    def in_ms(moment: datetime) -> int:
        return round(moment.timestamp() * 1000)

    found = [sorted((r.user, in_ms(r.first), in_ms(r.last), r.clicks) for r in rows) for rows in in_one_line]
    assert found == [sorted(map(tuple, rows)) for rows in by_hand]


@pytest.mark.all
@pytest.mark.since("4.1")
def test_a_query_moves_from_sparks_operator_with_its_state(lab: Lab) -> None:
    """The new query counts on from what the old one had counted, also for users that it has not seen yet."""
    before, after = migration.migrate(lab.spark, lab.folder)
    assert sorted(map(tuple, before[-1])) == [("ann", 3, 2), ("cem", 1, 1)]
    assert [sorted(map(tuple, rows)) for rows in after] == [
        [("ann", 4, 3), ("dan", 1, 1)],
        [("bob", 2, 1), ("dan", 2, 2)],
    ]
    state = holdfast.read_state(lab.spark, lab.folder / "new/going_on", "visits", table="visits").to_pylist()
    assert {row["user"]: row["n"] for row in state} == {"ann": 4, "bob": 2, "cem": 1, "dan": 2}
    [row] = re.findall(r"on holdfast: (.*)", migration.__doc__ or "")
    assert row in [str(one.asDict()) for one in after[0]]
