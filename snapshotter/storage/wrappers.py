"""Wrappers around a storage: each changes one behaviour and delegates the rest.

::

    PrefixedStorage(checkpoint, "totals/shard-0003")     one shard: keys are "commits/17-9f3c"
    LimitedStorage(checkpoint, Bandwidth(10_000_000))    sends at most 10 MB/s

A shard is represented by a `PrefixedStorage`; each of its objects repeats the prefix in its header.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from holdfast import clock
from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.snapshotter.storage.object_storage import (
    Buffer,
    ObjectInfo,
    ObjectStorage,
    check_folder,
    check_key,
    flat_view,
)


class WrappedStorage(ObjectStorage):
    """Delegates to `inner`, and closes it; a subclass overrides what it changes."""

    _folder = ""  #: Prefix of all keys in `inner`

    def __init__(self, inner: ObjectStorage) -> None:
        super().__init__(inner.url)
        self.inner = inner

    @property
    def requests(self) -> dict[str, int]:
        return self.inner.requests

    def put(self, key: str, data: Buffer) -> None:
        self.inner.put(self._folder + key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.inner.put_if_absent(self._folder + key, data)

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        return self.inner.get(self._folder + key, limit_bytes)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        return self.inner.get_range(self._folder + key, start, end)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return self.inner.list(self._folder + check_folder(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete([self._folder + key for key in keys])

    def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
        return self.inner.abort_unfinished_uploads(self._folder + check_folder(prefix), before_ms)

    def close(self) -> None:
        self.inner.close()


class PrefixedStorage(WrappedStorage):
    """A folder of a storage, as a storage. Closing it closes `inner`: do not close an instance that others use."""

    def __init__(self, inner: ObjectStorage, prefix: str) -> None:
        super().__init__(inner)
        self.prefix = check_key(prefix)
        self._folder = f"{prefix}/"
        self.url = f"{inner.url}/{prefix}"

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return [replace(info, key=info.key.removeprefix(self._folder)) for info in super().list(prefix)]


class Bandwidth:
    """A token bucket that limits the bytes sent per second; for many threads."""

    def __init__(
        self,
        bytes_per_second: int,
        *,
        monotonic_ms: Callable[[], int] = clock.monotonic_ms,
        sleep_ms: Callable[[int], None] = clock.sleep_ms,
    ) -> None:
        self._bytes_per_ms = bytes_per_second / 1000
        self._monotonic_ms, self._sleep_ms = monotonic_ms, sleep_ms
        self._lock = threading.Lock()
        self._free_ms = float(monotonic_ms())

    def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` may be sent."""
        with self._lock:
            turn_ms = max(self._free_ms, self._monotonic_ms())
            self._free_ms = turn_ms + size_bytes / self._bytes_per_ms
        while (left_ms := turn_ms - self._monotonic_ms()) > 0:
            self._sleep_ms(max(1, round(left_ms)))


class LimitedStorage(WrappedStorage):
    """A storage with an upload limit; storages that share a `bandwidth` are limited together."""

    def __init__(self, inner: ObjectStorage, bandwidth: Bandwidth) -> None:
        super().__init__(inner)
        self._bandwidth = bandwidth

    def put(self, key: str, data: Buffer) -> None:
        self._bandwidth.take(flat_view(data).nbytes)
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._bandwidth.take(flat_view(data).nbytes)
        self.inner.put_if_absent(key, data)
