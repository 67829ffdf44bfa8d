"""The fault-injecting storage does what it says, and the generic storage cleans up after such faults."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest

from holdfast.errors import InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage import fsspec as storage_fsspec
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.faulty_storage import Fault, FaultyStorage, Operation

_PLACES = itertools.count()


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
    assert storage.operations[:2] == [Operation("put", ("a",), None), Operation("put", ("b",), "fail")]


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


class Recorder:
    """Makes one method of fsspec's memory file system fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException) -> None:
        kind = fsspec.get_filesystem_class("memory")

        def fail(*args: Any, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(kind, method, fail)


@pytest.mark.parametrize(("method", "error"), [("mv", OSError("no move")), ("size", RuntimeError("no size"))])
def test_a_failed_move_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> None:
    monkeypatch.setattr(storage_fsspec, "_RENAMES", {"memory"})
    with open_storage(url) as storage:
        with monkeypatch.context() as patch:
            Recorder(patch, method, error)
            with pytest.raises(UnavailableError, match="action=put key=a/b"):
                storage.put("a/b", b"1")
        assert not [path for path in fsspec.filesystem("memory").store if path.startswith(url.removeprefix("memory:/"))]
        storage.put("a/b", b"2")
        assert storage.get("a/b") == b"2"


def test_a_short_write_is_not_moved(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_fsspec, "_RENAMES", {"memory"})
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "size", lambda self, path: 0)
    with open_storage(url) as storage:
        with pytest.raises(UnavailableError, match=r"a different size.*stored=0 written=3"):
            storage.put("a/b", b"123")
        with pytest.raises(NotFoundError):
            storage.get("a/b")


def test_a_short_move_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a file system that copies, and fails half-way without a word."""
    monkeypatch.setattr(storage_fsspec, "_RENAMES", {"memory"})
    kind = fsspec.get_filesystem_class("memory")
    monkeypatch.setattr(kind, "mv", lambda self, _path, to: self.pipe_file(to, b"1"))
    with open_storage(url) as storage, pytest.raises(UnavailableError, match=r"a different size.*stored=1 written=3"):
        storage.put("a/b", b"123")


def test_two_writers_of_a_key_do_not_share_a_temporary_file(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an attempt is made again while the first one hangs."""
    monkeypatch.setattr(storage_fsspec, "_RENAMES", {"memory"})
    kind = fsspec.get_filesystem_class("memory")
    size, again = kind.size, iter([True])

    def meanwhile(self: Any, path: str) -> Any:
        if next(again, False):
            storage.put("a/b", b"123")
        return size(self, path)

    monkeypatch.setattr(kind, "size", meanwhile)
    with open_storage(url) as storage:
        storage.put("a/b", b"123")
        assert storage.get("a/b") == b"123"
        assert [info.key for info in storage.list("")] == ["a/b"]


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
