"""Objects on any other file system that fsspec supports, such as ``memory://``.

A put is one `pipe_file`: object stores publish an object after its last byte. Only file systems in `_CREATES` can hold
state; others may show partial files. ``memory://`` is shared within the process, and a forked child has its own copy.
"""

from __future__ import annotations

import errno
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.connections import Connections
from holdfast.snapshotter.storage.errors import translated
from holdfast.snapshotter.storage.object_storage import (
    Action,
    Buffer,
    ObjectInfo,
    ObjectStorage,
    check_folder,
    check_key,
    check_range,
    flat_view,
    unconditional,
)
from holdfast.snapshotter.storage.options import secrets_of

#: Called by `find`; asynchronous file systems override it to list differently. A test fails if it is removed.
PRIVATE = {AsyncFileSystem: ("_find",)}
_LOG = logging.getLogger(__name__)
_in_memory = threading.Lock()
#: Schemes that fsspec knows only if their package is installed.
_PACKAGES = {"abfss": "adlfs"}
#: Schemes whose `pipe_file` passes the condition to the store: two concurrent callers cannot both create an object.
_CREATES = frozenset({"abfs", "abfss", "az", "gcs", "gs", "memory"})
#: Bytes read before the size is requested; enough for all objects except large commits.
_FIRST_BYTES = 16 << 20
_ABSENT = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR}
_TIME_NAMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


class FsspecStorage(ObjectStorage):
    """Objects on a file system of fsspec. `url` is the root, without credentials."""

    def __init__(self, scheme: str, url: str, options: Mapping[str, object]) -> None:
        if scheme not in fsspec.available_protocols():
            if package := _PACKAGES.get(scheme):
                raise InvalidArgumentError(
                    f"{scheme}:// needs the package {package} on the driver and the executors: pip install {package}"
                )
            known = "abfs, file, gs, hdfs, memory, s3 and the others of fsspec"
            raise InvalidArgumentError(f"unknown storage scheme; known schemes: {known}", scheme=scheme)
        with translated("open", url, ""):
            try:
                fsspec.get_filesystem_class(scheme)
            except ImportError as exc:  # its message names the package
                raise InvalidArgumentError(
                    f"{scheme}:// needs a package that is not installed on the driver and the executors: {exc}"
                ) from exc
        super().__init__(url.rstrip("/"))
        if self.url == f"{scheme}:":
            raise InvalidArgumentError("storage URL must name a root, such as scheme://root", scheme=scheme)
        self._secrets = secrets_of(options)
        self._creates = scheme in _CREATES
        self._connections = Connections(partial(_connect, self.url, dict(options)))
        weakref.finalize(self, self._connections.release)

    def put(self, key: str, data: Buffer) -> None:
        """Store an object; see `ObjectStorage.put`. fsspec requires bytes, so other buffers are copied."""
        check_key(key)
        content = data if isinstance(data, bytes) else bytes(flat_view(data))
        with translated("put", self.url, key, self._secrets):
            fs, root = self._begin("put")
            fs.pipe_file(f"{root}/{key}", content)
        self._requests.add("put_bytes", len(content))
        _LOG.debug("put key=%s size_bytes=%d", key, len(content))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        check_key(key)
        content, is_new = bytes(flat_view(data)), True
        with translated("put", self.url, key, self._secrets):
            fs, root = self._begin("put")
            if not self._creates:
                raise unconditional(key, self.url)
            try:
                # For memory://, fsspec checks before it puts, so a lock makes that atomic.
                with _in_memory if isinstance(fs, MemoryFileSystem) else nullcontext():
                    fs.pipe_file(f"{root}/{key}", content, mode="create")
            except FileExistsError:
                is_new = False
        if is_new:
            self._requests.add("put_bytes", len(content))
        else:
            self._require(key, content)

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        return self._read_file(key, lambda fs, path: self._read(fs, path, key, limit_bytes))

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        check_range(start, end)
        data = self._read_file(key, lambda fs, path: memoryview(fs.cat_file(path, start=start, end=end)).toreadonly())
        return self._whole_range(data, start, end, key)

    def _read_file(self, key: str, read: Callable[[Any, str], memoryview]) -> memoryview:
        """Return the result of `read`, which takes the file system and the file's path."""
        check_key(key)
        with translated("get", self.url, key, self._secrets):
            fs, root = self._begin("get")
            try:
                data = read(fs, f"{root}/{key}")
            except OSError as exc:
                if not _is_absence(exc):
                    raise
                raise NotFoundError("no such object", action="get", key=key, storage=self.url) from exc
        self._requests.add("get_bytes", data.nbytes)
        return data

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        check_folder(prefix)
        with translated("list", self.url, prefix, self._secrets):
            fs, root = self._begin("list")
            fs.invalidate_cache()
            found = _files_below(fs, f"{root}/{prefix}".rstrip("/") or "/")
            inside = f"{root}/".lstrip("/")
            return self._listed(
                ObjectInfo(name.lstrip("/").removeprefix(inside), info["size"], _modified_ms(fs, name, info))
                for name, info in found.items()
                if name.lstrip("/").startswith(inside + prefix)
            )

    def delete(self, keys: Iterable[str]) -> None:

        def delete(key: str) -> None:
            with translated("delete", self.url, key, self._secrets):
                fs, root = self._begin("delete")
                with _suppressed_absence():
                    fs.rm_file(f"{root}/{key}")  # not rm, which expands * and ?

        self._delete_each(keys, delete)

    def close(self) -> None:
        """Drop this process's file system; its connections close when it is garbage-collected."""
        super().close()
        self._connections.release()

    def _begin(self, action: Action) -> tuple[Any, str]:
        """Count a request; return this process's file system and the root's path, without a trailing slash."""
        self._require_open()
        self._requests.add(action)
        return self._connections.of_this_process()

    def _read(self, fs: Any, path: str, key: str, limit_bytes: int) -> memoryview:
        """Return a file's bytes, at most `limit_bytes`, with one request if the file is small."""
        # Some file systems allocate the whole requested range. The extra byte shows whether the file is larger.
        first = min(limit_bytes, _FIRST_BYTES)
        data = memoryview(fs.cat_file(path, start=0, end=first + 1))
        if data.nbytes > first:
            fs.invalidate_cache()
            size_bytes = fs.size(path)  # None if unknown
            self._require_size(max(size_bytes or 0, data.nbytes), limit_bytes, key)
            data = memoryview(fs.cat_file(path, start=0, end=(size_bytes or limit_bytes) + 1))
            self._require_size(data.nbytes, limit_bytes, key)
        return data.toreadonly()


def _connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL, and the URL's path in it, without a trailing slash."""
    fs, path = url_to_fs(url, skip_instance_cache=True, **options)
    return fs, path.rstrip("/")


def _files_below(fs: Any, top: str) -> dict[str, Mapping[str, Any]]:
    """Return the files below a folder by path; empty if the folder does not exist."""
    found: dict[str, Mapping[str, Any]] = {}
    if not _finds_by_walking(fs):
        with _suppressed_absence():
            found.update(fs.find(top, detail=True))
        return found
    # fsspec's own walk silently skips folders that cannot be listed.
    folders = [top]
    for folder in folders:
        for info in _entries(fs, folder):
            name = info["name"].rstrip("/")
            if info["type"] != "directory":
                found[info["name"]] = info
            elif name != folder.rstrip("/"):
                folders.append(name)
    return found


def _entries(fs: Any, folder: str) -> list[Mapping[str, Any]]:
    """Return the details of a folder's entries; empty if the folder does not exist."""
    there: list[Mapping[str, Any]] = []
    try:
        there = fs.ls(folder, detail=True)
    except OSError as exc:
        if not _is_absence(exc):
            raise
        # A file may have vanished, such as a temporary one: SMB's list requests the details of each file it found.
        with _suppressed_absence():
            for name in fs.ls(folder, detail=False):
                with _suppressed_absence():
                    there.append(fs.info(name))
    return there


def _is_absence(exc: OSError) -> bool:
    """Return whether an error means that a file is absent; SMB, for one, reports that only by errno."""
    return isinstance(exc, (FileNotFoundError, IsADirectoryError, NotADirectoryError)) or exc.errno in _ABSENT


@contextmanager
def _suppressed_absence() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if not _is_absence(exc):
            raise


def _finds_by_walking(fs: Any) -> bool:
    """Return whether a file system lists folder by folder; object stores list everything at once."""
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._find is AsyncFileSystem._find  # noqa: SLF001
    return type(fs).find is AbstractFileSystem.find


def _modified_ms(fs: Any, name: str, info: Mapping[str, Any]) -> int:
    """Return a file's modification time, which file systems report under different names."""
    if "modificationTime" in info:  # WebHDFS, in ms; its `modified` makes a request, and uses the local time zone
        return int(info["modificationTime"])
    value = next((info[field] for field in _TIME_NAMES if info.get(field) is not None), None)
    if value is None:
        value = fs.modified(name)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return int(value * 1000)
