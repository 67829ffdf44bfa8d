"""Real S3 servers behind a proxy that fails on demand and counts what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.faults.fault_proxy import FaultProxy
from tests.faults.s3.objects import (
    PART_BYTES,
)
from tests.servers.s3 import BUCKET, S3Server
from tests.tiers import cases


@pytest.fixture(scope="module", params=cases(["moto", "versitygw"]))
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def running_proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy: FaultProxy) -> FaultProxy:
    running_proxy.reset()
    return running_proxy


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture
def open_through(server: S3Server, proxy: FaultProxy, url: str) -> Iterator[Callable[..., ObjectStorage]]:
    """Return a function that opens this test's storage through the proxy."""
    opened = []

    def open_it(total_max_attempts: int = 4, read_timeout: float = 20, **more: object) -> ObjectStorage:
        retries = {"total_max_attempts": total_max_attempts}
        config = {"retries": retries, "read_timeout": read_timeout}
        options = server.options(proxy.url, config_kwargs=config, part_size_bytes=PART_BYTES, **more)
        opened.append(open_storage(url, options))
        return opened[-1]

    yield open_it
    for storage in opened:
        storage.close()


@pytest.fixture
def storage(open_through: Callable[..., ObjectStorage]) -> ObjectStorage:
    return open_through()
