"""The object storage boundary: whole, immutable objects under keys, and nothing else.

All durable data passes through `ObjectStorage`. The interface is deliberately small: it has what every file system and
object store can offer, with the guarantees that the layers above rely on::

    with open_storage("s3://bucket/app") as storage:
        storage.put("totals/shard-0003/commits/17-9f3c", data)
        storage.put_if_absent("_sinks/totals/00000000000000000017", entry)     ConflictError if the key is taken
        storage.get(key), storage.get_range(key, 0, 100)                       NotFoundError if it does not exist
        [info.key for info in storage.list("totals/")]
        storage.delete([key])
        storage.abort_unfinished_uploads("totals/", before_ms)                 leftovers of killed processes

    url                    file:///data/app                     s3://bucket/app
    key                    totals/shard-0003/commits/17-9f3c    (relative, split by "/")
    object                 /data/app/totals/shard-0003/...      bucket: bucket, key: app/totals/...

Invariants, by name; `holdfast.testing.storage_contract` checks each:

whole       a key holds all the bytes of one put or nothing, at every moment, for every reader, after any crash
durable     when `put` returns, the object survives a crash of this process and, on local disks, of the machine
fresh       `get` and `list` ask the store, never a cache
counted     every request that the client can see is counted, including retries: `ObjectStorage.requests`
typed       each failure is a `holdfast.errors` class; only `errors` maps third-party exceptions
contained   a key is validated before any I/O and cannot lead outside the root
silent      no URL, repr, log record, exception or pickle holds credentials
bounded     no call waits forever: attempts and time are limited by default
limited     `get` refuses an object that is larger than the caller allows, before it takes memory

Keys are written once: nearly every object has a new, random name, so its put needs no lock, rename or condition.
Putting the same bytes again after an unclear failure is harmless. If a name decides which process was first, such as
that of a sink's decision, `put_if_absent` stores the object.

Implementations: `local` (file), `s3`, `hdfs`, `fsspec` (memory and any other fsspec URL); `opening` chooses one by URL.
`wrappers` add a prefix or a bandwidth limit. `probe` tries the actions a query needs when the query starts.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, Self, TypeAlias

from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import (
    ClosedError,
    ConflictError,
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)

if TYPE_CHECKING:
    import typing_extensions

#: Part of `collections.abc` since Python 3.12.
Buffer: TypeAlias = "typing_extensions.Buffer"
Action = Literal["put", "get", "list", "delete"]
#: The size limit for objects of a storage that cannot read ranges; no commit is larger.
RANGE_OBJECT_BYTES_MAX = 4 << 30
ACTIONS: tuple[Action, ...] = ("put", "get", "list", "delete")
KEY_LIMIT_BYTES = 1024
SEGMENT_LIMIT_BYTES = 255
TEMPORARY_PREFIX = ".tmp-"
"""File names with this prefix are unfinished writes: no key may contain one, and no list shows them."""

# S3 sends keys as XML 1.0, which cannot represent control characters; HDFS forbids colons and the name .snapshot.
# Refusing these everywhere keeps storages alike.
_UNSAFE = re.compile("[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff:]")
_RESERVED = {"", ".", "..", ".snapshot"}


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object in a listing.

    Attributes
    ----------
    key : str
        The key, as given to `ObjectStorage.put`.
    size_bytes : int
        The size of the object.
    modified_ms : int
        When the object was written, by the store's clock, in ms since 1970; some stores round to seconds.
    """

    key: str
    size_bytes: int
    modified_ms: int


class RequestCounts:
    """Requests by action, and bytes stored and returned; counted per thread without a lock, so forks are safe."""

    def __init__(self) -> None:
        self._by_thread: dict[int, Counter[str]] = {}

    def add(self, what: Action | Literal["put_bytes", "get_bytes"], count: int = 1) -> None:
        """Count requests, or the bytes of an object stored or returned."""
        # The system may reuse a dead thread's number: the new thread continues its count.
        self._by_thread.setdefault(threading.get_ident(), Counter())[what] += count

    def as_dict(self) -> dict[str, int]:
        """Return the sums: ``put``, ``get``, ``list``, ``delete``, ``put_bytes``, ``get_bytes``."""
        # Copies, because other threads go on counting.
        counts = [counter.copy() for counter in list(self._by_thread.values())]
        return {name: sum(counter[name] for counter in counts) for name in (*ACTIONS, "put_bytes", "get_bytes")}


class ObjectStorage(ABC):
    """Whole objects under keys below one root; the module docstring lists the guarantees.

    Many threads may use an instance. It also works in a forked child, which makes new connections and leaves the
    parent's alone. It cannot be pickled.

    Attributes
    ----------
    url : str
        The root, normalised, without credentials and without a trailing slash.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._requests = RequestCounts()
        self._closed = False

    @property
    def requests(self) -> dict[str, int]:
        """The requests to the store, and the bytes stored and returned, since this instance was made, by action."""
        return self._requests.as_dict()

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Store `data` under `key`: whole and durable when the call returns.

        Parameters
        ----------
        key : str
            A key that was never used before, or the same key with the same bytes after an unclear failure.
        data : Buffer
            Any C-contiguous buffer: bytes, memoryview, pyarrow.Buffer. It is neither changed nor kept.

        Raises
        ------
        InvalidArgumentError
            The key is invalid or collides with a folder of other keys, access is denied, or the root does not
            exist.
        ConflictError
            The key holds other bytes; only some storages detect this.
        UnavailableError
            The storage did not answer, or is full. The object was stored whole or not at all.
        """

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Store `data` under `key` unless the key holds other bytes; otherwise like `put`.

        Parameters
        ----------
        key : str
            Of two callers with different bytes, one succeeds.
        data : Buffer
            As for `put`; should be small, because it is sent in one request.

        Raises
        ------
        ConflictError
            The key holds other bytes, and keeps them.
        InvalidArgumentError
            As for `put`; or the storage does not support conditional puts, and stores nothing.
        UnavailableError
            As for `put`.

        Notes
        -----
        Atomic on local disks, HDFS, S3 (``If-None-Match: *``), Google Cloud Storage and Azure. A custom storage that
        does not override it is refused when a query starts (`probe`).
        """
        raise unconditional(key, self.url)

    def _require(self, key: str, data: Buffer) -> None:
        """Raise ConflictError unless the object under the key holds these bytes."""
        view = flat_view(data)
        try:
            is_same = self.get(key, view.nbytes) == view
        except NotFoundError as exc:
            raise UnavailableError(
                "the object that had this key was deleted meanwhile: try again", action="put", key=key, storage=self.url
            ) from exc
        except CorruptionError:  # the object is larger
            is_same = False
        if not is_same:
            raise self._taken(key)

    @abstractmethod
    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        """Return the whole object.

        Parameters
        ----------
        key : str
            The key given to `put`.
        limit_bytes : int
            The largest accepted size: a larger object is refused before it takes memory. The default suffices for
            objects without state.

        Returns
        -------
        memoryview
            The bytes, flat and read-only; it owns its memory and stays valid after `close`.

        Raises
        ------
        NotFoundError
            The object does not exist. Denied access and a missing bucket are never reported as this.
        InvalidArgumentError
            The key is invalid, or access is denied.
        CorruptionError
            The object is larger than `limit_bytes`, or the store's own checksum repeatedly does not match the
            received bytes.
        UnavailableError
            The storage did not answer.
        """

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Return bytes `start` to `end` of an object that is known to have them.

        Parameters
        ----------
        key : str
            The key given to `put`.
        start, end : int
            ``0 <= start < end``.

        Returns
        -------
        memoryview
            As for `get`. Ranges are not verified: their readers must detect damage themselves.

        Raises
        ------
        NotFoundError, InvalidArgumentError, UnavailableError
            As for `get`.
        CorruptionError
            The object is shorter.

        Notes
        -----
        For a few bytes of a large object. A storage that cannot read ranges reads the whole object.
        """
        check_range(start, end)
        return self._whole_range(self.get(key, RANGE_OBJECT_BYTES_MAX)[start:end], start, end, key)

    @abstractmethod
    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return every object below a folder, at any depth.

        Parameters
        ----------
        prefix : str
            A folder: "" for everything, or whole segments with a trailing slash, such as "totals/shard-0003/".
            So a neighbour such as "totals/shard-00031/" is never included.

        Returns
        -------
        Sequence[ObjectInfo]
            Ordered by the UTF-8 bytes of the key, and always complete. Unfinished writes, and names that no `put`
            can have made, are left out.

        Raises
        ------
        InvalidArgumentError
            The prefix is not a folder, access is denied, or the root's bucket does not exist.
        UnavailableError
            The storage did not answer.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a missing object is not an error.

        Parameters
        ----------
        keys : Iterable[str]
            The keys; all are validated before the first object is deleted.

        Raises
        ------
        InvalidArgumentError
            A key is invalid, or access is denied for at least one key.
        UnavailableError
            At least one object could not be deleted, and a retry may help. Both errors are raised after every
            key was tried; the message names the first failed key, the error's notes name all failed keys.
        """

    def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
        """Remove leftovers of killed puts, which take space but appear in no list.

        Parameters
        ----------
        prefix : str
            A folder, as for `list`; nothing outside it is touched.
        before_ms : int
            Remove only uploads begun before this time, by the store's clock, in ms since 1970: later uploads may be
            in progress. A put whose upload is removed fails with UnavailableError and stores nothing.

        Returns
        -------
        int
            Number of uploads removed.

        Raises
        ------
        InvalidArgumentError
            The prefix is not a folder, or access is denied.
        UnavailableError
            The storage did not answer; some uploads may have been removed.
        """
        check_folder(prefix)
        return 0  # most storages have no unfinished uploads

    def close(self) -> None:
        """Release connections; any later call raises ClosedError. Closing twice is allowed."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("storage is closed: open it again", storage=self.url)

    def _whole_range(self, data: memoryview, start: int, end: int, key: str) -> memoryview:
        """Return the bytes of a range. Raises `CorruptionError` if the object ends before the range does."""
        if data.nbytes != end - start:
            raise CorruptionError(
                "the object is shorter than expected", action="get", key=key, storage=self.url, end=end
            )
        return data

    def _require_size(self, size_bytes: int, limit_bytes: int, key: str) -> None:
        """Raise CorruptionError if an object is larger than its reader accepts."""
        if size_bytes > limit_bytes:
            raise CorruptionError(
                "the object is larger than any object that holdfast stores under such a key",
                action="get",
                key=key,
                storage=self.url,
                size_bytes=size_bytes,
                limit_bytes=limit_bytes,
            )

    def _require_deleted(self, failures: Sequence[tuple[str, HoldfastError]]) -> None:
        """Raise one error for all keys that could not be deleted, if any; its notes name each key."""
        if not failures:
            return
        # If one failure is permanent, so is the whole call's.
        key, worst = next((pair for pair in failures if not pair[1].retryable), failures[0])
        error = type(worst)(
            f"not every object was deleted: {worst.message}",
            action="delete",
            failed=len(failures),
            key=key,
            storage=self.url,
            detail=worst.facts.get("detail"),
        )
        for failed_key, failure in failures:
            kind = type(failure).__name__
            error.add_note(f"not deleted: key={failed_key} error={kind} detail={failure.facts.get('detail')}")
        raise error from failures[0][1]

    def _taken(self, key: str) -> ConflictError:
        return ConflictError(
            "another object has this key, and objects are never overwritten: choose a different key",
            action="put",
            key=key,
            storage=self.url,
        )

    def _listed(self, found: Iterable[ObjectInfo]) -> Sequence[ObjectInfo]:
        """Sort a listing by key, and drop names that no put can have made."""
        ours = [info for info in found if not key_problem(info.key)]
        return sorted(ours, key=lambda info: info.key.encode())

    def _delete_each(self, keys: Iterable[str], delete: Callable[[str], None]) -> None:
        """Delete objects one by one; raise one error for all objects that could not be deleted."""
        failures: list[tuple[str, HoldfastError]] = []
        for key in [check_key(key) for key in keys]:
            self._require_open()
            try:
                delete(key)
            except HoldfastError as error:
                failures.append((key, error))
        self._require_deleted(failures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return class and URL, which hold no credentials."""
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: a pickle would carry credentials and live connections."""
        message = (
            f"{type(self).__name__} holds credentials and connections and cannot be pickled: "
            "send its URL, and call open_storage(url, options) with local options where it is needed"
        )
        raise TypeError(message)


class SizedStorage(ObjectStorage):
    """A storage that knows an object's size before it reads the object."""

    @abstractmethod
    def _read(self, key: str, choose: Callable[[int], tuple[int, int]]) -> memoryview:
        """Return a range of an object's bytes; `choose` maps the object's size to the start and end."""

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:

        def whole(size_bytes: int) -> tuple[int, int]:
            self._require_size(size_bytes, limit_bytes, key)
            return 0, size_bytes

        return self._read(key, whole)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        check_range(start, end)
        data = self._read(key, lambda size_bytes: (min(start, size_bytes), min(end, size_bytes)))
        return self._whole_range(data, start, end, key)


def unconditional(key: str, url: str) -> InvalidArgumentError:
    """Return the error for a conditional put that the storage does not support."""
    return InvalidArgumentError(
        "the storage has no conditional put, so two drivers could overwrite each other's decisions: use a local disk "
        "with hard links, HDFS, S3 with conditional writes (AWS, MinIO, Ceph, versitygw), "
        "Google Cloud Storage or Azure",
        action="put",
        key=key,
        storage=url,
    )


def check_range(start: int, end: int) -> None:
    """Raise InvalidArgumentError if a range is empty or negative."""
    if not 0 <= start < end:
        raise InvalidArgumentError("a range must begin at 0 or later, and not be empty", start=start, end=end)


def flat_view(data: Buffer) -> memoryview:
    """Return a buffer's bytes as a flat view, without copying; raise InvalidArgumentError if that is impossible."""
    try:
        return memoryview(data).cast("B")
    except TypeError as exc:
        raise InvalidArgumentError("data must be a C-contiguous buffer", type=type(data).__name__) from exc


def check_key(key: str) -> str:
    """Return `key` if every storage can hold it: segments of 1 to 255 bytes, joined by "/", at most 1,024 bytes in all.

    Refuses absolute keys, the segments ``.``, ``..`` and ``.snapshot``, colons, control characters, lone surrogates,
    and names of unfinished writes.
    """
    problem = key_problem(key)
    if problem:
        shown = key if len(key) <= 80 else key[:77] + "..."
        raise InvalidArgumentError(f"storage key {problem}", key=ascii(shown))
    return key


def check_folder(prefix: str) -> str:
    """Return `prefix` if it is "" or a valid folder that ends in a slash; else raise InvalidArgumentError."""
    if prefix:
        if not prefix.endswith("/"):
            raise InvalidArgumentError('list prefix must be "" or a folder that ends in "/"', prefix=ascii(prefix))
        check_key(prefix[:-1])
    return prefix


def key_problem(key: str) -> str | None:
    """Return what is wrong with a key, or None."""
    if _UNSAFE.search(key):
        return "has a colon, a control character or a lone surrogate"
    if len(key.encode()) > KEY_LIMIT_BYTES:
        return f"is longer than {KEY_LIMIT_BYTES} bytes"
    for segment in key.split("/"):
        if segment in _RESERVED:
            return "must be relative, without empty, ., .. or .snapshot segments"
        if len(segment.encode()) > SEGMENT_LIMIT_BYTES:
            return f"has a segment longer than {SEGMENT_LIMIT_BYTES} bytes"
        if segment.startswith(TEMPORARY_PREFIX):
            return f"has a segment that begins with {TEMPORARY_PREFIX}, which is reserved for unfinished writes"
    return None
