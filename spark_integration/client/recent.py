"""The last micro-batches of the queries that run on this machine, as their state servers remember them.

Read from outside the query, without Spark. A server that does not answer in time is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast import clock
from holdfast.errors import HoldfastError
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.measures import together
from holdfast.spark_integration.client.messages import Message, field
from holdfast.spark_integration.executor import local_dirs

#: For all servers together; one that hangs leaves the next ones the least.
_TIMEOUT_SECONDS, _LEAST_SECONDS = 2.0, 0.25
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecentBatch:
    """One micro-batch of one operator: on one executor, or on all that were asked."""

    #: The query's id, and the name of the operator's directory
    query: str
    operator: str
    batch_id: int | None  #: None where Spark does not tell
    batch_ms: int  #: When it was planned, in ms since 1970
    shards: int  #: Shards that were called
    values: Mapping[str, int]  #: Their measures together, by the names of `CallMeasures`

    def ms(self, name: str) -> float:
        """Return a time by its name without the unit, in ms."""
        return self.values.get(f"{name}_us", 0) / 1_000


def over_executors(batches: Iterable[RecentBatch]) -> list[RecentBatch]:
    """Return the micro-batches of operators, each once, newest first."""
    found: dict[tuple[str, str, int, int | None], RecentBatch] = {}
    for one in batches:
        place = (one.query, one.operator, one.batch_ms, one.batch_id)
        so_far = found.get(place, replace(one, shards=0, values={}))
        values = together(so_far.values, one.values)
        found[place] = replace(so_far, shards=so_far.shards + one.shards, values=values)
    return sorted(found.values(), key=lambda one: (one.batch_ms, one.batch_id or 0), reverse=True)


def recent_batches(local_dir: str | None = None) -> list[RecentBatch]:
    """Return the last micro-batches of this user's running queries on this machine, oldest first.

    Cost: a request to each state server, two seconds for those together that do not answer, and a quarter of a second
    more for each further one. Nothing of a query is changed, or waits.
    """
    found: list[RecentBatch] = []
    end_ms = clock.monotonic_ms() + int(_TIMEOUT_SECONDS * 1000)
    for root in local_dirs.all_roots(local_dir):
        for directory in sorted(root.glob(f"{local_dirs.user_name()}/executor-*")):
            left_seconds = (end_ms - clock.monotonic_ms()) / 1000
            found += _ask(directory, max(left_seconds, _LEAST_SECONDS))
    return sorted(found, key=lambda batch: batch.batch_ms)


def _ask(executor_directory: Path, timeout_seconds: float) -> list[RecentBatch]:
    client = StateClient(executor_directory)
    try:
        answer = client.call("recent", timeout_seconds=timeout_seconds)
        return [_read(batch) for batch in answer]
    except HoldfastError as exc:
        _log.info("%s is left out: %s", executor_directory, exc)
        return []
    finally:
        client.close()


def _read(batch: Message) -> RecentBatch:
    values: dict[str, Any] = field(batch, "values", dict)
    return RecentBatch(
        query=field(batch, "query", str),
        operator=field(batch, "operator", str),
        batch_id=None if batch.get("batch_id") is None else field(batch, "batch_id", int),
        batch_ms=field(batch, "batch_ms", int),
        shards=field(batch, "shards", int),
        values={name: field(values, name, int) for name in values},
    )
