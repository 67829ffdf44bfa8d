"""The memory backend keeps what every backend promises."""

from __future__ import annotations

import pytest

from holdfast import clock
from holdfast.backends.memory import MemoryBackend
from holdfast.testing import BackendContract, MakeBackend


class TestMemoryBackend(BackendContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: MemoryBackend(directory, tables, clock.new_id)
