"""A state server's open shards, one backend per directory, and the storages of their commit logs."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast import clock
from holdfast.backends import local_files
from holdfast.backends.base import Backend
from holdfast.backends.local.folder_locks import try_lock_alone
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import Bandwidth, LimitedStorage
from holdfast.spark_integration.client.messages import Committed, ShardAddress
from holdfast.spark_integration.executor.takeover import open_backend

REPLACE_WITHIN_SECONDS = 30.0
IDLE_AFTER_MS = 10 * 60_000
#: Below the executor's directory: shards that are being removed.
BEING_REMOVED = "going"

_log = logging.getLogger(__name__)

#: A storage's URL and options; may hold credentials.
_Place = tuple[str, tuple[tuple[str, str], ...]]


class ShardQueue:
    """A queue of each shard's newest announcement; `work` runs in one thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, Committed] = OrderedDict()
        self._working = False
        self._ending = False

    def put(self, message: Committed) -> None:
        with self._changed:
            self._waiting[message.shard.directory] = message
            self._changed.notify_all()

    def put_back(self, message: Committed) -> None:
        """Queue a commit again unless a newer commit of its shard is queued."""
        with self._changed:
            self._waiting.setdefault(message.shard.directory, message)
            self._changed.notify_all()

    def forget(self, directory: str) -> None:
        """Discard a shard's queued announcement, if any."""
        with self._changed:
            self._waiting.pop(directory, None)
            self._changed.notify_all()

    def end(self) -> None:
        """Let `work` return once the queue is empty."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until the queue is empty and idle; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._working, timeout_seconds)

    def work(self, handle: Callable[[Committed], None]) -> None:
        """Handle announcements one by one until `end`."""
        while True:
            with self._changed:
                self._working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return
                _, message = self._waiting.popitem(last=False)
                self._working = True
            handle(message)


def require_below(root: Path, text: str) -> Path:
    """Return the path of a requested directory, which must be below `root`. Raises `InvalidArgumentError`."""
    directory = Path(text)
    inside = directory.is_relative_to(root) and directory.resolve().is_relative_to(root.resolve())
    if not inside or directory == root or ".." in directory.parts:
        raise InvalidArgumentError("not a directory of this executor's shards", directory=text)
    return directory


class _Slot:
    """A directory's backend, the address for which it is open, and its users."""

    def __init__(self) -> None:
        self.holders = 0
        self.changed = threading.Condition()
        self.address: ShardAddress | None = None
        self.backend: Backend | None = None
        self.identity: tuple[int, int] | None = None
        self.users = 0
        self.wanted_ms = self.used_ms = 0

    def is_outdated(self, address: ShardAddress) -> bool:
        """Return whether the backend is open for a different address or in a removed directory."""
        return self.backend is not None and (
            self.address != address or self.identity != _identity(Path(address.directory))
        )


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return a value that differs from the identity of a later directory with the same name; None if absent."""
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class OpenShards:
    """Opens shards on first use and reopens them after changes of tables, options or directory; thread-safe."""

    def __init__(self, executor_directory: Path) -> None:
        self.root = executor_directory
        self._slots: dict[Path, _Slot] = {}
        self._lock = threading.Lock()

    @contextmanager
    def use(self, message: Committed) -> Iterator[Backend]:
        """Yield the backend of an announced shard; it stays open for the context."""
        address, directory = message.shard, require_below(self.root, message.shard.directory)
        with self._slot(directory) as slot:
            with slot.changed:
                if slot.is_outdated(address) and slot.wanted_ms >= message.announced_ms:
                    raise NotFoundError(
                        "the shard has been reopened with different tables or options, or in a new directory",
                        directory=address.directory,
                    )
                _close_if_outdated(slot, address)
                if slot.backend is None:
                    slot.backend = open_backend(
                        address.backend, directory, address.schemas(), address.backend_options, self.root
                    )
                    slot.address, slot.wanted_ms = address, 0
                    slot.identity = _identity(directory)
                # Newer announcements may have arrived while this one was waiting.
                slot.wanted_ms = max(slot.wanted_ms, message.announced_ms)
                backend = slot.backend
                slot.users += 1
            try:
                yield backend
            finally:
                with slot.changed:
                    slot.users -= 1
                    slot.used_ms = clock.monotonic_ms()
                    slot.changed.notify_all()

    @contextmanager
    def _slot(self, directory: Path) -> Iterator[_Slot]:
        """Yield the slot of a directory; forget it at the end if it is closed and unused."""
        with self._lock:
            slot = self._slots.setdefault(directory, _Slot())
            slot.holders += 1
        try:
            yield slot
        finally:
            with self._lock:
                slot.holders -= 1
                if not slot.holders and slot.backend is None:
                    del self._slots[directory]

    def close_unused(self) -> None:
        """Close shards idle for `IDLE_AFTER_MS`, and shards whose directory is gone."""
        for directory in self._directories():
            with self._slot(directory) as slot, slot.changed:
                is_idle = clock.monotonic_ms() - slot.used_ms > IDLE_AFTER_MS
                if not slot.users and (is_idle or slot.identity != _identity(directory)):
                    _close(slot)

    def remove(self, directory: Path) -> bool:
        """Close a shard and remove its local state; return False if this server or a worker uses it."""
        going = self.root / BEING_REMOVED / clock.new_id()
        require_below(self.root, str(directory))
        with self._slot(directory) as slot, slot.changed:
            if slot.users:
                return False
            _close(slot)
            if directory.exists():
                with try_lock_alone(directory) as is_unused:
                    if not is_unused:
                        return False
                    local_files.move_folder(directory, going)
        shutil.rmtree(going, ignore_errors=True)
        return True

    def finish_removals(self) -> None:
        """Finish the removals that a killed server started."""
        shutil.rmtree(self.root / BEING_REMOVED, ignore_errors=True)

    def _directories(self) -> list[Path]:
        with self._lock:
            return list(self._slots)

    def close(self, timeout_seconds: float) -> None:
        """Close all shards, except shards still in use after the timeout."""
        end_ms = clock.monotonic_ms() + int(timeout_seconds * 1000)
        for directory in self._directories():
            with self._slot(directory) as slot, slot.changed:
                left_seconds = max(0, end_ms - clock.monotonic_ms()) / 1000
                if slot.changed.wait_for(lambda s=slot: not s.users, left_seconds):  # type: ignore[misc]
                    _close(slot)
                else:
                    _log.warning("left %s open: it is still in use", directory)


def _close_if_outdated(slot: _Slot, address: ShardAddress) -> None:
    """Wait until a shard is unused and close it if it is open for a different address."""
    if slot.is_outdated(address) and not slot.changed.wait_for(
        lambda: not slot.users or not slot.is_outdated(address), REPLACE_WITHIN_SECONDS
    ):
        raise UnavailableError(
            "a different query uses the shard, with different tables or options or in a different directory: stop "
            "that query",
            directory=address.directory,
        )
    if slot.is_outdated(address):
        _close(slot)


def _close(slot: _Slot) -> None:
    backend, slot.backend = slot.backend, None
    if backend is not None:
        try:
            backend.close()
        except HoldfastError:
            _log.exception("cannot close a shard cleanly; lost versions will be restored", stacklevel=2)


@dataclass
class _Opened:
    storage: ObjectStorage
    threads: Executor  #: Upload threads, separate per storage, so that a hanging storage blocks no other
    users: int = 0


class DurableLogs:
    """Opens commit logs; thread-safe. A storage stays open until `close_unused` finds it unneeded."""

    def __init__(
        self,
        new_threads: Callable[[], Executor],
        open_at: Callable[[str, dict[str, str]], ObjectStorage] = open_storage,
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
        """Yield the log of an announced shard; None without a state directory."""
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
        """Limit the upload bandwidth of a storage; all shards share the limit."""
        if bytes_per_second is None:
            return storage
        with self._lock:
            if self._bandwidth is None or self._bandwidth[0] != bytes_per_second:
                self._bandwidth = bytes_per_second, Bandwidth(bytes_per_second)
            return LimitedStorage(storage, self._bandwidth[1])

    def _use(self, place: _Place) -> _Opened:
        url, options = place
        with self._lock:
            if place not in self._opened:
                self._opened[place] = _Opened(self._open_at(url, dict(options)), self._new_threads())
            opened = self._opened[place]
            opened.users += 1
            return opened

    def close_unused(self, known: Iterable[Committed]) -> None:
        """Close storages that no shard of `known` needs: their queries ended, or their credentials changed."""
        wanted = {_place_of(message) for message in known}
        with self._lock:
            unused = [place for place, o in self._opened.items() if not o.users and place not in wanted]
            closing = [self._opened.pop(place) for place in unused]
        for opened in closing:
            try:
                opened.threads.shutdown(wait=False)
                opened.storage.close()
            except Exception as exc:  # noqa: BLE001  the storage is no longer needed; the text may hold secrets
                _log.warning("closing %s failed: %s", opened.storage.url, type(exc).__name__)


def _place_of(message: Committed) -> _Place | None:
    if message.state_dir is None:
        return None
    return message.state_dir, tuple(sorted(message.storage_options.items()))
