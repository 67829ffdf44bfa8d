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


class TestMemoryBackendSynced(BackendContract):
    """The same files with fsync, as the filesystem backend writes them."""

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        class Synced(MemoryBackend):
            fsync = True

        return lambda directory, tables: Synced(directory, tables, clock.new_id)
