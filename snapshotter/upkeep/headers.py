"""The headers of a shard's objects, each read and checked when it is first asked for."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.snapshotter.commit_objects import COMMIT_BYTES_MAX, Commit, read_commit
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.snapshots.manifest import PART_OBJECT_BYTES_MAX, Manifest, read_manifest
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import StoredObject

#: The size of the largest object of each kind that names others, or is named.
LIMITS_BYTES = {"commit": COMMIT_BYTES_MAX, "snapshot": NOTICE_BYTES_MAX, "part": PART_OBJECT_BYTES_MAX}


class Headers:
    """What the commits and snapshots of a shard say.

    Parameters
    ----------
    shard : PrefixedStorage

    Notes
    -----
    Objects never change, so what was read stays true. Threads: many; the same object may then be read twice.
    """

    def __init__(self, shard: PrefixedStorage) -> None:
        self.shard = shard
        self._known: dict[str, Commit | Manifest] = {}

    def commit(self, stored: StoredObject) -> Commit:
        """Return a commit, without its rows.

        Raises
        ------
        NotFoundError, CorruptionError, UnavailableError
            It is not there, is damaged or belongs elsewhere, or cannot be read now.
        """
        header = self._read(stored)
        assert isinstance(header, Commit)
        return header

    def manifest(self, stored: StoredObject) -> Manifest:
        """Return the manifest of a snapshot; raises as `commit`."""
        header = self._read(stored)
        assert isinstance(header, Manifest)
        return header

    def remember(self, key: str, header: Commit | Manifest) -> None:
        """Take a header that was read otherwise."""
        self._known[key] = header

    def forget_all_but(self, keys: Collection[str]) -> None:
        """Forget the headers of objects that are gone."""
        for key in self._known.keys() - set(keys):
            del self._known[key]

    def _read(self, stored: StoredObject) -> Commit | Manifest:
        if stored.key not in self._known:
            data = self.shard.get(stored.key, LIMITS_BYTES[stored.kind])
            self._known[stored.key], _ = read_header(self.shard, stored, data)
        return self._known[stored.key]


def read_header(
    shard: PrefixedStorage, stored: StoredObject, data: memoryview
) -> tuple[Commit, ChainEntry] | tuple[Manifest, ChainEntry]:
    """Return what the bytes of a commit, without its rows, or of a manifest say, and what names it in a chain.

    Raises
    ------
    CorruptionError
        It is damaged, or belongs elsewhere.
    """
    source = f"{shard.url}/{stored.key}"
    if stored.kind == "snapshot":
        return read_manifest(data, shard.prefix, source, stored.key)
    assert stored.pointer is not None
    commit = read_commit(data, shard.prefix, stored.pointer, source).without_rows()
    return commit, commit.entry
