"""The shards that a state server has open: one backend for each directory, shared by all that use it."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast import clock
from holdfast.backends import local_files
from holdfast.backends.base import Backend
from holdfast.backends.folder_locks import alone
from holdfast.backends.registry import find_backend
from holdfast.backends.run import TableSchema
from holdfast.errors import HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.spark_integration.dead_executors import adopt_shard
from holdfast.spark_integration.state_messages import ShardAddress

REPLACE_WITHIN_SECONDS = 30.0
IDLE_AFTER_MS = 10 * 60_000
#: Below the executor's directory: shards that are being removed.
GOING = "going"

_log = logging.getLogger(__name__)


def open_backend(shard: ShardAddress, tables: Mapping[str, TableSchema], executor_directory: Path) -> Backend:
    """Open a shard in this process; what a dead executor left of it is taken over first, where there is none here."""
    backend = find_backend(shard.backend)

    def open_at(path: Path) -> Backend:
        return backend(path, tables, clock.new_id, shard.backend_options, executor_directory)

    directory = Path(shard.directory)
    if not backend.in_memory:
        adopt_shard(directory, executor_directory, open_at)
    return open_at(directory)


def require_below(root: Path, text: str) -> Path:
    """Return the directory that a request names.

    Raises
    ------
    InvalidArgumentError
        It is not below `root`, which holds the executor's shards.
    """
    directory = Path(text)
    inside = directory.is_relative_to(root) and directory.resolve().is_relative_to(root.resolve())
    if not inside or directory == root or ".." in directory.parts:
        raise InvalidArgumentError("not a directory of this executor's shards", directory=text)
    return directory


class _Slot:
    """One directory: its backend, what it was opened for, how many use it now, and when the last one ended."""

    def __init__(self) -> None:
        self.holders = 0
        self.changed = threading.Condition()
        self.address: ShardAddress | None = None
        self.backend: Backend | None = None
        self.identity: tuple[int, int] | None = None
        self.users = 0
        self.used_ms = 0


def _identity(directory: Path) -> tuple[int, int] | None:
    """Tell a directory from another that takes its place later; None where there is none."""
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class OpenShards:
    """Opens shards on first use, and again when their tables, their options or their directory are others.

    Parameters
    ----------
    executor_directory : pathlib.Path
        Only shards below it are opened.

    Notes
    -----
    Threads: any. A shard that opens, or closes, holds back nobody who uses another.
    """

    def __init__(self, executor_directory: Path) -> None:
        self._root = executor_directory
        self._slots: dict[Path, _Slot] = {}
        self._lock = threading.Lock()

    @contextmanager
    def use(self, address: ShardAddress) -> Iterator[Backend]:
        """Return the shard's backend, which stays open as long as the context lasts.

        Raises
        ------
        InvalidArgumentError
            The directory is not one of this executor's shards, or the backend is not known.
        UnavailableError
            Another definition of the operator uses the shard and does not let go.
        HoldfastError
            The shard cannot be opened. The next use tries again.
        """
        directory = require_below(self._root, address.directory)
        with self._slot(directory) as slot:
            with slot.changed:
                self._close_if_other(slot, address, directory)
                if slot.backend is None:
                    slot.backend = open_backend(address, address.schemas(), self._root)
                    slot.address = address
                    slot.identity = _identity(directory)
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
        """Return the slot of a directory; one that is closed and that nobody holds any more is forgotten."""
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

    def _close_if_other(self, slot: _Slot, address: ShardAddress, directory: Path) -> None:
        def is_other() -> bool:
            return slot.backend is not None and (slot.address != address or slot.identity != _identity(directory))

        if is_other() and not slot.changed.wait_for(lambda: not slot.users or not is_other(), REPLACE_WITHIN_SECONDS):
            raise UnavailableError(
                "the shard is still used as it was before its tables, options or directory changed: stop the other "
                "query that uses it",
                directory=directory,
            )
        if is_other():
            _close(slot)

    def close_unused(self) -> None:
        """Close shards that nobody has used for `IDLE_AFTER_MS`, or whose directory is gone: their query has ended."""
        for directory in self._directories():
            with self._slot(directory) as slot, slot.changed:
                is_idle = clock.monotonic_ms() - slot.used_ms > IDLE_AFTER_MS
                if not slot.users and (is_idle or slot.identity != _identity(directory)):
                    _close(slot)

    def remove(self, directory: Path) -> bool:
        """Close a shard and remove its local state; False where somebody is at work on it, here or in a worker.

        Raises
        ------
        InvalidArgumentError
            The directory is not one of this executor's shards.
        UnavailableError
            Local storage is failing.
        """
        going = self._root / GOING / clock.new_id()
        require_below(self._root, str(directory))
        with self._slot(directory) as slot, slot.changed:
            if slot.users:
                return False
            _close(slot)
            if directory.exists():
                with alone(directory) as is_unused:
                    if not is_unused:
                        return False
                    local_files.move_folder(directory, going)
        shutil.rmtree(going, ignore_errors=True)
        return True

    def remove_going(self) -> None:
        """Remove what a killed server has left of shards that it was removing."""
        shutil.rmtree(self._root / GOING, ignore_errors=True)

    def _directories(self) -> list[Path]:
        with self._lock:
            return list(self._slots)

    def close(self, timeout_seconds: float) -> None:
        """Close all shards; those still in use after so long are left as they are."""
        end_ms = clock.monotonic_ms() + int(timeout_seconds * 1000)
        for directory in self._directories():
            with self._slot(directory) as slot, slot.changed:
                left_seconds = max(0, end_ms - clock.monotonic_ms()) / 1000
                if slot.changed.wait_for(lambda s=slot: not s.users, left_seconds):  # type: ignore[misc]
                    _close(slot)
                else:
                    _log.warning("%s is still in use, and is not closed", directory)


def _close(slot: _Slot) -> None:
    backend, slot.backend = slot.backend, None
    if backend is not None:
        try:
            backend.close()
        except HoldfastError:
            _log.exception("a shard did not close well; what it has lost is restored", stacklevel=2)
