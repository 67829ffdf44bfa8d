"""An operator on one embedded shard."""

from __future__ import annotations

from tests.unit.spark_integration.embedded_shard import EmbeddedShard


class FunctionShard(EmbeddedShard):
    """Runs a function over tables of rows, of which some columns are the keys."""

    run = EmbeddedShard.micro_batch
