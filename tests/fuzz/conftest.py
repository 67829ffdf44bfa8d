"""What the fuzzers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.built_in import ram_directory


@pytest.fixture
def ram_path() -> Iterator[Path]:
    """Return a folder in RAM where there is room, since databases sync their files."""
    with ram_directory() as path:
        yield path
