"""The contract of faulty storages, and the probe that tells storages without conditional writes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.probe import probe_storage
from holdfast.testing.faulty_storage import Action, Fault, FaultyStorage, Operation
from tests.model.turns import OverwritingStorage
from tests.servers.s3 import BUCKET, S3Server

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

PERMISSIONS = {"put": "s3:PutObject", "get": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"}
_PLACES = itertools.count()


@pytest.fixture
def memory() -> Iterator[ObjectStorage]:
    with open_storage(f"memory://probe/{next(_PLACES)}") as storage:
        yield storage


@pytest.fixture(params=["moto", "versitygw"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


def test_it_does_each_thing_once_and_leaves_nothing(memory: ObjectStorage) -> None:
    storage = FaultyStorage(memory)
    probe_storage(storage, "totals/probes")
    assert [operation.action for operation in storage.operations] == ["put", "put", "get", "list", "delete"]
    (key,) = storage.operations[0].keys
    assert key.startswith("totals/probes/probe-")
    assert not memory.list("")


def test_a_store_that_does_not_heed_the_condition_is_refused(memory: ObjectStorage) -> None:
    """Some gateways to S3 take If-None-Match and replace the object all the same: there, two drivers would decide."""
    with pytest.raises(InvalidArgumentError, match=r"failed the check.*no conditional put.*Google"):
        probe_storage(OverwritingStorage(memory), "totals/probes")
    assert not memory.list("")


def test_a_store_that_answers_from_a_copy_is_refused(memory: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "list", lambda prefix: [])
    with pytest.raises(UnavailableError, match="right after its put"):
        probe_storage(memory, "totals/probes")


@pytest.mark.parametrize("action", ["put", "get", "list", "delete"])
def test_a_failure_that_may_pass_stays_one(memory: ObjectStorage, action: Action) -> None:
    storage = FaultyStorage(memory, [Fault("fail", action=action)])
    with pytest.raises(UnavailableError, match="injected fault"):
        probe_storage(storage, "totals/probes")
    storage.assert_all_hit()
    assert len(memory.list("")) == (action == "delete")


@pytest.mark.s3
@pytest.mark.parametrize("action", PERMISSIONS)
def test_s3_permission_that_is_missing(server: S3Server, action: str) -> None:
    url = f"s3://{BUCKET}/probe/{next(_PLACES)}"
    message = rf"state\.dir failed.*access denied.*action={action} .*key=totals/probes/.*permission="
    with server.user_without(PERMISSIONS[action]) as options, open_storage(url, options) as storage:
        with pytest.raises(InvalidArgumentError, match=message + PERMISSIONS[action]) as raised:
            probe_storage(storage, "totals/probes")
        assert str(options["secret"]) not in str(raised.value)


@pytest.mark.s3
def test_s3_user_with_all_permissions(server: S3Server) -> None:
    """A user who lacks only what is never asked for passes: so it was the missing permission above."""
    url = f"s3://{BUCKET}/probe/{next(_PLACES)}"
    with server.user_without("s3:PutBucketTagging") as options, open_storage(url, options) as storage:
        probe_storage(storage, "totals/probes")
        assert not storage.list("")


@pytest.mark.hdfs
@pytest.mark.parametrize(("mode", "action"), [(0o500, "put"), (0o555, "put"), (0o333, "list")])
def test_hdfs_folder_of_somebody_else(hdfs: Hdfs, mode: int, action: str) -> None:
    root = f"/probe/{next(_PLACES)}"
    hdfs.client().mkdirs(f"{root}/totals/probes", create_parent=True)
    hdfs.client().set_permission(f"{root}/totals/probes", mode)
    with (
        hdfs.other_user(),
        open_storage(hdfs.url + root, hdfs.options()) as storage,
        pytest.raises(InvalidArgumentError, match=f"access denied: check the user.*action={action} key=totals/probes/"),
    ):
        probe_storage(storage, "totals/probes")
    assert not hdfs.files(root), "nothing is left behind"


@pytest.mark.hdfs
def test_hdfs(hdfs: Hdfs) -> None:
    with open_storage(f"{hdfs.url}/probe/{next(_PLACES)}", hdfs.options()) as storage:
        probe_storage(storage, "totals/probes")
        assert not storage.list("")


@pytest.fixture
def url() -> str:
    return f"memory://storage-faulty/{next(_PLACES)}"


@pytest.fixture
def make(url: str) -> Iterator[Callable[..., FaultyStorage]]:
    with open_storage(url) as inner:
        yield lambda *faults, **more: FaultyStorage(inner, faults, **more)


def test_the_nth_put_fails_and_nothing_is_stored(make: Callable[..., FaultyStorage]) -> None:
    storage = make(Fault("fail", action="put", nth=2))
    storage.put("a", b"1")
    with pytest.raises(UnavailableError, match="injected"):
        storage.put("b", b"2")
    storage.put("c", b"3")
    assert [info.key for info in storage.list("")] == ["a", "c"]
    storage.assert_all_hit()
    assert storage.operations[:2] == [Operation("put", ("a",)), Operation("put", ("b",))]


def test_a_lost_reply_is_stored(make: Callable[..., FaultyStorage]) -> None:
    storage = make(Fault("lose_reply", action="put", key="x/*", error=lambda: TimeoutError("lost")))
    storage.put("a", b"1")
    with pytest.raises(TimeoutError, match="lost"):
        storage.put("x/1", b"1")
    assert storage.get("x/1") == b"1"


def test_for_ever_and_in_a_row(make: Callable[..., FaultyStorage]) -> None:
    row, ever = Fault("fail", action="get", times=2), Fault("fail", action="delete", key="b", times=None)
    storage = make(row, ever)
    storage.put("a", b"1")
    for _ in range(2):
        with pytest.raises(UnavailableError):
            storage.get("a")
    assert storage.get("a") == b"1"
    for _ in range(5):
        with pytest.raises(UnavailableError):
            storage.delete(["a", "b"])
    assert (row.hits, row.seen, ever.hits) == (2, 3, 5)


def test_stop_before_and_after(make: Callable[..., FaultyStorage]) -> None:
    class StoppedError(BaseException):
        pass

    def stop() -> None:
        raise StoppedError

    for kind, stored in (("stop", 0), ("stop_after", 1)):
        storage = make(Fault(kind, action="put"), stop=stop)  # type: ignore[arg-type]
        with pytest.raises(StoppedError):
            storage.put(kind, b"1")
        assert len(storage.list("")) == stored


def test_delay_waits(make: Callable[..., FaultyStorage]) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(10)

    storage = make(Fault("delay", action="put", wait=wait))
    writer = threading.Thread(target=storage.put, args=("a", b"1"))
    writer.start()
    assert begun.wait(10)
    assert not storage.list("")
    go.set()
    writer.join()
    assert storage.get("a") == b"1"


def test_a_fault_that_never_happened_is_told(make: Callable[..., FaultyStorage]) -> None:
    storage = make(Fault("fail", nth=3))
    storage.list("")
    with pytest.raises(AssertionError, match=r"never happened.*nth=3"):
        storage.assert_all_hit()


def test_delete_goes_on_after_a_failure(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = fsspec.get_filesystem_class("memory").rm_file

    def rm_file(self: Any, path: str) -> None:
        if path.endswith("b"):
            raise PermissionError("kept")
        remove(self, path)

    with open_storage(url) as storage:
        for key in "abc":
            storage.put(key, b"1")
        with monkeypatch.context() as patch:
            patch.setattr(fsspec.get_filesystem_class("memory"), "rm_file", rm_file)
            with pytest.raises(InvalidArgumentError, match=r"not every object.*failed=1 key=b"):
                storage.delete("abc")
        assert [info.key for info in storage.list("")] == ["b"]


def test_memory_is_shared_in_the_process_by_name(url: str) -> None:
    with open_storage(url) as one, open_storage(f"{url}/below") as below, open_storage(f"{url}0") as neighbour:
        below.put("k", b"1")
        neighbour.put("n", b"1")
        assert [info.key for info in one.list("")] == ["below/k"]


def test_seam_is_small() -> None:
    assert ObjectStorage.__abstractmethods__ == {"put", "get", "list", "delete"}
