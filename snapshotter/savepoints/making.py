"""Savepoints in the making: one maker at a time has a name, whatever the storage allows.

::

    <name>/making-5f0c1d…       somebody makes a savepoint here; goes when it is finished, or has failed
    <name>/operators/…          its pieces
    <name>/savepoint            its manifest, last

Many storages overwrite without a word, so two makers of one name would both finish, and each delete the other's pieces.
Each one therefore looks for a manifest, puts its mark, and looks again: at once, and before it stores the manifest; and
afterwards, before it deletes anything.

Invariants
----------
* **the last one**: the mark that was put last has the name: who sees a later one than its own gives up. So nobody need
  know whether an earlier maker is alive, and one that was killed blocks nothing: it is taken over by beginning anew.
* **still mine**: a maker whose own mark is gone gives up, too: somebody deletes the folder.
* **whole first**: what the manifest does not name is deleted only when the manifest stands and all it names is there.
  From then on there is a savepoint: that something cannot be deleted is no failure.

The manifest replaces no other: of two makers that store theirs at once, one is refused. Only where the storage cannot
refuse (`ObjectStorage.put_if_absent`) can a put that is held up until the other maker has finished replace that one's
manifest. Its maker finds that its mark is gone, and raises; no order of requests can undo it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from holdfast import clock
from holdfast.errors import ConflictError, HoldfastError, NotFoundError, UnavailableError
from holdfast.snapshotter.savepoints.manifest import Savepoint, read_manifest
from holdfast.snapshotter.savepoints.saved_operator import KEY
from holdfast.snapshotter.savepoints.savepoints import MARK, require_free, savepoint_folder, unnamed
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

_log = logging.getLogger(__name__)
_KEYS_SHOWN = 5


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
        UnavailableError
            The storage did not answer; once the manifest is asked to be stored, nobody knows whether it was.

        Notes
        -----
        What cannot be deleted is named in a warning.
        """
        data = savepoint.encode()
        read_manifest(data, savepoint.name, f"{self.folder.url}/{KEY}")  # whatever it says, it can be read
        missing = _missing(savepoint.keys, self._required())
        if missing:
            raise self._conflict(missing)
        try:
            self.folder.put_if_absent(KEY, data)
            listed = list(self.folder.list(""))
            missing = _missing({**savepoint.keys, KEY: data.size}, listed)
            # The manifest is read last: while another maker may still replace it, that one's mark is in the listing.
            is_mine = not missing and self._is_last(listed) and self._holds(data.to_pybytes())
        except ConflictError as exc:
            raise self._conflict() from exc
        except UnavailableError as exc:
            raise UnavailableError(
                "nobody knows whether the savepoint is finished: run holdfast savepoint verify before making it again",
                name=self.folder.prefix,
                because=exc,
            ) from exc
        if not is_mine:
            raise ConflictError(
                "somebody else deleted this savepoint, or made one of its name, while its manifest was stored: run "
                "holdfast savepoint verify; unless it is whole, delete it and make it again, one process at a time",
                name=self.folder.prefix,
                missing=missing,
            )
        self._delete([*(key for key in unnamed(listed, savepoint) if key != self.mark), self.mark])

    def require(self) -> None:
        """Raise `ConflictError` if somebody else has, or takes, the name."""
        self._required()

    def _required(self) -> list[ObjectInfo]:
        listed = list(self.folder.list(""))
        if not self._is_last(listed) or any(info.key == KEY for info in listed):
            raise self._conflict()
        return listed

    def _is_last(self, listed: Iterable[ObjectInfo]) -> bool:
        # Two that were put in one tick of the store's clock are told apart by their ids: by all makers alike.
        marks = sorted((info.modified_ms, info.key) for info in listed if MARK.fullmatch(info.key))
        return bool(marks) and marks[-1][1] == self.mark

    def _holds(self, manifest: bytes) -> bool:
        try:
            return bytes(self.folder.get(KEY)) == manifest
        except NotFoundError:  # it was listed: somebody has deleted it since
            return False

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

    def _conflict(self, missing: str | None = None) -> ConflictError:
        return ConflictError(
            "somebody else is deleting this savepoint, or making one of its name: make it again, under another name",
            name=self.folder.prefix,
            missing=missing,
        )


def _missing(sizes: Mapping[str, int], listed: Iterable[ObjectInfo]) -> str | None:
    """Return an object that is not there with its size, if there is one."""
    found = {info.key: info.size_bytes for info in listed}
    return next((key for key, size_bytes in sizes.items() if found.get(key) != size_bytes), None)


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
