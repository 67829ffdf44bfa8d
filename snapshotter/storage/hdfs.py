"""Objects as files on HDFS (``hdfs://``), through hdfs-native, which needs neither Java nor a Hadoop installation.

::

    <root>/totals/shard-0003/
        17-9f3c                 an object
        .tmp-5f0c1d…            an unfinished write; it stays after a crash, and no list shows it

    put     create a new temporary file, write, close, check its size, rename without overwriting
    get     open, which returns size and blocks, and read the whole file or a range
    list    one recursive listing, page by page
    delete  one request per key

hdfs-native's file objects publish partial data when they are closed or garbage-collected. So an object is written under
a temporary name.

Durable: hdfs-native asks every DataNode to sync each completed block, and the NameNode logs a rename before it
answers.

Bounded: each attempt runs in its own thread and is abandoned, with its client, after `operation_timeout_seconds` (120)
plus 1 s per MiB; an abandoned attempt renames nothing. A transient failure is retried under a new temporary name for
`retry_seconds` (30).

Lost reply: the next attempt may find that the object already exists, and compares the bytes.

`Client.inner` is private: its ``create`` returns a writer that closes only on request, unlike the client's own
``create``, whose writer also closes when it is garbage-collected. `PRIVATE` names it; a test fails if it is removed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import hdfs_native

from holdfast import clock
from holdfast.backends.options import did_you_mean
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.connections import Connections
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
)
from holdfast.snapshotter.storage.options import dotted

PRIVATE = {hdfs_native.Client: ("inner",)}
PIECE_BYTES = 8 << 20
MIN_RATE_BYTES_PER_SECOND = 1 << 20
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_OURS = {"operation_timeout_seconds": 120.0, "retry_seconds": 30.0}
_CLIENT = ("config_dir", "kerberos_principal", "kerberos_keytab", "kerberos_cache")
_HADOOP = ("dfs.", "fs.", "hadoop.")
# To detect a dead NameNode within 4 s and a hanging DataNode within 20 s; retries are made by this module.
_DEFAULTS = {
    "dfs.client.failover.max.attempts": "5",
    "dfs.client.failover.sleep.base.millis": "100",
    "dfs.client.failover.sleep.max.millis": "1000",
    "dfs.client.socket-timeout": "20000",
}
_DELETES_PER_SECOND = 50
_FIRST_PAUSE_MS, _LAST_PAUSE_MS = 250, 4_000


class Attempt:
    """One attempt at an operation, in its own thread; it can be abandoned but not interrupted."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._abandoned = False

    def allow(self, seconds: float) -> None:
        """Extend the attempt's time limit."""
        self._limit_seconds += seconds

    def check(self) -> None:
        """Raise if the caller has given up: nothing may be published after that."""
        if self._abandoned:
            raise TimeoutError

    def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, or abandon it at the time limit and raise TimeoutError."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as exc:  # noqa: BLE001  raised again in the waiting thread
                done.set_exception(exc)

        waited = 0.0
        try:
            # Not a pool: at exit, the interpreter would wait for its threads.
            threading.Thread(target=run, name="holdfast-hdfs", daemon=True).start()
            while not done.done() and (left := self._limit_seconds - waited) > 0:
                wait([done], left)
                waited += left
            return done.result(0)
        finally:
            self._abandoned = not done.done()


def read_file(
    client: hdfs_native.Client, attempt: Attempt, path: str, choose: Callable[[int], tuple[int, int]]
) -> memoryview:
    """Return a range of a file's bytes; `choose` maps the file's size to start and end. Raises `NotFoundError`."""
    try:
        reader = client.read(path)
    except (FileNotFoundError, RuntimeError) as exc:
        if _is_absence(exc):
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
    """Return the files below a folder, whose path ends in a slash; empty if the folder does not exist."""
    top = folder.rstrip("/") or "/"
    try:
        # For a file, HDFS lists the file itself.
        return [s for s in client.list_status(top, True) if not s.isdir and s.path.startswith(folder)]
    except (FileNotFoundError, RuntimeError) as exc:
        if not _is_absence(exc):
            raise
        if _status(client, top) is not None:
            raise UnavailableError("a folder was removed while it was listed") from exc
        return []


def is_file(client: hdfs_native.Client, path: str) -> bool:
    """Return whether a path is a file, rather than a folder or absent."""
    found = _status(client, path)
    return found is not None and not found.isdir


def _status(client: hdfs_native.Client, path: str) -> hdfs_native.FileStatus | None:
    try:
        return client.get_file_info(path)
    except (FileNotFoundError, RuntimeError) as exc:
        if _is_absence(exc):
            return None
        raise


def delete_file(client: hdfs_native.Client, path: str) -> None:
    """Delete a file; do nothing if the path is absent, below a file, or a folder that is not empty."""
    try:
        client.delete(path, False)
    except (FileNotFoundError, RuntimeError) as exc:
        if not _is_absence(exc) and "PathIsNotEmptyDirectoryException" not in str(exc):
            raise


def _is_absence(exc: Exception) -> bool:
    """Return whether an error means that a path is absent; below a file, HDFS reports a failed access check."""
    return isinstance(exc, FileNotFoundError) or "(is not a directory)" in str(exc)


class HdfsStorage(SizedStorage):
    """Objects as files on HDFS; see the module docstring.

    `authority`: ``host:port`` of the NameNode, the name of a name service, or "" for ``fs.defaultFS`` in
    HADOOP_CONF_DIR; `root`: the root's path without leading and trailing slashes, "" for the whole file system;
    `options`: Hadoop's settings by name (``dfs.…``), the parameters `config_dir` and `kerberos_…` of
    `hdfs_native.Client`, and this module's `operation_timeout_seconds` and `retry_seconds`.
    """

    def __init__(
        self,
        authority: str,
        root: str,
        options: Mapping[str, object],
        *,
        sleep_ms: Callable[[int], None] = clock.sleep_ms,
    ) -> None:
        if "@" in authority:
            raise InvalidArgumentError("hdfs URL names a user: set HADOOP_USER_NAME where the executors run instead")
        if root:
            check_key(root)  # like keys, HDFS forbids colons in names
        flat, known = dotted(options), {*_OURS, *_CLIENT}
        for name in flat:
            if name not in known and not name.startswith(_HADOOP):
                hint = did_you_mean(name, {*known, *_DEFAULTS}) or "; Hadoop's options begin with dfs., fs. or hadoop."
                raise InvalidArgumentError(f"unknown option for hdfs storage{hint}", option=name)
        super().__init__(f"hdfs://{authority}/{root}".rstrip("/"))
        address = f"hdfs://{authority}" if authority else None
        self._root = f"/{root}" if root else ""
        ours = {name: float(str(flat.pop(name, default))) for name, default in _OURS.items()}
        self._timeout_seconds, self._retry_seconds = ours["operation_timeout_seconds"], ours["retry_seconds"]
        parameters: dict[str, Any] = {name: str(flat.pop(name)) for name in _CLIENT if name in flat}
        config = _DEFAULTS | {name: str(value) for name, value in flat.items()}
        self._sleep_ms = sleep_ms
        self._clients = Connections(partial(hdfs_native.Client, address, config, **parameters))
        weakref.finalize(self, self._clients.release)

    def put(self, key: str, data: Buffer) -> None:
        """Store an object; see `ObjectStorage.put`. Raises ConflictError if the key holds other bytes."""
        path, view = self._path(key), flat_view(data)
        seconds = view.nbytes / MIN_RATE_BYTES_PER_SECOND
        self._perform("put", key, lambda client, attempt: self._put(client, attempt, path, view), seconds)
        self._requests.add("put_bytes", view.nbytes)
        _LOG.debug("put key=%s size_bytes=%d", key, view.nbytes)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Store an object; see `ObjectStorage.put_if_absent`. On HDFS, no put replaces an object."""
        self.put(key, data)

    def _read(self, key: str, choose: Callable[[int], tuple[int, int]]) -> memoryview:
        path = self._path(key)
        try:
            data = self._perform("get", key, lambda client, attempt: read_file(client, attempt, path, choose))
        except NotFoundError as exc:
            raise NotFoundError("no such object", action="get", key=key, storage=self.url) from exc
        self._requests.add("get_bytes", data.nbytes)
        return data

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        folder = f"{self._root}/{check_folder(prefix)}"
        found = self._perform("list", prefix, lambda client, _: files_below(client, folder))
        top = self._root or "/"
        if not (found or prefix) and self._perform("list", prefix, lambda client, _: is_file(client, top)):
            raise InvalidArgumentError("this is a file: give a directory", storage=self.url)
        return self._listed(
            ObjectInfo(one.path.removeprefix(f"{self._root}/"), one.length, one.modification_time) for one in found
        )

    def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
        folder = f"{self._root}/{check_folder(prefix)}"
        found = self._perform("list", prefix, lambda client, _: files_below(client, folder))
        old = [one.path for one in found if one.modification_time < before_ms]
        left = [path for path in old if path.rpartition("/")[2].startswith(TEMPORARY_PREFIX)]
        self._delete_files({path.removeprefix(f"{self._root}/"): path for path in left})
        return len(left)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; see `ObjectStorage.delete`. Gives up if the NameNode does not answer."""
        self._delete_files({key: self._path(key) for key in keys})

    def _delete_files(self, waiting: dict[str, str]) -> None:
        """Delete files by key; raise one error for all files that could not be deleted."""
        failures: list[tuple[str, HoldfastError]] = []

        def delete_waiting(client: hdfs_native.Client, attempt: Attempt) -> None:
            for key, path in list(waiting.items()):
                attempt.check()
                self._requests.add("delete")
                try:
                    with translated("delete", self.url, key):
                        delete_file(client, path)
                except InvalidArgumentError as error:
                    failures.append((key, error))
                waiting.pop(key, None)  # an abandoned attempt may also be removing keys

        if waiting:
            try:
                self._perform("delete", next(iter(waiting)), delete_waiting, len(waiting) / _DELETES_PER_SECOND)
            except UnavailableError as error:
                failures += [(key, error) for key in waiting]
        self._require_open()
        self._require_deleted(failures)

    def close(self) -> None:
        """Drop this process's client; running calls continue."""
        super().close()
        self._clients.release()

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _perform(
        self, action: Action, key: str, work: Callable[[hdfs_native.Client, Attempt], _T], seconds: float = 0.0
    ) -> _T:
        """Run `work`, and retry it while its failure may be transient; `seconds` extends the time limit."""
        start_ms, pause_ms = clock.monotonic_ms(), _FIRST_PAUSE_MS
        while True:
            self._require_open()
            if action != "delete":  # counted per key
                self._requests.add(action)
            try:
                with translated(action, self.url, key):
                    return self._attempt(work, seconds)
            except UnavailableError as error:
                if clock.monotonic_ms() - start_ms + pause_ms > self._retry_seconds * 1000:
                    raise
                _LOG.debug("retrying action=%s key=%s detail=%s", action, key, error.facts.get("detail"))
            self._sleep_ms(pause_ms)
            pause_ms = min(2 * pause_ms, _LAST_PAUSE_MS)

    def _attempt(self, work: Callable[[hdfs_native.Client, Attempt], _T], seconds: float) -> _T:
        client = self._clients.of_this_process()
        attempt = Attempt(self._timeout_seconds + seconds)
        try:
            return attempt.run(lambda: work(client, attempt))
        except TimeoutError:
            self._clients.forget()
            raise

    def _put(self, client: hdfs_native.Client, attempt: Attempt, path: str, view: memoryview) -> None:
        temporary = f"{path.rpartition('/')[0]}/{TEMPORARY_PREFIX}{clock.new_id()}"
        try:
            writer = client.inner.create(temporary, hdfs_native.WriteOptions(overwrite=False))
            for start in range(0, view.nbytes, PIECE_BYTES):
                attempt.check()
                writer.write(bytes(view[start : start + PIECE_BYTES]))
            writer.close()
            stored = client.get_file_info(temporary).length
            if stored != view.nbytes:
                raise UnavailableError(
                    "HDFS stored a different size than was written", stored=stored, written=view.nbytes
                )
            attempt.check()
            self._move(client, attempt, temporary, path, view)
        except BaseException:
            self._remove(client, temporary)
            raise

    def _move(self, client: hdfs_native.Client, attempt: Attempt, temporary: str, path: str, view: memoryview) -> None:
        try:
            client.rename(temporary, path, False)
        except FileExistsError as exc:
            is_same = client.get_file_info(path).length == view.nbytes
            if not is_same or read_file(client, attempt, path, lambda found: (0, min(view.nbytes, found))) != view:
                raise self._taken(path.removeprefix(f"{self._root}/")) from exc
            client.delete(temporary, False)

    def _remove(self, client: hdfs_native.Client, temporary: str) -> None:
        """Remove an unfinished write if possible; ignore errors, because an earlier error is being raised."""
        for _ in range(3):  # hdfs-native may send the first request on a broken connection
            with suppress(OSError, RuntimeError):
                client.delete(temporary, False)
                return
            self._sleep_ms(_FIRST_PAUSE_MS)
