"""Lays out the directories of an executor's local state.

::

    <root>/holdfast-<user id>/                      0700, owned by the user
        executor-<pid>-<start>/                     of one executor
            state-server.lock                       held by its state server
            state-server.sock                       its socket
            memory-held/                            contents of memory/, see holdfast.backends.run_files.memory
            memory/                                 backends with state in RAM: removed with the executor
            going/                                  shards being removed
            disk/                                   all other backends: kept for the next executor
                <query id>/<operator's directory>/
                    runs/<run id>                   the operator definition that has this name in the run
                    shard-0003-1f0c77ab/            see holdfast.backends.run_files.backend
                        durable                     marks a shard that may be removed, as it can be restored
        executor-<pid>-<start>.<id>/                a process's working files, see `process_directory`
    <temporary directory>/holdfast-<user id>/
        logs/state-server-executor-….<digest>.log   kept for a week
        <digest of its path>.sock                   the socket, if its own path is too long

The root is ``spark.holdfast.local.dir`` if that is set. Otherwise it is ``/dev/shm``, if large enough, for a backend
with state in RAM, and the first of Spark's local directories for others, outside the part that Spark deletes when the
executor ends.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import xxhash

from holdfast.backends import local_files
from holdfast.backends.local.errors import NAMED_IN
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.executor.processes import ProcessId, executor_process

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_MIN_BYTES = 256 << 20
IN_MEMORY, ON_DISK = "memory", "disk"
SHARD_PREFIX = "shard-"
RUNS, CLAIM_SUFFIX = "runs", "-claim"
_EXECUTOR = "executor-"
# Spark gives workers the directories of the executor's blocks and deletes them when the executor ends.
_SPARK_BLOCKS = "blockmgr-"
_log = logging.getLogger(__name__)
LOCK_NAME = "state-server.lock"
LOG_KEPT_MS = 7 * 24 * 60 * 60_000
_SOCKET_PATH_LIMIT = 100


def choose_root(local_dir: str | None, *, in_memory: bool) -> Path:
    """Return the root of this executor's local state; state in RAM keeps the root of the first call."""
    if local_dir is not None:
        return Path(local_dir)
    disk = _disk_root()
    if not in_memory:
        return disk
    for root in (SHARED_MEMORY, disk):
        # If a different user owns the directory, creating it later raises a clear error.
        with suppress(PermissionError):
            if (root / user_name() / _executor_name() / IN_MEMORY).is_dir():
                return root
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        free = 0
    if free >= SHARED_MEMORY_MIN_BYTES and os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY
    _warn_once(
        f"{SHARED_MEMORY} has {free >> 20} MB free, less than the {SHARED_MEMORY_MIN_BYTES >> 20} MB wanted: "
        f"the state of the memory backend goes to {disk} instead. Give the container more shared memory, or "
        "set spark.holdfast.local.dir."
    )
    return disk


def all_roots(local_dir: str | None) -> list[Path]:
    """Return the distinct roots of the local state of executors on this machine."""
    if local_dir is not None:
        return [Path(local_dir)]
    return list(dict.fromkeys((_disk_root(), SHARED_MEMORY)))


def _disk_root() -> Path:
    disk = Path(os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or temporary_directory()).absolute()
    return disk.parent if disk.name.startswith(_SPARK_BLOCKS) else disk


def temporary_directory() -> Path:
    """Return the system's directory for temporary files. Raises `UnavailableError`."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as exc:
        raise UnavailableError(
            f"no temporary directory is writable for local state or the server's log: set TMPDIR ({exc.strerror})"
        ) from exc


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def private_directory(path: Path) -> Path:
    """Create a directory that only this user can access, or check that an existing one is private."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as exc:
        raise UnavailableError(
            f"cannot keep local state under {path} ({exc.strerror}): make {path.parent} writable, or set "
            f"a different directory in {NAMED_IN}",
            path=str(path),
        ) from exc
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not private:
        raise InvalidArgumentError(
            f"{path} is not a private directory of this user: remove it, or set a different directory in {NAMED_IN}",
            owner=found.st_uid,
            mode=oct(found.st_mode & 0o777),
        )
    return path


def user_directory(root: Path) -> Path:
    return private_directory(root / user_name())


def user_name() -> str:
    """Return the name of the user's directory below a root."""
    return f"holdfast-{os.getuid()}"


def executor_directory(root: Path, executor: ProcessId | None = None) -> Path:
    """Return the directory of an executor, by default of this worker's executor."""
    return private_directory(user_directory(root) / _executor_name(executor))


def process_directory(root: Path, name: str) -> Path:
    """Return a directory of this process; `name` distinguishes several."""
    return private_directory(user_directory(root) / f"{_executor_name(ProcessId.of(os.getpid()))}.{name}")


def process_of(directory: Path) -> ProcessId | None:
    """Return the executor or process that owns a directory, or None."""
    return ProcessId.parse(directory.name.partition(".")[0].removeprefix(_EXECUTOR))


def _executor_name(executor: ProcessId | None = None) -> str:
    return f"{_EXECUTOR}{executor or executor_process()}"


def shards_directory(executor_directory: Path, *, in_memory: bool) -> Path:
    """Return the directory of an executor's shards in RAM or on disk."""
    return private_directory(executor_directory / (IN_MEMORY if in_memory else ON_DISK))


def shard_name(shard: int, shards: int, backend: str, state_dir: str | None) -> str:
    """Return the name of a shard's directory, with a digest of the facts whose change invalidates local versions."""
    kind = xxhash.xxh32_hexdigest("\n".join([backend, str(shards), state_dir or ""]).encode())
    return f"{SHARD_PREFIX}{shard:04d}-{kind}"


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
    """Return a digest of an executor's directory: an executor with several has a state server for each."""
    return xxhash.xxh3_64_hexdigest(os.fsencode(executor_directory))


def make_log_directory() -> None:
    private_directory(user_directory(temporary_directory()) / "logs")


def _log_directory() -> Path:
    return temporary_directory() / user_name() / "logs"


def remove_old_logs(now_ms: int) -> None:
    """Delete logs of ended executors that were not written to for `LOG_KEPT_MS`."""
    folder = _log_directory()
    for name in glob.glob("state-server-*.log*", root_dir=folder):  # `Path.glob` fails on a damaged disk
        path = folder / name
        executor = ProcessId.parse(path.name.partition(".")[0].removeprefix("state-server-executor-"))
        with suppress(OSError):
            is_old = path.stat().st_mtime_ns // 1_000_000 < now_ms - LOG_KEPT_MS
            if is_old and not (executor is not None and executor.is_alive()):
                path.unlink()


def take_lock(executor_directory: Path, *, shared: bool = False) -> int | None:
    """Return a descriptor that holds the server lock; None if a different process holds it."""
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
    """Lock an open file or directory until it is closed; return whether the lock was free."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_found(executor_directory: Path, socket: Path, lock: int) -> bool:
    """Return whether workers can still find the server: a cleaner may have removed its lock file or socket."""
    try:
        there = os.stat(executor_directory / LOCK_NAME)
        os.stat(socket)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # a damaged disk hides them; if the server ended, workers would only start a new server
    return os.path.samestat(os.fstat(lock), there)
