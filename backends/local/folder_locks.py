"""Shared and exclusive locks on a folder, released when the holding process ends, however it ends.

::

    to fill or read it        lock_shared(folder)        any number of locks, in any processes
    to remove it              try_lock_alone(folder)     never waits: False while it is locked

A lock, not a folder's age, shows that the folder is still needed. The lock follows the folder when it is renamed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from holdfast.errors import NotFoundError

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderLock:
    """Keeps a folder in place until closed or until the process ends; made by `lock_shared`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def lock_shared(folder: Path) -> FolderLock:
    """Take a shared lock on a folder. Raises `NotFoundError`, `OSError`."""
    try:
        descriptor = os.open(folder, _OPEN)
    except FileNotFoundError as exc:
        raise NotFoundError(f"{folder} does not exist") from exc
    with ExitStack() as undo:
        lock = undo.enter_context(FolderLock(descriptor))
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits only for a removal in progress
        if not _is_at(descriptor, folder):
            raise NotFoundError(f"{folder} was removed")
        undo.pop_all()
    return lock


@contextmanager
def try_lock_alone(folder: Path) -> Iterator[bool]:
    """Take an exclusive lock on a folder for the context; False if it is locked or gone."""
    try:
        descriptor = os.open(folder, _OPEN)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield _is_at(descriptor, folder)
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, folder: Path) -> bool:
    """Return whether an open folder still exists under its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(folder))
    except FileNotFoundError:
        return False
