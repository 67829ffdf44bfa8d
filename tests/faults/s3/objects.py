"""Objects, actions and unfinished uploads, for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from tests.faults.fault_proxy import FaultProxy
from tests.servers.s3 import BUCKET, S3Server

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
