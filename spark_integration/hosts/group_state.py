"""``applyInPandasWithState`` as the host: a shard's pointer is the state of its group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupState

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.hosts.host import SentRows
from holdfast.spark_integration.shard.pointer_row import POINTER_STATE, PointerRow
from holdfast.spark_integration.shard.timeout import TimeoutConf, set_shard_timeout
from holdfast.spark_integration.shard_call.call import call_shard
from holdfast.spark_integration.transport.routes import ROUTE


@dataclass(frozen=True)
class GroupStateHost:
    """The `Host` of steps that hand on no watermark."""

    output_mode: str
    timeout_conf: TimeoutConf

    @property
    def drops_late_rows(self) -> bool:
        return self.timeout_conf == "EventTimeTimeout"

    def run(self, rows: SentRows, initial: SentRows | None) -> DataFrame:
        if initial is not None:
            raise InvalidArgumentError("applyInPandasWithState takes no initial state")
        step, timeout_conf = rows.step, self.timeout_conf

        def shard(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
            group = StateOfGroup(state, timeout_conf)
            if not group.has_been_called():
                yield from call_shard(step, key, chunks, group)

        return rows.frame.groupBy(ROUTE).applyInPandasWithState(
            shard, step.output.sent_schema, POINTER_STATE, self.output_mode, timeout_conf
        )


class StateOfGroup:
    """The `ShardGroup` on Spark's `GroupState`."""

    def __init__(self, state: GroupState, timeout_conf: TimeoutConf) -> None:
        self._state = state
        self._timeout_conf = timeout_conf
        self._remembered = PointerRow.read(state.get) if state.exists else None

    @property
    def batch_ms(self) -> int:
        return self._state.getCurrentProcessingTimeMs()

    @property
    def watermark_ms(self) -> int:
        return self._state.getCurrentWatermarkMs()

    def has_been_called(self) -> bool:
        """Tell whether the shard was already called with rows in this micro-batch, and so has fired what was due."""
        remembered = self._remembered
        return self._state.hasTimedOut and remembered is not None and remembered.batch_ms == self.batch_ms

    def remembered(self) -> PointerRow | None:
        return self._remembered

    def remember(self, row: PointerRow) -> None:
        # Always put the pointer back: Spark keeps an old timeout when a call updates nothing.
        self._state.update(row.columns())
        set_shard_timeout(self._state, self._timeout_conf, row.earliest_timer_ms)
