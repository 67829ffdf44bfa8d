"""When Spark calls a shard that has no data: the shard's own timeout in Spark's state.

A shard's timers live in its tables. Spark is told of the earliest one only, as the timeout of the shard's group, so
that it calls the shard in exactly those micro-batches in which data or a timer is due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

TimeoutConf = Literal["NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"]


def set_shard_timeout(state: GroupState, timeout_conf: TimeoutConf, earliest_timer_ms: int | None) -> None:
    """Set the timeout of a shard's group to its earliest timer, after the group's state was updated."""
    if earliest_timer_ms is None:
        return  # the update has cleared it
    if timeout_conf == "ProcessingTimeTimeout":
        state.setTimeoutDuration(max(1, earliest_timer_ms - state.getCurrentProcessingTimeMs()))
    elif earliest_timer_ms >= state.getCurrentWatermarkMs():
        state.setTimeoutTimestamp(earliest_timer_ms)
    else:
        # A timer that stays although it has fired, as spark.holdfast.timeouts=spark asks for: Spark calls in each
        # micro-batch for such a one, and has no public call that sets a timeout in the past.
        state._timeout_timestamp = earliest_timer_ms  # noqa: SLF001
