"""Savepoints in the making: one maker at a time has a name, whatever the storage allows.

::

    <name>/making-5f0c1d…       somebody makes a savepoint here; goes when it is finished, or has failed
    <name>/operators/…          its pieces
    <name>/savepoint            its manifest, last

Many storages overwrite without a word, so two makers of one name would both finish, and each delete the other's pieces.
Each one therefore looks for a manifest, puts its mark, and looks again: at once, and before it stores the manifest.

Invariants
----------
* **the last one**: the mark that was put last has the name: who sees a later one than its own gives up. So nobody need
  know whether an earlier maker is alive, and one that was killed blocks nothing: it is taken over by beginning anew.
* **still mine**: a maker whose own mark is gone gives up, too: somebody deletes the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from holdfast import clock
from holdfast.errors import ConflictError, HoldfastError
from holdfast.snapshotter.savepoints.manifest import Savepoint, read_manifest
from holdfast.snapshotter.savepoints.saved_operator import KEY
from holdfast.snapshotter.savepoints.savepoints import MARK, require_free, savepoint_folder, unnamed
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage


@dataclass(frozen=True)
class Making:
    """A savepoint that is made.

    Attributes
    ----------
    folder : PrefixedStorage
        Where its objects go.
    mark : str
        The key that says so.
    """

    folder: PrefixedStorage
    mark: str

    def finish(self, savepoint: Savepoint) -> None:
        """Store the manifest, and remove what it does not name: the marks, and pieces of others.

        Raises
        ------
        ConflictError
            Somebody has deleted parts of it meanwhile, or makes another savepoint of the name.
        """
        data = savepoint.encode()
        read_manifest(data, savepoint.name, f"{self.folder.url}/{KEY}")  # whatever it says, it can be read
        sizes = {info.key: info.size_bytes for info in self._required()}
        missing = [key for key, size_bytes in savepoint.keys.items() if sizes.get(key) != size_bytes]
        if missing:
            raise self._conflict(missing[0])
        self.folder.put(KEY, data)
        if bytes(self.folder.get(KEY)) != data.to_pybytes():
            raise self._conflict()
        self.folder.delete(unnamed(self.folder, savepoint))

    def require(self) -> None:
        """Raise `ConflictError` if somebody else has, or takes, the name."""
        self._required()

    def _required(self) -> list[ObjectInfo]:
        listed = list(self.folder.list(""))
        # Two that were put in one tick of the store's clock are told apart by their ids: by all makers alike.
        marks = sorted((info.modified_ms, info.key) for info in listed if MARK.fullmatch(info.key))
        if not marks or marks[-1][1] != self.mark or any(info.key == KEY for info in listed):
            raise self._conflict()
        return listed

    def _conflict(self, missing: str | None = None) -> ConflictError:
        return ConflictError(
            "somebody else deletes this savepoint, or makes one of its name: make it again, under another name",
            name=self.folder.prefix,
            missing=missing,
        )


@contextmanager
def making(target: ObjectStorage, name: str, new_id: Callable[[], str] = clock.new_id) -> Iterator[Making]:
    """Take a name for a savepoint, until it is finished or an error ends the context.

    Raises
    ------
    ConflictError
        There is a savepoint of the name, or somebody else begins one at this moment.
    """
    require_free(target, name)
    mine = Making(savepoint_folder(target, name), f"making-{new_id()}")
    mine.folder.put(mine.mark, b"")
    try:
        mine.require()
        yield mine
    except BaseException:
        with suppress(HoldfastError):  # it is in nobody's way, and `delete` and the next maker remove it
            mine.folder.delete([mine.mark])
        raise
