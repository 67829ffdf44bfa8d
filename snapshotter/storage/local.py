"""Objects as files below one local folder (``file://``).

::

    <root>/                          created with mode 0700 if it is missing
        totals/shard-0003/           created with mode 0700, whatever the umask
            17-9f3c                  an object, 0600
            .tmp-4711-0              an unfinished write; it stays after a crash, and no list shows it

A put creates a temporary file in the same folder, writes and fsyncs it, renames it, and fsyncs the folder. If the key
must be free, a hard link replaces the rename, because it never overwrites. On first use of a folder, an instance also
fsyncs its parent, even if another process made the folder: that process may have died before the fsync.

Uses plain system calls instead of fsspec, which never calls fsync and publishes partial data if a ``with`` body raises.
Folders below the root are opened relative to their parent without following links, so no planted link leads outside.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from holdfast.backends.block_io import read_at, write_at
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.errors import translated
from holdfast.snapshotter.storage.object_storage import (
    TEMPORARY_PREFIX,
    Action,
    Buffer,
    ObjectInfo,
    SizedStorage,
    check_folder,
    check_key,
    flat_view,
    key_problem,
    unconditional,
)

_LOG = logging.getLogger(__name__)
#: Skips entries that were deleted or replaced after their folder was read.
_UNLESS_GONE = suppress(FileNotFoundError, NotADirectoryError)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# File systems without hard links raise various errors, but not these, which a rename may raise, too.
_NOT_ABOUT_LINKS = {
    *(errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOMEM, errno.EINTR),
}


class LocalStorage(SizedStorage):
    """Objects as local files. `root` is an absolute, normalised path; it may be, or lead through, a symbolic link."""

    def __init__(self, root: str) -> None:
        super().__init__(f"file://{root}")
        self._root = root
        self._durable: set[tuple[str, ...]] = set()
        self._numbers = itertools.count()

    def put(self, key: str, data: Buffer) -> None:
        self._put(key, data, _replace)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if not self._put(key, data, partial(_link, without_links=unconditional(key, self.url))):
            self._require(key, data)

    def _put(self, key: str, data: Buffer, publish: Callable[[str, str, int], bool]) -> bool:
        """Write a temporary file and give it its name with `publish`; return False if the name is taken."""
        view = flat_view(data)
        *folder, name = check_key(key).split("/")
        self._begin("put")
        with translated("put", self.url, key), self._made_folder(tuple(folder)) as at:
            temporary = self._write_temporary(at, view)
            try:
                published = publish(temporary, name, at)
            except BaseException:
                _remove(temporary, at)
                raise
            os.fsync(at)
        if published:
            self._requests.add("put_bytes", view.nbytes)
            _LOG.debug("put key=%s size_bytes=%d", key, view.nbytes)
        return published

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        folder = tuple(check_folder(prefix).split("/")[:-1])
        self._begin("list")
        self._require_no_file()  # a file would look like an empty folder
        found: list[ObjectInfo] = []
        with translated("list", self.url, prefix), _UNLESS_GONE, self._folder(folder) as at:
            for _, above, entry in _files(at, prefix):
                with _UNLESS_GONE:
                    size_bytes = entry.stat(follow_symlinks=False).st_size
                    found.append(ObjectInfo(above + entry.name, size_bytes, _modified_ms(entry)))
        return self._listed(found)

    def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
        folder = tuple(check_folder(prefix).split("/")[:-1])
        self._begin("list")
        removed = 0
        with translated("abort", self.url, prefix), _UNLESS_GONE, self._folder(folder) as top:
            for at, _, entry in _files(top, prefix):
                with _UNLESS_GONE:
                    if entry.name.startswith(TEMPORARY_PREFIX) and _modified_ms(entry) < before_ms:
                        os.unlink(entry.name, dir_fd=at)
                        removed += 1
        return removed

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; see `ObjectStorage.delete`. Folders stay, because another writer may be using them."""

        def delete(key: str) -> None:
            *folder, name = key.split("/")
            self._begin("delete")
            with translated("delete", self.url, key), _UNLESS_GONE, self._folder(tuple(folder)) as at:
                try:
                    os.unlink(name, dir_fd=at)
                except (IsADirectoryError, PermissionError):  # a folder, which is not an object; EPERM outside Linux
                    if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                        raise

        self._delete_each(keys, delete)

    def _begin(self, action: Action) -> None:
        self._require_open()
        self._requests.add(action)

    def _require_no_file(self) -> None:
        if os.path.isfile(self._root):
            raise InvalidArgumentError("this is a file: give a directory", storage=self.url)

    @contextmanager
    def _folder(self, segments: tuple[str, ...]) -> Iterator[int]:
        at = self._open_folder(segments)
        try:
            yield at
        finally:
            os.close(at)

    @contextmanager
    def _made_folder(self, segments: tuple[str, ...]) -> Iterator[int]:
        """Open a folder for a write, making it and its parents durable; yield its descriptor."""
        at = -1
        if segments in self._durable:
            with suppress(FileNotFoundError):  # removed since
                at = self._open_folder(segments)
        if at < 0:
            self._require_no_file()
            _make_root(self._root)
            at = self._open_folder(segments, make=True)
            self._durable.add(segments)
        try:
            yield at
        finally:
            os.close(at)

    def _open_folder(self, segments: tuple[str, ...], *, make: bool = False) -> int:
        """Open a folder below the root segment by segment, without following links; return its descriptor."""
        at = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for segment in segments:
            try:
                if make:
                    _make_folder(segment, at)
                below = os.open(segment, _FOLDER, dir_fd=at)
                if make:
                    os.fsync(at)
            finally:
                os.close(at)
            at = below
        return at

    def _read(self, key: str, choose: Callable[[int], tuple[int, int]]) -> memoryview:
        *folder, name = check_key(key).split("/")
        self._begin("get")
        with translated("get", self.url, key):
            try:
                # O_NONBLOCK: opening a planted pipe must not wait for its writer.
                with self._folder(tuple(folder)) as at:
                    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
                try:
                    found = os.fstat(file)
                    if not stat.S_ISREG(found.st_mode):
                        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
                    start, end = choose(found.st_size)
                    data = memoryview(bytearray(end - start))
                    data = data[: read_at(file, data, start)].toreadonly()
                finally:
                    os.close(file)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as exc:
                raise NotFoundError("no such object", action="get", key=key, storage=self.url) from exc
        self._requests.add("get_bytes", data.nbytes)
        return data

    def _write_temporary(self, at: int, view: memoryview) -> str:
        """Write and fsync a new file in the folder; return its name. On failure, leave nothing."""
        while True:
            # No random name needed: O_EXCL makes it unique, even against a process with the same id that has died or
            # runs in a different container.
            name = f"{TEMPORARY_PREFIX}{os.getpid()}-{next(self._numbers)}"
            try:
                file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=at)
                break
            except FileExistsError:
                continue
        try:
            try:
                os.fchmod(file, 0o600)
                write_at(file, view, 0)
                os.fsync(file)
            finally:
                os.close(file)
        except BaseException:
            _remove(name, at)
            raise
        return name


def _replace(temporary: str, name: str, at: int) -> bool:
    """Rename a temporary file to its name, replacing any file there; return True."""
    os.replace(temporary, name, src_dir_fd=at, dst_dir_fd=at)
    return True


def _link(temporary: str, name: str, at: int, *, without_links: Exception) -> bool:
    """Link a temporary file to its name; return False if the name is taken."""
    is_linked = True
    try:
        os.link(temporary, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
    except OSError as exc:
        found = None
        with suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
        if found is None and not isinstance(exc, FileExistsError):
            if exc.errno in _NOT_ABOUT_LINKS:
                raise
            raise without_links from exc
        if found is not None and not stat.S_ISREG(found):
            raise FileExistsError(errno.EEXIST, "not an object that could be compared", name) from exc
        is_linked = False
    _remove(temporary, at)
    return is_linked


def _make_root(root: str) -> None:
    """Make the root and its missing parents, each private and durable."""
    if os.path.isdir(root):
        return
    parent = os.path.dirname(root)
    _make_root(parent)
    at = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _make_folder(os.path.basename(root), at)
        os.fsync(at)
    finally:
        os.close(at)


def _make_folder(name: str, at: int) -> None:
    """Make a folder of mode 0700 if it is missing."""
    try:
        os.mkdir(name, 0o700, dir_fd=at)
    except FileExistsError:
        return
    except FileNotFoundError as exc:
        if os.fstat(at).st_nlink:  # the parent still exists, so this file system, like /proc, has no new folders
            raise PermissionError(errno.EPERM, "this file system does not allow new folders", name) from exc
        raise
    os.chmod(name, 0o700, dir_fd=at)  # the umask may have cleared bits


def _files(at: int, above: str) -> Iterator[tuple[int, str, os.DirEntry[str]]]:
    """Yield every file below an open folder, with the descriptor and the key of its folder.

    Skips links, pipes, and folders whose names are not valid keys, such as a file server's ``.snapshot``.
    """
    with os.scandir(at) as entries:
        for entry in entries:
            with _UNLESS_GONE:
                if entry.is_file(follow_symlinks=False):
                    yield at, above, entry
                elif entry.is_dir(follow_symlinks=False) and not key_problem(entry.name):
                    below = os.open(entry.name, _FOLDER, dir_fd=at)
                    try:
                        yield from _files(below, f"{above}{entry.name}/")
                    finally:
                        os.close(below)


def _modified_ms(entry: os.DirEntry[str]) -> int:
    return entry.stat(follow_symlinks=False).st_mtime_ns // 1_000_000


def _remove(name: str, at: int) -> None:
    """Remove a temporary file if possible; ignore errors, because an earlier error is being raised."""
    with suppress(OSError):
        os.unlink(name, dir_fd=at)
