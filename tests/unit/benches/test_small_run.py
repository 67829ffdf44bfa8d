"""Engines whose rows are compared before they are measured."""

from __future__ import annotations

from collections import Counter

from holdfast.benches.runs.small_run import verdict


def test_the_same_rows_in_the_same_micro_batches_are_equal() -> None:
    """In any order; however many engines."""
    batches = [Counter(["a", "b", "b"]), Counter(["c"])]
    assert verdict({"ours": batches, "spark": [Counter(["b", "a", "b"]), Counter(["c"])]}) == {"rows": 4, "equal": True}


def test_a_row_more_or_less_is_no_equality() -> None:
    """Nor is no row at all: the first micro-batch that differs is named, with a row."""
    found = verdict({"ours": [Counter(), Counter(["a"])], "spark": [Counter(), Counter(["a", "a"])]})
    assert found == {"rows": 1, "equal": False, "differences": {"spark": {"batch": 1, "rows": 1, "first": "a"}}}
    assert verdict({"ours": [Counter()], "spark": [Counter()]}) == {"rows": 0, "equal": False}
