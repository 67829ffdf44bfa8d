"""What is observed of calls, when Spark observes some of them twice."""

from __future__ import annotations

import pytest

from holdfast.spark_integration.client.measures import METRICS
from holdfast.spark_integration.transport.observed import of_each_shard_once

ONCE = {metric.name: 12 if metric.is_sum else 7 for metric in METRICS} | {"shards": 4, "calls": 4}


def test_a_micro_batch_that_was_evaluated_once_is_as_observed() -> None:
    assert of_each_shard_once(ONCE) == ONCE
    nothing = dict.fromkeys(ONCE) | {"shards": 0, "calls": 0}
    assert of_each_shard_once(nothing) == nothing


@pytest.mark.parametrize("times", [2, 3])
def test_totals_of_shards_that_were_called_again_count_once(times: int) -> None:
    """The largest values are the same, and what is not known stays so."""
    seen = {name: value * times if isinstance(value, int) and value == 12 else value for name, value in ONCE.items()}
    seen |= {"calls": 4 * times, "snapshot_bytes": None}
    assert of_each_shard_once(seen) == ONCE | {"calls": 4 * times, "snapshot_bytes": None}
