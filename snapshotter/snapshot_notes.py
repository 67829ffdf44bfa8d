"""Local notes of the snapshots that a shard has in durable storage.

``<shard directory>/snapshots/<version>-<commit id>`` tells every process of the executor that this version has a
snapshot, so that the commits that follow build on it, and which local files it has stored, so that the next snapshot
does not send them again. A note that is lost costs work, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.backends import local_files, stored_file
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.manifest import Part, SnapshotFile

_KIND = "snapshot-note"
#: Chains that a running attempt may still shorten end at one of the newest.
_KEPT = 4

#: What tells one local file from every other: inode, size in bytes and time of modification in ns. A file of the same
#: name and size is another file; a link to it, or the file after its folder was renamed, is the same.
Identity = tuple[int, int, int]


def identity_of(path: Path) -> Identity:
    """Return what tells a local file from every other.

    Raises
    ------
    NotFoundError
        It is not there.
    """
    with local_files.reading(path):
        found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


class SnapshotNotes:
    """The notes of one shard.

    Parameters
    ----------
    folder : pathlib.Path
        Made when the first note is left.
    new_id : callable
        Returns a new unique name each time.
    """

    def __init__(self, folder: Path, new_id: Callable[[], str]) -> None:
        self._folder = folder
        self._new_id = new_id

    def leave(self, entry: ChainEntry, files: Iterable[tuple[Identity, SnapshotFile]]) -> None:
        """Note a snapshot, and which local files it has stored. Only the newest notes are kept.

        Raises
        ------
        UnavailableError
            Local storage is full or failing.
        """
        stored = [{"identity": identity, "file": asdict(file)} for identity, file in files]
        note, _ = stored_file.encode(_KIND, {"entry": asdict(entry), "files": stored})
        with local_files.writing(self._folder):
            local_files.make_private_folder(self._folder)
            temporary = self._folder / f".{self._new_id()}"
            temporary.write_bytes(note)
            temporary.rename(self._folder / entry.pointer)
            for old in sorted(self._pointers())[:-_KEPT]:
                (self._folder / str(old)).unlink(missing_ok=True)

    def _pointers(self) -> list[Pointer]:
        found = []
        for name in local_files.list_folder(self._folder):
            with suppress(InvalidArgumentError):
                found.append(Pointer.parse(name))
        return found

    def apply_to(self, lineage: Lineage) -> Lineage:
        """Return a lineage with the newest snapshot that was noted of one of its versions."""
        wanted = {*lineage.since, *(entry.pointer for entry in lineage.commits)}
        noted = [str(pointer) for pointer in self._pointers() if str(pointer) in wanted]
        entries = {pointer: entry for pointer in noted if (entry := self._entry(pointer)) is not None}
        return lineage.standing_on(entries) if entries else lineage

    def _entry(self, pointer: str) -> ChainEntry | None:
        header = self._read(pointer)
        try:
            return None if header is None else ChainEntry(**header["entry"])
        except (KeyError, TypeError):
            return None

    def files_of(self, entry: ChainEntry) -> dict[Identity, SnapshotFile]:
        """Return the local files that a snapshot has stored; none where its note is gone, or is another's."""
        header = self._read(entry.pointer)
        if header is None or self._entry(entry.pointer) != entry:
            return {}
        try:
            return {_identity(stored["identity"]): _file(stored["file"]) for stored in header["files"]}
        except (KeyError, TypeError, ValueError):
            return {}

    def _read(self, pointer: str) -> Mapping[str, Any] | None:
        try:
            return local_files.read_header(self._folder / pointer, _KIND)
        except (NotFoundError, CorruptionError):
            return None


def _identity(values: list[int]) -> Identity:
    inode, size_bytes, modified_ns = values
    return inode, size_bytes, modified_ns


def _file(values: Mapping[str, Any]) -> SnapshotFile:
    return SnapshotFile(**{**values, "parts": tuple(Part(**part) for part in values["parts"])})
