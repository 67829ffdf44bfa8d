"""HDFS whose answers are lost, and whose NameNode and DataNode hang, die and come back: nothing is torn or lost."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import pytest

from holdfast.errors import ConflictError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.faults.any_client import require_harmless_forks, require_no_leaks
from tests.faults.elsewhere import run_python
from tests.faults.interrupted import interrupt_once
from tests.tiers import cases

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

pytestmark = pytest.mark.hdfs


@dataclass
class Rule:
    kind: Literal["reset", "drop_reply", "hang"]
    method: str
    times: int | None = None
    hits: int = field(default=0, init=False)
    release: threading.Event = field(default_factory=threading.Event, init=False)

    def claims(self, request: bytes) -> bool:
        name = self.method.encode()
        if bytes([len(name)]) + name not in request or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True


class RpcProxy:
    """See the module; use as a context manager."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.rules: list[Rule] = []
        self.url = "hdfs://{}:{}".format(*self._listener.getsockname())

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="rpc proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            _close(one)

    def rule(self, kind: Literal["reset", "drop_reply", "hang"], method: str, times: int | None = None) -> Rule:
        self.rules.append(Rule(kind, method, times))
        return self.rules[-1]

    def reset(self) -> None:
        for rule in self.rules:
            rule.release.set()
        self.rules.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._upstream)
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                _Connection(client, server, self.rules)


class _Connection:
    """The two directions of one connection, each a thread."""

    def __init__(self, client: socket.socket, server: socket.socket, rules: list[Rule]) -> None:
        self._client, self._server, self._rules = client, server, rules
        self._rule: Rule | None = None
        for direction in (self._requests, self._answers):
            threading.Thread(target=self._until_closed, args=(direction,), name="rpc proxy", daemon=True).start()

    def _until_closed(self, direction: object) -> None:
        with suppress(OSError):
            direction()  # type: ignore[operator]
        _close(self._client)
        _close(self._server)

    def _requests(self) -> None:
        while data := self._client.recv(1 << 16):
            rule = next((rule for rule in list(self._rules) if rule.claims(data)), None)
            if rule and rule.kind == "reset":
                return
            self._rule = rule
            self._server.sendall(data)

    def _answers(self) -> None:
        while data := self._server.recv(1 << 16):
            if self._rule and self._rule.kind == "drop_reply":
                return
            if self._rule:
                self._rule.release.wait()
            self._client.sendall(data)


def _close(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


TWO_BLOCKS = os.urandom(1 << 20) * 11
ACTIONS: dict[str, Callable[[ObjectStorage], object]] = {
    "put": lambda storage: storage.put("folder/new", b"1"),
    "get": lambda storage: storage.get("folder/object"),
    "list": lambda storage: storage.list("folder/"),
    "delete": lambda storage: storage.delete(["folder/object"]),
}
_PLACES = itertools.count()


@pytest.fixture(autouse=True)
def _whole_again(hdfs: Hdfs) -> Iterator[None]:
    """Leave to the next test a NameNode and a DataNode that serve, however this one ends."""
    yield
    hdfs.revive()


@pytest.fixture(scope="module")
def running_proxy(hdfs: Hdfs) -> Iterator[RpcProxy]:
    with RpcProxy(hdfs.address) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy: RpcProxy) -> RpcProxy:
    running_proxy.reset()
    return running_proxy


@pytest.fixture
def root() -> str:
    return f"/faults/{next(_PLACES)}"


@pytest.fixture
def storage(hdfs: Hdfs, root: str) -> Iterator[ObjectStorage]:
    with open_storage(hdfs.url + root, hdfs.options()) as storage:
        yield storage


@pytest.fixture
def through(proxy: RpcProxy, hdfs: Hdfs, root: str) -> Iterator[Callable[..., ObjectStorage]]:
    """Return a function that opens this test's storage through the proxy."""
    opened = []

    def open_it(**options: object) -> ObjectStorage:
        opened.append(open_storage(proxy.url + root, hdfs.options(**options)))
        return opened[-1]

    yield open_it
    proxy.reset()
    for storage in opened:
        storage.close()


@pytest.mark.parametrize("kind", cases(["drop_reply", "reset"]))
@pytest.mark.parametrize("method", ["create", "addBlock", "complete", "rename2"])
def test_put_whose_call_or_answer_is_lost(
    through: Callable[..., ObjectStorage], proxy: RpcProxy, hdfs: Hdfs, root: str, kind: Any, method: str
) -> None:
    """Whichever step it is, the object is there once and whole, and no unfinished write is left."""
    storage = through()
    lost = proxy.rule(kind, method, times=1)
    storage.put("folder/object", b"written once")
    assert lost.hits == 1
    assert storage.get("folder/object") == b"written once"
    assert hdfs.files(root) == {f"{root}/folder/object": 12}


@pytest.mark.parametrize(
    ("action", "method"), [("get", "getBlockLocations"), ("list", "getListing"), ("delete", "delete")]
)
def test_another_answer_lost(through: Callable[..., ObjectStorage], proxy: RpcProxy, action: str, method: str) -> None:
    storage = through()
    storage.put("folder/object", b"1")
    lost = proxy.rule("drop_reply", method, times=1)
    ACTIONS[action](storage)
    assert lost.hits == 1
    assert bool(storage.list("")) == (action != "delete")


def test_answer_of_rename_lost(through: Callable[..., ObjectStorage], proxy: RpcProxy, hdfs: Hdfs, root: str) -> None:
    """The caller hears that nothing is known, which is true: the object is there, whole."""
    storage = through(retry_seconds=5)
    lost = proxy.rule("drop_reply", "rename2")
    with pytest.raises(UnavailableError, match="action=put key=o "):
        storage.put("o", b"data")
    assert lost.hits >= 2
    assert hdfs.files(root) == {f"{root}/o": 4}


@pytest.mark.parametrize("method", cases(["complete", "create", "getFileInfo"]))
def test_namenode_that_hangs_ends_by_the_limit_of_the_operation(
    through: Callable[..., ObjectStorage], proxy: RpcProxy, hdfs: Hdfs, root: str, method: str
) -> None:
    """What was left behind publishes nothing when the answer comes at last; the next call takes a new connection."""
    storage = through(operation_timeout_seconds=4, retry_seconds=0)
    hang = proxy.rule("hang", method, times=1)
    start = time.monotonic()
    with pytest.raises(UnavailableError, match=r"action=put key=o .*TimeoutError"):
        storage.put("o", b"late")
    assert time.monotonic() - start < 8
    assert hang.hits == 1
    storage.put("other", b"on a new connection, while the first still hangs")
    proxy.reset()
    end = time.monotonic() + 30
    while any(thread.name == "holdfast-hdfs" for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.05)
    assert list(hdfs.files(root)) == [f"{root}/other"]
    storage.put("o", b"again")
    assert storage.get("o") == b"again"


def test_a_stopped_namenode_and_its_return(hdfs: Hdfs, root: str) -> None:
    """The driver itself would wait without limit."""
    with open_storage(hdfs.url + root, hdfs.options(operation_timeout_seconds=2, retry_seconds=0)) as storage:
        storage.put("kept", b"1")
        hdfs.namenode.signal(signal.SIGSTOP)
        for action, call in ACTIONS.items():
            with pytest.raises(UnavailableError, match=f"action={action} "):
                call(storage)
        hdfs.namenode.signal(signal.SIGCONT)
        assert storage.get("kept") == b"1"


def test_a_stopped_datanode(hdfs: Hdfs, root: str) -> None:
    with open_storage(hdfs.url + root, hdfs.options(retry_seconds=1)) as storage:
        storage.put("folder/object", b"1")
        hdfs.datanode.signal(signal.SIGSTOP)
        for action in ("put", "get"):
            with pytest.raises(UnavailableError, match=f"action={action} "):
                ACTIONS[action](storage)
        hdfs.datanode.signal(signal.SIGCONT)
        assert {path for path in hdfs.files(root) if ".tmp-" not in path} == {f"{root}/folder/object"}
        assert storage.get("folder/object") == b"1"


def test_namenode_that_is_gone(hdfs: Hdfs, root: str) -> None:
    """Each action ends in time, deleting many keys too, and the same storage works when the NameNode is back."""
    with open_storage(hdfs.url + root, hdfs.options(retry_seconds=1)) as storage:
        storage.put("folder/object", b"1")
        hdfs.namenode.kill()
        start = time.monotonic()
        for action, call in ACTIONS.items():
            with pytest.raises(UnavailableError, match=f"action={action} ") as raised:
                call(storage)
            assert raised.value.retryable
        with pytest.raises(UnavailableError, match="failed=100 "):
            storage.delete(str(number) for number in range(100))
        assert time.monotonic() - start < 60
        hdfs.revive()
        assert storage.get("folder/object") == b"1"


@pytest.mark.parametrize("which", cases(["namenode", "datanode"]))
def test_killed_and_restarted_during_writes(hdfs: Hdfs, storage: ObjectStorage, root: str, which: str) -> None:
    """Who writes goes on; every object is there, whole, and no unfinished write is shown."""
    data = {f"f/{number}": os.urandom(1000) * (10_000 if number % 8 == 0 else 10) for number in range(40)}
    stored: list[str] = []

    def write(key: str) -> None:
        storage.put(key, data[key])
        stored.append(key)

    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, key) for key in data]
        while len(stored) < 8:
            time.sleep(0.005)
        getattr(hdfs, which).kill()
        assert len(stored) < len(data), "killed too late to prove anything"
        hdfs.revive()
        for done in writing:
            done.result()
    assert {info.key: info.size_bytes for info in storage.list("f/")} == {k: len(v) for k, v in data.items()}
    for key, content in data.items():
        assert storage.get(key) == content


@pytest.mark.all
def test_safe_mode_is_waited_for(hdfs: Hdfs, storage: ObjectStorage) -> None:
    storage.put("first", b"1")
    hdfs.datanode.kill()
    hdfs.namenode.kill()
    hdfs.start_namenode()  # it stays in safe mode until a DataNode has reported
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(storage.put, "second", b"2")
        with pytest.raises(TimeoutError):
            put.result(2)
        hdfs.start_datanode()
        put.result(60)
    assert storage.get("first") == b"1"
    assert storage.get("second") == b"2"


def test_damaged_on_the_disk_of_the_datanode(hdfs: Hdfs, root: str) -> None:
    """HDFS's own checksums find it; the driver does not tell damage from absence, but returns no wrong byte."""
    with open_storage(hdfs.url + root, hdfs.options(retry_seconds=0)) as storage:
        content = os.urandom(54_321)
        storage.put("o", content)
        blocks = [path for path in (hdfs.folder / "data").rglob("blk_*") if path.stat().st_size == len(content)]
        (block,) = blocks
        with block.open("r+b") as file:
            file.seek(30_000)
            file.write(bytes([content[30_000] ^ 0xFF]))
        with pytest.raises(UnavailableError, match="action=get key=o "):
            storage.get("o")


def test_other_bytes_under_a_key_that_is_taken(hdfs: Hdfs, storage: ObjectStorage, root: str) -> None:
    storage.put("o", b"first")
    for other in (b"other", b"longer than the first"):
        with pytest.raises(ConflictError, match=r"another object has this key.*action=put key=o "):
            storage.put("o", other)
    assert storage.get("o") == b"first"
    assert hdfs.files(root) == {f"{root}/o": 5}


@pytest.mark.parametrize("action", ACTIONS)
def test_denied_access(hdfs: Hdfs, storage: ObjectStorage, root: str, action: str) -> None:
    storage.put("folder/object", b"1")
    hdfs.client().set_permission(f"{root}/folder/object", 0o600)
    hdfs.client().set_permission(f"{root}/folder", 0o700)
    with hdfs.other_user(), open_storage(storage.url, hdfs.options()) as refused:
        with pytest.raises(InvalidArgumentError, match=f"access denied: .*action={action} .*key=folder/") as raised:
            ACTIONS[action](refused)
        assert not raised.value.retryable
        assert len(str(raised.value)) < 600, "the stack trace of the NameNode is left out"
    assert storage.get("folder/object") == b"1"


def test_object_and_folder_of_one_name(storage: ObjectStorage) -> None:
    storage.put("a/b", b"1")
    for key in ("a", "a/b/c"):
        with pytest.raises(InvalidArgumentError, match="collides"):
            storage.put(key, b"1")
    assert [info.key for info in storage.list("")] == ["a/b"]


def test_more_than_one_block(storage: ObjectStorage) -> None:
    storage.put("o", TWO_BLOCKS)
    assert storage.get("o") == TWO_BLOCKS


def test_interrupted_put_leaves_nothing(
    through: Callable[..., ObjectStorage], proxy: RpcProxy, hdfs: Hdfs, root: str
) -> None:
    """An exception that leaves the writer publishes no short file."""
    storage = through()
    hang = proxy.rule("hang", "addBlock")
    interrupt_once(lambda: storage.put("o", TWO_BLOCKS), lambda: hang.hits)
    assert hang.hits == 1
    assert f"{root}/o" not in hdfs.files(root)
    proxy.reset()
    end = time.monotonic() + 30
    while hdfs.files(root) and time.monotonic() < end:
        time.sleep(0.05)
    assert not hdfs.files(root)


KILLED = """
import os, sys, threading, time
from holdfast.snapshotter.storage.opening import open_storage
with open_storage(sys.argv[1]) as storage:
    storage.put("before", b"1")
    threading.Thread(target=storage.put, args=("o", bytes(256 << 20)), daemon=True).start()
    client = storage._clients.of_this_process()
    path = sys.argv[1].split("/", 3)[3]
    while not any(".tmp-" in s.path for s in client.list_status("/" + path, True)):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""


def test_killed_writer(hdfs: Hdfs, storage: ObjectStorage, root: str, tmp_path: Path) -> None:
    """Its unfinished file is no object, and in nobody's way."""
    done = run_python("-c", KILLED, storage.url, folder=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path for path in hdfs.files(root) if ".tmp-" in path]
    assert [info.key for info in storage.list("")] == ["before"]
    with pytest.raises(NotFoundError):
        storage.get("o")
    storage.put("o", b"by the next one")
    assert storage.get("o") == b"by the next one"
    assert storage.abort_unfinished_uploads("", before_ms=1) == 0
    assert storage.abort_unfinished_uploads("other/", before_ms=1 << 52) == 0
    assert storage.abort_unfinished_uploads("", before_ms=1 << 52) == 1
    assert set(hdfs.files(root)) == {f"{root}/before", f"{root}/o"}


def test_a_forked_child_works_and_leaves_the_parent_alone(storage: ObjectStorage, tmp_path: Path) -> None:
    require_harmless_forks(storage.url, {}, tmp_path, busy_threads=0)


def test_opening_and_closing_leaks_nothing(hdfs: Hdfs, root: str) -> None:
    require_no_leaks(hdfs.url + root, hdfs.options())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retry_secons": 1}, r"did you mean 'retry_seconds'\?.*option=retry_secons"),
        ({"endpoint_url": "x"}, "unknown option for hdfs storage"),
    ],
)
def test_refused_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        open_storage("hdfs://127.0.0.1:1/x", options)


def test_user_in_the_url_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="HADOOP_USER_NAME"):
        open_storage("hdfs://somebody@127.0.0.1:1/x")


def test_default_file_system_that_nobody_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    with open_storage("hdfs:///app") as storage, pytest.raises(InvalidArgumentError, match="action=list"):
        storage.list("")
