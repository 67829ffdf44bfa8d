"""The seam between a shard's call and Spark's operator that makes the call.

To Spark each shard is a group of one of its own stateful operators, the host, which keeps the shard's pointer as the
group's state: `holdfast.spark_integration.hosts`.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.spark_integration.shard.pointer_row import PointerRow


class ShardGroup(Protocol):
    """A shard as its host sees it, during one call."""

    @property
    def batch_ms(self) -> int:
        """When the micro-batch was planned: Spark's processing time, in ms since 1970."""

    @property
    def watermark_ms(self) -> int:
        """The event-time watermark, in ms since 1970; asked for only if the input has one."""

    def remembered(self) -> PointerRow | None:
        """Return the row that the last call put; None in the first."""

    def remember(self, row: PointerRow) -> None:
        """Keep a row for the next call, and make the host call the shard when its earliest timer is due."""
