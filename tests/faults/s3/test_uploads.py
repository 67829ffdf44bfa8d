"""Uploads in parts that fail, hang, are aborted or left unfinished."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.snapshotter.storage import s3 as s3_storage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from tests.faults.fault_proxy import FaultProxy
from tests.faults.interrupted import interrupt_once
from tests.faults.s3.objects import (
    THREE_PARTS,
    assert_nothing_left,
    begin_upload,
    parts_stored,
    requests_of,
    uploads,
)
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, Versitygw

pytestmark = pytest.mark.s3


def test_reply_of_complete_lost_for_ever(
    open_through: Callable[..., ObjectStorage], proxy: FaultProxy, server: S3Server
) -> None:
    """The object is whole, and stays, although its put has failed and the upload was aborted."""
    storage = open_through(total_max_attempts=1)
    lost = proxy.rule("drop_reply", method="POST", path="uploadId=")
    with pytest.raises(UnavailableError, match="action=put key=o "):
        storage.put("o", THREE_PARTS)
    assert lost.hits >= 1
    proxy.rules.clear()
    assert storage.get("o") == THREE_PARTS
    assert not uploads(server)


def test_large_object_is_uploaded_in_parts(storage: ObjectStorage, proxy: FaultProxy) -> None:
    storage.put("o", THREE_PARTS)
    assert [requests_of(proxy, method) for method in ("POST", "PUT")] == [2, 3]
    assert storage.get("o") == THREE_PARTS


def test_part_fails_for_ever(open_through: Callable[..., ObjectStorage], proxy: FaultProxy, server: S3Server) -> None:
    storage = open_through(total_max_attempts=2)
    failed = proxy.rule("status", method="PUT", path="partNumber=2", code=500, s3_code="InternalError")
    with pytest.raises(UnavailableError, match=r"action=put key=o .*InternalError/500"):
        storage.put("o", THREE_PARTS)
    assert failed.hits == 2
    assert requests_of(proxy, "DELETE") == 1
    assert_nothing_left(server, storage)


def test_credentials_that_expire_in_the_middle_of_an_upload(
    storage: ObjectStorage, proxy: FaultProxy, server: S3Server
) -> None:
    """A person must act: it is not tried again, and the parts are gone."""
    expired = proxy.rule("status", method="PUT", path="partNumber=2", code=400, s3_code="ExpiredToken")
    with pytest.raises(InvalidArgumentError, match=r"access denied.*action=put key=o .*ExpiredToken"):
        storage.put("o", THREE_PARTS)
    assert expired.hits == 1
    assert_nothing_left(server, storage)


KILLED = """
import sys
from holdfast.snapshotter.storage.opening import open_storage
url, endpoint, key, secret = sys.argv[1:]
client = {"endpoint_url": endpoint, "region_name": "us-east-1"}
storage = open_storage(url, {"key": key, "secret": secret, "client_kwargs": client, "part_size_bytes": 5 << 20})
storage.put("killed", bytes(11 << 20))
"""


def test_a_killed_upload_is_swept(storage: ObjectStorage, proxy: FaultProxy, server: S3Server, tmp_path: Path) -> None:
    """What it had sent is no object, and goes when it is old."""
    hang = proxy.rule("hang", method="PUT", path="partNumber=3")
    command = [sys.executable, "-c", KILLED, storage.url, proxy.url, ACCESS_KEY, SECRET_KEY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, cwd=tmp_path) as process:
        while not hang.hits:
            time.sleep(0.01)
        process.kill()
    assert not storage.list("")
    assert len(uploads(server)) == 1
    assert storage.abort_unfinished_uploads("", before_ms=1) == 0
    assert storage.abort_unfinished_uploads("", before_ms=1 << 52) == 1
    assert not uploads(server)


def test_part_hangs(
    open_through: Callable[..., ObjectStorage],
    proxy: FaultProxy,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3_storage, "_MIN_RATE_BYTES_PER_SECOND", 11 << 20)  # so 1 s for all of it
    storage = open_through(operation_timeout_seconds=1)
    hang = proxy.rule("hang", method="PUT", path="partNumber=2")
    proxy.rule("hang", method="PUT", path="partNumber=3")
    start = time.monotonic()
    with pytest.raises(UnavailableError, match="TimeoutError"):
        storage.put("o", THREE_PARTS)
    assert time.monotonic() - start < 6
    assert hang.hits == 1
    assert_nothing_left(server, storage)


def test_reply_of_complete_lost(storage: ObjectStorage, proxy: FaultProxy, server: S3Server) -> None:
    lost = proxy.rule("drop_reply", method="POST", path="uploadId=", times=1)
    storage.put("o", THREE_PARTS)
    assert lost.hits == 1
    assert storage.get("o") == THREE_PARTS
    with server.client() as client:
        assert not client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


@pytest.mark.parametrize(
    ("fault", "options"),
    [("drop_reply", {"path": "partNumber=2"}), ("cut_request", {"path": "partNumber=3", "at": 1000})],
    ids=["sent twice", "cut in the body"],
)
def test_a_part_that_is_sent_again(
    storage: ObjectStorage, proxy: FaultProxy, fault: str, options: dict[str, Any]
) -> None:
    met = proxy.rule(fault, method="PUT", times=1, **options)
    storage.put("o", THREE_PARTS)
    assert met.hits == 1
    assert storage.get("o") == THREE_PARTS


def test_interrupted_upload_leaves_nothing(storage: ObjectStorage, proxy: FaultProxy, server: S3Server) -> None:
    """An exception that leaves the writer publishes no truncated object."""
    hang = proxy.rule("hang", method="PUT", path="partNumber=2")
    interrupt_once(lambda: storage.put("o", THREE_PARTS), lambda: hang.hits)
    assert hang.hits == 1
    end = time.monotonic() + 10
    while requests_of(proxy, "DELETE") == 0 and time.monotonic() < end:
        time.sleep(0.05)
    storage.list("")  # the abort was answered before
    assert_nothing_left(server, storage)


def test_upload_aborted_by_somebody_else(storage: ObjectStorage, proxy: FaultProxy, server: S3Server) -> None:
    gone = proxy.rule("status", method="POST", path="uploadId=", code=404, s3_code="NoSuchUpload")
    with pytest.raises(UnavailableError, match="aborted by somebody else"):
        storage.put("o", THREE_PARTS)
    assert gone.hits == 1
    assert_nothing_left(server, storage)


def test_abort_fails_too(open_through: Callable[..., ObjectStorage], proxy: FaultProxy, server: S3Server) -> None:
    storage = open_through(total_max_attempts=1)
    proxy.rule("status", method="PUT", path="partNumber=1", code=500, s3_code="InternalError")
    abort = proxy.rule("status", method="DELETE", code=503)
    with pytest.raises(UnavailableError, match="InternalError/500") as raised:
        storage.put("o", THREE_PARTS)
    assert abort.hits == 1
    chain = "".join(traceback.format_exception(raised.value))
    assert "multipart upload left behind" in chain
    with server.client() as client:  # leave nothing to the other tests
        (upload,) = client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
        assert upload["UploadId"] in chain
        client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])


def test_unfinished_uploads_of_the_folder_are_aborted(
    open_through: Callable[..., ObjectStorage], server: S3Server, proxy: FaultProxy
) -> None:
    """Only those of the folder, and only those begun before: others may be at work, and neighbours are not ours."""
    storage = open_through(s3_additional_kwargs={"MaxUploads": 2})
    storage.put("s-1/finished", THREE_PARTS)
    neighbours = {begin_upload(server, storage, key) for key in ("s-10/o", "s-1", "t/o")}
    ours = {begin_upload(server, storage, f"s-1/{number}") for number in range(5)}
    assert storage.abort_unfinished_uploads("s-1/", before_ms=1) == 0
    assert uploads(server) == neighbours | ours
    proxy.log.clear()
    assert storage.abort_unfinished_uploads("s-1/", before_ms=1 << 52) == 5
    assert requests_of(proxy, "DELETE") == 5
    assert requests_of(proxy, "GET") == (3 if isinstance(server, Versitygw) else 1), "moto has one page for all"
    assert uploads(server) == neighbours
    assert storage.get("s-1/finished") == THREE_PARTS
    assert storage.abort_unfinished_uploads("", before_ms=1 << 52) == 3
    assert not uploads(server)


def test_an_abort_that_fails_is_told_and_made_again(
    open_through: Callable[..., ObjectStorage], server: S3Server, proxy: FaultProxy
) -> None:
    storage = open_through(total_max_attempts=2)
    ours = {begin_upload(server, storage, f"{number}") for number in range(3)}
    denied = proxy.rule("status", method="DELETE", code=403, s3_code="AccessDenied", skip=1, times=1)
    with pytest.raises(InvalidArgumentError, match=r"access denied.*action=abort"):
        storage.abort_unfinished_uploads("", before_ms=1 << 52)
    gone = proxy.rule("status_after", method="DELETE", code=404, s3_code="NoSuchUpload", times=1)
    assert storage.abort_unfinished_uploads("", before_ms=1 << 52) == 1, "the other one was gone already"
    assert (denied.hits, gone.hits, len(ours)) == (1, 1, 3)
    assert not uploads(server)


def test_an_upload_that_is_taken_away_stores_nothing(
    open_through: Callable[..., ObjectStorage], server: S3Server, proxy: FaultProxy
) -> None:
    """The put that is still at work fails when it completes; a part that comes after the abort leaves no upload."""
    storage = open_through(total_max_attempts=1)
    late = proxy.rule("delay", method="PUT", path="partNumber=3", seconds=3)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(storage.put, "o", THREE_PARTS)
        # A server may answer an abort with an error while a part is still coming in, and have done it all the same.
        while not late.hits or parts_stored(server) < 2:
            time.sleep(0.01)
        with open_through() as other:
            assert other.abort_unfinished_uploads("", before_ms=1 << 52) == 1
        with pytest.raises(UnavailableError):
            writing.result()
    assert late.hits >= 1, "the client repeats what moto answers with a reset"
    assert_nothing_left(server, storage)
