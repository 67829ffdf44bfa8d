"""The calls to hdfs-native: attempts that can be abandoned, files, and how absence looks.

`Client.inner` is not public: its ``create`` returns a writer that closes only when it is told to, which the client's
own ``create`` wraps in one that also closes when it is collected. `PRIVATE` names it; a test fails when it is gone.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import hdfs_native

from holdfast.errors import NotFoundError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_T = TypeVar("_T")
PRIVATE = {hdfs_native.Client: ("inner",)}
PIECE_BYTES = 8 << 20
MIN_RATE_BYTES_PER_SECOND = 1 << 20


class Attempt:
    """One attempt at an operation, in its own thread, which can be abandoned but not interrupted."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._abandoned = False

    def allow(self, seconds: float) -> None:
        """Extend the attempt's limit."""
        self._limit_seconds += seconds

    def check(self) -> None:
        """Raise if the caller has given up: nothing may be published after that."""
        if self._abandoned:
            raise TimeoutError

    def run(self, work: Callable[[], _T]) -> _T:
        """Return the work's result, or abandon it and raise TimeoutError."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as exc:  # noqa: BLE001  raised in the thread that waits
                done.set_exception(exc)

        waited = 0.0
        try:
            # Not a pool: that would wait for its threads when the interpreter exits.
            threading.Thread(target=run, name="holdfast-hdfs", daemon=True).start()
            while waited < self._limit_seconds:
                step = self._limit_seconds - waited
                with suppress(TimeoutError):
                    return done.result(step)
                if done.done():
                    return done.result()
                waited += step
            raise TimeoutError
        finally:
            self._abandoned = not done.done()


def create_file(client: hdfs_native.Client, path: str) -> Any:
    """Return a writer of a new file, which closes only when it is told to."""
    return client.inner.create(path, hdfs_native.WriteOptions(overwrite=False))


def read_file(
    client: hdfs_native.Client, attempt: Attempt, path: str, choose: Callable[[int], tuple[int, int]]
) -> memoryview:
    """Return some bytes of a file; raise NotFoundError if it is absent.

    Parameters
    ----------
    choose : callable
        Is told the size, and returns where to begin and to end, or raises.
    """
    try:
        reader = client.read(path)
    except (FileNotFoundError, RuntimeError) as exc:
        if _says_absent(exc):
            raise NotFoundError("no such file") from exc
        raise
    begin, end = choose(len(reader))
    size = end - begin
    attempt.allow(size / MIN_RATE_BYTES_PER_SECOND)
    if size <= PIECE_BYTES:
        return memoryview(reader.read_range(begin, size))
    data = bytearray(size)
    for start in range(0, size, PIECE_BYTES):
        attempt.check()
        stop = min(start + PIECE_BYTES, size)
        data[start:stop] = reader.read_range(begin + start, stop - start)
    if len(data) != size:
        raise UnavailableError("HDFS returned a different size than it announced", received=len(data), size=size)
    return memoryview(data).toreadonly()


def files_below(client: hdfs_native.Client, folder: str) -> Sequence[hdfs_native.FileStatus]:
    """Return the files below a folder, which ends in a slash; empty if it is absent."""
    top = folder.rstrip("/") or "/"
    try:
        # Of a file, HDFS lists the file itself.
        return [s for s in client.list_status(top, True) if not s.isdir and s.path.startswith(folder)]
    except (FileNotFoundError, RuntimeError) as exc:
        if not _says_absent(exc):
            raise
        if _is_there(client, top):
            raise UnavailableError("a folder was removed while it was listed") from exc
        return []


def is_file(client: hdfs_native.Client, path: str) -> bool:
    """Tell whether there is a file at a path, rather than a folder or nothing."""
    try:
        return not client.get_file_info(path).isdir
    except (FileNotFoundError, RuntimeError) as exc:
        if _says_absent(exc):
            return False
        raise


def _is_there(client: hdfs_native.Client, path: str) -> bool:
    try:
        client.get_file_info(path)
    except (FileNotFoundError, RuntimeError) as exc:
        if _says_absent(exc):
            return False
        raise
    return True


def delete_file(client: hdfs_native.Client, path: str) -> None:
    """Delete a file; do nothing if the path is absent, below a file, or a folder."""
    try:
        client.delete(path, False)
    except (FileNotFoundError, RuntimeError) as exc:
        if not _says_absent(exc) and "PathIsNotEmptyDirectoryException" not in str(exc):
            raise


def _says_absent(exc: Exception) -> bool:
    """Tell whether there is nothing at a path; HDFS calls a path below a file a failed access check."""
    return isinstance(exc, FileNotFoundError) or "(is not a directory)" in str(exc)
