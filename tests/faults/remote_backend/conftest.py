"""A backend with one owner behind a real state server, one server for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.remote_backend import RemoteBackend
from holdfast.testing import MakeBackend
from tests.faults.executor_process import (
    OWNED,
    Executor,
    remote_backends,
    started_executors,
)
from tests.faults.remote_backend.rows import TABLES
from tests.tiers import cases


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """One for all tests, also those that kill its server: the next call starts another."""
    tmp_path_factory.getbasetemp()
    with started_executors() as start:
        yield start()


@pytest.fixture
def client(executor: Executor) -> StateClient:
    client = executor.client()
    client.require_server()
    return client


@pytest.fixture(params=cases(["rocksdb", OWNED]))
def make(request: pytest.FixtureRequest, executor: Executor, client: StateClient) -> MakeBackend:
    return remote_backends(executor, client, request.param)


@pytest.fixture
def backend(make: MakeBackend, tmp_path: Path) -> RemoteBackend:
    backend = make(tmp_path, TABLES)
    assert isinstance(backend, RemoteBackend)
    return backend
