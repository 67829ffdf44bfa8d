"""Servers that are gone, credentials that are wrong, processes that fork, and what a client leaves behind."""

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

import pytest

from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.faults.fault_proxy import FaultProxy
from tests.faults.s3.objects import (
    ACTIONS,
    THREE_PARTS,
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
        try:
            for action, call in ACTIONS.items():
                with pytest.raises(UnavailableError, match=f"action={action} "):
                    call(storage)
        finally:
            versitygw.start()
        assert storage.get("folder/object") == b"1"


@pytest.mark.parametrize("action", ACTIONS)
def test_wrong_credentials(server: S3Server, storage: ObjectStorage, action: str) -> None:
    storage.put("folder/object", b"1")
    with server.wrong_credentials() as options, open_storage(storage.url, options) as refused:
        with pytest.raises(InvalidArgumentError, match=f"access denied: .*action={action} .*key=folder/") as raised:
            ACTIONS[action](refused)
        assert not raised.value.retryable
    assert storage.get("folder/object") == b"1"


@pytest.mark.parametrize("action", ACTIONS)
def test_missing_bucket_is_not_an_absent_object(server: S3Server, action: str) -> None:
    with (
        open_storage("s3://no-such-bucket/root", server.options()) as storage,
        pytest.raises(InvalidArgumentError, match=f"no such bucket.*action={action} "),
    ):
        ACTIONS[action](storage)


@pytest.mark.parametrize("action", ACTIONS)
def test_answer_of_something_else_is_not_an_absent_object(
    storage: ObjectStorage, proxy: FaultProxy, action: str
) -> None:
    storage.put("folder/object", b"1")
    other = proxy.rule("status", code=404, s3_code="PageNotFound")
    with pytest.raises(InvalidArgumentError, match="check the endpoint"):
        ACTIONS[action](storage)
    assert other.hits == 1


@pytest.mark.parametrize("action", ACTIONS)
def test_no_credentials(server: S3Server, url: str, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither set nor found: it says so, and asks no server."""
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


def test_expired_token(storage: ObjectStorage, proxy: FaultProxy) -> None:
    expired = proxy.rule("status", code=400, s3_code="ExpiredToken")
    with pytest.raises(InvalidArgumentError, match="access denied"):
        storage.get("o")
    assert expired.hits == 1


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
    def cycle() -> None:
        with open_storage(url, server.options()) as storage:
            storage.list("")

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    cycle()
    gc.collect()
    before = descriptors()
    for _ in range(5):
        cycle()
    gc.collect()
    assert descriptors() <= before


def test_forgetting_to_close_is_silent(server: S3Server, url: str) -> None:
    storage = open_storage(url, server.options())
    storage.list("")
    del storage
    gc.collect()  # an unclosed session would warn, and a warning fails the test


FORKED = """
import os, signal, sys, threading
from holdfast.snapshotter.storage.opening import open_storage
url, endpoint, key, secret = sys.argv[1:]
storage = open_storage(url, {"key": key, "secret": secret, "client_kwargs": {"endpoint_url": endpoint}})
storage.put("parent", b"1")
stop = threading.Event()
def busy():
    while not stop.is_set():
        storage.get("parent")
threads = [threading.Thread(target=busy) for _ in range(3)]
for thread in threads: thread.start()
children = []
for number in range(3):
    child = os.fork()
    if not child:
        signal.alarm(20)
        storage.put(f"child-{number}", b"2")
        assert storage.get("parent") == b"1"
        if number == 1: storage.close()
        if number == 2: sys.exit(0)
        os._exit(0)
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
stop.set()
for thread in threads: thread.join()
print(codes, [info.key for info in storage.list("")])
storage.close()
"""


def test_a_forked_child_works_and_leaves_the_parent_alone(server: S3Server, url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, url, server.url, ACCESS_KEY, SECRET_KEY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AWS_DEFAULT_REGION": "us-east-1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path, check=False
    )
    assert done.stdout == "[0, 0, 0] ['child-0', 'child-1', 'child-2', 'parent']\n", done.stderr
    assert not done.stderr


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


def test_absent_object(storage: ObjectStorage) -> None:
    with pytest.raises(NotFoundError, match="NoSuchKey"):
        storage.get("absent")


def test_root_and_key_together_are_limited(server: S3Server) -> None:
    with (
        open_storage(f"s3://{BUCKET}/" + "/".join(["d" * 100] * 9), server.options()) as storage,
        pytest.raises(InvalidArgumentError, match="with the root's prefix"),
    ):
        storage.put("k" * 200, b"1")
