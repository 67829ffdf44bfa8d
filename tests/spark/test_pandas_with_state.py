"""Spark's own ``applyInPandasWithState`` on holdfast, from end to end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

import holdfast
from tests.spark.conftest import OUTPUT, STATE, Lab

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

pytestmark = pytest.mark.spark

FIRST = [("a", 1), ("b", 2), ("a", 3), (None, 4)]
SECOND = [("a", 10), ("c", 20), (None, 30), ("", 40)]


def count_and_sum(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n, total = state.getOption or (0, 0)
    for frame in frames:
        n += len(frame)
        total += frame["v"].sum()
    state.update((n, total))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "total": [total]})


@pytest.mark.parametrize("transport", ["packed", "rows"])
@pytest.mark.parametrize("backend", ["memory", "filesystem", "rocksdb"])
def test_state_is_carried_from_micro_batch_to_micro_batch(lab: Lab, transport: str, backend: str) -> None:
    lab.configure({"transport": transport, "backend": backend})
    lab.feed(FIRST)
    lab.feed(SECOND)
    totals = holdfast.stream(lab.source()).groupBy("key")
    output = lab.run(totals.applyInPandasWithState(count_and_sum, OUTPUT, STATE, "update", "NoTimeout", name="totals"))
    assert [{row["key"]: (row["n"], row["total"]) for row in rows} for rows in output] == [
        {"a": (2, 4), "b": (1, 2), None: (1, 4)},
        {"a": (3, 14), "c": (1, 20), None: (2, 34), "": (1, 40)},
    ]
    assert lab.state() == {"a": (3, 14), "b": (1, 2), "c": (1, 20), None: (2, 34), "": (1, 40)}
