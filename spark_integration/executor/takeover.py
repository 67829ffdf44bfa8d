"""Takes over the local state of dead executors on this machine, and removes what is not taken over within a day.

::

    <root>/holdfast-<user id>/
        executor-<pid>-<start>/         dead: its process is gone and its state server's lock is free
            disk/<query id>/<operator>/
                shard-0003-…/           ── verified, then one rename ──▶ below the executor that needs it
            found-dead                  time of discovery: a day later everything is removed
        executor-<pid>-<start>.<id>/    of a process that reads state, or creates or restores a savepoint
            work/                       a shard or a snapshot in use

To take over a shard, a process holds a lock on the shard and a shared lock on the dead executor's directory. The
executor's own state server, and a process that removes the directory, lock the directory exclusively.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from holdfast import clock
from holdfast.backends import local_files
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.run import TableSchema
from holdfast.errors import HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.spark_integration.executor.local_dirs import (
    LOCK_NAME,
    ON_DISK,
    SHARD_PREFIX,
    choose_root,
    private_directory,
    process_directory,
    process_of,
    socket_path,
    take_lock,
    try_lock,
    user_directory,
)

KEPT_MS = 24 * 60 * 60_000
# A state server ends within 20 s of its executor.
WAIT_MS = 25_000
#: How often, at most, a process with many working directories looks for dead executors.
LOOK_EVERY_MS = 60_000
_FOUND_DEAD = "found-dead"
_TAKING_OVER = "taking-over"
_WORK = "work"

_log = logging.getLogger(__name__)
_searched_ms: dict[Path, int] = {}


def open_backend(
    name: str, directory: Path, tables: Mapping[str, TableSchema], options: Mapping[str, str], executor_directory: Path
) -> Backend:
    """Open a shard in this process; if it is absent, first take over a dead executor's files."""
    backend = find_backend(name)

    def open_at(path: Path) -> Backend:
        return backend(path, tables, clock.new_id, options, executor_directory)

    if not backend.in_memory:
        adopt_shard(directory, executor_directory, open_at)
    return open_at(directory)


def adopt_shard(directory: Path, executor_directory: Path, open_backend: Callable[[Path], Backend]) -> bool:
    """Take over the newest version of a shard from a dead executor; return whether it succeeded."""
    if os.path.exists(directory):  # `Path.exists` fails on a damaged disk
        return False
    with ExitStack() as locks:
        found: list[tuple[Pointer, Path]] = []
        for dead in _dead_executors(executor_directory.parent):
            path = dead / directory.relative_to(executor_directory)
            if (
                os.path.isdir(path)
                and locks.enter_context(_executor_lock(dead, shared=True, wait_ms=WAIT_MS))
                and locks.enter_context(_shard_lock(path))
            ):
                newest = _newest_version(path, open_backend)
                found += [] if newest is None else [(newest, path)]
        return bool(found) and _take_over(*max(found), directory, open_backend)


def _newest_version(path: Path, open_backend: Callable[[Path], Backend]) -> Pointer | None:
    try:
        with open_backend(private_directory(path)) as backend:
            return max(backend.versions(), default=None)
    except HoldfastError as exc:
        _log.warning("cannot take over %s: %s", path, exc)
        return None


def _take_over(newest: Pointer, path: Path, directory: Path, open_backend: Callable[[Path], Backend]) -> bool:
    try:
        with open_backend(path) as backend:
            damaged = backend.verify()
        local_files.make_private_folder(directory.parent)
        os.rename(path, directory)
        (directory / _TAKING_OVER).unlink(missing_ok=True)
    except (HoldfastError, OSError) as exc:
        _log.warning("cannot take over %s: %s", path, exc)
        return False
    _log.info("took over %s, newest version %s, %d damaged files", path, newest, len(damaged))
    return True


def remove_dead_executors(root: Path, now_ms: int) -> None:
    """Delete the state of dead executors in RAM, and state on disk that was not taken over for `KEPT_MS`; log it."""
    for path in _dead_executors(user_directory(root)):
        try:
            with _executor_lock(path) as is_mine:
                size = _remove_what_ended(path, now_ms) if is_mine else 0
        except (HoldfastError, OSError) as exc:  # a damaged disk must not stop other removals or a server
            _log.warning("cannot remove a dead executor's files in %s: %s", path, exc)
            continue
        if size:
            _log.warning("removed %d bytes that a dead executor left in %s", size, path)


@contextmanager
def working_directory(local_dir: str | None = None) -> Iterator[Path]:
    """Yield a temporary directory that looks like an executor's, so the clean-up removes it after a kill."""
    root = choose_root(local_dir, in_memory=False)
    begun_ms = clock.monotonic_ms()
    if begun_ms - _searched_ms.get(root, -LOOK_EVERY_MS) >= LOOK_EVERY_MS:  # reading pointers creates hundreds
        _searched_ms[root] = begun_ms
        remove_dead_executors(root, clock.now_ms())
    path = process_directory(root, clock.new_id())
    lock = None
    try:
        lock = take_lock(path)
        if lock is None:  # a different container mistook this process for dead and removed its directory
            raise UnavailableError("the working directory was removed: try again", path=str(path))
        yield private_directory(path / _WORK)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def leave_executor_directory(path: Path) -> None:
    """Delete the local state of an ended executor, except shards that the next executor can use."""
    _remove_all_but_shards(path)
    if not (path / ON_DISK).exists():
        shutil.rmtree(path, ignore_errors=True)


def _remove_what_ended(path: Path, now_ms: int) -> int:
    """Delete the unusable files of a dead executor; return the bytes freed."""
    size = _remove_all_but_shards(path)
    note = path / _FOUND_DEAD
    with suppress(OSError):
        if not note.exists():
            note.touch(mode=0o600)
            os.utime(note, ns=(now_ms * 1_000_000, now_ms * 1_000_000))
        is_kept = (path / ON_DISK).exists() and note.stat().st_mtime_ns // 1_000_000 > now_ms - KEPT_MS
        if not is_kept:
            size += _remove(path)
    return size


def _remove_all_but_shards(path: Path) -> int:
    with suppress(OSError):
        socket_path(path).unlink()
    size = sum(
        _remove(path / name) for name in local_files.list_folder(path) if name not in (ON_DISK, LOCK_NAME, _FOUND_DEAD)
    )
    for operator in (path / ON_DISK).glob("*/*"):
        if not any(operator.glob(f"{SHARD_PREFIX}*")):
            _remove(operator)
    for folder in (*(path / ON_DISK).glob("*"), path / ON_DISK):
        with suppress(OSError):
            folder.rmdir()
    return size


def _remove(path: Path) -> int:
    if not path.is_dir() or path.is_symlink():
        with suppress(OSError):
            path.unlink()
        return 0
    size = local_files.folder_bytes(path)
    shutil.rmtree(path, ignore_errors=True)
    return size


def _dead_executors(user_directory: Path) -> list[Path]:
    return [path for path in sorted(user_directory.glob("executor-*")) if _is_dead(path)]


def _is_dead(path: Path) -> bool:
    executor = process_of(path)
    if executor is None or not os.path.isdir(path) or executor.is_alive():  # `Path.is_dir` fails on a damaged disk
        return False
    try:
        private_directory(path)
    except (InvalidArgumentError, UnavailableError) as exc:
        _log.warning("skipping a dead executor's directory: %s", exc)
        return False
    return True


@contextmanager
def _executor_lock(path: Path, *, shared: bool = False, wait_ms: int = 0) -> Iterator[bool]:
    """Hold a dead executor's lock inside the ``with`` block; yield False if a different process holds it."""
    try:
        descriptor = _wait_for(lambda: take_lock(path, shared=shared), wait_ms)
    except UnavailableError:  # removed in the meantime
        descriptor = None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def _shard_lock(path: Path) -> Iterator[bool]:
    """Lock a file in a shard's directory, because backends lock the directory; yield False if it was taken over."""
    note = path / _TAKING_OVER
    try:
        descriptor = os.open(note, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        _log.warning("cannot take over %s: %s", path, exc)
        yield False
        return
    try:
        has_lock = _wait_for(lambda: try_lock(descriptor) or None, WAIT_MS)
        # A worker that takes over the shard renames the directory and with it the lock file, so the path may be free.
        yield bool(has_lock) and note.exists() and os.path.samestat(os.fstat(descriptor), note.stat())
    finally:
        os.close(descriptor)


def _wait_for(attempt: Callable[[], int | None], wait_ms: int) -> int | None:
    """Repeat `attempt` until it returns a result or the time is up."""
    end_ms = clock.monotonic_ms() + wait_ms
    while (found := attempt()) is None and clock.monotonic_ms() < end_ms:
        clock.sleep_ms(50)
    return found
