"""A new shard begins only where something keeps the number of shards for every later start of the query."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.shard.task import StreamingTask
from holdfast.spark_integration.shard_call.call import require_number_of_shards
from holdfast.spark_integration.shard_call.store import require_kept_shards


def test_another_number_than_spark_keeps_is_refused_where_nothing_else_keeps_one() -> None:
    """Without a state directory a restart in another session would begin keys anew."""

    def require(shards: int | None, state_dir: str | None, partitions: int | None) -> None:
        settings = SimpleNamespace(shards=shards, state_dir=state_dir)
        operator: Any = SimpleNamespace(name="op", shards=4, settings=settings)
        require_number_of_shards(operator, StreamingTask("query", "run", True, None, partitions))

    require(4, None, 7)
    require(None, "/durable", 7)
    require(None, None, 4)
    require(None, None, None)
    with pytest.raises(SchemaMismatchError, match="to 7"):
        require(None, None, 7)


def test_a_task_that_writes_no_record_needs_one_that_keeps_the_number() -> None:
    """Else a restart in a session with other shuffle partitions begins keys anew: Spark 4.0 over Connect did."""
    stored: Any = SimpleNamespace(shards=4)
    require_kept_shards(stored, "op", 4)
    for other in (None, SimpleNamespace(shards=7)):
        with pytest.raises(InvalidArgumentError, match=r"set spark\.holdfast\.shards and never change it"):
            require_kept_shards(other, "op", 4)  # type: ignore[arg-type]
