"""Storages around a storage: each changes one thing, and passes everything else on.

::

    PrefixedStorage(checkpoint, "totals/shard-0003")     one shard: keys are "commits/17-9f3c"
    LimitedStorage(checkpoint, Bandwidth(10_000_000))    no more than 10 MB/s are sent

A shard is a `PrefixedStorage` wherever one is handed on: its prefix is also the name that each of the shard's
objects repeats in its header.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast import clock
from holdfast.snapshotter.storage.keys import check_folder, check_key
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage, flat_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

__all__ = ["Bandwidth", "LimitedStorage", "PrefixedStorage", "WrappedStorage"]


class WrappedStorage(ObjectStorage):
    """Passes everything on to another storage; a subclass overrides what it changes.

    Parameters
    ----------
    inner : ObjectStorage
        Where the work is done; closed with this one.
    """

    def __init__(self, inner: ObjectStorage) -> None:
        super().__init__(inner.url)
        self.inner = inner

    @property
    def requests(self) -> dict[str, int]:
        """Return the requests of the storage underneath."""
        return self.inner.requests

    def put(self, key: str, data: Buffer) -> None:
        """Store an object; see `ObjectStorage.put`."""
        self.inner.put(key, data)

    def get(self, key: str) -> memoryview:
        """Return an object; see `ObjectStorage.get`."""
        return self.inner.get(key)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return the objects of a folder; see `ObjectStorage.list`."""
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; see `ObjectStorage.delete`."""
        self.inner.delete(keys)

    def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
        """Remove what killed puts left behind; see `ObjectStorage.abort_unfinished_uploads`."""
        return self.inner.abort_unfinished_uploads(prefix, before_ms)

    def close(self) -> None:
        """Close the storage underneath."""
        self.inner.close()


class PrefixedStorage(WrappedStorage):
    """A folder of a storage as a storage of its own.

    Parameters
    ----------
    inner : ObjectStorage
        Closed with this one: a view that is handed on is not closed.
    prefix : str
        Whole segments, without a slash at either end: ``totals/shard-0003``.

    Attributes
    ----------
    prefix : str
    """

    def __init__(self, inner: ObjectStorage, prefix: str) -> None:
        super().__init__(inner)
        self.prefix = check_key(prefix)
        self._folder = f"{prefix}/"
        self.url = f"{inner.url}/{prefix}"

    def put(self, key: str, data: Buffer) -> None:
        """Store an object below the prefix; see `ObjectStorage.put`."""
        self.inner.put(self._folder + key, data)

    def get(self, key: str) -> memoryview:
        """Return an object below the prefix; see `ObjectStorage.get`."""
        return self.inner.get(self._folder + key)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return the objects of a folder below the prefix; see `ObjectStorage.list`."""
        infos = self.inner.list(self._folder + check_folder(prefix))
        return [replace(info, key=info.key.removeprefix(self._folder)) for info in infos]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects below the prefix; see `ObjectStorage.delete`."""
        self.inner.delete([self._folder + key for key in keys])

    def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
        """Remove what killed puts left below the prefix; see `ObjectStorage.abort_unfinished_uploads`."""
        return self.inner.abort_unfinished_uploads(self._folder + check_folder(prefix), before_ms)


_LOOK_EVERY_MS = 100


def _go_on() -> None:
    """Never cancel."""


class Bandwidth:
    """A limit of the bytes that are sent per second, shared by all threads that send.

    A bucket of tokens, kept as the moment when it is full again: who takes bytes is given the next free moment, sleeps
    until then, and sends. So callers go in the order in which they came, nobody polls, and a large part is paid for by
    whoever comes after it.

    Parameters
    ----------
    bytes_per_second : int
        At least 1.
    monotonic_ms, sleep_ms : callable, optional
        As in `holdfast.clock`.

    Notes
    -----
    Threads: any. Over any stretch of time at most ``bytes_per_second`` times its length is let through, and one part; a
    part more for each wait that was cancelled meanwhile.
    """

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

    def take(self, size_bytes: int, check: Callable[[], None] = _go_on) -> None:
        """Wait until so many bytes may be sent.

        Parameters
        ----------
        size_bytes : int
            What is sent next.
        check : callable, optional
            Called before the wait and every 0.1 s of it; what it raises ends the wait, for example because the upload
            was cancelled. The bytes are then given back.
        """
        check()
        turn_ms = self._free_ms_after(size_bytes)
        try:
            while (left_ms := turn_ms - self._monotonic_ms()) > 0:
                self._sleep_ms(max(1, min(_LOOK_EVERY_MS, round(left_ms))))
                check()
        except BaseException:
            self._free_ms_after(-size_bytes)
            raise

    def _free_ms_after(self, size_bytes: int) -> float:
        """Reserve bytes, or give them back; returns the moment at which they may go."""
        with self._lock:
            turn_ms = max(self._free_ms, self._monotonic_ms()) if size_bytes > 0 else self._free_ms
            self._free_ms = turn_ms + size_bytes / self._bytes_per_ms
            return turn_ms


class LimitedStorage(WrappedStorage):
    """A storage that is sent a limited number of bytes per second.

    Parameters
    ----------
    inner : ObjectStorage
    bandwidth : Bandwidth
        May be shared with other storages: the limit then holds for all of them together.
    """

    def __init__(self, inner: ObjectStorage, bandwidth: Bandwidth) -> None:
        super().__init__(inner)
        self._bandwidth = bandwidth

    def put(self, key: str, data: Buffer) -> None:
        """Wait until so many bytes may be sent, and store the object; see `ObjectStorage.put`."""
        self._bandwidth.take(flat_view(data).nbytes)
        self.inner.put(key, data)
