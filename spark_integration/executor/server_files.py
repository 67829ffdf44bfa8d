"""How a state server and its workers find each other: a lock, a socket and a log for each directory of an executor."""

from __future__ import annotations

import fcntl
import glob
import os
from contextlib import suppress
from pathlib import Path

import xxhash

from holdfast.backends import local_files
from holdfast.spark_integration.executor.local_dirs import private_directory, temporary_directory, user_directory
from holdfast.spark_integration.executor.processes import ProcessId

LOCK_NAME = "state-server.lock"
LOG_KEPT_MS = 7 * 24 * 60 * 60_000
_SOCKET_PATH_LIMIT = 100


def socket_path(executor_directory: Path) -> Path:
    """Return the socket of an executor's state server; Unix limits its path to about 107 bytes."""
    path = executor_directory / "state-server.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
        return path
    return user_directory(temporary_directory()) / f"{_digest(executor_directory)}.sock"


def log_path(executor_directory: Path) -> Path:
    """Return the state server's log file, which outlives the executor."""
    return _log_directory() / f"state-server-{executor_directory.name}.{_digest(executor_directory)}.log"


def _digest(executor_directory: Path) -> str:
    """Return a digest that distinguishes an executor's directories: RAM, disk, each ``spark.holdfast.local.dir``.

    Each has a state server of its own.
    """
    return xxhash.xxh3_64_hexdigest(os.fsencode(executor_directory))


def make_log_directory() -> None:
    """Make the directory of the log files."""
    user_directory(temporary_directory())
    private_directory(_log_directory())


def _log_directory() -> Path:
    return temporary_directory() / f"holdfast-{os.getuid()}" / "logs"


def remove_old_logs(now_ms: int) -> None:
    """Delete logs of ended executors that were not written to for `LOG_KEPT_MS`."""
    folder = _log_directory()
    for name in glob.glob("state-server-*.log*", root_dir=folder):  # `Path.glob` fails where the disk does
        path = folder / name
        executor = ProcessId.parse(path.name.partition(".")[0].removeprefix("state-server-executor-"))
        with suppress(OSError):
            is_old = path.stat().st_mtime_ns // 1_000_000 < now_ms - LOG_KEPT_MS
            if is_old and not (executor is not None and executor.is_alive()):
                path.unlink()


def take_lock(executor_directory: Path, *, shared: bool = False) -> int | None:
    """Return a descriptor that holds the executor's server lock, or None if another process holds it.

    `shared`: share it with other processes that ask for it shared.
    """
    with local_files.writing(executor_directory):
        descriptor = os.open(executor_directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        is_mine = False
        try:
            is_mine = try_lock(descriptor, shared=shared)
        finally:
            if not is_mine:
                os.close(descriptor)
    return descriptor if is_mine else None


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file or directory until it is closed; tell whether no other process holds it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_found(executor_directory: Path, socket: Path, lock: int) -> bool:
    """Tell whether workers still find the server that holds a lock: the file that is locked, and the socket, are there.

    Where a program that cleans temporary directories has removed the file, the next worker locks another one.
    """
    try:
        there = os.stat(executor_directory / LOCK_NAME)
        os.stat(socket)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # a damaged disk hides them; a server that ended for it would be followed by another
    return os.path.samestat(os.fstat(lock), there)
