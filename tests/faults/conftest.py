"""What the fault tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.executor_process import StartExecutor, started_executors
from tests.model.built_in import ram_directory


@pytest.fixture
def ram_path() -> Iterator[Path]:
    """Return a folder in RAM where there is room, since these tests sync files thousands of times."""
    with ram_directory() as path:
        yield path


@pytest.fixture
def executors(tmp_path: Path) -> Iterator[StartExecutor]:
    """Return a function that starts executors; they end with the test."""
    # tmp_path first: pytest's own directory must not lie in the temporary directory of these executors.
    with started_executors() as start:
        yield start
