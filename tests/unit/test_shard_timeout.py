"""What Spark is told of a shard: its pointer's row, and when it is to be called without rows."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import StructType

from holdfast.backends.base import Pointer
from holdfast.spark_integration.pointer_row import POINTER_COLUMNS, PointerRow
from holdfast.spark_integration.shard_timeout import set_shard_timeout


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


@pytest.mark.parametrize("binary", [bytes, bytearray])
def test_a_row_comes_back_as_it_was_put(binary: Any) -> None:
    """Spark hands binary state back as bytes or as a bytearray."""
    row = PointerRow(Pointer(7, "aa"), b"commit", 1000, 6)
    columns = row.columns()
    assert len(columns) == len(POINTER_COLUMNS)
    assert PointerRow.read((*columns[:2], binary(b"commit"), *columns[3:])) == row
    assert row.carried_commits == {Pointer(7, "aa"): b"commit"}
    bare = PointerRow(Pointer(7, "aa"), None, None, 6)
    assert PointerRow.read(bare.columns()) == bare
    assert bare.carried_commits == {}
