"""The headers of a shard's objects, each read and checked when it is first asked for."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.snapshotter.commit_objects import Commit, read_commit, read_commit_end, require_intact
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.snapshots.manifest import Manifest, read_manifest
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import StoredObject


class Headers:
    """The headers of a shard's commits and snapshots.

    Objects never change, so what was read stays true. Threads: many; the same object may then be read twice.
    """

    def __init__(self, shard: PrefixedStorage) -> None:
        self.shard = shard
        self._known: dict[str, Commit | Manifest] = {}

    def commit(self, stored: StoredObject) -> Commit:
        """Return a commit, without its rows. Raises `NotFoundError`, `CorruptionError`, `UnavailableError`."""
        header = self._read(stored)
        assert isinstance(header, Commit)
        return header

    def manifest(self, stored: StoredObject) -> Manifest:
        """Return the manifest of a snapshot; raises as `commit`."""
        header = self._read(stored)
        assert isinstance(header, Manifest)
        return header

    def remember(self, key: str, header: Commit | Manifest) -> None:
        """Add a header that was read elsewhere."""
        self._known[key] = header

    def forget_all_but(self, keys: Collection[str]) -> None:
        """Forget the headers of objects that are gone."""
        for key in self._known.keys() - set(keys):
            del self._known[key]

    def _read(self, stored: StoredObject) -> Commit | Manifest:
        if stored.key not in self._known:
            self._known[stored.key], _ = read_header(self.shard, stored)
        return self._known[stored.key]


def read_header(
    shard: PrefixedStorage, stored: StoredObject
) -> tuple[Commit, ChainEntry] | tuple[Manifest, ChainEntry]:
    """Return a commit without its rows, or a manifest, and its entry in a chain.

    Raises `NotFoundError`, `CorruptionError` or `UnavailableError` if it is not there, is damaged or belongs elsewhere,
    or cannot be read now.

    Memory: 16 MiB. Of a larger commit, as a restore or a rescale stores them, only the end is read; whether the rest of
    it is whole, `require_whole` tells.
    """
    source = f"{shard.url}/{stored.key}"
    if stored.kind == "snapshot":
        return read_manifest(shard.get(stored.key), shard.prefix, source, stored.key)
    assert stored.pointer is not None
    if _is_large(stored):
        read = partial(shard.get_range, stored.key)
        commit = read_commit_end(read, stored.size_bytes, shard.prefix, stored.pointer, source)
    else:
        commit = read_commit(shard.get(stored.key), shard.prefix, stored.pointer, source).without_rows()
    return commit, commit.entry


def require_whole(shard: PrefixedStorage, stored: StoredObject, header: Commit | Manifest) -> None:
    """Read the rest of an object after `read_header`; raises `CorruptionError` if it is damaged."""
    if isinstance(header, Commit) and _is_large(stored):
        require_intact(partial(shard.get_range, stored.key), header)


def _is_large(stored: StoredObject) -> bool:
    return stored.size_bytes > NOTICE_BYTES_MAX
