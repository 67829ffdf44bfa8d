"""Executors, which are child processes that wait, and their shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faults.executor_process import (
    Executor,
    StartExecutor,
)
from tests.faults.state_server.shard import Shard


@pytest.fixture
def executor(executors: StartExecutor) -> Executor:
    return executors()


@pytest.fixture
def shards() -> Iterator[Callable[..., Shard]]:
    made: list[Shard] = []

    def make(*arguments: Any, **more: Any) -> Shard:
        made.append(Shard(*arguments, **more))
        return made[-1]

    yield make
    for shard in made:
        shard.threads.shutdown()
