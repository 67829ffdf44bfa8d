"""The look at stored state when an operator is defined, where Spark fails."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors.exceptions.connect import SparkConnectGrpcException

from holdfast.settings import Settings
from holdfast.spark_integration.plan.definition import StoredState, stored_state

LOST = SparkConnectGrpcException(
    "Lost task 0.0 in stage 4.0 (TID 9): java.nio.channels.CancelledKeyException\n\tat java.base/X"
)


def session(*answers: SparkConnectGrpcException | dict[str, Any]) -> Any:
    """Return a session that gives its jobs these answers, one after the other."""
    left = list(answers)

    def collect() -> list[dict[str, Any]]:
        answer = left.pop(0)
        if isinstance(answer, SparkConnectGrpcException):
            raise answer
        return [answer]

    def map_in_arrow(_look: Callable[..., object], _columns: str) -> SimpleNamespace:
        return SimpleNamespace(collect=collect)

    return SimpleNamespace(range=lambda *_args, **_named: SimpleNamespace(mapInArrow=map_in_arrow))


FOUND = {"shards": 4, "query": "q", "problem": None}


def looked(spark: Any) -> StoredState:
    return stored_state(spark, Settings.parse({}), "totals", object())  # type: ignore[arg-type]


def test_a_worker_that_spark_lost_costs_a_second_look() -> None:
    """Spark repeats no task of a local master, and a look changes nothing."""
    assert looked(session(LOST, FOUND)) == StoredState(4, "q", None)


@pytest.mark.parametrize(
    "answers", [(LOST, LOST), (SparkConnectGrpcException("No module named 'app'"), FOUND)], ids=len
)
def test_what_stays_wrong_is_raised(answers: tuple[Any, ...]) -> None:
    with pytest.raises(SparkConnectGrpcException):
        looked(session(*answers))
