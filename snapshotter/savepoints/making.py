"""Savepoints in the making: whoever stores a manifest first has the name.

::

    <name>/operators/…          pieces, of all who make a savepoint of this name
    <name>/savepoint            the manifest, last

Pieces have unique names, so two makers of one name do not disturb each other, and one that was killed blocks nobody.

Invariants
----------
* **first one**: a manifest is put only if there is none. While one stands, no piece of anybody else can come to be
  named: so what it does not name is deleted.
* **whole**: a manifest is stored when all that it names is there, and its maker looks once more: somebody may be
  deleting the folder. From then on there is a savepoint: that something cannot be deleted is no failure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.errors import ConflictError, HoldfastError, UnavailableError
from holdfast.snapshotter.savepoints.manifest import Savepoint, read_manifest
from holdfast.snapshotter.savepoints.saved_operator import KEY
from holdfast.snapshotter.savepoints.savepoints import require_free, savepoint_folder, unnamed
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

_log = logging.getLogger(__name__)
_KEYS_SHOWN = 5


@dataclass(frozen=True)
class Making:
    """A savepoint in the making; its objects go into `folder`."""

    folder: PrefixedStorage

    def finish(self, savepoint: Savepoint) -> None:
        """Store the manifest, and remove what it does not name.

        Raises `ConflictError` if somebody has deleted parts of it meanwhile, or has made another savepoint of the name;
        `UnavailableError` if the storage did not answer; once the manifest is asked to be stored, nobody knows whether
        it was.

        What cannot be deleted is named in a warning.
        """
        name, data = self.folder.prefix, savepoint.encode()
        read_manifest(data, savepoint.name, f"{self.folder.url}/{KEY}")  # whatever it says, it can be read
        self._require(savepoint.keys, self.folder.list(""))
        try:
            self.folder.put_if_absent(KEY, data)
            listed = self.folder.list("")
        except ConflictError as exc:
            raise ConflictError(
                "another process has made a savepoint of this name meanwhile: use another name",
                name=name,
            ) from exc
        except UnavailableError as exc:
            raise UnavailableError(
                "the savepoint may or may not be finished: run holdfast savepoint verify before making it again",
                name=name,
                because=exc,
            ) from exc
        self._require({**savepoint.keys, KEY: data.size}, listed)
        self._delete(unnamed(listed, savepoint))

    def _require(self, sizes: Mapping[str, int], listed: Iterable[ObjectInfo]) -> None:
        """Raise `ConflictError` if an object is not there with its size."""
        found = {info.key: info.size_bytes for info in listed}
        missing = next((key for key, size_bytes in sizes.items() if found.get(key) != size_bytes), None)
        if missing is not None:
            raise ConflictError(
                "another process has deleted this savepoint meanwhile, or made one of its name: make it "
                "again, under another name",
                name=self.folder.prefix,
                missing=missing,
            )

    def _delete(self, keys: list[str]) -> None:
        try:
            self.folder.delete(keys)
        except HoldfastError as exc:
            more = f" and {len(keys) - _KEYS_SHOWN} more" if len(keys) > _KEYS_SHOWN else ""
            _log.warning(
                "the savepoint %s is finished and whole, but these objects, which are not part of it, may be left: "
                "%s%s: %s",
                self.folder.url,
                ", ".join(keys[:_KEYS_SHOWN]),
                more,
                exc,
            )


def making(target: ObjectStorage, name: str) -> Making:
    """Begin a savepoint. Raises `ConflictError` if there is one of this name."""
    require_free(target, name)
    return Making(savepoint_folder(target, name))
