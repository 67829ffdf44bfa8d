"""Requests that S3 answers late, wrongly or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.retries.standard import ExponentialBackoff

from holdfast.backends import stored_file
from holdfast.errors import ConflictError, CorruptionError, HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.snapshotter.storage import s3 as s3_storage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.faults.fault_proxy import FaultProxy
from tests.faults.s3.conftest import ACTIONS, THREE_PARTS, requests_of
from tests.servers.s3 import BUCKET, S3Server

pytestmark = pytest.mark.s3


def test_small_objects_cost_one_request(storage: ObjectStorage, proxy: FaultProxy) -> None:
    storage.put("o", b"small")
    assert storage.get("o") == b"small"
    assert [method for method, _, _ in proxy.log] == ["PUT", "GET"]


def test_reply_of_put_lost(storage: ObjectStorage, proxy: FaultProxy) -> None:
    storage.put("first", b"1")  # so that the connection is a reused one
    lost = proxy.rule("drop_reply", method="PUT", path="/o$", times=1)
    storage.put("o", b"written once")
    assert lost.hits == 1
    assert requests_of(proxy, "PUT") == 3
    assert storage.get("o") == b"written once"


def test_reply_of_put_lost_for_ever(open_through: Callable[..., ObjectStorage], proxy: FaultProxy) -> None:
    """Nobody knows whether it is stored: that is an error, and nothing is deleted, neither this nor anything else."""
    storage = open_through(total_max_attempts=2)
    storage.put("before", b"1")
    lost = proxy.rule("drop_reply", method="PUT")
    with pytest.raises(UnavailableError, match="action=put key=o "):
        storage.put("o", b"small")
    assert lost.hits >= 2
    proxy.rules.clear()
    assert {info.key: storage.get(info.key) for info in storage.list("")} == {"before": b"1", "o": b"small"}
    assert requests_of(proxy, "DELETE") + requests_of(proxy, "POST") == 0


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_conflict_is_never_taken_for_an_object(storage: ObjectStorage, proxy: FaultProxy, code: str) -> None:
    """409 says that nothing was done: try again, for ever it is an error, and the key is not there."""
    conflict = proxy.rule("status", method="PUT", code=409, s3_code=code)
    for put in (storage.put, storage.put_if_absent):
        with pytest.raises(UnavailableError, match=f"detail={code}/409") as raised:
            put("o", b"data")
        assert raised.value.retryable
    assert conflict.hits >= 2
    proxy.rules.clear()
    assert not storage.list("")
    storage.put("o", b"data")
    assert storage.get("o") == b"data"


@pytest.mark.parametrize(
    ("put", "rule"),
    [
        ("put", {"kind": "status_after", "code": 500, "s3_code": "InternalError", "times": 1}),
        ("put_if_absent", {"kind": "status", "code": 409, "s3_code": "ConditionalRequestConflict", "times": 2}),
    ],
    ids=["done, but answered with an error", "meets another one"],
)
def test_a_put_is_asked_again(storage: ObjectStorage, proxy: FaultProxy, put: str, rule: dict[str, Any]) -> None:
    """AWS says so of the second, where several tasks of a query's first micro-batch put its operator's record."""
    met = proxy.rule(method="PUT", **rule)
    getattr(storage, put)("o", b"mine")
    assert met.hits == rule["times"]
    assert storage.get("o") == b"mine"


def test_reply_of_a_conditional_put_lost(storage: ObjectStorage, proxy: FaultProxy) -> None:
    """Sent again, it finds its own object: that is no conflict."""
    storage.put("first", b"1")  # so that the connection is a reused one
    lost = proxy.rule("drop_reply", method="PUT", path="/o$", times=1)
    storage.put_if_absent("o", b"mine")
    assert lost.hits == 1
    assert storage.get("o") == b"mine"
    with pytest.raises(ConflictError):
        storage.put_if_absent("o", b"your")
    assert [method for method, _, _ in proxy.log[-2:]] == ["PUT", "GET"], "two requests, where the key is taken"


@pytest.mark.parametrize("body", ["", "<Error/>"], ids=["NotImplemented", "no code"])
def test_a_store_without_conditional_writes(storage: ObjectStorage, proxy: FaultProxy, body: str) -> None:
    """It says so, and is refused: two drivers could overwrite each other's decisions."""
    unknown = proxy.rule("status", method="PUT", code=501, s3_code="NotImplemented", body=body, times=1)
    with pytest.raises(InvalidArgumentError, match=r"no conditional put.*AWS, MinIO"):
        storage.put_if_absent("o", b"mine")
    assert unknown.hits == 1
    assert storage.list("") == []


def test_what_had_the_key_is_deleted_meanwhile(storage: ObjectStorage, proxy: FaultProxy) -> None:
    """Whether it was the same is not known any more: try again."""
    taken = proxy.rule("status", method="PUT", code=412, s3_code="PreconditionFailed", times=1)
    with pytest.raises(UnavailableError, match="deleted meanwhile"):
        storage.put_if_absent("o", b"mine")
    assert taken.hits == 1
    storage.put_if_absent("o", b"mine")
    assert storage.get("o") == b"mine"


@pytest.mark.parametrize("attempts", [1, 4])
def test_request_cut_in_the_body(open_through: Callable[..., ObjectStorage], proxy: FaultProxy, attempts: int) -> None:
    """A body of which half arrived is no object: it is sent again, or nothing is stored."""
    storage = open_through(total_max_attempts=attempts)
    cut = proxy.rule("cut_request", method="PUT", at=50_000, times=None if attempts == 1 else 1)
    if attempts == 1:
        with pytest.raises(UnavailableError, match="action=put key=o "):
            storage.put("o", b"x" * 100_000)
        assert not storage.list("")
    else:
        storage.put("o", b"x" * 100_000)
        assert storage.get("o") == b"x" * 100_000
    assert cut.hits >= 1


@pytest.mark.parametrize("action", ACTIONS)
def test_latency(storage: ObjectStorage, proxy: FaultProxy, action: str) -> None:
    storage.put("folder/object", b"1")
    late = proxy.rule("delay", seconds=0.4)
    start = time.monotonic()
    ACTIONS[action](storage)
    assert time.monotonic() - start >= 0.4
    assert late.hits == 1


def test_outage_is_waited_for(server: S3Server, proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may be away for half a minute before a micro-batch fails, unless the user says otherwise."""
    pauses_seconds = []
    pause_of = ExponentialBackoff.delay_amount

    def no_pause(self: ExponentialBackoff, context: object) -> float:
        self._random = lambda: 0.5
        pauses_seconds.append(pause_of(self, context))
        return 0

    monkeypatch.setattr(ExponentialBackoff, "delay_amount", no_pause)
    busy = proxy.rule("status", code=503, times=8)
    with open_storage(url, server.options(proxy.url)) as storage:
        storage.put("o", b"1")
        assert storage.get("o") == b"1"
    assert busy.hits == 8
    assert 30 < sum(pauses_seconds) < 60


def test_busy_for_ever(open_through: Callable[..., ObjectStorage], proxy: FaultProxy) -> None:
    busy = proxy.rule("status", code=503)
    with open_through(total_max_attempts=4) as storage:
        start = time.monotonic()
        with pytest.raises(UnavailableError, match=r"action=put key=o storage=s3://.* detail=SlowDown/503") as raised:
            storage.put("o", b"1")
        # Attempts do not multiply; the pauses between them are at most 1 + 2 + 4 s.
        assert busy.hits == 4
        assert time.monotonic() - start < 12
        assert raised.value.retryable
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize(
    "rule",
    [{"kind": "reset", "times": 1}, {"kind": "drop_reply", "times": 1}, {"kind": "status", "code": 503, "times": 2}],
    ids=["reset", "drop_reply", "busy"],
)
@pytest.mark.parametrize("action", ACTIONS)
def test_broken_connection(
    open_through: Callable[..., ObjectStorage], proxy: FaultProxy, action: str, rule: dict[str, Any]
) -> None:
    """Or a store that is busy: whatever was asked is asked again."""
    storage = open_through()
    storage.put("folder/object", b"1")
    broken = proxy.rule(**rule)
    ACTIONS[action](storage)
    assert broken.hits == rule["times"]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("cut_reply", UnavailableError),
        ("flip_byte", CorruptionError),
        ("short_reply", (CorruptionError, UnavailableError)),
        ("gzip", (CorruptionError, UnavailableError)),
    ],
)
@pytest.mark.parametrize("times", [1, None])
def test_body_cut_or_changed(
    storage: ObjectStorage, proxy: FaultProxy, kind: str, error: type[Exception], times: int | None
) -> None:
    """Also where only the checksum tells: it is read again, or an error, never other bytes."""
    storage.put("o", b"x" * 1000)
    changed = proxy.rule(kind, method="GET", at=500, times=times)  # type: ignore[arg-type]
    if times is None:
        with pytest.raises(error, match="action=get key=o"):
            storage.get("o")
    else:
        assert storage.get("o") == b"x" * 1000
    assert changed.hits == (3 if times is None else 1)


def test_body_whose_size_is_not_announced(storage: ObjectStorage, proxy: FaultProxy) -> None:
    """A proxy that sends bodies in chunks hides where they end: the error names what is missing, and holds nothing."""
    storage.put("o", b"x" * 3_000_000)
    chunked = proxy.rule("chunked_reply", method="GET", times=40)  # a client has 32 connections
    for _ in range(40):
        with pytest.raises(UnavailableError, match=r"action=get key=o.*no Content-Length"):
            storage.get("o")
    assert chunked.hits == 40
    assert len(storage.get("o")) == 3_000_000


@pytest.mark.parametrize("size_bytes", [1000, len(THREE_PARTS)])
def test_bytes_damaged_on_their_way_to_the_store(
    open_through: Callable[..., ObjectStorage], proxy: FaultProxy, size_bytes: int
) -> None:
    """Versitygw refuses them, moto stores them: then the digest inside of every file of ours tells when it is read."""
    storage = open_through(total_max_attempts=1)
    data, _ = stored_file.encode("part", {}, {"bytes": lambda sink: sink.write(os.urandom(size_bytes))})
    damaged = proxy.rule("flip_request", method="PUT", at=500)
    try:
        storage.put("o", data)
    except HoldfastError:
        assert not storage.list("")
    else:
        with pytest.raises(CorruptionError):
            stored_file.decode(storage.get("o"), source="o", kind="part")
    assert damaged.hits >= 1


def test_range_of_a_large_object_cut(storage: ObjectStorage, proxy: FaultProxy) -> None:
    storage.put("o", THREE_PARTS)
    proxy.log.clear()
    # The first answer tells the size only; the ranges follow.
    cut = proxy.rule("cut_reply", method="GET", at=100_000, skip=2, times=1)
    assert storage.get("o") == THREE_PARTS
    assert cut.hits == 1
    assert requests_of(proxy, "GET") == 5


def test_a_range_of_another_size_is_not_read(storage: ObjectStorage, proxy: FaultProxy) -> None:
    """As from a store that ignores ranges: four times the object would be in memory."""
    storage.put("o", THREE_PARTS)
    whole = proxy.rule("status", method="GET", skip=1, code=200, body="x" * len(THREE_PARTS))
    with pytest.raises(UnavailableError, match=r"body has 0 of \d+ bytes"):
        storage.get("o")
    assert whole.hits >= 3


def test_hang_ends_by_the_read_timeout(open_through: Callable[..., ObjectStorage], proxy: FaultProxy) -> None:
    storage = open_through(total_max_attempts=2, read_timeout=0.3)
    hang = proxy.rule("hang", path="test_hang_ends_by_the_read_timeout")  # not a straggler of the test before
    start = time.monotonic()
    with pytest.raises(UnavailableError, match="action=get key=o"):
        storage.get("o")
    assert hang.hits == 2
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("action", ACTIONS)
def test_hang_ends_by_the_limit_of_the_operation(
    open_through: Callable[..., ObjectStorage], proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    storage = open_through(operation_timeout_seconds=20)
    storage.list("")  # the first request loads botocore's models
    monkeypatch.setattr(storage, "_timeout_seconds", 0.3)
    hang = proxy.rule("hang")
    start = time.monotonic()
    with pytest.raises(UnavailableError, match=f"action={action} .*key=folder/"):
        ACTIONS[action](storage)
    assert hang.hits == 1
    assert time.monotonic() - start < 3


def test_list_of_many_pages(open_through: Callable[..., ObjectStorage], proxy: FaultProxy) -> None:
    storage = open_through(s3_additional_kwargs={"MaxKeys": 2}, total_max_attempts=2)
    keys = [f"p/{number}" for number in range(7)]
    for key in keys:
        storage.put(key, b"1")
    busy = proxy.rule("status", path="continuation-token", skip=1, times=1)
    proxy.log.clear()
    assert [info.key for info in storage.list("p/")] == keys
    assert busy.hits == 1
    assert len(proxy.log) == 5
    failing = proxy.rule("status", path="continuation-token", skip=1)
    with pytest.raises(UnavailableError, match="action=list key=p/"):
        storage.list("p/")
    assert failing.hits == 2


def test_objects_that_come_and_go_between_pages(open_through: Callable[..., ObjectStorage], proxy: FaultProxy) -> None:
    """Whatever was there all the time is in the list, each once."""
    storage, other = open_through(s3_additional_kwargs={"MaxKeys": 2}), open_through()
    for number in range(1, 8):
        storage.put(f"p/{number}", b"1")
    late = proxy.rule("delay", path="continuation-token", skip=1, times=1, seconds=1)
    with ThreadPoolExecutor(1) as pool:
        listing = pool.submit(storage.list, "p/")
        while not late.hits:
            time.sleep(0.01)
        other.delete(["p/1", "p/4", "p/7"])  # in an earlier page, the last of one, in a later page
        other.put("p/0", b"1")
        keys = [info.key for info in listing.result()]
    assert late.hits == 1
    assert {"p/2", "p/3", "p/5", "p/6"} <= set(keys) <= {f"p/{number}" for number in range(8)}
    assert keys == sorted(set(keys))


def test_delete_in_batches(storage: ObjectStorage, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_storage, "_DELETE_BATCH", 2)
    for number in range(5):
        storage.put(f"{number}", b"1")
    storage.delete(f"{number}" for number in range(5))
    assert requests_of(proxy, "POST") == 3
    assert not storage.list("")


@pytest.mark.parametrize(
    ("code", "expected"), [("AccessDenied", InvalidArgumentError), ("InternalError", UnavailableError)]
)
def test_delete_fails_for_single_keys(
    storage: ObjectStorage, proxy: FaultProxy, url: str, code: str, expected: type[HoldfastError]
) -> None:
    root = url.removeprefix(f"s3://{BUCKET}/")
    errors = "".join(f"<Error><Key>{root}/{key}</Key><Code>{code}</Code></Error>" for key in ("b", "d"))
    missing = f"<Error><Key>{root}/e</Key><Code>NoSuchKey</Code></Error>"
    partly = proxy.rule("status", method="POST", code=200, body=f"<DeleteResult>{errors}{missing}</DeleteResult>")
    with pytest.raises(expected, match=f"not every object was deleted.*failed=2 key=b .*detail={code}") as raised:
        storage.delete(["a", "b", "c", "d", "e"])
    assert partly.hits == 1
    assert [note.split()[2] for note in raised.value.__notes__] == ["key=b", "key=d"]
