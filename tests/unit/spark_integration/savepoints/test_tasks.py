"""Shards are worked on by this process as by tasks of Spark's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from holdfast.errors import CorruptionError, HoldfastError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.savepoints.tasks import OwnProcess, ShardTask

SHARDS = [("totals", number) for number in range(6)]


@dataclass(frozen=True)
class Storing(ShardTask):
    """Stores an object for each shard; fails at one; counts how many shards are under way."""

    GIVEN: ClassVar[str] = "operator string, shard int"
    RETURNED: ClassVar[str] = "operator string, shard int, error string"

    error: HoldfastError | None = None
    under_way: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    meet: Any = field(default_factory=lambda: threading.Barrier(2))

    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[dict[str, Any]]:
        with self.lock:
            self.under_way.append(row["shard"])
            self.most.append(len(self.under_way))
        if self.error is None:
            self.meet.wait(10)  # shards come in twos: a third one would break the rule, a single one the barrier
        elif row["shard"] == 2:
            raise self.error
        opened(self.target).put(f"{row['operator']}-{row['shard']}", b"1")
        with self.lock:
            self.under_way.remove(row["shard"])
        yield {"operator": row["operator"], "shard": row["shard"], "error": None}


@pytest.fixture
def done() -> list[int]:
    return []


@pytest.fixture
def alone(tmp_path: Path, done: list[int]) -> Iterator[OwnProcess]:
    with ThreadPoolExecutor(8) as executor:
        yield OwnProcess.of(str(tmp_path / "durable"), {}, executor, 2, done.append)


def test_shards_are_worked_on_side_by_side_but_no_more_than_memory_has_room_for(
    alone: OwnProcess, tmp_path: Path, done: list[int]
) -> None:
    task = Storing(alone.settings, str(tmp_path / "target"))
    found = alone.run(SHARDS, task)
    assert [(row["operator"], row["shard"]) for row in found] == SHARDS
    assert max(task.most) == 2
    assert sum(done) == 6
    assert len(list((tmp_path / "target").iterdir())) == 6


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (CorruptionError("a piece is damaged"), "totals, shard 2: a piece is damaged"),
        (UnavailableError("away"), "away"),
    ],
    ids=["damaged", "away"],
)
def test_an_error_is_raised_with_its_shard(alone: OwnProcess, tmp_path: Path, error: HoldfastError, says: str) -> None:
    """As one that a task returns, or fails of."""
    with pytest.raises(type(error), match=says):
        alone.run(SHARDS, Storing(alone.settings, str(tmp_path / "target"), error))
