"""Local notes of the snapshots that a shard has in durable storage.

``<shard directory>/snapshots/<version>-<commit id>`` tells every process of the executor that this version has a
snapshot, so that the commits that follow build on it, and which local files it has stored, so that the next snapshot
does not send them again. A note that is lost costs work, and nothing else.

The notes that were left last are kept, whatever their versions: after Spark was set back, the lower ones count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.backends import local_files, stored_file
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.snapshots.manifest import CleanedUp, Manifest, Part, SnapshotFile

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


@dataclass(frozen=True)
class SnapshotNote:
    """What this executor knows of a snapshot without asking the storage.

    Attributes
    ----------
    files : mapping of Identity to SnapshotFile
        The local files that it has stored.
    cleaned : CleanedUp
    written_ms : int
        See `holdfast.snapshotter.snapshots.manifest.Manifest`.
    """

    files: Mapping[Identity, SnapshotFile]
    cleaned: CleanedUp
    written_ms: int


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

    def leave(self, entry: ChainEntry, manifest: Manifest, files: Iterable[tuple[Identity, SnapshotFile]]) -> None:
        """Note a snapshot, and which local files it has stored. Only the notes that were left last are kept.

        Raises
        ------
        UnavailableError
            Local storage is full or failing.
        """
        stored = [{"identity": identity, "file": asdict(file)} for identity, file in files]
        header = {"entry": asdict(entry), "files": stored, "written_ms": manifest.written_ms}
        note, _ = stored_file.encode(_KIND, header | {"cleaned": asdict(manifest.cleaned)})
        with local_files.lock_folder(self._folder.parent), local_files.writing(self._folder):
            local_files.make_private_folder(self._folder)
            older = self._left()
            temporary = self._folder / f".{self._new_id()}"
            temporary.write_bytes(note)
            # The newest, even where the clock was set back.
            left_ns = max(temporary.stat().st_mtime_ns, *(left_ns + 1 for left_ns, _ in older), 0)
            os.utime(temporary, ns=(left_ns, left_ns))
            temporary.rename(self._folder / entry.pointer)
            for _, pointer in sorted(self._left())[:-_KEPT]:
                (self._folder / str(pointer)).unlink(missing_ok=True)

    def _left(self) -> list[tuple[int, Pointer]]:
        """Return when each note was left, in ns, and its version."""
        found = []
        for name in local_files.list_folder(self._folder):
            with suppress(InvalidArgumentError, FileNotFoundError):
                found.append((os.stat(self._folder / name).st_mtime_ns, Pointer.parse(name)))
        return found

    def apply_to(self, lineage: Lineage) -> Lineage:
        """Return a lineage with the newest snapshot that was noted of one of its versions."""
        wanted = {*lineage.since, *(entry.pointer for entry in lineage.commits)}
        noted = [name for name in local_files.list_folder(self._folder) if name in wanted]
        entries = {pointer: entry for pointer in noted if (entry := self._entry(pointer)) is not None}
        return lineage.standing_on(entries) if entries else lineage

    def _entry(self, pointer: str) -> ChainEntry | None:
        header = self._read(pointer)
        try:
            return None if header is None else ChainEntry.decode(header["entry"])
        except (KeyError, TypeError, ValueError):
            return None

    def note_of(self, entry: ChainEntry) -> SnapshotNote | None:
        """Return the note of a snapshot; None where it is gone, or another's."""
        header = self._read(entry.pointer)
        if header is None or self._entry(entry.pointer) != entry:
            return None
        try:
            files = {_identity(stored["identity"]): _file(stored["file"]) for stored in header["files"]}
            return SnapshotNote(files, CleanedUp.decode(header["cleaned"]), int(header["written_ms"]))
        except (KeyError, TypeError, ValueError):
            return None

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
