"""Real S3 servers behind a proxy that fails on demand and counts what it did."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.faults.fault_proxy import FaultProxy
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


PART_BYTES = 5 << 20


THREE_PARTS = os.urandom(1 << 20) * 11


ACTIONS: dict[str, Callable[[ObjectStorage], object]] = {
    "put": lambda storage: storage.put("folder/object", b"again"),
    "get": lambda storage: storage.get("folder/object"),
    "list": lambda storage: storage.list("folder/"),
    "delete": lambda storage: storage.delete(["folder/object"]),
}


def requests_of(proxy: FaultProxy, method: str) -> int:
    return sum(logged == method for logged, _, _ in proxy.log)


def assert_nothing_left(server: S3Server, storage: ObjectStorage) -> None:
    """Neither the object nor an unfinished upload is on the server."""
    with server.client() as client:
        assert not client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    assert not storage.list("")


def begin_upload(server: S3Server, storage: ObjectStorage, key: str) -> str:
    """Leave what a process leaves that is killed in the middle of a large put; returns the upload's id."""
    name = f"{storage.url.removeprefix(f's3://{BUCKET}/')}/{key}"
    with server.client() as client:
        upload = str(client.create_multipart_upload(Bucket=BUCKET, Key=name)["UploadId"])
        client.upload_part(Bucket=BUCKET, Key=name, UploadId=upload, PartNumber=1, Body=b"x" * PART_BYTES)
    return upload


def uploads(server: S3Server) -> set[str]:
    with server.client() as client:
        return {upload["UploadId"] for upload in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])}


def parts_stored(server: S3Server) -> int:
    """Count the parts that the unfinished uploads of the bucket have."""
    with server.client() as client:
        found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        lists = [client.list_parts(Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"]) for each in found]
    return sum(len(parts.get("Parts", [])) for parts in lists)
