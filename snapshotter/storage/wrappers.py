"""Storages around a storage: each changes one thing, and passes everything else on.

::

    PrefixedStorage(checkpoint, "totals/shard-0003")     one shard: keys are "commits/17-9f3c"
    LimitedStorage(checkpoint, Bandwidth(10_000_000))    no more than 10 MB/s are sent

A shard is a `PrefixedStorage` wherever one is handed on: its prefix is also the name that each of the shard's
objects repeats in its header.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.snapshotter.storage.bandwidth import Bandwidth
from holdfast.snapshotter.storage.keys import check_folder, check_key
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage, flat_view

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

__all__ = ["LimitedStorage", "PrefixedStorage", "WrappedStorage"]


class WrappedStorage(ObjectStorage):
    """Passes everything on to another storage; a subclass overrides what it changes.

    Parameters
    ----------
    inner : ObjectStorage
        Where the work is done; closed with this one.
    """

    def __init__(self, inner: ObjectStorage) -> None:
        super().__init__(inner.url)
        self.inner = inner

    @property
    def requests(self) -> dict[str, int]:
        """Return the requests of the storage underneath."""
        return self.inner.requests

    def put(self, key: str, data: Buffer) -> None:
        """Store an object; see `ObjectStorage.put`."""
        self.inner.put(key, data)

    def get(self, key: str) -> memoryview:
        """Return an object; see `ObjectStorage.get`."""
        return self.inner.get(key)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return the objects of a folder; see `ObjectStorage.list`."""
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; see `ObjectStorage.delete`."""
        self.inner.delete(keys)

    def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
        """Remove what killed puts left behind; see `ObjectStorage.abort_unfinished_uploads`."""
        return self.inner.abort_unfinished_uploads(prefix, before_ms)

    def close(self) -> None:
        """Close the storage underneath."""
        self.inner.close()


class PrefixedStorage(WrappedStorage):
    """A folder of a storage as a storage of its own.

    Parameters
    ----------
    inner : ObjectStorage
        Closed with this one: a view that is handed on is not closed.
    prefix : str
        Whole segments, without a slash at either end: ``totals/shard-0003``.

    Attributes
    ----------
    prefix : str
    """

    def __init__(self, inner: ObjectStorage, prefix: str) -> None:
        super().__init__(inner)
        self.prefix = check_key(prefix)
        self._folder = f"{prefix}/"
        self.url = f"{inner.url}/{prefix}"

    def put(self, key: str, data: Buffer) -> None:
        """Store an object below the prefix; see `ObjectStorage.put`."""
        self.inner.put(self._folder + key, data)

    def get(self, key: str) -> memoryview:
        """Return an object below the prefix; see `ObjectStorage.get`."""
        return self.inner.get(self._folder + key)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return the objects of a folder below the prefix; see `ObjectStorage.list`."""
        infos = self.inner.list(self._folder + check_folder(prefix))
        return [replace(info, key=info.key.removeprefix(self._folder)) for info in infos]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects below the prefix; see `ObjectStorage.delete`."""
        self.inner.delete([self._folder + key for key in keys])

    def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
        """Remove what killed puts left below the prefix; see `ObjectStorage.abort_unfinished_uploads`."""
        return self.inner.abort_unfinished_uploads(self._folder + check_folder(prefix), before_ms)


class LimitedStorage(WrappedStorage):
    """A storage that is sent a limited number of bytes per second.

    Parameters
    ----------
    inner : ObjectStorage
    bandwidth : Bandwidth
        May be shared with other storages: the limit then holds for all of them together.
    """

    def __init__(self, inner: ObjectStorage, bandwidth: Bandwidth) -> None:
        super().__init__(inner)
        self._bandwidth = bandwidth

    def put(self, key: str, data: Buffer) -> None:
        """Wait until so many bytes may be sent, and store the object; see `ObjectStorage.put`."""
        self._bandwidth.take(flat_view(data).nbytes)
        self.inner.put(key, data)
