"""Makes Spark call a shard without data when a timer is due, through the timeout of the shard's group.

A shard's timers live in its tables. Spark knows only the earliest, as the timeout of the shard's group, and so calls
the shard in exactly those micro-batches that have data for it or in which a timer is due.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

TimeoutConf = Literal["NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"]
TimeMode = Literal["None", "ProcessingTime", "EventTime"]

#: The table of keys' timers, which is not the user's state.
TIMERS_TABLE = "timers"

#: How Spark calls a shard whose timers are due.
TIMEOUT_CONF: Mapping[str, TimeoutConf] = {
    "None": "NoTimeout",
    "ProcessingTime": "ProcessingTimeTimeout",
    "EventTime": "EventTimeTimeout",
}

#: By their names in lower case; Spark knows the first by another one, too.
TIME_MODES: Mapping[str, TimeMode] = {
    "none": "None",
    "notime": "None",
    "processingtime": "ProcessingTime",
    "eventtime": "EventTime",
}

#: Where `GroupState` has the timeout to send to Spark; private to it, and used in this module alone.
PRIVATE_TIMEOUT = "_timeout_timestamp"


def set_shard_timeout(state: GroupState, timeout_conf: TimeoutConf, earliest_timer_ms: int | None) -> None:
    """Set the timeout of a shard's group to its earliest timer; call it after the group's state was updated."""
    if earliest_timer_ms is None:
        return  # the update has cleared it
    if timeout_conf == "ProcessingTimeTimeout":
        state.setTimeoutDuration(max(1, earliest_timer_ms - state.getCurrentProcessingTimeMs()))
        return
    watermark_ms = state.getCurrentWatermarkMs()
    if earliest_timer_ms < watermark_ms and hasattr(state, PRIVATE_TIMEOUT):
        # With spark.holdfast.timeouts=spark a timer may stay after it has fired, and is due in every micro-batch. Spark
        # has no public call that sets a timeout in the past: with those alone it is due when the watermark moves on.
        setattr(state, PRIVATE_TIMEOUT, earliest_timer_ms)
    else:
        state.setTimeoutTimestamp(max(earliest_timer_ms, watermark_ms, 1))  # Spark refuses 0


def timeout_of(state: GroupState) -> int | None:
    """Return the timeout that a call has set, in milliseconds since 1970."""
    due_ms = getattr(state, PRIVATE_TIMEOUT, None)
    if due_ms is None:
        due_ms = json.loads(state.json())["timeoutTimestamp"]  # 20 µs a key
    return None if due_ms == state.NO_TIMESTAMP else int(due_ms)
