"""A backend with one owner keeps what every backend promises, also when it is used through a state server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.backends.base import Backend
from holdfast.backends.registry import find_backend
from holdfast.spark_integration.client.remote_backend import RemoteBackend
from holdfast.testing import BackendContract, MakeBackend
from tests.faults.executor_process import OWNED, remote_backends, started_executors
from tests.tiers import cases


@pytest.fixture(scope="module", params=cases([("rocksdb", {"memory": "2g"}), (OWNED, {})]), ids=lambda given: given[0])
def make_remote_backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeBackend]:
    """Make backends in one state server, each in a directory of its own."""
    tmp_path_factory.getbasetemp()  # before the temporary directory is another
    with started_executors() as start:
        executor = start()
        backend, options = request.param
        yield remote_backends(executor, executor.client(), backend, **options)


@pytest.mark.slow
class TestRemoteBackend(BackendContract):
    @pytest.fixture
    def make_backend(self, make_remote_backend: MakeBackend) -> MakeBackend:
        return make_remote_backend

    def kind(self, backend: Backend) -> type[Backend]:
        assert isinstance(backend, RemoteBackend)
        return find_backend(backend._shard.backend)
