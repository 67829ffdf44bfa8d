"""A storage that fails on demand: wraps any storage, for tests of the layers above.

::

    faults = [Fault("fail", action="put", nth=3), Fault("lose_reply", action="put", key="*/commits/*")]
    storage = FaultyStorage(open_storage("memory://test"), faults)
    ...
    storage.assert_all_hit()             # a fault that never fired proves nothing

    kind          what the caller sees                         the wrapped storage
    fail          the error                                    does nothing
    lose_reply    the error                                    performs the operation
    delay         the result, once `wait` has returned         performs the operation
    stop          nothing: `stop` is called first              does nothing
    stop_after    nothing: `stop` is called afterwards         performs the operation

Operations that match a fault are counted from 1, over all threads. A crash test runs its job once without faults, reads
`len(storage.operations)`, and then stops the job at each operation in turn.
"""

from __future__ import annotations

import fnmatch
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import UnavailableError
from holdfast.snapshotter.storage.object_storage import Action, ObjectInfo, ObjectStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

__all__ = ["Action", "Fault", "FaultyStorage", "Kind", "Operation", "kill_this_process"]

_T = TypeVar("_T")
Kind = Literal["fail", "lose_reply", "delay", "stop", "stop_after"]


def kill_this_process() -> None:
    """End this process like a crash: nothing is flushed, closed or cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Fault:
    """A rule: which operations fail, and how."""

    kind: Kind  #: What happens; see the module
    action: Action | None = None  #: The operation it applies to; None for all
    key: str = "*"  #: An `fnmatch` pattern for the key, the prefix, or any of the keys to delete
    nth: int = 1  #: The first matching operation to fail, counted from 1
    times: int | None = 1  #: The number of matching operations in a row to fail; None for all
    #: Makes the error of `fail` and `lose_reply`
    error: Callable[[], Exception] = lambda: UnavailableError("injected fault")
    wait: Callable[[], object] = lambda: None  #: What `delay` waits for: an event of the test, or a sleep
    seen: int = field(default=0, init=False)  #: Operations that matched so far
    hits: int = field(default=0, init=False)  #: Times it fired

    def claims(self, action: str, keys: Sequence[str]) -> bool:
        """Count an operation; return whether the fault applies to it."""
        if self.action not in (None, action) or not any(fnmatch.fnmatchcase(key, self.key) for key in keys):
            return False
        self.seen += 1
        happens = self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)
        self.hits += happens
        return happens


@dataclass(frozen=True, slots=True)
class Operation:
    """A requested operation."""

    action: Action
    keys: tuple[str, ...]  #: The key, the prefix, or the keys to delete


class FaultyStorage(ObjectStorage):
    """Delegates to a storage, except where a fault applies.

    `inner`: does the work; closed with this storage. `faults`: the first that fires acts on an operation, and later
    ones do not count it. `stop`: called by `stop` and `stop_after`.
    """

    def __init__(
        self, inner: ObjectStorage, faults: Iterable[Fault] = (), *, stop: Callable[[], None] = kill_this_process
    ) -> None:
        super().__init__(inner.url)
        self.inner = inner
        self.faults = list(faults)
        self.operations: list[Operation] = []
        self._stop = stop
        self._lock = threading.Lock()

    def put(self, key: str, data: Buffer) -> None:
        self._perform("put", (key,), lambda: self.inner.put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Store an object, or fail; see `ObjectStorage.put_if_absent`. Faults treat it as a put."""
        self._perform("put", (key,), lambda: self.inner.put_if_absent(key, data))

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        return self._perform("get", (key,), lambda: self.inner.get(key, limit_bytes))

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        return self._perform("get", (key,), lambda: self.inner.get_range(key, start, end))

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return self._perform("list", (prefix,), lambda: self.inner.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = tuple(keys)
        self._perform("delete", wanted, lambda: self.inner.delete(wanted))

    @property
    def requests(self) -> dict[str, int]:
        return self.inner.requests

    def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
        """Delegate; no fault applies."""
        return self.inner.abort_unfinished_uploads(prefix, before_ms)

    def close(self) -> None:
        self.inner.close()

    def assert_all_hit(self) -> None:
        """Raise AssertionError if a fault never fired."""
        missed = [fault for fault in self.faults if not fault.hits]
        assert not missed, f"faults that never happened: {missed}"

    def _perform(self, action: Action, keys: tuple[str, ...], work: Callable[[], _T]) -> _T:
        with self._lock:
            fault = next((fault for fault in self.faults if fault.claims(action, keys)), None)
            self.operations.append(Operation(action, keys))
        if fault is None:
            return work()
        if fault.kind == "stop":
            self._stop()
        elif fault.kind == "delay":
            fault.wait()
        elif fault.kind == "fail":
            raise fault.error()
        result = work()
        if fault.kind == "stop_after":
            self._stop()
        elif fault.kind == "lose_reply":
            raise fault.error()
        return result
