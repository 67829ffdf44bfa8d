"""Where an executor keeps its local state.

::

    <root>/holdfast-<user id>/                      0700, owned by the user
        executor-<pid>-<start>/                     of one executor
            state-server.lock                       held by its state server
            state-server.sock                       where that listens
            memory-held/                            what is in memory/, see holdfast.backends.run_files.memory_usage
            memory/                                 of backends that keep state in RAM: gone when it ends
            going/                                  shards that are not in use any more, being removed
            disk/                                   of all others: kept for the next executor
                <query id>/<operator's directory>/
                    runs/<run id>                   which operator definition runs under this name
                    shard-0003-1f0c77ab/            see holdfast.backends.run_files.backend
    <temporary directory>/holdfast-<user id>/
        logs/state-server-executor-….<digest>.log   stays when the executor ends, for `LOG_KEPT_MS`
        <digest of that place>.sock                 the socket, where its own place has too long a name

The root is ``spark.holdfast.local.dir`` where it is set. Otherwise a backend that keeps state in RAM takes
``/dev/shm`` if that is large enough, else it falls back to the temporary directory, and says so. (Containers
often give ``/dev/shm`` 64 MB.)

What becomes of the directory of an executor that has ended: `holdfast.spark_integration.executor.takeover`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import xxhash

from holdfast.backends import local_files
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.executor.processes import ProcessId, executor_process

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_MIN_BYTES = 256 << 20
IN_MEMORY, ON_DISK = "memory", "disk"
LOCK_NAME = "state-server.lock"
SHARD_PREFIX = "shard-"
RUNS, CLAIM_SUFFIX = "runs", "-claim"
#: The run at work, and one that may still be ending.
RUNS_KEPT = 2
LOG_KEPT_MS = 7 * 24 * 60 * 60_000
_SOCKET_PATH_LIMIT = 100

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def choose_root(local_dir: str | None, *, in_memory: bool) -> Path:
    """Return the directory below which local state goes."""
    if local_dir is not None:
        return Path(local_dir)
    disk = Path(os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()).absolute()
    if not in_memory:
        return disk
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


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)


def private_directory(path: Path) -> Path:
    """Make a directory that only this user can enter, or check that it is one.

    Raises
    ------
    InvalidArgumentError
        Another user owns it, it is a link, or others may enter it.
    UnavailableError
        It cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as exc:
        raise UnavailableError(
            f"local state cannot be kept under {path} ({exc.strerror}): make {path.parent} writable, or name "
            "another directory in spark.holdfast.local.dir",
            path=str(path),
        ) from exc
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not private:
        raise InvalidArgumentError(
            f"{path} is not a private directory of this user: remove it, or name another directory in "
            "spark.holdfast.local.dir",
            owner=found.st_uid,
            mode=oct(found.st_mode & 0o777),
        )
    return path


def user_directory(root: Path) -> Path:
    """Return the user's directory below a root."""
    return private_directory(root / f"holdfast-{os.getuid()}")


def executor_directory(root: Path, executor: ProcessId | None = None) -> Path:
    """Return the directory of an executor, by default the one this worker serves."""
    return private_directory(user_directory(root) / f"executor-{executor or executor_process()}")


def state_directory(executor_directory: Path, *, in_memory: bool) -> Path:
    """Return the directory of all shards of an executor whose backends keep state in RAM, or on disk."""
    return private_directory(executor_directory / (IN_MEMORY if in_memory else ON_DISK))


def shard_name(shard: int, shards: int, backend: str, checkpoint_dir: str | None) -> str:
    """Return the name of a shard's directory.

    It holds a digest of what makes local versions useless when it changes: another backend has other files,
    another number of shards other rows, and in another checkpoint directory are not the commits on which the
    next one would build.
    """
    kind = xxhash.xxh32_hexdigest("\n".join([backend, str(shards), checkpoint_dir or ""]).encode())
    return f"{SHARD_PREFIX}{shard:04d}-{kind}"


def remove_if_empty(operator_directory: Path) -> None:
    """Remove the directory of an operator that has no shards here any more; of a query without any, all that is left.

    A query notes its runs under an operator's name even where the operator's shards lie in another directory; see
    `holdfast.spark_integration.shard.operator_directory`.
    """
    query = operator_directory.parent
    if not any(query.glob(f"*/{SHARD_PREFIX}*")):
        going = [*query.glob("*"), query]
    elif not any(operator_directory.glob(f"{SHARD_PREFIX}*")):
        going = [operator_directory]
    else:
        return
    for folder in going:
        shutil.rmtree(folder / RUNS, ignore_errors=True)
        with suppress(OSError):  # something else is there
            folder.rmdir()


def remove_old_runs(query_directory: Path) -> None:
    """Remove the notes of all but the newest runs of a query."""
    for runs in query_directory.glob(f"*/{RUNS}"):
        _remove_old_notes(runs)


def _remove_old_notes(runs: Path) -> None:
    modified: dict[str, float] = {}
    notes = list(runs.glob("*"))
    for note in notes:
        with suppress(OSError):
            run = note.name.removesuffix(CLAIM_SUFFIX)
            modified[run] = max(note.stat().st_mtime, modified.get(run, 0))
    old = set(sorted(modified, key=modified.__getitem__)[:-RUNS_KEPT])
    for note in notes:
        if note.name.removesuffix(CLAIM_SUFFIX) in old:
            with suppress(OSError):
                note.unlink()


def socket_path(executor_directory: Path) -> Path:
    """Return where the state server of an executor listens; Unix allows some 107 bytes for it."""
    path = executor_directory / "state-server.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
        return path
    return user_directory(Path(tempfile.gettempdir())) / f"{_digest(executor_directory)}.sock"


def log_path(executor_directory: Path) -> Path:
    """Return the state server's log file, which outlives the executor."""
    return _log_directory() / f"state-server-{executor_directory.name}.{_digest(executor_directory)}.log"


def _digest(executor_directory: Path) -> str:
    """Tell an executor's directories apart: one in RAM, one on disk, one for each ``spark.holdfast.local.dir``.

    Each has a state server of its own.
    """
    return xxhash.xxh3_64_hexdigest(os.fsencode(executor_directory))


def make_log_directory() -> None:
    """Make the directory of the log files."""
    user_directory(Path(tempfile.gettempdir()))
    private_directory(_log_directory())


def _log_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}" / "logs"


def remove_old_logs(now_ms: int) -> None:
    """Delete the log files, of executors that have ended, to which nothing was written for `LOG_KEPT_MS`."""
    for path in _log_directory().glob("state-server-*.log*"):
        executor = ProcessId.parse(path.name.partition(".")[0].removeprefix("state-server-executor-"))
        with suppress(OSError):
            is_old = path.stat().st_mtime_ns // 1_000_000 < now_ms - LOG_KEPT_MS
            if is_old and not (executor is not None and executor.is_alive()):
                path.unlink()


def take_lock(executor_directory: Path, *, shared: bool = False) -> int | None:
    """Return a descriptor that holds the executor's server lock, or None if another process holds it.

    Parameters
    ----------
    shared : bool, default False
        Hold it together with others that share it.

    Raises
    ------
    UnavailableError
        The directory is not there, or not writable.
    """
    with local_files.writing(executor_directory):
        descriptor = os.open(executor_directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(descriptor, shared=shared):
            os.close(descriptor)
            return None
    return descriptor


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file or directory until it is closed; tell whether no other process holds it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
