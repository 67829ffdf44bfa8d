"""Where an executor keeps its local state, and what dead executors left there.

::

    <root>/holdfast-<user id>/                      0700, owned by the user
        executor-<pid>-<start, ms>/                 of one executor; gone when it ends
            <query id>/<operator>/
                runs/<run id>                       which operator definition runs under this name
                shard-0003/                         see holdfast.backends.run_files

The root is ``spark.holdfast.local.dir`` where it is set. Otherwise a backend that keeps state in RAM takes
``/dev/shm`` if that is large enough, else it falls back to the temporary directory, and says so. (Containers
often give ``/dev/shm`` 64 MB.)
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.processes import ProcessId, executor_process

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_MIN_BYTES = 256 << 20

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def choose_root(local_dir: str | None, *, in_memory: bool) -> Path:
    """Return the directory below which local state goes."""
    if local_dir is not None:
        return Path(local_dir)
    disk = Path(os.environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir()).split(",")[0])
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


def dead_executor_directories(root: Path) -> Iterator[Path]:
    """Yield what executors that no longer run have left."""
    for path in user_directory(root).glob("executor-*"):
        executor = ProcessId.parse(path.name.removeprefix("executor-"))
        if executor is not None and not executor.is_alive():
            yield path


def remove_tree(path: Path) -> int:
    """Delete a directory of local state and return how many bytes its files had."""
    size = sum(p.lstat().st_size for p in path.rglob("*") if p.is_file() and not p.is_symlink())
    shutil.rmtree(path, ignore_errors=True)
    return size
