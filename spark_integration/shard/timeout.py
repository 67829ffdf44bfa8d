"""Sets the timeout of a shard's group, so that Spark calls the shard when a timer is due, even without data.

A shard's timers are in its tables. Spark gets only the earliest, as the timeout of the shard's group, and so calls the
shard in exactly the micro-batches in which the shard has data or a due timer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

TimeoutConf = Literal["NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"]
TimeMode = Literal["None", "ProcessingTime", "EventTime"]

#: The table of timers, which is not user state.
TIMERS_TABLE = "timers"

#: The timeout for a shard's timers, by time mode.
TIMEOUT_CONF: Mapping[str, TimeoutConf] = {
    "None": "NoTimeout",
    "ProcessingTime": "ProcessingTimeTimeout",
    "EventTime": "EventTimeTimeout",
}

#: Time modes by name in lower case; Spark has two names for the first.
TIME_MODES: Mapping[str, TimeMode] = {
    "none": "None",
    "notime": "None",
    "processingtime": "ProcessingTime",
    "eventtime": "EventTime",
}

#: Private attribute of `GroupState` with the timeout for Spark; only this module uses it.
PRIVATE_TIMEOUT = "_timeout_timestamp"


def set_shard_timeout(state: GroupState, timeout_conf: TimeoutConf, earliest_timer_ms: int | None) -> None:
    """Set the timeout of a shard's group to its earliest timer; call it after an update of the group's state."""
    if earliest_timer_ms is None:
        return  # the update has cleared the timeout
    if timeout_conf == "ProcessingTimeTimeout":
        state.setTimeoutDuration(max(1, earliest_timer_ms - state.getCurrentProcessingTimeMs()))
        return
    watermark_ms = state.getCurrentWatermarkMs()
    if earliest_timer_ms < watermark_ms and hasattr(state, PRIVATE_TIMEOUT):
        # With spark.holdfast.timeouts=spark, a fired timer may remain, due in every micro-batch. Spark's public methods
        # cannot set a timeout in the past: with them, the timer is due only after the watermark advances.
        setattr(state, PRIVATE_TIMEOUT, earliest_timer_ms)
    else:
        state.setTimeoutTimestamp(max(earliest_timer_ms, watermark_ms, 1))  # Spark rejects 0


def timeout_of(state: GroupState) -> int | None:
    """Return the timeout that a call has set, in ms since 1970; None if it set no timeout."""
    due_ms = getattr(state, PRIVATE_TIMEOUT, None)
    if due_ms is None:
        due_ms = json.loads(state.json())["timeoutTimestamp"]  # 20 µs per key
    return None if due_ms == state.NO_TIMESTAMP else int(due_ms)
