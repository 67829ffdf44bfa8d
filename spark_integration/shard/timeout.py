"""Makes Spark call a shard without data when a timer is due, through the timeout of the shard's group.

A shard's timers live in its tables. Spark knows only the earliest, as the timeout of the shard's group, and so calls
the shard in exactly those micro-batches that have data for it or in which a timer is due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

TimeoutConf = Literal["NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"]


def set_shard_timeout(state: GroupState, timeout_conf: TimeoutConf, earliest_timer_ms: int | None) -> None:
    """Set the timeout of a shard's group to its earliest timer; call it after the group's state was updated."""
    if earliest_timer_ms is None:
        return  # the update has cleared it
    if timeout_conf == "ProcessingTimeTimeout":
        state.setTimeoutDuration(max(1, earliest_timer_ms - state.getCurrentProcessingTimeMs()))
    elif earliest_timer_ms >= state.getCurrentWatermarkMs():
        state.setTimeoutTimestamp(earliest_timer_ms)
    else:
        # With spark.holdfast.timeouts=spark a timer may stay after it has fired and be due in every micro-batch. No
        # public call of Spark's sets a timeout in the past.
        state._timeout_timestamp = earliest_timer_ms  # noqa: SLF001
