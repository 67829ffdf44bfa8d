"""A target of two-phase commits that is a plain dict, and a driver that dies or fails at any of its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import StateLostError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

SCHEMA = pa.schema({"row": pa.string()})


class Killed(BaseException):
    """The driver's end: nobody catches it, and nothing is cleaned up."""


@dataclass
class Crash:
    """Kills the driver, or makes a request fail, before or after what it asks for was done."""

    at: int | None = None
    after: bool = False
    kills: bool = True
    calls: int = 0

    @contextmanager
    def around(self) -> Iterator[None]:
        self.calls += 1
        hit = self.calls == self.at
        if hit and not self.after:
            raise self._error()
        yield
        if hit:
            raise self._error()

    def _error(self) -> BaseException:
        return Killed() if self.kills else UnavailableError("injected fault")


@dataclass
class Target:
    """What survives: parts by handle, prepared and visible; the newest micro-batch, if it keeps a mark."""

    has_mark: bool
    prepared: dict[str, int] = field(default_factory=dict)
    visible: dict[str, int] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    newest: int = -1
    last: dict[str, Sequence[Handle]] = field(default_factory=dict)

    def shown(self, batch_id: int) -> set[str]:
        return {handle for handle, batch in self.visible.items() if batch == batch_id}


class CrashingStorage(WrappedStorage):
    """A storage of which each request is one of the driver's calls."""

    def __init__(self, inner: ObjectStorage, crash: Crash) -> None:
        super().__init__(inner)
        self._crash = crash

    def put(self, key: str, data: Buffer) -> None:
        with self._crash.around():
            super().put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        with self._crash.around():
            super().put_if_absent(key, data)

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        with self._crash.around():
            return super().get(key, limit_bytes)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        with self._crash.around():
            return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        with self._crash.around():
            super().delete(keys)


class ModelSink(TwoPhaseSink):
    """The seam upon a `Target`."""

    name = "model"

    def __init__(self, target: Target, crash: Crash) -> None:
        self.target, self.crash = target, crash

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        with self.crash.around():
            return self.target.newest if self.target.has_mark else None

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        raise NotImplementedError

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        with self.crash.around():
            if any(str(handle["id"]) not in self.target.prepared for handle in handles):
                raise UnavailableError("something is gone")

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        # One part after the other: a driver may die between two.
        for handle in handles:
            with self.crash.around():
                self._commit(str(handle["id"]))
        self.target.newest = max(self.target.newest, batch_id)
        self.target.last[query.query_id] = handles

    def _commit(self, handle: str) -> None:
        if handle in self.target.forgotten:
            raise StateLostError("the target does not know it any more")
        if handle in self.target.prepared:
            self.target.visible[handle] = self.target.prepared.pop(handle)
        elif handle not in self.target.visible:
            raise StateLostError("the target has lost it")

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        for handle in handles:
            with self.crash.around():
                assert str(handle["id"]) not in self.target.visible, "what is visible cannot be aborted"
                self.target.prepared.pop(str(handle["id"]), None)

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        # A list may lag: what was just committed may be among them.
        with self.crash.around():
            return [*({"id": handle} for handle in self.target.prepared), *self.target.last.pop(query.query_id, [])]
