"""Nexmark: what its suite asks, which events it refuses to make, and when engines have found the same."""

from __future__ import annotations

import pytest

from holdfast.benches.nexmark.equality import results, verdict
from holdfast.benches.nexmark.job import QUERIES, Nexmark
from holdfast.benches.runs.by_name import ENGINES, engines_for
from holdfast.benches.suites.measurement import Profile
from holdfast.benches.suites.suites import nexmark
from holdfast.errors import InvalidArgumentError

RIGHT = {(1,): (1, 10), (2,): (2, 20)}


def test_the_suite_asks_for_every_query_and_compares_what_is_found() -> None:
    full, quick = (nexmark(Profile(quick=quick)) for quick in (False, True))
    assert [entry.job.query for one in full for entry in [one.entries[one.baseline]]] == list(QUERIES)  # type: ignore[attr-defined]
    assert len(quick) == 1
    assert sum(one.minutes for one in full) <= 20
    for one in (*full, *quick):
        assert one.check is not None
        assert {entry.engine for entry in one.entries.values()} <= set(engines_for(Nexmark)) <= set(ENGINES)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"disorder_ms": 4_000}, "late"),
        ({"per_second": 2_000_000}, "microsecond"),
        ({"per_second": 953}, "shuffled"),
    ],
)
def test_events_that_would_be_lost_or_alike_are_refused(wrong: dict[str, int], why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        Nexmark(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "differing"),
    [
        ({(1,): (1, 11), (2,): (2, 20)}, 1),
        ({(1,): (1, 10)}, 1),
        (RIGHT | {(3,): (3, 30)}, 1),
        ({}, 2),
    ],
)
def test_a_wrong_a_missing_and_another_result_are_differences(
    found: dict[tuple[int], tuple[int, int]], differing: int
) -> None:
    """No time counts then."""
    told = verdict(RIGHT, {"good": RIGHT, "bad": found})
    assert not told["equal"]
    assert [(name, one["results"]) for name, one in told["differences"].items()] == [("bad", differing)]


def test_equal_results_are_equal_unless_there_are_none() -> None:
    assert verdict(RIGHT, {"good": RIGHT}) == {"rows": 2, "equal": True}
    assert not verdict({}, {"empty": {}})["equal"]


def test_in_append_mode_a_result_comes_once_and_in_update_mode_the_last_one_counts() -> None:
    average = QUERIES["4"]
    batches = [[{"category": 10, "average": 1.0}], [{"category": 10, "average": 2.0}]]
    right = results(average, batches[1:])
    assert results(average, batches, once=False) == right
    assert results(average, batches) != right
