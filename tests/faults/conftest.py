"""What the fault tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.executor_process import StartExecutor, started_executors


@pytest.fixture
def executors(tmp_path: Path) -> Iterator[StartExecutor]:
    """Return a function that starts executors; they end with the test."""
    # tmp_path first: pytest's own directory must not lie in the temporary directory of these executors.
    with started_executors() as start:
        yield start
