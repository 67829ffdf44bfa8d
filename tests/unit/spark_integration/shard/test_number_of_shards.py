"""A new shard begins only where something keeps the number of shards for every later start of the query."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.shard.call import require_number_of_shards
from holdfast.spark_integration.shard.streaming_task import StreamingTask


def operator(shards: int | None, checkpoint_dir: str | None) -> Any:
    return SimpleNamespace(name="op", shards=4, settings=SimpleNamespace(shards=shards, checkpoint_dir=checkpoint_dir))


def task(partitions: int | None, *, is_run_known: bool) -> StreamingTask:
    return StreamingTask("query", "run", is_run_known, None, partitions)


@pytest.mark.parametrize(
    ("shards", "checkpoint_dir", "partitions", "is_run_known"),
    [
        (4, "/durable", None, False),  # the setting
        (4, None, 7, True),
        (None, "/durable", 7, True),  # the operator's record
        (None, None, 4, True),  # Spark
        (None, None, None, False),  # nothing is kept, and no restart finds anything
    ],
)
def test_something_keeps_the_number(
    shards: int | None, checkpoint_dir: str | None, partitions: int | None, is_run_known: bool
) -> None:
    require_number_of_shards(operator(shards, checkpoint_dir), task(partitions, is_run_known=is_run_known))


def test_where_no_record_is_written_the_setting_must_keep_it() -> None:
    """Else a restart in a session with other shuffle partitions silently begins keys anew: Spark 4.0 over Connect."""
    with pytest.raises(InvalidArgumentError, match="set spark.holdfast.shards, and never change it"):
        require_number_of_shards(operator(None, "/durable"), task(None, is_run_known=False))


def test_another_number_than_spark_keeps_is_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="to 7"):
        require_number_of_shards(operator(None, None), task(7, is_run_known=True))
