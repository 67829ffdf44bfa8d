"""The seam between a step and its host, the Spark operator that runs it.

The host calls each shard as one of its groups, keeps the shard's pointer with the micro-batch, and wakes the shard when
a timer is due. Everything else, the user's state above all, is holdfast's.

==========================================================  ===========================================================
`group_state.GroupStateHost`                                 ``applyInPandasWithState``: runs on any state store
`stateful_processor.StatefulProcessorHost`                   ``transformWithStateInPandas``: hands on a watermark and
                                                             takes initial state; needs Spark's RocksDB state store
`batch.run_batch`                                            ``applyInPandas``, for batch queries: keeps nothing
==========================================================  ===========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pyspark.sql import DataFrame

from holdfast.spark_integration.shard_call.call import ShardStep


@dataclass(frozen=True)
class SentRows:
    """Rows on their way to their shards."""

    frame: DataFrame  #: To group by `ROUTE`
    step: ShardStep  #: What the shards do with them


class Host(Protocol):
    """One of Spark's stateful operators."""

    @property
    def drops_late_rows(self) -> bool:
        """Whether it drops rows that are older than the watermark."""

    def run(self, rows: SentRows, initial: SentRows | None) -> DataFrame:
        """Return the output of all shards' calls; runs on the driver.

        Parameters
        ----------
        rows : SentRows
        initial : SentRows or None
            Rows of the initial state, of which the first micro-batch makes each shard's first version.
        """
