"""The rocksdb backend keeps what every backend promises."""

from __future__ import annotations

import pytest

from holdfast import clock
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.testing import BackendContract, MakeBackend


class TestRocksDBBackend(BackendContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: RocksDBBackend(directory, tables, clock.new_id)
