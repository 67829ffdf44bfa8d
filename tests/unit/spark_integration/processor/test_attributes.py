"""Whoever keeps state in a processor's attributes is told; whoever keeps something else there is not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from holdfast.spark_integration.processor import transform_with_state
from tests.unit.spark_integration.processor.processor_shard import ProcessorShard


@pytest.fixture(autouse=True)
def first_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test see the warnings that a process gives once."""
    monkeypatch.setattr(transform_with_state, "_warned", set())


class Blameless(StatefulProcessor):
    """Changes nothing but what it may."""

    def __init__(self) -> None:
        self.limit = 5
        self.names = {"a": "ann"}
        self.model: Any = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.cache: dict[Any, Any] = {}
        self.seen: list[Any] = []
        self.names["b"] = "bob"
        self.model = object()

    @cached_property
    def table(self) -> list[int]:
        return [1, 2, 3]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        self.cache[key] = self.table
        self.seen.append(key)
        self.limit = 5
        self.handle.registerTimer(10)
        return iter([])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.cache.clear()
        return iter([])

    def close(self) -> None:
        self.handle = None


class Counting(Blameless):
    """Counts in attributes: in a new one, in one that it has, and in a container that it came with."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.by_key: dict[Any, int] = {}

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        self.n += 1
        self.last = key
        self.by_key[key] = self.by_key.get(key, 0) + 1
        self.handle.registerTimer(10)
        return iter([])


class CountingTimers(Blameless):
    """Sets an attribute when a timer fires."""

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.model = key
        return iter([])


def test_what_is_no_state_may_change(tmp_path: Path) -> None:
    """Caches that init makes, lazy properties, equal values: the tests' settings make a warning an error."""
    shard = ProcessorShard(tmp_path, Blameless(), "ProcessingTime")
    shard.run(["a", "b"])
    shard.run([], now=20)


@pytest.mark.parametrize(
    ("processor", "changed"), [(Counting(), "n, last, by_key"), (CountingTimers(), "model")], ids=["rows", "timers"]
)
def test_state_in_attributes_warns_once(processor: StatefulProcessor, changed: str, tmp_path: Path) -> None:
    """The warning names class and attributes; a process gives it once, whatever becomes of the copies."""
    shard = ProcessorShard(tmp_path, processor, "ProcessingTime")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        shard.run(["a", "b"])
        shard.run(["a"], now=20)
        shard.run(["a"], now=40)
    [warning] = warned
    assert f"{type(processor).__name__} has changed its attributes" in str(warning.message)
    assert f"timers: {changed}. They will be gone" in str(warning.message)


def test_a_batch_query_does_not_warn(tmp_path: Path) -> None:
    """There is no next micro-batch, in which anything could be gone."""
    shard = ProcessorShard(tmp_path, Counting(), "ProcessingTime")
    object.__setattr__(shard.function, "is_streaming", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard.run(["a"])
