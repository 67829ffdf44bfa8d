"""Clients of S3 when servers and networks fail, and uploads in parts."""

from __future__ import annotations

import gc
import logging
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

from holdfast.errors import HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.snapshotter.storage import s3 as s3_storage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.faults.any_client import require_harmless_forks, require_no_leaks
from tests.faults.fault_proxy import FaultProxy
from tests.faults.interrupted import interrupt_once
from tests.faults.s3.conftest import (
    ACTIONS,
    THREE_PARTS,
    assert_nothing_left,
    begin_upload,
    parts_stored,
    requests_of,
    uploads,
)
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, Versitygw

pytestmark = pytest.mark.s3


def test_server_killed_and_started_again_while_objects_are_written(versitygw: Versitygw) -> None:
    """Who writes goes on; what was acknowledged is there, and nothing is torn."""
    data = {f"{number}": os.urandom(1000) * 300 for number in range(60)}
    stored: list[str] = []
    kills = 0

    def write(key: str) -> None:
        storage.put(key, data[key])
        stored.append(key)

    with open_storage(f"s3://{BUCKET}/killed", versitygw.options()) as storage, ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, key) for key in data]
        for enough in (10, 30):
            while len(stored) < enough:
                time.sleep(0.005)
            versitygw.kill()
            kills += 1
            assert len(stored) < len(data), "killed too late to prove anything"
            versitygw.start()
        for done in writing:
            done.result()
        assert kills == 2
        assert {info.key for info in storage.list("")} == set(data)
        for key, content in data.items():
            assert storage.get(key) == content


def test_server_killed_and_not_started_again(versitygw: Versitygw) -> None:
    """Each action ends with an error that may pass, and the same storage works when the server is back."""
    options = versitygw.options(config_kwargs={"retries": {"total_max_attempts": 2}})
    with open_storage(f"s3://{BUCKET}/gone", options) as storage:
        storage.put("folder/object", b"1")
        versitygw.kill()
        start = time.monotonic()
        try:
            for action, call in ACTIONS.items():
                with pytest.raises(UnavailableError, match=f"action={action} "):
                    call(storage)
            assert time.monotonic() - start < 12
        finally:
            versitygw.start()
        assert storage.get("folder/object") == b"1"


@pytest.mark.parametrize("action", ACTIONS)
def test_wrong_credentials(server: S3Server, storage: ObjectStorage, action: str) -> None:
    storage.put("folder/object", b"1")
    with server.wrong_credentials() as options, open_storage(storage.url, options) as refused:
        said = f"access denied: check credentials.*action={action} .*key=folder/"
        with pytest.raises(InvalidArgumentError, match=said) as raised:
            ACTIONS[action](refused)
        assert not raised.value.retryable
    assert storage.get("folder/object") == b"1"


@pytest.mark.parametrize("action", ACTIONS)
def test_missing_bucket_is_not_an_absent_object(server: S3Server, action: str) -> None:
    with (
        open_storage("s3://no-such-bucket/root", server.options()) as storage,
        pytest.raises(InvalidArgumentError, match=f"no such bucket: create it.*action={action} "),
    ):
        ACTIONS[action](storage)


@pytest.mark.parametrize("action", ACTIONS)
def test_another_answer_is_not_an_absent_object(storage: ObjectStorage, proxy: FaultProxy, action: str) -> None:
    storage.put("folder/object", b"1")
    other = proxy.rule("status", code=404, s3_code="PageNotFound")
    with pytest.raises(InvalidArgumentError, match="check the endpoint"):
        ACTIONS[action](storage)
    assert other.hits == 1


@pytest.mark.parametrize("action", ACTIONS)
def test_no_credentials(server: S3Server, url: str, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    nowhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    for name, value in {**nowhere, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    client = {"endpoint_url": server.url, "region_name": "us-east-1"}
    with (
        open_storage(url, {"client_kwargs": client}) as storage,
        pytest.raises(
            InvalidArgumentError, match=rf"check credentials.*action={action} .*Unable to locate credentials"
        ),
    ):
        ACTIONS[action](storage)


def test_no_credentials_anywhere(server: S3Server, proxy: FaultProxy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="holdfast")
    token = "TOKENCANARY" * 3
    options = server.options(
        proxy.url, token=token, config_kwargs={"retries": {"total_max_attempts": 1}, "read_timeout": 0.2}
    )
    proxy.rule("status", path="busy")
    proxy.rule("status", path="denied", code=403, s3_code="InvalidAccessKeyId", body="")
    echo = f"<Error><Code>AccessDenied</Code><Message>no access for {SECRET_KEY} {ACCESS_KEY}</Message></Error>"
    proxy.rule("status", path="echo", code=403, body=echo)
    proxy.rule("hang", path="hang")
    shown = []
    with open_storage(f"s3://{BUCKET}/canary", server.options(proxy.url)) as storage:
        storage.put("fine", b"1")
    with open_storage(f"s3://{BUCKET}/canary", options) as storage:
        shown += [repr(storage), str(storage), storage.url]
        for key in ("busy", "denied", "echo", "hang", "absent"):
            with pytest.raises(HoldfastError) as raised:
                storage.get(key)
            shown += traceback.format_exception(raised.value)
    with pytest.raises(InvalidArgumentError) as raised_early:
        open_storage("s3://bucket", {**options, "secrett": SECRET_KEY})
    shown += traceback.format_exception(raised_early.value)
    shown += [record.getMessage() for record in caplog.records if record.name.startswith("holdfast")]
    assert any("put key=fine" in line for line in shown)
    for canary in (ACCESS_KEY, SECRET_KEY, token):
        assert not [line for line in shown if canary in line]


def test_opening_and_closing_leaks_nothing(server: S3Server, url: str) -> None:
    require_no_leaks(url, server.options())


def test_forgetting_to_close_is_silent(server: S3Server, url: str) -> None:
    storage = open_storage(url, server.options())
    storage.list("")
    del storage
    gc.collect()  # an unclosed session would warn, and a warning fails the test


def test_a_forked_child_works_and_leaves_the_parent_alone(server: S3Server, url: str, tmp_path: Path) -> None:
    require_harmless_forks(url, server.options(), tmp_path, busy_threads=3)


def test_every_attempt_is_counted(open_through: Callable[..., ObjectStorage], proxy: FaultProxy) -> None:
    """What the store charges for: retries, parts, the requests around them, and those that failed."""
    storage = open_through(total_max_attempts=3)
    busy = proxy.rule("status", code=503, times=2)
    storage.put("o", b"small")
    assert busy.hits == 2
    assert storage.requests["put"] == 3
    storage.put("large", THREE_PARTS)
    assert storage.requests["put"] == 3 + 5
    cut = proxy.rule("cut_reply", method="GET", at=2, times=1)
    storage.get("o")
    assert cut.hits == 1
    failing = proxy.rule("status", method="PUT", path="partNumber=2", code=500, s3_code="InternalError")
    with pytest.raises(UnavailableError):
        storage.put("other", THREE_PARTS)
    assert failing.hits == 3
    seen = [method for method, _, _ in proxy.log]
    counted = storage.requests
    assert counted["get"] == seen.count("GET") == 2
    assert counted["delete"] == seen.count("DELETE") == 1
    # Parts that were under way when the other one failed were counted, and may not have been sent.
    assert 0 <= counted["put"] - seen.count("PUT") - seen.count("POST") <= 2
    assert (counted["put_bytes"], counted["get_bytes"]) == (5 + len(THREE_PARTS), 5)


def test_root_and_key_together_are_limited(server: S3Server) -> None:
    with (
        open_storage(f"s3://{BUCKET}/" + "/".join(["d" * 100] * 9), server.options()) as storage,
        pytest.raises(InvalidArgumentError, match="with the root's prefix"),
    ):
        storage.put("k" * 200, b"1")


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


@pytest.mark.parametrize(
    ("rule", "error", "said", "hits"),
    [
        ({"method": "PUT", "path": "partNumber=2", "code": 500, "s3_code": "InternalError"},
         UnavailableError, r"action=put key=o .*InternalError/500", 2),
        ({"method": "PUT", "path": "partNumber=2", "code": 400, "s3_code": "ExpiredToken"},
         InvalidArgumentError, r"access denied.*action=put key=o .*ExpiredToken", 1),
        ({"method": "POST", "path": "uploadId=", "code": 404, "s3_code": "NoSuchUpload"},
         UnavailableError, "another process aborted the multipart upload", 1),
    ],
    ids=["a part fails", "credentials expire", "aborted by somebody else"],
)  # fmt: skip
def test_an_upload_that_fails_leaves_nothing(
    open_through: Callable[..., ObjectStorage], proxy: FaultProxy, server: S3Server,
    rule: dict[str, Any], error: type[HoldfastError], said: str, hits: int,
) -> None:  # fmt: skip
    """Whether it may be tried again or a person must act: the parts are gone."""
    storage = open_through(total_max_attempts=2)
    failed = proxy.rule("status", **rule)
    with pytest.raises(error, match=said):
        storage.put("o", THREE_PARTS)
    assert failed.hits == hits
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
    open_through: Callable[..., ObjectStorage], proxy: FaultProxy, server: S3Server, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("drop_reply", {"method": "PUT", "path": "partNumber=2"}),
        ("cut_request", {"method": "PUT", "path": "partNumber=3", "at": 1000}),
        ("drop_reply", {"method": "POST", "path": "uploadId="}),
    ],
    ids=["sent twice", "cut in the body", "completed twice"],
)
def test_a_part_is_sent_again(
    storage: ObjectStorage, proxy: FaultProxy, server: S3Server, fault: str, options: dict[str, Any]
) -> None:
    """And the reply to what completes the upload may be lost."""
    met = proxy.rule(fault, times=1, **options)
    storage.put("o", THREE_PARTS)
    assert met.hits == 1
    assert storage.get("o") == THREE_PARTS
    assert not uploads(server)


def test_interrupted_upload_leaves_nothing(storage: ObjectStorage, proxy: FaultProxy, server: S3Server) -> None:
    hang = proxy.rule("hang", method="PUT", path="partNumber=2")
    interrupt_once(lambda: storage.put("o", THREE_PARTS), lambda: hang.hits)
    assert hang.hits == 1
    end = time.monotonic() + 10
    while requests_of(proxy, "DELETE") == 0 and time.monotonic() < end:
        time.sleep(0.05)
    storage.list("")  # the abort was answered before
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
