"""Threads, as those who read many objects of a shard are given them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads
