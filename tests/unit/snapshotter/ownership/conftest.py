"""An empty storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ObjectStorage]:
    with open_storage(str(tmp_path)) as opened:
        yield opened
