"""What Spark is told of a shard: when it is to be called without rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import StructType

from holdfast.spark_integration.shard import timeout
from holdfast.spark_integration.shard.timeout import set_shard_timeout, timeout_of


def group_state(timeout_conf: str, now_ms: int) -> GroupState:
    """The state of a shard's group, as Spark's worker makes it."""
    return GroupState(
        optionalValue=None,  # type: ignore[arg-type]
        batchProcessingTimeMs=now_ms,
        eventTimeWatermarkMs=now_ms,
        timeoutConf=timeout_conf,
        hasTimedOut=False,
        watermarkPresent=True,
        defined=False,
        updated=False,
        removed=False,
        timeoutTimestamp=GroupState.NO_TIMESTAMP,
        keyAsUnsafe=b"",
        valueSchema=StructType(),
    )


def test_spark_reads_a_timeout_from_the_private_name_that_is_set() -> None:
    """`GroupState._timeout_timestamp`: were it renamed, a timer that stays would be lost, and nothing would fail."""
    state = group_state("EventTimeTimeout", 1000)
    state.setTimeoutTimestamp(1500)
    assert timeout.PRIVATE_TIMEOUT == "_timeout_timestamp"
    assert vars(state)["_timeout_timestamp"] == 1500
    state._timeout_timestamp = 400
    assert json.loads(state.json())["timeoutTimestamp"] == 400, "what the worker sends to Spark"


@pytest.mark.parametrize(
    ("timeout_conf", "earliest_ms", "expected_ms"),
    [
        ("NoTimeout", None, -1),
        ("EventTimeTimeout", None, -1),
        ("EventTimeTimeout", 1500, 1500),
        ("EventTimeTimeout", 1000, 1000),
        ("EventTimeTimeout", 400, 400),  # a timer that stays after it has fired: due in every micro-batch
        ("ProcessingTimeTimeout", None, -1),
        ("ProcessingTimeTimeout", 1500, 1500),
        ("ProcessingTimeTimeout", 400, 1001),
    ],
)
def test_the_shard_is_called_when_its_earliest_timer_is_due(
    timeout_conf: Any, earliest_ms: int | None, expected_ms: int
) -> None:
    state = group_state(timeout_conf, 1000)
    set_shard_timeout(state, timeout_conf, earliest_ms)
    assert state._timeout_timestamp == expected_ms


def test_a_timer_at_0_is_told_to_spark_as_1() -> None:
    """Spark refuses a timeout at 0, which would fail the query in every micro-batch; nothing happens in between."""
    state = group_state("EventTimeTimeout", 0)
    set_shard_timeout(state, "EventTimeTimeout", 0)
    assert state._timeout_timestamp == 1


@pytest.mark.parametrize(("earliest_ms", "expected_ms"), [(1500, 1500), (1000, 1000), (400, 1000)])
def test_without_the_private_name_public_ways_do(
    monkeypatch: pytest.MonkeyPatch, earliest_ms: int, expected_ms: int
) -> None:
    """A timer that stays is then due when the watermark moves on, and no timer is lost."""
    state = group_state("EventTimeTimeout", 1000)
    with monkeypatch.context() as patch:
        patch.setattr(timeout, "PRIVATE_TIMEOUT", "_gone")
        assert timeout_of(state) is None
        set_shard_timeout(state, "EventTimeTimeout", earliest_ms)
        assert timeout_of(state) == expected_ms
    assert timeout_of(state) == expected_ms
