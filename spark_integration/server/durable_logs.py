"""The commit logs of an executor's shards, for the state server: storages are opened once and shared."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

from holdfast import clock
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.snapshotter.storage.wrappers import Bandwidth, LimitedStorage
from holdfast.spark_integration.client.messages import Committed

_log = logging.getLogger(__name__)

#: A storage's URL and options; may hold credentials.
_Place = tuple[str, tuple[tuple[str, str], ...]]


def open_configured(url: str, options: dict[str, str]) -> ObjectStorage:
    """Open a storage as a query's configuration says."""
    return open_storage(url, parse_storage_options(options))


class _Opened:
    """A storage, the threads that upload to it, and the number of its users.

    One that hangs keeps its own threads, and nobody else's.
    """

    def __init__(self, storage: ObjectStorage, threads: Executor) -> None:
        self.storage = storage
        self.threads = threads
        self.users = 0

    def close(self) -> None:
        self.threads.shutdown(wait=False)
        self.storage.close()


class DurableLogs:
    """Makes commit logs.

    `new_threads`: makes the threads that upload to a storage; `open_at`: opens a storage, given its URL and options.

    Threads: any. A storage stays open while it is in use or a known shard needs it (`close_unused`).
    """

    def __init__(
        self,
        new_threads: Callable[[], Executor],
        open_at: Callable[[str, dict[str, str]], ObjectStorage] = open_configured,
        now_ms: Callable[[], int] = clock.now_ms,
    ) -> None:
        self._new_threads = new_threads
        self._open_at = open_at
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._bandwidth: tuple[int, Bandwidth] | None = None
        self._opened: dict[_Place, _Opened] = {}

    @contextmanager
    def log_of(self, message: Committed) -> Iterator[ObjectCommitLog | None]:
        """Open the log of a commit's shard for the context; None if nothing is durable."""
        place = _place_of(message)
        if place is None:
            yield None
            return
        opened = self._use(place)
        try:
            yield ObjectCommitLog(
                self._limited(opened.storage, message.upload_bandwidth_bytes),
                message.prefix,
                message.shard.schemas(),
                opened.threads,
                Path(message.shard.directory),
                message.shard.backend,
                now_ms=self._now_ms,
            )
        finally:
            with self._lock:
                opened.users -= 1

    def _limited(self, storage: ObjectStorage, bytes_per_second: int | None) -> ObjectStorage:
        """Return a storage with a limit that all shards share."""
        if bytes_per_second is None:
            return storage
        with self._lock:
            if self._bandwidth is None or self._bandwidth[0] != bytes_per_second:
                self._bandwidth = bytes_per_second, Bandwidth(bytes_per_second)
            return LimitedStorage(storage, self._bandwidth[1])

    def requests(self) -> dict[str, dict[str, int]]:
        """Return the requests made to each open storage and the bytes sent and received, by URL."""
        found: dict[str, Counter[str]] = {}
        with self._lock:
            for opened in self._opened.values():
                found.setdefault(opened.storage.url, Counter()).update(opened.storage.requests)
        return {url: dict(counted) for url, counted in found.items()}

    def _use(self, place: _Place) -> _Opened:
        url, options = place
        with self._lock:
            if place not in self._opened:
                self._opened[place] = _Opened(self._open_at(url, dict(options)), self._new_threads())
            opened = self._opened[place]
            opened.users += 1
            return opened

    def close_unused(self, known: Iterable[Committed]) -> None:
        """Close storages that are unused and that no shard of `known` will need.

        These belong to queries that have ended, or their credentials were replaced.
        """
        wanted = {_place_of(message) for message in known}
        with self._lock:
            unused = [place for place, o in self._opened.items() if not o.users and place not in wanted]
            closing = [self._opened.pop(place) for place in unused]
        for opened in closing:
            try:
                opened.close()
            except Exception as exc:  # noqa: BLE001  nobody needs it any more, and the text may hold anything
                _log.warning("closing %s failed: %s", opened.storage.url, type(exc).__name__)


def _place_of(message: Committed) -> _Place | None:
    if message.state_dir is None:
        return None
    return message.state_dir, tuple(sorted(message.storage_options.items()))
